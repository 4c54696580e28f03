"""The flight recorder: the last steps in bounded memory, for a dump."""
