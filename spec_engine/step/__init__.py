"""A step on the device: forwards behind their hooks, acceptance, and what it leaves for the next one."""
