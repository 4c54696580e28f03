"""The record layout, defined once beside the kernels and named here for readers of this package."""

from kvcanary_kernels.record import *  # noqa: F403
