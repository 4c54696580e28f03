"""The canary in a vLLM worker, over a stand-in with vLLM's names: silent when sound, and how it comes in."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig
from kvcanary.adapters import vllm as plugin
from kvcanary.adapters.observed.state import RING
from kvcanary.errors import AdapterError, KVCanaryError

from .served import go_on, load, without

pytestmark = pytest.mark.usefixtures("host")


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
    drafts = 2 if scene == "drafts" else 0
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
    assert report["owners"] == "the scheduler's block pool"
    assert {"R7", "R8", "W2", "W3"} <= set(report["classes"])
    assert report["slots_checked"] > 500
    assert report["bytes_checked"] > 500 * 128
    assert report["live_bytes"] == 0 < report["peak_live_bytes"]
    assert served.preemptions > 0
    assert served.violations > 3


def test_a_prefix_that_is_computed_in_the_same_step_is_no_finding(serve) -> None:
    """vLLM shares blocks that another request of the step is only about to fill: its reads see those writes."""
    served = serve()
    served.budget = 80
    tokens = [(3 * n) % 97 for n in range(30)]
    served.ask("a", tokens, 5)
    served.ask("b", tokens, 5)
    served.step()
    assert served.violations == 3
    served.run()
    report = served.wrapper.kvcanary_report()
    assert report["findings"] == []
    assert report["slots_checked"] > 24


def test_a_count_that_is_asked_for_too_early_waits(serve, monkeypatch) -> None:
    """The counter comes with the step it is of: where it has not arrived, the device is waited for, once."""
    served = serve()
    served.ask("a", [1, 2, 3], 5)
    served.step()
    canary, waits = served.wrapper.worker.kvcanary.canary, []
    canary.memory.total += 7
    canary.wrote()
    counts = canary.launches._counts
    arrived, count = int(counts[canary.step % RING]), functools.partial(canary.count_at, canary.step)
    assert count() == 7
    counts[canary.step % RING] = int(counts[(canary.step - 1) % RING])  # of another step

    def wait(device: torch.device) -> None:
        waits.append(device)
        counts[canary.step % RING] = arrived

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(canary.memory, "is_cuda", True)
    assert count() == 7
    monkeypatch.setattr(canary.memory, "is_cuda", False)
    assert len(waits) == served.wrapper.kvcanary_report()["waits"] == 1


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


@pytest.mark.parametrize(
    ("cache", "sentence"),
    [
        (
            torch.zeros(48, 4, 36),
            r"where K and V of target lie is not known, its tensor is \[48, 4, 36\].*no rea",
        ),
        ([torch.zeros(48, 4)], "layer l0 keeps a state, not K and V"),
    ],
    ids=["latent", "recurrent"],
)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_layouts_that_are_not_known_are_refused(serve, monkeypatch, runner: str, cache: Any, sentence: str) -> None:
    """A latent (MLA) cache, and a recurrent state: one sentence at start-up, and nothing is armed."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner

    kind = {"v1": gpu_model_runner, "v2": model_runner}[runner].GPUModelRunner
    right = kind.initialize_kv_cache

    def initialize(self: Any, config: Any) -> None:
        right(self, config)
        for layer in self.compilation_config.static_forward_context.values():
            layer.kv_cache = cache

    monkeypatch.setattr(kind, "initialize_kv_cache", initialize)
    with pytest.raises(AdapterError, match=sentence):
        serve(settings={"runner": runner})


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


