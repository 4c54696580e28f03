"""Indices in range that point at the wrong slot: exchanged, transposed, untranslated, of another request."""

from __future__ import annotations

from kvcanary.faults.fault import Fault
from kvcanary.faults.target import Target


def _exchange_pages(target: Target) -> bool:
    """Two pages of a row are looked for in each other's place."""
    size = target.setup.page_size
    for reader in target.running():
        whole = reader.committed_len // size
        if whole >= 2:
            first, second = sorted(target.rng.sample(range(whole), 2))
            here, there = (slice(page * size, (page + 1) * size) for page in (first, second))
            reader.slots[here], reader.slots[there] = reader.slots[there].clone(), reader.slots[here].clone()
            target.record(
                writer=reader.request_id,
                reader=reader.request_id,
                position=first * size,
                slot=int(reader.slots[first * size]),
            )
            return True
    return False


FAULTS = (
    Fault(
        name="addressing.pages_exchanged",
        story="Two entries of a page table change places: every token is there, at another position.",
        expected="R4",
        applies_to="requests of two whole pages and more",
        strike=_exchange_pages,
    ),
)
