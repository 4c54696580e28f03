"""K and V that outlive a request: the prefix tree, and the tier in host memory."""
