"""One model call as the host keeps it, what fired in it, what is set aside, and the counters of what was checked."""
