"""Loads of a connector that go wrong: T1 names the connector and what it did to the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcanary import KVCorruptionError

from .served import BLOCK, Served, go_on

pytestmark = pytest.mark.usefixtures("host")
TOKENS, OTHERS = [(3 * n) % 97 for n in range(30)], [(5 * n + 2) % 97 for n in range(30)]
RATIO = 2  # kernel blocks in a block of the manager


class StoreConnector:
    """Brings back what blocks held; `harm` (bytes by layer, those of the other prefix) may change what comes."""

    def __init__(self) -> None:
        self.kv_connector = self
        self.harm: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda kept, other: None
        self.job: list[int] = []
        self.failed = set[int]()

    def save(self, served: Served, blocks: list[int]) -> dict[str, torch.Tensor]:
        self.served = served
        return {name: cache[kernel_blocks(blocks)].clone() for name, cache in served.caches.items()}

    def pre_forward(self, scheduler_output: Any) -> None:
        self.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is there when the load has begun."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """What it says itself."""
        failed, self.failed = self.failed, set[int]()
        return failed

    def start_load_kv(self) -> None:
        blocks, self.job = self.job, []
        if blocks:
            skipped = self.harm(self.kept, self.other)
            where = kernel_blocks(blocks)
            for name, cache in self.served.caches.items():
                if name != skipped:
                    cache[where] = self.kept[name]


def kernel_blocks(blocks: list[int]) -> list[int]:
    return [block * RATIO + part for block in blocks for part in range(RATIO)]


def stored(serve: Any, **settings: Any) -> tuple[StoreConnector, Served]:
    """A connector that has kept the first two blocks of two prompts, and who served them."""
    connector = StoreConnector()
    served = serve(**{**settings, "settings": {"connector": connector, **settings.get("settings", {})}})
    served.ask("a", TOKENS, 4)
    served.ask("o", OTHERS, 4)
    go_on(served, 4)
    rows = {request.name: request.blocks for request in served.running}
    connector.kept, connector.other = (connector.save(served, rows[name][:2]) for name in ("a", "o"))
    served.run()
    return connector, served


def loads(serve: Any, harm: Callable[..., Any], is_clean: bool = False, **settings: Any) -> Any:
    """What is found when two blocks of a prefix come back by a connector that does this harm; None: nothing."""
    connector, served = stored(serve, **settings)
    load(connector, served, harm)
    served.ask("b", TOKENS, 4)
    if is_clean:
        served.run()
        groups = len(served.wrapper.worker.kvcanary.canary.groups)
        assert served.wrapper.kvcanary_report()["loads_checked"] == groups * 2 * BLOCK
        return None
    with pytest.raises(KVCorruptionError) as raised:
        served.run()
    return raised.value.findings[0]


def load(connector: StoreConnector, served: Served, harm: Callable[..., Any]) -> list[int]:
    """The blocks into which the connector brings the first prompt's with the step that is next."""
    served.cached.clear()
    blocks = served.free[:2]
    served.free = served.free[2:]
    served.ask("old", [(7 * n + 1) % 97 for n in range(16)], 1)  # what lies in the blocks before
    served.free = blocks + served.free
    served.run()
    served.cached.clear()
    served.free = [block for block in served.free if block not in blocks]
    for group in served.wrapper.worker.kvcanary.canary.groups:
        group.records[[slot for block in blocks for slot in slots(block)]] = 0
    connector.harm, connector.job = harm, blocks
    for number, block in enumerate(blocks):
        served.cached[tuple(TOKENS[: (number + 1) * BLOCK])] = block
        served.users[block] = 1
    return blocks


def slots(block: int) -> range:
    return range(block * BLOCK, (block + 1) * BLOCK)


def other_prefix(kept: dict[str, Any], other: dict[str, Any]) -> None:
    for name in kept:
        kept[name][2:] = other[name][2:]


def blocks_exchanged(kept: dict[str, Any], other: dict[str, Any]) -> None:
    for name in kept:
        kept[name] = kept[name][[2, 3, 0, 1]]


def zeros_at_the_end(kept: dict[str, Any], other: dict[str, Any]) -> None:
    for values in kept.values():
        values[3] = 0


def kv_exchanged(kept: dict[str, Any], other: dict[str, Any]) -> None:
    for name, values in kept.items():
        kept[name] = values.roll(8, -1)


def heads_exchanged(kept: dict[str, Any], other: dict[str, Any]) -> None:
    for name, values in kept.items():
        kept[name] = values.flip(1)


def layers_exchanged(kept: dict[str, Any], other: dict[str, Any]) -> None:
    kept["l0"], kept["l1"] = kept["l1"], kept["l0"]


