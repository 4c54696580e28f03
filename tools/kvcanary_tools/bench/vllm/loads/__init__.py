"""What a connector of a real vLLM brings back after a restart."""
