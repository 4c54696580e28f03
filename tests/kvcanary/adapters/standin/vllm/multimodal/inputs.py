"""What stands in a prompt behind placeholder ids."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PlaceholderRange:
    offset: int
    length: int


@dataclass
class MultiModalFeatureSpec:
    identifier: str
    mm_position: PlaceholderRange