def axes_exchanged(kept: dict[str, Any], other: dict[str, Any]) -> None:
    """[blocks, heads, 4, 16] whose memory is by slot and head: read as if it were by head and slot."""
    for name, values in kept.items():
        n, heads, size, dim = values.shape
        halves = [half.permute(0, 2, 1, 3).reshape(n, heads, size, dim // 2) for half in values.split(dim // 2, -1)]
        kept[name] = torch.cat(halves, -1)


def one_bit(kept: dict[str, Any], other: dict[str, Any]) -> None:
    kept["l1"].view(torch.int32)[2, 1, 1, 8 + 3] ^= 1 << 9


def noise(kept: dict[str, Any], other: dict[str, Any]) -> None:
    for values in kept.values():
        values[1] = torch.randn(values[1].shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("harm", "kind", "words"),
    [
        (other_prefix, "misrouted", "was loaded with the bytes of position 8 of 'o'"),
        (blocks_exchanged, "misrouted", "position 0 was loaded with the bytes of position 8 of the same prefix"),
        (zeros_at_the_end, "short", "nothing arrived behind offset 12: 1 of 4 pages hold zeros"),
        (kv_exchanged, "other layout", "K and V are exchanged"),
        (heads_exchanged, "other layout", "heads of K and V are in another order: 1, 0"),
        (layers_exchanged, "other layout", "layers are in another order: 1, 0"),
        (axes_exchanged, "other layout", "heads and slots of a block are exchanged"),
        (one_bit, "one word", "one bit, bit 9, of V, head 1, dim 3"),
        (noise, "unknown", "the bytes that came back are those of nothing that is known"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_each_kind_is_named(serve, harm: Any, kind: str, words: str) -> None:
    """The verdict, what speaks for it, the connector and the request."""
    found = loads(serve, harm)
    assert (found.code, found.reader, found.site) == ("T1", "b", ("load", 0))
    assert "an external load by StoreConnector" in found.sentence
    assert (found.found["verdict"], found.found["came_back_by"]) == (kind, "StoreConnector")
    assert found.causes[0].family == "transfer"
    assert found.causes[0].text.startswith(f"{kind}: ")
    assert words in found.causes[0].text


def test_what_was_not_loaded_at_the_end_is_short(serve) -> None:
    """The last entries hold what lay there before, in every layer."""

    def stop_early(kept: dict[str, Any], other: dict[str, Any]) -> None:
        before = own_bytes(stop_early)
        for name in kept:
            kept[name][2:] = before[name][2:]

    found = loads(lambda **settings: remember(stop_early, serve(**settings)), stop_early)
    assert (found.found["verdict"], found.position) == ("short", 8)
    assert "hold what lay there before" in found.causes[0].text


def test_what_was_not_loaded_in_between_is_stale(serve) -> None:
    """Entries before the last hold what lay there before."""

    def skip_one(kept: dict[str, Any], other: dict[str, Any]) -> None:
        before = own_bytes(skip_one)
        for name in kept:
            kept[name][1] = before[name][1]

    found = loads(lambda **settings: remember(skip_one, serve(**settings)), skip_one)
    assert (found.found["verdict"], found.position) == ("stale", 4)
    assert "it holds what lay there before" in found.causes[0].text


def test_a_layer_that_was_not_loaded_is_named(serve) -> None:
    """One layer holds what lay there before: the finding is about that one."""
    found = loads(serve, lambda kept, other: "l1")
    assert (found.found["verdict"], found.layers) == ("short", (1,))


def test_right_loads_are_silent(serve) -> None:
    """The clean twin: every entry was compared, and is what its name says."""
    assert loads(serve, lambda kept, other: None, is_clean=True) is None


TWO_GROUPS = (("l0",), ("l1",))


def test_entries_of_every_group_have_names(serve) -> None:
    """The clean twin of two groups of layers: entries of both were compared."""
    assert loads(serve, lambda kept, other: None, is_clean=True, groups=TWO_GROUPS) is None


@pytest.mark.parametrize("layer", ["l0", "l1"])
def test_a_load_that_goes_wrong_in_one_group_is_found_there(serve, layer: str) -> None:
    """The layers of one group come back with zeros at their end."""

    def harm(kept: dict[str, Any], other: dict[str, Any]) -> None:
        kept[layer][3] = 0

    found = loads(serve, harm, groups=TWO_GROUPS)
    assert (found.code, found.found["verdict"]) == ("T1", "short")
    assert found.pool == f"group {TWO_GROUPS.index((layer,))} target"
    assert layer in " ".join(found.evidence)


def test_what_a_window_hides_of_a_load_is_not_compared(serve) -> None:
    """Entries in front of the window that the row goes on with may be anybody's."""
    connector, served = stored(serve, groups=TWO_GROUPS, window=6)

    def harm(kept: dict[str, Any], other: dict[str, Any]) -> None:
        kept["l1"][:RATIO] = 0  # the first block

    load(connector, served, harm)
    served.ask("b", TOKENS, 4)
    served.run()
    report = served.wrapper.kvcanary_report()
    assert (report["fired"], report["loads_checked"]) == ({}, 2 * BLOCK + 5)


def remember(harm: Any, served: Served) -> Served:
    harm.served = served
    return served


def own_bytes(harm: Any) -> dict[str, torch.Tensor]:
    """What lies in the blocks that are loaded next."""
    served = harm.served
    blocks = [block for key, block in served.cached.items() if key in (tuple(TOKENS[:8]), tuple(TOKENS[:16]))]
    return {name: cache[kernel_blocks(blocks)].clone() for name, cache in served.caches.items()}
