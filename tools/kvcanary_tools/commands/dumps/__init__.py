"""The commands that read dumps, a file each."""
