"""The fault campaign: every fault in many configurations, with its twins, and the matrix of what was found."""