def test_layers_that_do_not_see_a_token_alone_are_known_by_their_names(serve) -> None:
    """Layer 0 does; an EAGLE draft's layers are numbered behind the target's."""
    served = serve(settings={"drafts": ("layers.2",)}, layers=("layers.0", "layers.1", "layers.2"))
    layers = served.wrapper.worker.kvcanary.canary.memory.layers
    assert [(own.names, own.reads_hidden) for own in layers] == [
        (("layers.0", "layers.1"), False), (("layers.2",), True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("MODE", "rais", "mode must be one of off, log, raise, abort, heal, got 'rais'"),
        (
            "MODE",
            "abort",
            "mode must be 'log', 'raise' or 'heal' here, got 'abort': nobody can end one request from outside",
        ),
        ("CONTENT", "all", "content must be one of write, rolling, full, got 'all'"),
        ("KV_CANARY", "log", "KVCANARY_KV_CANARY sets nothing: it is KVCANARY_MODE now"),
        ("MDOE", "log", "KVCANARY_MDOE sets nothing: did you mean KVCANARY_MODE?"),
    ],
)
def test_a_wrong_setting_is_refused_before_a_model_is_loaded(monkeypatch, name: str, value: str, sentence: str) -> None:
    """The plug-in says so in the first process that loads it, and replaces nothing."""
    monkeypatch.setenv("KVCANARY_MODE", "log" if name == "CONTENT" else "off")
    monkeypatch.setenv(f"KVCANARY_{name}", value)
    with pytest.raises(KVCanaryError) as raised:
        plugin.register()
    assert str(raised.value) == sentence
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    assert not hasattr(WorkerWrapperBase.init_device, "kvcanary_undo")


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

    from kvcanary.adapters.vllm.compatibility import NEEDED, NEEDED_OF, RUNNER_V1, RUNNER_V2, check

    assert check() == []
    assert len(NEEDED) > 10
    assert all(len(needs) > 5 for needs in NEEDED_OF.values())
    monkeypatch.setattr(model_runner.GPUModelRunner, "prepare_attn", lambda self, batch: None)
    [sentence] = check(runner=RUNNER_V2)
    assert "prepare_attn must begin with (self, input_batch), got (self, batch)" in sentence
    assert check(runner=RUNNER_V1) == check() == []  # the other runner attaches as before
    monkeypatch.delattr(model_runner.GPUModelRunner, "prepare_attn")
    with pytest.raises(AdapterError, match=r"vllm 0\.26\.0: .*prepare_attn is gone; unset KVCANARY_MODE"):
        serve()
    monkeypatch.undo()


def test_another_runner_is_refused(serve, monkeypatch) -> None:
    """A runner of another name is named, not half-followed."""
    from kvcanary.adapters.vllm.worker import attach

    worker = SimpleNamespace(model_runner=SimpleNamespace())
    with pytest.raises(AdapterError, match=r"the runner must be that of vllm\.v1\.worker\.gpu\.model_runner or "):
        attach(worker, CanaryConfig())
    assert not hasattr(worker, "kvcanary")


def test_a_worker_that_serves_already_says_that_nobody_asked_it(serve) -> None:
    """Any block may be somebody's: its attention is not probed, and the certificate has the reason."""
    from kvcanary.adapters.vllm.worker import attach

    worker = serve().wrapper.worker
    worker.kvcanary.detach()
    told = attach(worker, CanaryConfig(mode="log")).report()
    assert told["reader_probes"] == "attention not probed: the worker served already, and may have given any block away"


def test_workers_of_one_engine_tell_once(serve, monkeypatch, tmp_path, capsys) -> None:
    """Two ranks read one swapped table: one event, one report, one count; the merged report names both ranks.

    So it does of a bit in both that comes behind another of one rank: what a rank found first hides nothing.
    """
    from structlog.testing import capture_logs

    from kvcanary.adapters.hosted.ranks import merged

    monkeypatch.setenv("KVCANARY_MODE", "log")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = [serve(settings={"rank": rank, "world_size": 2}) for rank in range(2)]
    count = _found("R4")
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
            go_on(served, 2)
            block, offset = served.place("a", 1)
            served.caches["l1"].view(torch.int32)[block, 1, offset, 8 + 3] ^= 1 << 9
            go_on(served, 2)
    reported = [
        (event["code"], event["position"], event["rank"]) for event in events if event["event"] == "kvcanary.finding"
    ]
    assert [own for own in reported if own[:2] in (("R4", 8), ("R9", 3))] == [("R4", 8, 0), ("R9", 3, 1)]
    assert _found("R4") == count + 1
    shown = capsys.readouterr().err
    assert shown.count("kvcanary: ERROR:") == len(reported)
    assert ("\n  rank      0\n" in shown, "\n  rank      1\n" in shown) == (True, True)
    report = merged([served.wrapper.kvcanary_report() for served in ranks])
    found = {(f["code"], f["position"]): f["ranks"] for f in report["findings"]}
    assert found[("R4", 8)] == [0, 1]
    assert found[("R9", 3)] == [1]
    assert found[("R9", 1)] == [0, 1]
    assert report["armed"]
    assert [worker["rank"] for worker in report["workers"]] == [0, 1]


