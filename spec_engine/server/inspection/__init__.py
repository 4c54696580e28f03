"""What a server shows to whoever debugs it, and the faults that can be armed in it."""
