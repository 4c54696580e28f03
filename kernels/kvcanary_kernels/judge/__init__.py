"""What a forward reads and writes, judged on the device."""
