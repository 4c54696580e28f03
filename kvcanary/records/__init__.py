"""What is stored: device state, the 64-byte records, fingerprints; and how data gets to the device and back."""
