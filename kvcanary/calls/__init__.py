"""One model call as the host keeps it, the entries of its rows, what fired in them, and what is set aside."""
