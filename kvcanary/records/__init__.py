"""What is stored: the 64-byte records, fingerprints and states of pages; and how data gets to the device and back."""
