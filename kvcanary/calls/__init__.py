"""One model call as the host keeps it, the entries of its rows, and the violations that were found in them."""
