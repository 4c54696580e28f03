"""Lines of the engine broken one at a time: what the host's checks and the canary say of each, and what left by then.

Each break stands for a mistake that somebody could make in an engine: a formula that is off by one, a copy that was
forgotten, a forward without hooks. None is a fault of the catalogue, so that nothing here was known to the checks.
"""