def test_a_worker_that_nobody_hears_ends_by_itself(serve, monkeypatch, tmp_path) -> None:
    """Outputs of the second rank go nowhere: what it alone finds is told one step later, and its process ends."""
    from structlog.testing import capture_logs

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    served = serve(settings={"rank": 1, "world_size": 2})
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    go_on(served, 4)
    block, offset = served.place("a", 18)
    served.caches["l1"].view(torch.int32)[block, 1, offset, 8 + 3] ^= 1 << 9
    served.step()
    with capture_logs() as events, pytest.raises(SystemExit, match=r"content changed \(R9\).*layer 1"):
        served.step()
    reported = [(event["code"], event["rank"]) for event in events if event["event"] == "kvcanary.finding"]
    assert reported == [("R9", 1)]


@pytest.mark.parametrize(
    ("backend", "world", "tensor", "collected"),
    [("uni", 1, 1, [0]), ("mp", 4, 2, [2]), ("mp", 2, 2, [0]), ("ray", 2, 2, [0, 1])],
)
def test_which_worker_is_collected(backend: str, world: int, tensor: int, collected: list[int]) -> None:
    """Of processes that vLLM starts by itself the first of the last pipeline stage; elsewhere each."""
    from kvcanary.adapters.vllm.handle import is_collected

    parallel = SimpleNamespace(
        distributed_executor_backend=backend,
        world_size=world,
        tensor_parallel_size=tensor,
        prefill_context_parallel_size=1,
    )
    workers = [SimpleNamespace(rank=n, vllm_config=SimpleNamespace(parallel_config=parallel)) for n in range(world)]
    assert [worker.rank for worker in workers if is_collected(worker)] == collected


@pytest.mark.parametrize("struck", [[1], [0, 1]])
def test_the_measurement_over_two_workers_strikes_where_it_says(serve, monkeypatch, tmp_path, struck) -> None:
    """A bit of a cached block in one worker or in both: the request that finds the block names those ranks."""
    from structlog.testing import capture_logs

    from kvcanary.adapters.hosted.ranks import merged
    from kvcanary_tools.bench.vllm.parallel import strike

    monkeypatch.setenv("KVCANARY_MODE", "log")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks, tokens = [serve(settings={"rank": rank, "world_size": 2}) for rank in range(2)], [3 * n for n in range(30)]
    with capture_logs() as events:
        for served in ranks:
            served.ask("a", tokens, 3)
            served.run()
            assert (strike(served.wrapper, struck, 11, 1) is None) == (served.wrapper.rank not in struck)
            served.ask("b", tokens, 3)
            served.run()
            assert served.violations == 3
    reported = [event["rank"] for event in events if event["event"] == "kvcanary.finding"]
    assert reported == struck[:1]
    found = merged([served.wrapper.kvcanary_report() for served in ranks])["findings"][0]
    assert (found["code"], found["reader"], found["position"], found["layer"]) == ("R9", "b", 11, 1)
    assert (found["part"], found["ranks"]) == ("V", struck)


