"""Prefill in a process of its own, decode here: one pair of engines for many tests, and what they break between."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvcanary import CanaryConfig, CanaryManager, PoolView
from kvcanary.report.finding import Finding
from kvcanary.transfers import PageSnapshot, Peer
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.disagg.card import EngineCard
from spec_engine.disagg.decode_side import Arrival, DecodeSide
from spec_engine.disagg.handover import Handover
from spec_engine.disagg.link import Link, Piece, Transfer, until_over
from spec_engine.disagg.links import make_link
from spec_engine.disagg.prefill_side import PrefillSide
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Standalone

PAGE, SEED, HOST_PAGES = 4, 7, 24
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
WINDOWED = {
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
PREFILL, DECODE = Peer("prefill-1", 3, "GPU-of-prefill"), Peer("decode-1", 0, "GPU-of-decode")
_NUMBERS = itertools.count()
PARAMS = SamplingParams(max_new_tokens=10, temperature=0.8, seed=3)


def prompt(number: int, length: int = 30) -> list[int]:
    return [(number * 7 + place * 3) % 97 for place in range(length)]


def make_engine(kind: str = "tree", **settings: Any) -> Engine:
    """tree: four layers and a drafted tree; window: one layer of two sees six positions only, no draft."""
    torch.set_num_threads(1)
    settings = {"max_total_tokens": 512, "max_running_requests": 4, "host_pages": HOST_PAGES, **settings}
    mode, chunk = settings.pop("mode", "abort"), 512 if kind == "tree" else 8  # a window slides between chunks
    config = EngineConfig(
        draft="standalone" if kind == "tree" else "none",
        page_size=PAGE,
        topk=2,
        num_steps=3,
        num_draft_tokens=6,
        dtype="float64",
        prefix_cache=False,
        prefill_chunk_tokens=chunk,
        canary=CanaryConfig(mode=mode, content="full", seed=SEED, dump_dir=None),
        **settings,
    )
    if kind == "window":
        return Engine(config, model=random_model(0, logit_scale=6.0, **WINDOWED), tokenizer=MockTokenizer())
    whole = random_model(0, logit_scale=6.0, num_hidden_layers=4, **SHAPE)
    draft = Standalone(random_model(0, logit_scale=6.0, num_hidden_layers=4, **SHAPE), whole)
    return Engine(config, model=whole, draft=draft, tokenizer=MockTokenizer())


class Sender:
    """The child: engines by kind, and what a test asks of them. Its clock stands still unless it is told."""

    def __init__(self, transport: str) -> None:
        self._transport, self._now = transport, 0.0
        self._engines: dict[str, tuple[Engine, PrefillSide]] = {}
        self._links: list[Link] = []

    def card(self, kind: str) -> bytes:
        engine = make_engine(kind)
        peer = PREFILL._replace(engine=f"{PREFILL.engine}{'' if kind == 'tree' else '-' + kind}")
        link = make_link(self._transport, f"{peer.engine} of {id(self)}")
        side = PrefillSide(engine, link, peer, lease_seconds=30, clock=lambda: self._now)
        self._engines[kind] = engine, side
        return side.card.to_bytes()

    def prefill(self, kind: str, tokens: Sequence[int], fault: str = "") -> bytes:
        """A handover. `fault`: the copy to the host is waited for by nobody, or is of the slots that rows name."""
        engine, side = self._engines[kind]
        tier = engine.memory.tier
        maps = list(tier._maps)
        if fault == "no event":
            tier.wait = lambda block: None
        if fault == "full slots":
            tier._maps = [None] * len(maps)
        name = engine.submit(tokens, PARAMS, hands_over=True)
        while engine.has_work:
            engine.step()
        wire = side.hand_over(name).to_bytes()
        tier.__dict__.pop("wait", None)
        tier._maps = maps
        return wire

    def later(self, seconds: float) -> int:
        """So much later: leases that are left."""
        self._now += seconds
        for _, side in self._engines.values():
            side.tend()
        return sum(len(side.leases) for _, side in self._engines.values())

    def forget(self) -> None:
        """All blocks go, whoever has a ticket for them."""
        for engine, side in self._engines.values():
            for lease in list(side.leases.values()):
                side._let_go(lease)
            engine.streams.synchronize()

    def facts(self) -> dict[str, Any]:
        """Codes of findings, free places of the tiers, expired leases; PageLeakError where a page is nobody's."""
        for engine, _ in self._engines.values():
            engine.memory.check_accounting([])
            engine.canary.drain()
        found = [finding for engine, _ in self._engines.values() for finding in engine.canary.findings]
        return {
            "codes": [finding.code for finding in found],
            "readers": [finding.found.get("reader") for finding in found],
            "free": {kind: engine.memory.tier.num_free for kind, (engine, _) in self._engines.items()},
            "expired": sum(side.num_expired for _, side in self._engines.values()),
        }

    def shards(self) -> tuple[bytes, list[bytes]]:
        """Page 1 of a pool of 8 heads, by two ranks: where its K and V of each rank can be read, and their seals."""
        whole = shard_view(8, 0)
        halves = [shard_view(8, first, 4, whole) for first in (0, 4)]
        parts = [part.contiguous() for view in halves for part in (torch.stack(view.k), torch.stack(view.v))]
        self._links.append(make_link(self._transport, "ranks"))
        return self._links[-1].expose(parts), [seal_of(view)[1].to_bytes() for view in halves]


