"""The reader's probe in captured steps: programs of one token a row, of trees and of draft steps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError, ProbeForward, probe_pages
from kvcanary.probe.forwards import DRAFT
from kvcanary.probe.misread import Misread
from kvcanary.probe.reader import probe_pool
from spec_engine import Engine, EngineConfig
from spec_engine.core import ForwardBatch
from spec_engine.graphs.forward import StaticForward
from spec_engine.graphs.hooks import StaticAttention
from spec_engine.graphs.reader_probe import CAPTURED, CapturedReader
from spec_engine.memory.pools.fp8_pool import Fp8Pool
from spec_engine.memory.pools.pool import KVPool
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models.standalone import Standalone
from spec_engine.step.reader_probe import ProbedReader

HEADS = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def probed(
    device: str, *paths: str, page_size: int = 4, kind: type[KVPool] = KVPool
) -> tuple[ProbeForward, int, Misread] | None:
    """What the first forward that reads wrong has read, of a pool of 16-bit numbers; its bytes are as they were."""
    settings: dict[str, Any] = {"num_layers": 3, "num_pages": 2 * probe_pages(page_size), "page_size": page_size}
    settings |= {"kv_heads": 2, "head_dim": 16, "token_offset": 0, "dtype": torch.bfloat16}
    pool = kind("target", **settings, device=torch.device(device))
    for part in pool.parts:
        part.copy_(torch.randint(0, 100, part.shape))
    before = pool.kv.clone()
    eager = ProbedReader(pool, HEADS, "torch", None)
    pages = range(1, pool.view().num_pages)
    found = probe_pool(pool.view(), CapturedReader(pool, HEADS, eager), pages, HEADS, paths, dtype=pool.dtype)
    own = slice(page_size, None)  # padding writes into the null page
    assert torch.equal(pool.kv[:, own].view(torch.uint8), before[:, own].view(torch.uint8))
    return found


@pytest.mark.parametrize("kind", [KVPool, Fp8Pool])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_sound_programs_pass(device: str, page_size: int, kind: type[KVPool]) -> None:
    """All three paths, one behind the other."""
    assert probed(device, *CAPTURED, page_size=page_size, kind=kind) is None


def without_order(forward: StaticForward) -> None:
    """The pool's own order, in the place of the rows'."""
    forward.indices.copy_(torch.arange(len(forward.indices), device=forward.indices.device) % 16 + 4)


def of_the_other_branch(forward: StaticForward) -> None:
    """Each row of a draft step has the path of the branch beside it."""
    first, second = forward.indptr[1].item(), forward.indptr[2].item()
    both = forward.indices[:second].view(2, first)
    both[:, -forward.ancestors - 1 : -1] = both[:, -forward.ancestors - 1 : -1].flip(0).clone()


def of_siblings(forward: StaticForward) -> None:
    """A tree's nodes see all of it."""
    assert forward.tree_mask is not None
    forward.tree_mask.fill_(True)


@pytest.mark.parametrize(
    ("path", "change", "family", "text"),
    [
        ("decode", without_order, "addressing", "attention read slots that are not the row's, and that the probe has"),
        ("draft", without_order, "addressing", "attention read slots that are not the row's, and that the probe has"),
        ("draft", of_the_other_branch, "addressing", "attention ignores the row's table: it read slots"),
        ("verify", of_siblings, "draft", "the mask lets in nodes that are no ancestors: slots"),
    ],
)
def test_what_a_program_reads_is_named(
    monkeypatch: pytest.MonkeyPatch, path: str, change: Any, family: str, text: str
) -> None:
    """By its path and what it read, where forwards without graphs read right."""
    inner = StaticForward.read

    def read(forward: StaticForward, *args: Any, **kwargs: Any) -> None:
        inner(forward, *args, **kwargs)
        if forward.kind == path and (change is not of_the_other_branch or forward.ancestors):
            change(forward)

    monkeypatch.setattr(StaticForward, "read", read)
    found = probed("cpu", path)
    assert found is not None
    forward, layer, wrong = found
    assert (forward.path, layer, wrong.family) == (path, 0, family)
    assert wrong.text.startswith(text)


def make_engine(device: str = "cpu", **settings: Any) -> Engine:
    target = random_model(0, max_position_embeddings=256).to(device, torch.float32)
    draft = Standalone(
        random_model(1, num_hidden_layers=1, max_position_embeddings=256).to(device, torch.float32), target
    )
    own: dict[str, Any] = {"page_size": 4, "max_total_tokens": 512, "device": device, "dtype": "float32"}
    config = EngineConfig(**own | {"canary": CanaryConfig(mode="raise")} | settings)
    return Engine(config, model=target, draft=None if config.draft == "none" else draft, tokenizer=MockTokenizer())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("draft", "pools"), [("none", 1), ("standalone", 2)])
def test_an_engine_is_asked_with_graphs_and_without(device: str, draft: str, pools: int) -> None:
    """Each pool once more where steps are captured; again while it serves, by the same programs."""
    engine = make_engine(device, draft=draft, graphs="on")
    assert engine.canary.certificate()["reader_probes"] == 2 * pools
    programs = {name: len(reader._programs) for name, reader in engine.runner._readers.items()}
    engine._probe()
    assert engine.canary.certificate()["reader_probes"] == 4 * pools
    assert programs == {name: len(reader._programs) for name, reader in engine.runner._readers.items()}
    assert make_engine(device, draft=draft, graphs="off").canary.certificate()["reader_probes"] == pools


def test_an_engine_whose_captured_steps_read_wrong_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8 before it serves; without graphs nothing is wrong."""
    inner = StaticAttention.attend

    def attend(own: StaticAttention, layer: int, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        own._forward = replace(own._forward, indices=own._forward.indices.roll(1))
        return inner(own, layer, q, *kv)

    monkeypatch.setattr(StaticAttention, "attend", attend)
    make_engine(draft="none", graphs="off")
    with pytest.raises(KVCorruptionError) as caught:
        make_engine(draft="none", graphs="on")
    finding = caught.value.findings[0]
    assert (finding.code, finding.site) == ("R8", ("decode", 0))


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [
        ({}, True),
        ({"attention_backend": "paged", "page_size": 1}, True),
        ({"attention_backend": "paged"}, False),  # its branches own whole pages
    ],
)
def test_drafts_without_graphs_are_asked(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], is_asked: bool
) -> None:
    """Of an engine whose draft steps are not captured, each branch; it does not start where one reads another's."""
    inner = ProbedReader._batch

    def batch(reader: ProbedReader, forward: ProbeForward) -> ForwardBatch:
        own = inner(reader, forward)
        if forward.path != DRAFT:
            return own
        assert (own.rows_per_request, len(own.requests), len(own.prefix_lens)) == (2, 2, 2)
        first, second, *_ = forward.slots
        return replace(own, kv_indices=torch.cat((torch.tensor(second + first), own.kv_indices[2 * len(first) :])))

    make_engine(graphs="off", draft="standalone", **settings)
    monkeypatch.setattr(ProbedReader, "_batch", batch)
    with pytest.raises(KVCorruptionError, match="read elsewhere") if is_asked else nullcontext():
        make_engine(graphs="off", draft="standalone", **settings)
