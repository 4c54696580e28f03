"""Pages of docs/ that programs write, whole or between two marks."""
