"""Labels of the canary's metrics, for those who read them without an engine."""

#: That every sample of the canary has, or has on a GPU.
TARGET = frozenset({"model_name", "rank", "hostname", "gpu", "UUID", "pci_bus_id"})
