"""Recurrent states: who has which entry, what each has absorbed, and whether its bytes are those that were left."""
