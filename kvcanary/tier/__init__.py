"""A guard for tiers and stores: objects are sealed as they leave and compared as they come back, without a manager."""

from kvcanary.tier.tier import Tier

__all__ = ["Tier"]
