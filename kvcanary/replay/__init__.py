"""The events of a dump once more, through the same checks, on a CPU, with the damage that was found."""
