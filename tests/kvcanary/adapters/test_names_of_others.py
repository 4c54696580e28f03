"""A restart between store and load: blocks that another process wrote are compared with the names that it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcanary import KVCorruptionError
from kvcanary.adapters import vllm as plugin

from . import test_load_arrival as harms
from .served import BLOCK
from .test_load_arrival import TOKENS

pytestmark = pytest.mark.usefixtures("host")


@pytest.fixture
def restart(serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Serve prefixes, keep their blocks, and let another process load them after `harm`; what it finds first."""
    monkeypatch.setenv("KVCANARY_NAMES", f"file:{tmp_path / 'names.sqlite'}")

    def run(harm: Any, settings: dict[str, str] | None = None, computes: bool = False, **served_as: Any) -> Any:
        connector, first = harms.stored(serve, **served_as)
        first.wrapper.worker.kvcanary.detach()
        for name, value in (settings or {}).items():
            monkeypatch.setenv(name, value)
        plugin.register()
        second = serve(settings={"connector": connector}, **served_as)
        connector.served, connector.harm = second, harm
        if computes:  # the same prefix, with other bytes: kernels need not compute alike each time
            with monkeypatch.context() as patched:
                sin = torch.sin
                patched.setattr(torch, "sin", lambda values: sin(values) * (1 + 2**-20))
                second.ask("own", TOKENS, 4)
                second.run()
            second.cached.clear()
        blocks, second.free = second.free[:2], second.free[2:]
        connector.job = blocks
        for number, block in enumerate(blocks):
            second.cached[tuple(TOKENS[: (number + 1) * BLOCK])] = block
            second.users[block] = 1
        second.ask("b", TOKENS, 4)
        try:
            second.run()
        except KVCorruptionError as error:
            return error.findings[0]
        return second.wrapper.kvcanary_report()

    return run


def test_right_blocks_of_another_process_are_compared(restart: Any) -> None:
    """The clean twin: every entry of both blocks."""
    report = restart(lambda kept, other: None)
    assert (report["loads_checked"], report["fired"]) == (2 * BLOCK, {})
    assert (report["names"]["lost"], report["names"]["unanswered"]) == (0, 0)


def test_of_every_group(restart: Any) -> None:
    """Two groups of layers have names of their own."""
    report = restart(lambda kept, other: None, groups=harms.TWO_GROUPS)
    assert (report["loads_checked"], report["fired"]) == (4 * BLOCK, {})


def entries_turned(kept: dict[str, Any], other: dict[str, Any]) -> None:
    """The last page's entries come back the other way round, in every layer: a sum without places is the same."""
    for values in kept.values():
        values[3] = values[3].flip(1)


@pytest.mark.parametrize(
    ("harm", "kind", "words"),
    [
        (harms.other_prefix, "misrouted", "the block at position 8 was loaded with the bytes of another prefix"),
        (harms.blocks_exchanged, "misrouted", "loaded with the bytes of the block at position 8 of its own"),
        (harms.zeros_at_the_end, "short", "nothing arrived behind offset 12: 1 of 4 pages hold zeros"),
        (harms.kv_exchanged, "other layout", "K and V are exchanged"),
        (harms.heads_exchanged, "other layout", "heads of K and V are in another order: 1, 0"),
        (harms.layers_exchanged, "other layout", "layers are in another order: 1, 0"),
        (harms.axes_exchanged, "other layout", "heads and slots of a block are exchanged"),
        (entries_turned, "other layout", "entries of a block are in another order: 3, 2, 1, 0"),
        (harms.one_bit, "one word", "one bit, bit 9, of V, head 1, dim 3"),
        (harms.noise, "unknown", "the bytes that came back are those of nothing that is known"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_each_kind_is_named_after_a_restart(restart: Any, harm: Any, kind: str, words: str) -> None:
    """Before the first token, with the connector, the store and who wrote the block."""
    found = restart(harm)
    assert (found.code, found.reader, found.site) == ("T1", "b", ("load", 0))
    assert (found.found["verdict"], found.found["came_back_by"]) == (kind, "StoreConnector")
    assert words in found.causes[0].text
    told = " ".join(found.evidence)
    assert "was written by vllm " in told
    assert "names.sqlite says" in told


def test_a_prefix_that_two_processes_computed_differently(restart: Any) -> None:
    """Both are right; what neither of them has written is T1, and named by the entries of this worker."""
    report = restart(lambda kept, other: None, computes=True)
    assert (report["loads_checked"], report["fired"]) == (2 * BLOCK, {})
    found = restart(harms.one_bit, computes=True)
    assert (found.code, found.reader) == ("T1", "b")


def test_names_under_another_seed_are_not_compared(restart: Any) -> None:
    """Nor is anything found: what differs then are the keys. `kvcanary.names_of_others` says so."""
    report = restart(harms.one_bit, {"KVCANARY_SEED": "8"})
    assert (report["loads_checked"], report["fired"]) == (0, {})


def test_names_of_another_model_are_not_compared(restart: Any) -> None:
    """Nor is anything found."""
    report = restart(harms.one_bit, {"KVCANARY_MODEL": "other"})
    assert (report["loads_checked"], report["fired"]) == (0, {})
