"""`CanaryManager`, which an engine calls, the hooks of a forward, and the order of the checks of a step."""
