"""The engine and its canary on a CUDA device: eager forwards, the host path of the checks."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, HookOrderError, KVCorruptionError
from kvcanary.scrub.scrubber import STRIDE
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

TOKENS = 24

pytestmark = pytest.mark.gpu


def cuda_engine(mode: str = "raise", content: str = "full", tokens: int = TOKENS, **more) -> Engine:
    """Two requests some steps into their decoding."""
    canary = CanaryConfig(mode=mode, content=content)
    settings = {"page_size": 4, "topk": 2, "num_draft_tokens": 6, "max_total_tokens": 1024, "device": "cuda"}
    engine = Engine(EngineConfig(canary=canary, **settings | more))
    for excerpt in load_excerpts()[:2]:
        prompt = engine.tokenizer.encode(excerpt.prompt)[-64:]
        engine.submit(prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    for _ in range(4):
        engine.step()
    return engine


def run(engine: Engine) -> list[int]:
    tokens = []
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
    return tokens


@pytest.mark.parametrize("content", ["write", "rolling", "full"])
def test_clean_traffic_has_no_finding_and_the_same_tokens(content: str) -> None:
    """The canary changes nothing on a GPU either."""
    engine = cuda_engine(content=content)
    assert run(engine) == run(cuda_engine("off"))
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_flipped_bit_is_found_and_named(pool: str) -> None:
    """Slot, layer and part of a flip in the memory of the GPU."""
    engine = cuda_engine()
    slot = int(engine.request_table.table[engine.running[0].row, 20])
    kv = engine.pools[pool].kv
    kv.view(torch.int32)[-1, slot, 1, 0, 5] ^= 1 << 9
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    finding = caught.value.findings[0]
    assert (finding.code, finding.pool, finding.slot, finding.layer) == ("R9", pool, slot, kv.shape[0] - 1)
    assert (finding.part, finding.head, finding.dim, finding.bit) == ("V", 0, 5, 9)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_nan_in_the_null_page_is_found(graphs: str) -> None:
    """Between eager forwards and between replays of captured ones, which write padding there: by the next slice."""
    engine = cuda_engine(content="rolling", graphs=graphs, tokens=4 * STRIDE)
    engine.pools["target"].kv[1, 3, 0] = float("nan")
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    finding = caught.value.findings[0]
    assert (finding.code, finding.name, finding.slot, finding.layer) == ("R9", "content not finite", 3, 1)


def test_nan_in_a_page_that_is_granted_is_found() -> None:
    """The look is launched at the grant, before a forward writes there, and read with the step's other results."""
    engine = cuda_engine(content="rolling")
    page = engine.pools["draft"].num_slots // engine.config.page_size - 1
    engine.pools["draft"].kv[0, page * engine.config.page_size + 1, 1] = float("nan")
    engine.canary.admit("another", [1, 2, 3])
    engine.canary.on_alloc("another", [page])
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    finding = caught.value.findings[0]
    assert (finding.name, finding.pool, finding.page) == ("content not finite", "draft", page)


def test_a_canary_is_not_attached_while_a_graph_is_captured() -> None:
    """It allocates: the refusal says to attach first."""
    engine = cuda_engine("off")
    views = [pool.view() for pool in engine.pools.values()]
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(HookOrderError, match="attach it before a CUDA graph is captured"):
            CanaryManager(CanaryConfig(), views)
        torch.zeros(1, device="cuda")