@pytest.mark.parametrize("share", ["1e-9", "0.9999999"])
def test_a_share_of_workers_is_watched(serve, monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    """Who has no turn is not touched, serves the same, and reports share and week; who has one is watched as ever."""
    from structlog.testing import capture_logs

    monkeypatch.setenv("KVCANARY_SHARE", share)
    has_turn = share != "1e-9"
    with capture_logs() as events:
        served = serve(settings={"rank": 2, "world_size": 4})
    turns = [(own["watched"], own["rank"], own["share"]) for own in events if own["event"] == "kvcanary.turn"]
    assert turns == [(has_turn, 2, float(share))]
    attached = [own for own in events if own["event"] == "kvcanary.attached"]
    assert [own["turn"]["share"] for own in attached] == [float(share)] * has_turn
    assert [own["hardware"]["pid"] for own in attached] == [os.getpid()] * has_turn
    served.ask("a", [(3 * n) % 97 for n in range(30)], 4)
    served.run()
    report = served.wrapper.kvcanary_report()
    assert (report["armed"], report["rank"], report["turn"]["share"]) == (has_turn, 2, float(share))
    assert hasattr(served.runner.execute_model, "kvcanary_replaces") == has_turn


def _found(code: str) -> float:
    """`kvcanary_findings_total` of a code, at all places of reading and on all devices."""
    from prometheus_client import REGISTRY

    families = [family for family in REGISTRY.collect() if family.name == "kvcanary_findings"]
    samples = [sample for family in families for sample in family.samples if sample.name.endswith("_total")]
    return sum(sample.value for sample in samples if sample.labels["code"] == code)


def test_workers_have_one_seed_and_know_their_share(serve, monkeypatch, tmp_path) -> None:
    """The seed is that of the first one, as long as they run; what they hold alike is asked of the model's heads."""
    import torch.distributed as dist

    monkeypatch.delenv("KVCANARY_SEED")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        handle = serve(settings={"rank": 0, "world_size": 2}).wrapper.worker.kvcanary
        seed = handle.config.seed
        assert handle.canary.memory.seed == seed
        assert handle._bind().memory.seed == seed  # as when it wakes up
        assert handle._shard_of(False) == (0, 2, 4)
        assert handle.sampled.copies is None  # two heads each: nobody else's
        monkeypatch.setattr("kvcanary.adapters.hosted.handle.StoredCopies", lambda canary, num_ranks: [num_ranks])
        assert serve(settings={"rank": 0, "world_size": 2}).wrapper.worker.kvcanary.sampled.copies == [2]
        monkeypatch.setenv("KVCANARY_DISABLE", "X2")
        assert serve(settings={"rank": 0, "world_size": 2}).wrapper.worker.kvcanary.sampled.copies is None
    finally:
        dist.destroy_process_group()
    alone = serve().wrapper.worker.kvcanary
    assert (alone.config.seed, alone._shard_of(False), alone.sampled) == (None, None, None)


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_what_workers_sample_is_compared_before_it_leaves(serve, monkeypatch, tmp_path, mode) -> None:
    """Another rank has other tokens in the third step: X1 in that step, in mode raise instead of its tokens."""
    import torch.distributed as dist

    from kvcanary import KVCorruptionError
    from kvcanary.adapters.hosted import sampled
    from kvcanary.ranks import Agreement, level

    class Other(Agreement):
        def _greatest(self, numbers, step):
            return [own + (step == 3 and place == 2) for place, own in enumerate(super()._greatest(numbers, step))]

    monkeypatch.setenv("KVCANARY_MODE", mode)
    monkeypatch.setattr(sampled, "Agreement", Other)
    monkeypatch.setattr(sampled, "levels_of", lambda given: {"tokens": level({"a": list(given["a"])}, True)})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        served = serve(settings={"rank": 0, "world_size": 2})
        served.ask("a", [5, 6, 7], 6)
        if mode == "raise":
            with pytest.raises(KVCorruptionError):
                served.run()
        else:
            served.run()
        report = served.wrapper.kvcanary_report()
        assert "X1" in report["classes"]
        assert [(own["code"], own["step"]) for own in report["incidents"]] == [("X1", 3)]
        left = []
        monkeypatch.setattr(served.wrapper.worker.kvcanary.sampled, "leave", lambda: left.append(True))
        served.wrapper.worker.kvcanary.detach()
        assert left
    finally:
        dist.destroy_process_group()
