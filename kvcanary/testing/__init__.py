"""Testing: `check_adapter` drives an engine with its adapter, and says what the canary was not told."""

from kvcanary.testing.adapter_check import AdapterCheck, Drivable, check_adapter

__all__ = ["AdapterCheck", "Drivable", "check_adapter"]
