"""What an engine declares: pools and their layouts, slot maps, the plans of a forward, where it is launched."""
