"""What runs compiled on the host, and the layouts of memory that it shares with Python."""
