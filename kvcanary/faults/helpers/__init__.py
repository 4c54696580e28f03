"""What faults share: how they come at an entry, a page or a forward, and their harmless twins."""
