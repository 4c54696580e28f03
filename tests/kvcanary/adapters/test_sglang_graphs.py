"""What SGLang's attention reads in graphs, by stand-ins for its backend and its batches: no SGLang is needed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary.adapters.hosted.probing import IN_A_GRAPH
from kvcanary.adapters.sglang import attention_probe
from kvcanary.adapters.sglang.attention_probe import _Asked, captures_decodes
from kvcanary.pools.views import PoolView

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOTS, HEADS, DIM, WIDTH = 64, 2, 16, 48


class Mode(Enum):
    DECODE, EXTEND, TARGET_VERIFY = range(3)

    def is_decode(self) -> bool:
        return self is Mode.DECODE


@dataclass
class Batch:
    forward_mode: Any
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    input_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    positions: torch.Tensor
    extend_seq_lens: torch.Tensor | None = None


class Backend:
    """Attends by rows and lengths that it was told of: eager ones of its own, or those that its graphs read."""

    def __init__(self, table: torch.Tensor, harm: str = "") -> None:
        self.table, self.harm, self.replays, self.captures = table, harm, 0, 0

    def init_forward_metadata(self, batch: Any) -> None:
        self.slots, self.lens = self.table[batch.req_pool_indices], batch.seq_lens

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.graph_slots = self.table.new_zeros(max_bs, self.table.shape[1])
        self.graph_lens = torch.zeros(max_bs, dtype=torch.int64, device=self.table.device)

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        self.slots, self.lens = self.graph_slots, self.graph_lens
        self.replays += not in_capture
        self.captures += in_capture
        if in_capture or self.harm != "all kept":
            self.lens.copy_(batch.seq_lens)
        if in_capture or not self.harm:
            self.slots.copy_(self.table[batch.req_pool_indices])

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        pass

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


class Layer:
    qk_head_dim = v_head_dim = DIM

    def __init__(self, layer_id: int, view: PoolView, host: Host) -> None:
        self.layer_id, self.scaling, self._host = layer_id, DIM**-0.5, host
        self.tp_q_head_num = self.tp_k_head_num = HEADS
        self._k, self._v = view.k[layer_id], view.v[layer_id]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
        backend, n = self._host.backend, len(q)
        self._k[batch.out_cache_loc], self._v[batch.out_cache_loc] = k.view(n, HEADS, DIM), v.view(n, HEADS, DIM)
        new = torch.ones_like(backend.lens) if batch.extend_seq_lens is None else batch.extend_seq_lens.long()
        row = torch.arange(len(backend.lens), device=q.device).repeat_interleave(new, output_size=n)
        places = torch.arange(backend.slots.shape[1], device=q.device)
        seen = places[None] <= batch.positions[:, None] if batch.extend_seq_lens is not None else None
        seen = places[None] < backend.lens[:, None] if seen is None else seen
        slots = backend.slots[row].long()
        scores = torch.einsum("nhd,nphd->nhp", q.view(n, HEADS, DIM), self._k[slots]) * self.scaling
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return torch.einsum("nhp,nphd->nhd", weights, self._v[slots]).flatten(1)


class Host:
    """A runner that has captured decodes of these sizes, and a pool of two layers."""

    def __init__(self, device: str, harm: str = "", sizes: tuple[int, ...] = (1, 2, 4)) -> None:
        k, v = ([torch.zeros(SLOTS, HEADS, DIM, device=device) for _ in range(2)] for _ in range(2))
        self.view = PoolView("target", k, v, page_size=1)
        self.table = torch.zeros(8, WIDTH, dtype=torch.int32, device=device)
        self.own, self.fresh = Backend(self.table), Backend(self.table, harm)
        self.backend = self.own  # in whose context a forward runs
        layers = [Layer(number, self.view, self) for number in range(2)]
        plans = SimpleNamespace(own_plan=lambda batch: self, bind_runner_slots=lambda batch: None)
        captured = SimpleNamespace(capture_forward_mode=Mode.DECODE, capture_bs=list(sizes))
        self.runner = SimpleNamespace(
            model=SimpleNamespace(modules=lambda: layers),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=None,
            attn_backend=self.own,
            dtype=torch.float32,
            kv_index_translator=plans,
            decode_cuda_graph_runner=captured,
            _get_attention_backend=lambda: self.fresh,
        )

    def bind(self, batch: Any, reader: Any) -> None:
        """A plan says nothing here."""

    def modules(self, name: str) -> Any:
        """What stands for SGLang's."""

        @contextmanager
        def within(context: Any) -> Any:
            before, self.backend = self.backend, context.attn_backend
            yield
            self.backend = before

        return SimpleNamespace(
            ForwardBatch=Batch,
            ForwardMode=Mode,
            ForwardContext=lambda attn_backend: SimpleNamespace(attn_backend=attn_backend),
            forward_context=within,
            build_replay_fb_view=lambda forward_batch, buffers, bs, raw_bs, num_tokens: buffers,
        )

    def asked(self, **how: Any) -> _Asked:
        pool = SimpleNamespace(names=["layer 0", "layer 1"], view=self.view)
        return _Asked(self.runner, SimpleNamespace(chunked_prefill_size=WIDTH), pool, 0, None, **how)


