"""Captured decode steps: static buffers by batch size, index arrays built on the device, the canary's hooks inside."""
