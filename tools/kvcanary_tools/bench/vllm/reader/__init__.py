"""What attention of a real vLLM reads, within its graphs and outside: right, and harmed."""
