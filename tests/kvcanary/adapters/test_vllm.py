"""The canary in a vLLM worker, over a stand-in with vLLM's names and signatures: silent when sound, exact when not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.adapters import vllm as plugin
from kvcanary.errors import AdapterError

STANDIN = Path(__file__).parent / "standin"
FULL = {"KVCANARY_MODE": "raise", "KVCANARY_CONTENT": "full", "KVCANARY_KV_CANARY_SEED": "7"}
BLOCK = 8


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is `vllm` as long as a test runs."""
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, value in FULL.items():
        monkeypatch.setenv(name, value)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@dataclass
class Request:
    name: str
    tokens: list[int]
    length: int
    drafts: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    is_known: bool = False


@dataclass
class Served:
    """A scheduler of a few lines: prefix cache, chunked prefill, preemption of the youngest, finished blocks reused."""

    settings: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 24
    layers: tuple[str, ...] = ("l0", "l1")
    groups: tuple[tuple[str, ...], ...] = ()
    window: int | None = None
    budget: int = 20
    zeroes: bool = False

    def __post_init__(self) -> None:
        from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        names = self.groups or (self.layers,)
        specs = [AttentionSpec(BLOCK, 2, 8, torch.float32)] * len(names)
        if self.window:
            specs[-1] = AttentionSpec(BLOCK, 2, 8, torch.float32, self.window)
        self.config = KVCacheConfig(
            self.num_blocks, [], [KVCacheGroupSpec(list(n), s) for n, s in zip(names, specs, strict=True)]
        )
        self.wrapper = WorkerWrapperBase()
        self.wrapper.init_worker([self.settings])
        self.wrapper.init_device()
        self.wrapper.initialize_from_config([self.config])
        self.wrapper.compile_or_warm_up_model()
        self.free = list(range(1, self.num_blocks))
        self.cached: dict[tuple[int, ...], int] = {}
        self.users: dict[int, int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.preemptions = self.hits = self.copies = 0
        self.extra: dict[str, Any] = {}

    @property
    def runner(self) -> Any:
        return self.wrapper.worker.model_runner

    @property
    def caches(self) -> dict[str, Any]:
        return {n: layer.kv_cache for n, layer in self.runner.compilation_config.static_forward_context.items()}

    def ask(self, name: str, tokens: list[int], length: int, drafts: int = 0) -> None:
        self.waiting.append(Request(name, list(tokens), len(tokens) + length, drafts))
        self.outputs[name] = []

    def release(self, request: Request) -> None:
        for block in request.blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        request.blocks, request.computed, request.is_known = [], 0, False

    def take(self) -> int | None:
        if not self.free:
            return None
        block = self.free.pop(0)
        self.cached = {key: held for key, held in self.cached.items() if held != block}
        self.users[block] = 1
        self.fresh.append(block)
        return block

    def find_prefix(self, request: Request) -> None:
        """Blocks that somebody has computed, or computes in this very step."""
        for number in range((len(request.tokens) - 1) // BLOCK):
            block = self.cached.get(tuple(request.tokens[: (number + 1) * BLOCK]))
            if block is None:
                return
            if not self.users.get(block):
                self.free.remove(block)
            self.users[block] = self.users.get(block, 0) + 1
            request.blocks.append(block)
            request.computed += BLOCK
            self.hits += 1

    def share(self, request: Request, length: int) -> None:
        for number in range(min(length, len(request.tokens)) // BLOCK):
            self.cached.setdefault(tuple(request.tokens[: (number + 1) * BLOCK]), request.blocks[number])

    def step(self) -> dict[str, list[int]]:
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        self.fresh: list[int] = []
        budget, counts, new, cached, spec, preempted = self.budget, {}, [], CachedRequestData(), {}, set()
        while self.waiting and len(self.running) < 4:
            self.running.append(self.waiting.pop(0))
        for request in list(self.running):
            if not request.blocks and budget > 0:
                self.find_prefix(request)
            drafts = request.drafts if request.is_known and request.computed == len(request.tokens) - 1 else 0
            count = min(len(request.tokens) + drafts - request.computed, budget)
            if count <= 0 or request not in self.running:
                continue
            added: list[int] = []
            while len(request.blocks) * BLOCK < request.computed + count:
                block = self.take()
                if block is None:
                    victim = self.running[-1]
                    self.running.remove(victim)
                    if victim.is_known:
                        preempted.add(victim.name)
                    counts.pop(victim.name, None)
                    new = [data for data in new if data.req_id != victim.name]
                    for lines in (cached.req_ids,):
                        if victim.name in lines:
                            place = lines.index(victim.name)
                            for values in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
                                del values[place]
                    never = victim.blocks[victim.computed // BLOCK :]
                    self.cached = {key: held for key, held in self.cached.items() if held not in never}
                    self.release(victim)
                    self.waiting.insert(0, victim)
                    self.preemptions += 1
                    if victim is request:
                        break
                    continue
                request.blocks.append(block)
                added.append(block)
            if request not in self.running:
                continue
            budget -= count
            counts[request.name] = count
            self.share(request, request.computed + count)
            if drafts and count > 1:
                spec[request.name] = [(7 * n + len(request.tokens)) % 97 for n in range(count - 1)]
            groups = len(self.config.kv_cache_groups)
            if request.is_known:
                cached.req_ids.append(request.name)
                cached.num_computed_tokens.append(request.computed)
                cached.new_block_ids.append((added,) * groups if added else None)
            else:
                request.is_known = True
                data = NewRequestData(
                    request.name,
                    request.tokens,
                    [],
                    None,
                    None,
                    (list(request.blocks),) * groups,
                    request.computed,
                    None,
                )
                data.prefill_token_ids = list(request.tokens)
                new.append(data)
        output = SchedulerOutput(new, cached, counts, sum(counts.values()), spec, self.finished, preempted)
        if self.zeroes:
            output.new_block_ids_to_zero = [block for block in self.fresh if self.users.get(block)]
        for name, value in self.extra.items():
            setattr(output, name, value)
        self.extra = {}
        self.finished = set()
        self.wrapper.execute_model(output)
        if not counts:
            return {}
        given = self.wrapper.sample_tokens(None).get_output()
        for request in [request for request in self.running if request.name in counts]:
            tokens = given[request.name]
            request.computed = min(
                request.computed + counts[request.name], len(request.tokens) + max(len(tokens) - 1, 0)
            )
            request.tokens += tokens
            self.outputs[request.name] += tokens
            self.share(request, request.computed)
            if len(request.tokens) >= request.length:
                self.finished.add(request.name)
                self.running.remove(request)
                self.release(request)
        return given

    def run(self, steps: int = 400) -> dict[str, list[int]]:
        for _ in range(steps):
            if not (self.waiting or self.running or self.finished):
                break
            self.step()
        return self.outputs

    def place(self, request: str, position: int, group: int = 0) -> tuple[int, int]:
        """(kernel block, offset) of a position, along the worker's own table."""
        number = self.runner.req_states.req_id_to_index[request]
        size = self.runner.kernel_block_sizes[group]
        return int(self.runner.block_tables.block_tables[group].gpu[number, position // size]), position % size


def load(served: Served, drafts: int = 0) -> None:
    shared = [(3 * n) % 97 for n in range(19)]
    for number in range(7):
        tail = [(5 * number + n) % 97 for n in range(4 + 7 * number)]
        served.ask(f"r{number}", shared + tail, 12 + number, drafts)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Make(settings of Served) a worker with the plug-in."""
    plugin.register()
    yield Served
    plugin.unregister()


def without(**settings: Any) -> Served:
    plugin.unregister()
    return Served(**settings)


SCENES = {
    "plain": {},
    "drafts": {"settings": {"drafts": ("d0",)}, "layers": ("l0", "l1", "d0"), "num_blocks": 18},
    "window": {"groups": (("l0",), ("w0",)), "window": 20},
    "zeroed": {"zeroes": True},
    "v1": {"settings": {"runner": "v1"}},
    "v1 window": {"settings": {"runner": "v1"}, "groups": (("l0",), ("w0",)), "window": 20},
    "v1 zeroed": {"settings": {"runner": "v1"}, "zeroes": True},
}


@pytest.mark.parametrize("scene", SCENES)
def test_a_sound_worker_has_no_finding(serve, scene: str) -> None:
    """Shared prefixes, chunks, preemption, drafts, windows, zeroing: tokens as without the plug-in, and no finding."""
    drafts = 3 if scene == "drafts" else 0
    bare = without(**SCENES[scene])
    load(bare, drafts)
    expected = bare.run()
    assert not hasattr(bare.wrapper.worker, "kvcanary")
    plugin.register()
    served = serve(**SCENES[scene])
    load(served, drafts)
    assert served.run() == expected
    report = served.wrapper.kvcanary_report()
    assert report["findings"] == []
    assert report["armed"]
    assert report["unchecked"] == {}
    assert report["fired"] == {}
    assert report["untold_incidents"] == 0
    assert report["forwards"] > 20
    assert report["store"] == "not proved"
    assert {"R7", "R8", "W2", "W3", "P1"} <= set(report["inactive_classes"])
    assert report["slots_checked"] > 500
    assert report["bytes_checked"] > 500 * 128
    assert report["live_bytes"] == 0 < report["peak_live_bytes"]
    assert served.preemptions > 0
    assert served.hits > 3


def test_a_prefix_that_is_computed_in_the_same_step_is_no_finding(serve) -> None:
    """vLLM shares blocks that another request of the step is only about to fill: its reads see those writes."""
    served = serve()
    served.budget = 80
    tokens = [(3 * n) % 97 for n in range(30)]
    served.ask("a", tokens, 5)
    served.ask("b", tokens, 5)
    served.step()
    assert served.hits == 3
    served.run()
    report = served.wrapper.kvcanary_report()
    assert report["findings"] == []
    assert report["slots_checked"] > 24


def broken(served: Served, harm: Callable[[Served], Any], steps: int = 3) -> Any:
    """The finding after `harm` was done to a worker with two long requests."""
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    served.ask("b", [(3 * n) % 97 for n in range(17)] + [5, 6, 7], 40)
    for _ in range(6):
        served.step()
    harm(served)
    with pytest.raises(KVCorruptionError) as raised:
        go_on(served, steps)
    return raised.value.findings[0]


def go_on(served: Served, steps: int) -> None:
    for _ in range(steps):
        served.step()


def test_a_flipped_bit_names_request_layer_and_word(serve) -> None:
    """One bit of one V: code, request, position, layer, part, head, dim and bit."""

    def flip(served: Served) -> None:
        block, offset = served.place("b", 18)
        served.caches["l1"].view(torch.int32)[block, 1, offset, 8 + 3] ^= 1 << 9

    found = broken(serve(), flip)
    assert (found.code, found.reader, found.position, found.layer) == ("R9", "b", 18, 1)
    assert (found.part, found.head, found.dim, found.bit) == ("V", 1, 3, 9)
    assert found.writer == "b"
    assert "l1" in " ".join(found.evidence)
    assert found.causes[0].family == "bits"


def test_a_wrong_token_is_found(serve) -> None:
    """A forward is fed another token than the request has there: W6, at its position."""

    def misfeed(served: Served) -> None:
        right = served.runner.make_batch

        def make_batch(output: Any) -> Any:
            batch = right(output)
            batch.input_ids[0] += 1
            return batch

        served.runner.make_batch = make_batch

    found = broken(serve(), misfeed, steps=1)
    assert found.code == "W6"
    assert found.writer in ("a", "b")


@pytest.mark.parametrize("content", ["rolling", "write"])
def test_the_last_look_reads_every_byte(serve, monkeypatch, content: str) -> None:
    """Rolling reads each position once in 128 steps; what it had no time for is read when the request ends."""
    monkeypatch.setenv("KVCANARY_CONTENT", content)
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = serve()
    served.ask("a", [(3 * n) % 97 for n in range(30)], 12)
    go_on(served, 4)
    for position in (3, 19):
        block, offset = served.place("a", position)
        served.caches["l0"].view(torch.int32)[block, 0, offset, 0] ^= 1
    served.run()
    served.ask("b", [1, 2, 3], 2)
    served.run()
    found = served.wrapper.kvcanary_report()["findings"]
    assert [(f["code"], f["position"], f["site"]) for f in found] == (
        [("R9", 3, ["release", 0])] if content == "rolling" else []
    )


def test_a_cached_block_is_read_when_it_is_hit(serve, monkeypatch) -> None:
    """Bytes that changed while nobody ran: found in the first step of the request that finds the block."""
    monkeypatch.setenv("KVCANARY_CONTENT", "rolling")
    served = serve()
    tokens = [(3 * n) % 97 for n in range(30)]
    served.ask("a", tokens, 4)
    go_on(served, 3)
    block, offset = served.place("a", 5)
    served.run()
    served.caches["l1"].view(torch.int32)[block, 0, offset, 0] ^= 1
    served.ask("b", tokens, 4)
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    assert (found.code, found.reader, found.position, found.layer) == ("R9", "b", 5, 1)


def test_swapped_table_entries_are_found(serve) -> None:
    """Two entries of a block table exchanged: R4 at the first position of the first."""

    def swap(served: Served) -> None:
        number = served.runner.req_states.req_id_to_index["a"]
        line = served.runner.block_tables.block_tables[0].gpu[number]
        line[[2, 5]] = line[[5, 2]]

    found = broken(serve(), swap)
    assert (found.code, found.reader, found.position) == ("R4", "a", 8)
    assert found.found["position"] == 20


def test_a_slot_mapping_off_by_one_is_found(serve) -> None:
    """What is stored one slot further than the table says: W5, in the step that does it."""

    def shift(served: Served) -> None:
        tables = served.runner.block_tables
        right = tables.compute_slot_mappings
        tables.compute_slot_mappings = lambda *a, **k: right(*a, **k) + 1

    found = broken(serve(), shift, steps=1)
    assert found.code == "W5"
    assert found.position is not None


def test_a_block_handed_out_while_still_read_is_found(serve) -> None:
    """A running request's block is given to a new one, which fills it: the reader finds another's tokens."""

    def steal(served: Served) -> None:
        [victim] = [request for request in served.running if request.name == "a"]
        served.free.insert(0, victim.blocks[1])
        served.ask("c", [40 + n for n in range(16)], 5)
        served.take_all = True

    found = broken(serve(), steal)
    assert found.code in ("R4", "R5", "R6", "R9")
    assert found.reader == "a"
    assert found.writer in ("b", "c")


def test_a_copy_left_out_is_found(serve) -> None:
    """A copy-on-write copy that was told of and not made: T1 at the first slot of the destination."""
    served = serve()
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    go_on(served, 4)
    source, target = served.running[0].blocks[1], served.free[0]
    served.extra = {"kv_cache_block_copies": [(source, target)]}
    served.step()
    assert served.wrapper.kvcanary_report()["findings"] == []
    served.runner.copy = lambda copies: None
    served.extra = {"kv_cache_block_copies": [(source, served.free[1])]}
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    assert (found.code, found.slot) == ("T1", served.free[1] * BLOCK)
    assert "a copy of blocks" in found.action


def test_a_block_that_was_not_zeroed_is_found(serve) -> None:
    """Zeroing that did not happen: T1, where bytes of the last owner still lie."""
    served = serve(zeroes=True)
    load(served)
    go_on(served, 8)
    served.runner.zero = lambda blocks: None
    with pytest.raises(KVCorruptionError) as raised:
        served.run()
    found = raised.value.findings[0]
    assert found.code == "T1"
    assert "zeroed blocks" in found.action
    assert found.layers == (0, 1)


class Connector:
    """Keeps the bytes of chosen blocks, and loads them for requests that begin with those tokens."""

    def __init__(self) -> None:
        self.kv_connector = self
        self.kept: dict[str, torch.Tensor] = {}
        self.jobs: list[list[int]] = []

    def save(self, served: Served, blocks: list[int]) -> None:
        ratio = 2
        where = [block * ratio + part for block in blocks for part in range(ratio)]
        self.kept = {name: cache[where].clone() for name, cache in served.caches.items()}
        self.served = served

    def pre_forward(self, scheduler_output: Any) -> None:
        for blocks in self.jobs:
            where = [block * 2 + part for block in blocks for part in range(2)]
            for name, cache in self.served.caches.items():
                cache[where] = self.kept[name][: len(where)]
        self.jobs = []


@pytest.mark.parametrize("goes_wrong", [False, True])
def test_external_loads_are_judged_by_name(serve, goes_wrong: bool) -> None:
    """What comes back under a prefix that was written here must be those bytes; loaded elsewhere, it is T1."""
    connector = Connector()
    served = serve(settings={"connector": connector})
    tokens = [(3 * n) % 97 for n in range(30)]
    served.ask("a", tokens, 30)
    go_on(served, 4)
    connector.save(served, served.running[0].blocks[:2])
    served.run()
    served.cached.clear()
    for cache in served.caches.values():
        cache.normal_()
    served.wrapper.worker.kvcanary.canary.forget()
    blocks = served.free[:2]
    served.free = served.free[2:]
    connector.jobs = [served.free[-2:] if goes_wrong else blocks]
    for number, block in enumerate(blocks):
        served.cached[tuple(tokens[: (number + 1) * BLOCK])] = block
        served.users[block] = 1
    served.ask("b", tokens, 4)
    if goes_wrong:
        with pytest.raises(KVCorruptionError) as raised:
            served.run()
        found = raised.value.findings[0]
        assert (found.code, found.page) == ("T1", blocks[0] * 2)
        assert "an external load" in found.action
    else:
        served.run()
        report = served.wrapper.kvcanary_report()
        assert report["findings"] == []
        assert report["unchecked"] == {}
        assert report["loads_checked"] == 16


def test_log_mode_goes_on(serve, monkeypatch) -> None:
    """Every fault is told of once, and serving goes on to the same tokens."""
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = serve()
    load(served)
    go_on(served, 6)
    name = served.running[0].name
    block, offset = served.place(name, 3)
    served.caches["l0"].view(torch.int32)[block, 0, offset, 0] ^= 1
    served.run()
    report = served.wrapper.kvcanary_report()
    assert {(f["code"], f["position"], f["layer"]) for f in report["findings"]} == {("R9", 3, 0)}
    assert report["fired"]["R9"] > 1


def test_sleep_drops_what_was_known(serve) -> None:
    """After sleep and wake-up the pools are new: nothing of before is compared, and the canary goes on."""
    served = serve()
    load(served)
    served.run()
    served.wrapper.sleep(1)
    served.wrapper.wake_up()
    served.cached.clear()
    load(served)
    served.run()
    report = served.wrapper.kvcanary_report()
    assert report["findings"] == []
    assert report["forwards"] > 20


def test_the_layout_is_proved_by_a_store(serve) -> None:
    """Two KV heads make the shapes of two layouts equal: the reading that the backend does not store by is refused."""
    from vllm.v1.worker.gpu import model_runner

    class Older:
        """(blocks, 2, block_size, heads, dim): K and V beside each other."""

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
            size = kv_cache.shape[2]
            memory = kv_cache.transpose(1, 2).reshape(-1).clone()
            for slot, k, v in zip(slot_mapping.tolist(), key, value, strict=True):
                block, offset = divmod(slot, size)
                view = memory.view(-1, 2, size, 2, 8)
                view[block, 0, offset], view[block, 1, offset] = k, v
            kv_cache.copy_(memory.view(kv_cache.transpose(1, 2).shape).transpose(1, 2))

    model_runner.Impl.do_kv_cache_update = Older.do_kv_cache_update
    with pytest.raises(AdapterError) as raised:
        serve()
    assert "where K and V of target lie is not known" in str(raised.value)
    assert "packed in the last axis: it does not show what was stored" in str(raised.value)


def test_off_is_absent(monkeypatch) -> None:
    """Without KVCANARY_MODE, or with off, the plug-in replaces nothing and imports neither torch nor vLLM."""
    for value in ("", "off", "OFF "):
        monkeypatch.setenv("KVCANARY_MODE", value)
        plugin.register()
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    assert not hasattr(WorkerWrapperBase.init_device, "kvcanary_undo")
    program = "import sys; from kvcanary.adapters.vllm import register; register(); print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert result.stdout.strip() == "False", result.stderr


def test_the_plugin_is_loaded_twice_and_undone(serve) -> None:
    """Twice is once; `detach` and `unregister` leave the classes and instances as they were."""
    plugin.register()
    served = serve()
    handle, worker = served.wrapper.worker.kvcanary, served.wrapper.worker
    replaced = {name for name in (*vars(worker), *vars(worker.model_runner)) if name in dir(type(handle))}
    handle.detach()
    handle.detach()
    assert not hasattr(worker, "kvcanary")
    assert not replaced & {"sample_tokens", "sleep"}
    for owner, name in ((worker, "sleep"), (worker.model_runner, "prepare_attn")):
        assert name not in vars(owner)
    load(served)
    served.run()
    plugin.unregister()
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    assert not hasattr(WorkerWrapperBase.init_device, "kvcanary_undo")


def test_drift_is_refused_whole(serve, monkeypatch) -> None:
    """A gone name, another signature, an unknown release or another runner: a sentence, and nothing attached."""
    from vllm.v1.worker.gpu import model_runner

    from kvcanary.adapters.vllm.drift import NEEDED, NEEDED_OF, check

    assert check() == []
    assert check("0.33.0")[0] == "vllm 0.33.0 is not known here: install 0.26"
    assert len(NEEDED) > 10
    assert all(len(needs) > 5 for needs in NEEDED_OF.values())
    monkeypatch.setattr(model_runner.GPUModelRunner, "prepare_attn", lambda self, batch: None)
    [sentence] = check()
    assert "prepare_attn must begin with (self, input_batch), got (self, batch)" in sentence
    monkeypatch.delattr(model_runner.GPUModelRunner, "prepare_attn")
    with pytest.raises(AdapterError, match=r"prepare_attn is gone; unset KVCANARY_MODE"):
        serve()
    monkeypatch.undo()


def test_another_runner_is_refused(serve, monkeypatch) -> None:
    """A runner of another name is named, not half-followed."""
    from kvcanary.adapters.vllm.worker import attach

    worker = SimpleNamespace(model_runner=SimpleNamespace())
    with pytest.raises(AdapterError, match=r"the runner must be that of vllm\.v1\.worker\.gpu\.model_runner or "):
        attach(worker, CanaryConfig())
    assert not hasattr(worker, "kvcanary")


def first_row(served: Served) -> tuple[str, Any]:
    """The request in the first row of runner V1's batch, and its line of the block table."""
    batch = served.runner.input_batch
    return batch.req_ids[0], batch.block_table[0].block_table.gpu[0]


@pytest.mark.parametrize("harm", ["flip", "swap", "shift"])
def test_runner_v1_names_faults_too(serve, monkeypatch, harm: str) -> None:
    """Rows that move are followed by request: a flipped bit, swapped table entries, slots one too far."""
    served = serve(settings={"runner": "v1"})
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    served.ask("b", [(3 * n) % 97 for n in range(17)] + [5, 6, 7], 40)
    go_on(served, 6)
    name, line = first_row(served)
    if harm == "flip":
        served.caches["l1"].view(torch.int32)[int(line[4]), 1, 2, 8 + 3] ^= 1 << 9
    right = served.runner._prepare_inputs

    def prepare(output: Any) -> None:
        right(output)
        table = served.runner.input_batch.block_table[0]
        if harm == "swap":
            table.block_table.gpu[0, [2, 4]] = table.block_table.gpu[0, [4, 2]]
        if harm == "shift":
            table.slot_mapping.gpu += 1

    served.runner._prepare_inputs = prepare
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    if harm == "flip":
        assert (found.code, found.reader, found.position, found.layer) == ("R9", name, 18, 1)
        assert (found.part, found.head, found.dim, found.bit) == ("V", 1, 3, 9)
    elif harm == "swap":
        assert (found.code, found.position, found.found["position"]) == ("R4", 8, 16)
    else:
        assert found.code == "W5"
    assert "W6" in served.wrapper.worker.kvcanary.canary.certificate()["inactive_classes"]


def test_workers_of_one_engine_tell_once(serve, monkeypatch, tmp_path) -> None:
    """Two ranks read one swapped table: one event and one count; the merged report names both ranks."""
    from prometheus_client import REGISTRY
    from structlog.testing import capture_logs

    from kvcanary.adapters.vllm.told import merged

    monkeypatch.setenv("KVCANARY_MODE", "log")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = [serve(settings={"rank": rank, "world_size": 2}) for rank in range(2)]
    count = REGISTRY.get_sample_value("kvcanary_findings_total", {"code": "R4"}) or 0
    with capture_logs() as events:
        for served in ranks:
            served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
            served.ask("b", [5, 6, 7, 8, 9], 40)
            go_on(served, 4)
            line = served.runner.block_tables.block_tables[0].gpu[served.runner.req_states.req_id_to_index["a"]]
            line[[2, 5]] = line[[5, 2]]
            if served is ranks[1]:  # and this one alone has a flipped bit
                block, offset = served.place("b", 3)
                served.caches["l1"].view(torch.int32)[block, 1, offset, 8 + 3] ^= 1 << 9
            go_on(served, 1)
    told = [(event["code"], event["position"]) for event in events if event["event"] == "kvcanary.finding"]
    assert told.count(("R4", 8)) == 1
    assert told.count(("R9", 3)) == 1
    assert REGISTRY.get_sample_value("kvcanary_findings_total", {"code": "R4"}) == count + 1
    report = merged([served.wrapper.kvcanary_report() for served in ranks])
    found = {(f["code"], f["position"]): f["ranks"] for f in report["findings"]}
    assert found[("R4", 8)] == [0, 1]
    assert found[("R9", 3)] == [1]
    assert report["armed"]
    assert [worker["rank"] for worker in report["workers"]] == [0, 1]