def serve(pipe: Connection, transport: str) -> None:
    """The child's life: what is asked is answered, an exception with its text."""
    sender = Sender(transport)
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            with torch.inference_mode():
                pipe.send((True, getattr(sender, what)(*arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


@dataclass
class Outcome:
    """What became of a request: its tokens, how it ended, what was found, and prompt tokens that were forwarded."""

    tokens: list[int]
    reason: str | None
    findings: list[Finding]
    forwarded: int


class Pair:
    """A child that prefills, and engines here, by kind, that decode."""

    def __init__(self, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.child = context.Process(target=serve, args=(there, transport), daemon=True)
        self.child.start()
        there.close()
        self.transport = transport
        self.sides: dict[str, tuple[Engine, DecodeSide, LooseLink]] = {}
        self.ahead = 0.0
        self._cards: dict[str, EngineCard] = {}
        self._expected: dict[tuple[str, int], list[int]] = {}

    def clock(self) -> float:
        """Of the receiver: seconds that pass, and those that a test skips."""
        return time.monotonic() + self.ahead

    def ask(self, what: str, *arguments: Any) -> Any:
        self._pipe.send((what, *arguments))
        if not self._pipe.poll(60):
            raise TimeoutError(f"the child does not answer {what!r}")
        is_answered, answer = self._pipe.recv()
        if not is_answered:
            raise RuntimeError(answer)
        return answer

    def side(self, kind: str = "tree") -> tuple[Engine, DecodeSide, LooseLink]:
        if kind not in self.sides:
            engine, link = (
                make_engine(kind),
                LooseLink(make_link(self.transport, f"decode-{kind}-{next(_NUMBERS)}", seconds=10)),
            )
            side = DecodeSide(engine, link, DECODE, timeout=20, clock=self.clock)
            if kind not in self._cards:
                self._cards[kind] = EngineCard.from_bytes(self.ask("card", kind))
            side.meet(self._cards[kind])
            self.sides[kind] = engine, side, link
        return self.sides[kind]

    def expected(self, number: int, kind: str = "tree") -> list[int]:
        """Tokens of one engine that does all by itself."""
        if (kind, number) not in self._expected:
            self._expected[kind, number] = list(make_engine(kind).generate([prompt(number)], PARAMS)[0].token_ids)
        return self._expected[kind, number]

    def send(self, number: int = 0, kind: str = "tree", fault: str = "") -> Handover:
        self.side(kind)
        return Handover.from_bytes(self.ask("prefill", kind, prompt(number), fault))

    def receive(
        self, handover: Handover, kind: str = "tree", spoil: Callable[[Engine, Arrival], None] | None = None
    ) -> Outcome:
        """The rest of the request; `spoil` has the arrival when it is over."""
        engine, side, _ = self.side(kind)
        arrival = side.begin(handover)
        while not arrival.is_over(self.clock()):
            time.sleep(0.0005)
        if spoil is not None:
            spoil(engine, arrival)
        return self.finish(arrival, kind)

    def finish(self, arrival: Arrival, kind: str = "tree") -> Outcome:
        engine, side, _ = self.side(kind)
        before, known = engine.metrics.prefill_tokens, len(engine.canary.findings)
        side.submit(arrival)
        events = []
        with torch.inference_mode():
            while engine.has_work:
                events += engine.step()
        tokens = [token for event in events for token in event.token_ids]
        found = engine.canary.findings[known:]
        return Outcome(tokens, events[-1].finish_reason, found, engine.metrics.prefill_tokens - before)

    def renew(self) -> None:
        """Engines here are new ones: a canary tells of a place once."""
        for _, _, link in self.sides.values():
            link.close()
        self.sides.clear()

    def close(self) -> None:
        self._pipe.close()
        self.child.join(5)
        if self.child.is_alive():
            self.child.kill()
        self.renew()


class LooseLink:
    """A link that leaves out pieces, or begins what is fetched only when it is released."""

    def __init__(self, link: Link) -> None:
        self._link, self.name = link, link.name
        self.holds = False
        self.leaves_out: Callable[[Piece], bool] = lambda piece: False

    def fetch(self, peer: str, there: Sequence[Piece], here: Sequence[Piece]) -> Transfer:
        kept = [(own, other) for own, other in zip(here, there, strict=True) if not self.leaves_out(own)]
        own, other = [piece for piece, _ in kept], [piece for _, piece in kept]
        return Held(lambda: self._link.fetch(peer, other, own), self.holds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class Held:
    """A transfer that may begin later."""

    def __init__(self, begin: Callable[[], Transfer], holds: bool) -> None:
        self._begin, self._transfer = begin, None if holds else begin()

    def release(self) -> None:
        self._transfer = self._begin()
        until_over(self._transfer, 10)

    @property
    def is_over(self) -> bool:
        return self._transfer is not None and self._transfer.is_over

    @property
    def error(self) -> str:
        return self._transfer.error


# ranks that hold some heads each


def shard_view(whole_heads: int, first: int, heads: int = 0, whole: PoolView | None = None) -> PoolView:
    """Two layers of 4 pages; of all heads with random rows, or of some of another view's."""
    if whole is None:
        generator = torch.Generator().manual_seed(5)
        shape = (4 * PAGE, whole_heads, 8)
        rows = [[torch.randn(shape, generator=generator) for _ in range(2)] for _ in "kv"]
        heads = whole_heads
    else:
        rows = [[one[:, first : first + heads].clone() for one in part] for part in (whole.k, whole.v)]
    return PoolView("t", k=rows[0], v=rows[1], page_size=PAGE, first_head=first, whole_heads=whole_heads)


def seal_of(view: PoolView, seal: PageSnapshot | None = None) -> tuple[CanaryManager, PageSnapshot]:
    """Page 1 holds four tokens of a request, as they lie there or as a seal says; the canary, and its own seal."""
    manager = CanaryManager(CanaryConfig(mode="log", seed=SEED, content="full", dump_dir=None), [view])
    manager.arm()
    manager.begin_step(1)
    manager.admit("r", [5, 6, 7, 8])
    manager.on_alloc("r", [1], for_load=True)
    manager.on_load_begin("r", [1])
    manager.on_load_end("r", [1], PAGE, seal)
    manager.commit("r", PAGE)
    manager.drain()
    return manager, manager.on_offload([1])
