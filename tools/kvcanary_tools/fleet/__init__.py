"""Many servers as one: their certificates added up, and which GPU, code path, version or connector is to blame."""
