"""Adapters: the canary inside engines that others wrote. Each is one module, named after its host."""