@pytest.fixture
def host_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*args: Any) -> Host:
        host = Host(*args)
        monkeypatch.setattr(attention_probe, "import_module", host.modules)
        monkeypatch.setattr(attention_probe, "missing", lambda needs: [])
        return host

    return make


@pytest.mark.parametrize("device", DEVICES)
def test_decodes_of_a_sound_graph_are_silent(host_of, device: str) -> None:
    """It is of a backend of its own: SGLang's graphs go on with what they have."""
    host = host_of(device)
    before = [own.clone() for own in (*host.view.k, *host.view.v, host.table)]
    asked = host.asked(is_captured=True)
    assert (asked.why_not(), asked.probe()) == (None, None)
    assert (host.fresh.captures, host.fresh.replays) == (2, 2)  # one a layer
    assert (host.own.captures, host.own.replays, hasattr(host.own, "graph_lens")) == (0, 0, False)
    after = (*host.view.k, *host.view.v, host.table)
    padding = slice(1, None)  # rows of padding store into slot 0, as they do in SGLang
    assert all(torch.equal(one[padding], other[padding]) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("harm", ["all kept", "slots kept"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_a_graph_keeps_of_its_capture_is_named(host_of, device: str, harm: str) -> None:
    """And silent outside of graphs, where the same layers read by what they are told."""
    host = host_of(device, harm)
    assert host.asked().probe() is None
    forward, layer, misread = host.asked(is_captured=True).probe()
    assert (forward.path, layer, misread.evidence[-1]) == ("decode", 0, IN_A_GRAPH)
    assert (host.fresh.captures, host.fresh.replays > 1) == (1, True)  # all passes replay one graph


@pytest.mark.parametrize(
    ("is_right", "captures", "expected"), [(True, True, [None, True]), (True, False, [None]), (False, True, [None])]
)
def test_graphs_are_asked_behind_what_is_right_outside(
    monkeypatch: pytest.MonkeyPatch, host_of, is_right: bool, captures: bool, expected: list[bool | None]
) -> None:
    """Of every group once more, where decodes are captured."""
    host, asked = host_of("cpu"), list[bool | None]()
    if not captures:
        host.runner.decode_cuda_graph_runner = None

    def ask(canary: Any, group: Any, pool: Any, make: Any) -> bool:
        asked.append(make.keywords.get("is_captured"))
        return is_right

    monkeypatch.setattr(attention_probe, "ask", ask)
    groups = [SimpleNamespace(layers=[object()], window=0)] * 2
    attention_probe.probe_layers(SimpleNamespace(groups=groups), host.runner, None, [None, None])
    assert asked == expected * 2


def test_a_server_whose_graphs_are_too_small_is_not_asked(host_of) -> None:
    host = host_of("cpu", "", (1, 2))
    assert host.asked(is_captured=True).why_not() == "no graph of 3 rows is captured"
    assert host.asked().why_not() is None


@pytest.mark.parametrize(
    ("runner", "expected"),
    [
        (SimpleNamespace(decode_cuda_graph_runner=None), False),
        (SimpleNamespace(), False),
        (SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(bs=4)), False),
        (SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_forward_mode=Mode.TARGET_VERIFY)), False),
        (SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_forward_mode=Mode.DECODE)), True),
    ],
    ids=["none", "a runner without", "eager", "verifies", "decodes"],
)
def test_who_captures_decodes(runner: Any, expected: bool) -> None:
    assert captures_decodes(runner) is expected
