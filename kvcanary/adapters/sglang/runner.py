"""One model runner of SGLang and the pool that it stores into: what each of its forwards is about to read and write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.hosted.cells import Shard
from kvcanary.adapters.hosted.handle import HostHandle
from kvcanary.adapters.observed import moves as paged_moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.inputs import (
    NOTHING,
    UNKNOWN,
    Entries,
    SampledTokens,
    judge_fed,
    tell_lost,
    tell_outgrown,
    tell_unfed,
)
from kvcanary.adapters.observed.state import Forward
from kvcanary.adapters.sglang import states
from kvcanary.adapters.sglang.attention_probe import probe_layers
from kvcanary.adapters.sglang.fed import FedForward, Given, are_named, identity_of, tokens_of
from kvcanary.adapters.sglang.layout import parts_of
from kvcanary.calls.violation import NO_SLOT
from kvcanary.config import CanaryConfig
from kvcanary_kernels.record.layout import MASK_32, STEP_SITE

UNNAMED = "requests with contents whose places in the prompt do not name them: other ones look the same"


class Verified(NamedTuple):
    """A verify whose acceptance is not known yet.

    nodes:  [rows * nodes] tokens of its trees, and where they are stored; before: [rows] entries that were committed
    """

    batch: Any
    nodes: Tensor
    slots: Tensor
    before: Tensor


class WatchedRunner(HostHandle):
    """The canary of one runner's pool.

    A row of SGLang's `req_to_token` is a row here. Who has it now is told by its generation, which grows whenever the
    row is given out again.
    """

    host = "sglang"
    canary: PagedCanary
    role: ClassVar[str] = "target"
    #: As of `Layers`. Of no target: entries that a verify rejects are recorded with other tokens than they are of.
    reads_hidden: ClassVar[bool] = False
    token_offset: ClassVar[int] = 0  # the entry of position p is fed the token of p + offset
    name_offset: ClassVar[int] = 0  # and has the name of that of p + offset
    _samples: SampledTokens | None = None  # of the target, which samples
    _are_kept: NDArray[np.bool_] | None = None  # of the last forward, as `SampledTokens.sampled` has it

    def __init__(
        self, runner: Any, config: CanaryConfig, most_tokens: int, width: int, shard: Shard | None = None
    ) -> None:
        """width: nodes of a tree that is verified, at most; 1: nobody drafts;  shard: of each layer, None: all"""
        ranks = import_module("sglang.srt.runtime_context").get_parallel()
        super().__init__(config, ranks.tp_rank, ranks.tp_size == 1)
        self.runner, self.rows, self.nodes = runner, runner.req_to_token_pool, width
        self.num_rows, self.length = self.rows.req_to_token.shape
        pool = runner.token_to_kv_pool
        self.canary = self._adopt(PagedCanary(config, self.num_rows, width, most_tokens, pool.device))
        self.canary.dumps.environment |= {"version": import_module("sglang").__version__, "role": self.role}
        parts = parts_of(pool, self.role, self.token_offset, runner.sliding_window_size, shard)
        self._num_ranks = 1 if shard is None else shard.num_ranks
        for number, part in enumerate(parts):
            slots, null_slots = part.view.num_slots, part.view.null_slots
            group = self.canary.memory.add_group(number, 1, slots, part.window, null_slots=null_slots)
            self.canary.memory.add_layers(group, part.view, part.names, reads_hidden=self.reads_hidden)
        self.owners = self.canary.follow_owners()
        self._slot_maps = [part.slot_map for part in parts]
        self._given = Given(self.rows.req_to_token, most_tokens, self._slot_maps)
        self._generations: dict[int, int] = {}
        self._weights = ""
        self._reweighted, self._older = 0, torch.zeros((), dtype=torch.int64, device=pool.device)
        has_states = self.role == "target" and getattr(self.rows, "mamba_pool", None) is not None
        unwatched = states.not_followed(self.rows, runner.attn_backend, width > 1) if has_states else None
        self.not_watched = [] if unwatched is None else [unwatched]
        self.states = states.RowStates(self.canary, self.rows, width > 1) if has_states and not unwatched else None
        if self.role == "target":
            self._samples = SampledTokens(self.canary, width)
        self.tier: Any = None  # of host_tier.py: what comes into the pool from elsewhere
        self.verified: Verified | None = None
        self._uids: dict[int, int] = {}  # by row
        self._numbers: dict[str, int] = {}  # rows of the requests that run, by name
        self.on_their_way = 0  # tokens of a request, at most, that SGLang samples before it looks at them
        self._ends: dict[str, int] = {}  # what requests have, by name, of whom a prefill has left some for the next

    def arm(self) -> None:
        """Compile and capture what every forward launches; from now on forwards are judged."""
        forward = self._empty_forward()
        self.canary.prepare(forward)
        if self._samples is not None:
            self._samples.prepare(forward)
        if self.states is not None:
            self.states.prepare(forward)
        for group in self.canary.groups:
            for layers in group.layers:  # compiled before SGLang moves entries
                paged_moves.fingerprints_of(layers, torch.zeros(1, dtype=torch.int64, device=layers.stamps.device))
        self.probe_reader()
        self._arm(self.canary)

    def probe_reader(self) -> None:
        """Ask its attention what it reads, over slots that nobody has: before it serves. KVCorruptionError in mode
        raise.
        """
        probe_layers(self.canary, self.runner, self.runner.server_args, self._slot_maps)

    def compare_ranks(self, group: Any) -> None:
        """Compare what this gloo group runs and samples, which nobody else uses; None: there is one rank."""
        self._compare_ranks(self.canary, group, self._num_ranks)

    def adapted(self, nodes: int, steps: int) -> None:
        """From the next round on trees have so many nodes, behind so many draft steps; at most as many as `width`."""
        self.nodes = nodes

    def forget(self) -> None:
        """Nobody answers for the bytes any more."""
        self.canary.memory.forget()
        self.owners.forget()
        if self.canary.poison is not None:
            self.canary.poison.forget()
        if self.states is not None:
            self.states.forget()
        self._generations.clear()
        self._reweighted = 0  # nothing is left of the weights before

    def flush(self) -> None:
        """Do now what waits for a forward: bytes are about to go."""
        self._flush()

    def reweighted(self, version: str | None) -> None:
        """The model has other weights from the next forward on; version: as SGLang was told, if it was."""
        self._reweighted, self._weights = self.canary.step, version or ""

    def report(self) -> dict[str, Any]:
        """`not_watched`: what else of a request lies in the pool; `older_weights`: entries that requests began with
        and that were stored before the weights changed to `weights`, as their version is called; `loads_checked`:
        entries from the host tier that were compared
        """
        own = {"not_watched": self.not_watched, "older_weights": int(self._older), "weights": self._weights}
        loads = {} if self.tier is None else {"loads_checked": self.tier.compared}
        return {**super().report(), **own, **loads}

    def sent(self) -> Callable[[], None]:
        """What looks at the counter of findings as it is now, when the step's tokens are there."""
        return functools.partial(self._counted, self.canary.step)

    def _counted(self, step: int) -> None:
        self._look_at(self.canary.count_at(step), step)

    def leave(self, request: Any) -> None:
        """A request gives its row back, or loses it."""
        number = request.kv.req_pool_idx
        self._ends.pop(request.rid, None)
        if self._generations.pop(number, None) is not None:
            self.canary.leave([number], [request.rid])

    def left(self, number: int) -> None:
        """What a row had is free by now, or the prefix cache's."""
        uid = self._uids.pop(number, None)
        if uid is not None:
            self.owners.left(uid)

    def granted(self, requests: Sequence[Any], begins: Sequence[int], ends: Sequence[int]) -> None:
        """Rows have slots for their entries from `begins` to `ends` now.

        What a row has no room for lies where SGLang has put it: in those behind it.
        """
        if max(ends, default=0) > self.length:
            tell_outgrown(self.canary, list(self._outgrown(requests, ends)), self.length)
        told = [  # what ran before there was a canary is not followed
            (number, begin, end, self._uids[number])
            for request, begin, end in zip(requests, begins, ends, strict=True)
            if end > begin and (number := request.kv.req_pool_idx) in self._uids
        ]
        if told:
            own = np.array(told)
            new = own[:, 2] - own[:, 1]
            numbers, first, _, uids = np.repeat(own, new, 0).T
            places = first + np.arange(len(first)) - np.repeat(np.cumsum(new) - new, new)
            rows, places, owners = self.canary.memory.upload(torch.from_numpy(np.stack((numbers, places, uids))))
            entries = (rows * self.length + places).clamp(max=self.rows.req_to_token.numel() - 1)
            self.owners.granted(self.rows.req_to_token.view(-1)[entries].to(torch.int64), owners)

    def _outgrown(self, requests: Sequence[Any], ends: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """Of rows that reach into those behind them: the request, its entries, and the slot of the first there."""
        entries = self.rows.req_to_token.view(-1)
        for request, end in zip(requests, ends, strict=True):
            behind = (request.kv.req_pool_idx + 1) * self.length
            if end > self.length:
                yield request.rid, end, int(entries[behind]) if behind < len(entries) else NO_SLOT

    def freed(self, slots: Tensor) -> None:
        """Slots [n] int64 went back to the allocator."""
        self.owners.freed(slots)

    def shared(self, request: Any) -> None:
        """The prefix cache has taken the beginning of a row."""
        number, length = request.kv.req_pool_idx, request.kv.cache_protected_len
        if length:
            self.owners.shared(self.rows.req_to_token[number, :length].to(torch.int64))

    def moved(self, method: Any, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """The engine moves entries: accepted nodes to the front, the end of a prefix to each branch."""
        self._flush()
        row_of = None if self.verified is None else functools.partial(_of_window, self.verified)
        move, moved = functools.partial(method, tgt_loc, src_loc), functools.partial(paged_moves.moved, self.canary)
        for group, own in zip(self.canary.groups[1:], self._given.mapped, strict=True):
            move = functools.partial(moved, group, own.of(src_loc), own.of(tgt_loc), move, row_of)
        moved(self.canary.groups[0], src_loc, tgt_loc, move, row_of)

    def _held(self) -> Collection[int]:
        return list(self._generations)

    # forwards

    def begin(self, requests: Iterable[Any]) -> None:
        """A step begins, of these requests; their rows are read now, for a later step may take them."""
        self._numbers = {request.rid: request.kv.req_pool_idx for request in requests}

    def forward(self, method: Any, batch: Any, requests: Mapping[str, Any]) -> Any:
        """Run a forward; `requests`: those that run, by name."""
        mode = batch.forward_mode
        if mode.is_idle():
            return method()
        if mode.is_target_verify():
            return self._verify(method, batch)
        if mode.is_extend():
            new, site = np.asarray(batch.extend_seq_lens_cpu), ("prefill", 0)
        else:
            new, site = np.ones(batch.batch_size, dtype=np.int64), ("decode", 0)
        fed = self._entries_of(batch, new)
        if site[0] == "decode" and self._samples is not None:
            tell_lost(self.canary, list(self._lost(fed, requests)))
        judge_fed(self.canary, "W6", "token", fed.tokens, self._known(fed, requests), fed.entries, site)
        self._are_kept = None
        if self._samples is not None and site[0] == "prefill":
            self._begin_prompts(batch, requests)
        self.read(fed, batch, site)
        output = method()
        self._wrote()
        return output

    def stored(self, count: int) -> Tensor:
        """[count] tokens of what the last forward has stored, or a verify accepted."""
        return self._given.tokens[:count]

    def read(self, fed: FedForward, batch: Any, site: tuple[str, int]) -> None:
        """Record what is about to be written, and judge what is about to be read."""
        numbers, total = np.array([self._numbers[name] for name in batch.rids]), len(fed.entries.rows)
        ends = self.canary.ends_at_most(numbers, fed.new, self.length) if fed.ends is None else fed.ends
        self._given.fill(fed, self.canary.memory.upload(torch.from_numpy(np.cumsum([0, *fed.new]))))
        if self._given.mapped:
            longest = self.length if fed.ends is None else int(fed.ends.max())
            for mapped in self._given.mapped:
                mapped.fill(self.canary.memory.upload(torch.from_numpy(numbers)), longest, fed.entries.slots)
        if self.tier is not None:
            self.tier.arrive(self._given.tables)
        forward = self._made(list(batch.rids), numbers, site, ends, total)
        self._read(forward)
        if self._samples is not None:
            self._samples.compare(forward)
        if self.states is not None:
            self.states.begin(forward)

    def _lost(self, fed: FedForward, requests: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """Of rows of a decode whose requests have not got every token that was sampled before it, but for those that
        are on their way: the request, the tokens that it has, and should have.
        """
        for name, end in zip(fed.entries.requests, [] if fed.ends is None else fed.ends.tolist(), strict=False):
            request = requests.get(name)
            if request is not None and request.input_embeds is None:
                known = len(request.origin_input_ids) + len(request.output_ids)
                if known + self.on_their_way < end:
                    yield name, known, end - self.on_their_way

    def _begin_prompts(self, batch: Any, requests: Mapping[str, Any]) -> None:
        """Whose prompts a prefill ends, so that what is sampled of them counts; nothing is behind what the others have.

        A row that computes nothing has nothing to sample from.
        """
        begins, new = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        own = map(requests.get, batch.rids)
        known = [np.inf if one is None else len(one.origin_input_ids) + len(one.output_ids) for one in own]
        self._are_kept = np.add(begins, new) >= np.array(known)
        for name, end, is_kept in zip(batch.rids, known, self._are_kept.tolist(), strict=True):
            self._ends.pop(name, None)
            if not is_kept and end != np.inf:
                self._ends[name] = int(end)
        rows = zip(batch.rids, begins, new, strict=True)
        tell_unfed(self.canary, [(name, length) for name, length, count in rows if not count])

    def sample(self, method: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Each row goes on with the token that this gives of it, whatever SGLang keeps of it until then."""
        tokens = method(logits_output, forward_batch, *args, **kwargs)
        if self._samples is not None and self._is_running and forward_batch.rids:
            self._samples.sampled(tokens[: len(forward_batch.rids), None], self._are_kept)
        return tokens

    def _wrote(self) -> bool:
        if self.tier is not None:
            self.tier.ran()
        if self.states is not None:
            self.states.left()
        has_run = super()._wrote()
        if has_run and self.tier is not None:
            self.tier.wrote()
        return has_run

    def _verify(self, method: Any, batch: Any) -> Any:
        """Nodes of trees have no places of their own yet: what is accepted is recorded when that is known."""
        self._flush()  # it stores before it is shown
        copies = (own.clone() for own in (batch.input_ids, batch.out_cache_loc, batch.seq_lens))
        self.verified = Verified(batch, *copies)
        if self.states is not None:
            self.states.verifying(batch.req_pool_indices[: batch.batch_size], list(batch.rids))
        return method()

    def accepted(self, lengths: Tensor, index: Tensor, chosen: Tensor) -> None:
        """What the last verify accepted lies in front of its window now: judge and record it, and read its rows.

        lengths: [rows] nodes that were accepted of each;  index: [rows, n] which these are, -1 behind them
        chosen:  [rows * m] tokens that the target chose behind each of them
        """
        verified, self.verified = self.verified, None
        if verified is None:
            return
        batch, nodes, slots, before = verified
        n, width = batch.batch_size, self.nodes
        new = np.full(n, width)
        offsets = torch.arange(width, device=nodes.device)
        tokens, out = nodes.view(n, width).clone(), chosen.view(n, -1)[:, : width - 1]
        tokens[:, 1 : 1 + out.shape[1]] = out.to(nodes.dtype)
        positions = (before[:, None] + offsets).flatten()
        path = torch.zeros(n, width, dtype=torch.int64, device=nodes.device)
        path[:, : index.shape[1]] = index.clamp(min=0)[:, :width]
        entries = Entries(
            list(batch.rids), np.repeat(np.arange(n), width), positions, slots,
            lambda entry: f"node {int(path.flatten()[entry]) % width} of the tree of its row",
        )  # fmt: skip
        fed = torch.where(offsets < lengths[:, None], nodes[path], tokens).flatten()
        judge_fed(self.canary, "W6", "token", fed, tokens.flatten(), entries, ("verify", 0))
        ends = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + width
        self.read(FedForward(entries, new, tokens.flatten(), before + width, ends), batch, ("verify", 0))
        if self._samples is not None:
            own = chosen.view(n, -1)[:, :width]
            are_accepted = offsets[: own.shape[1]] < lengths[:, None]
            self._samples.sampled(torch.where(are_accepted, own, UNKNOWN))
        if self.states is not None:
            first = torch.arange(n, device=index.device)[:, None] * width
            self.states.accepted(torch.where(index >= 0, index - first, -1))
        self._wrote()

    def admit(self, requests: Sequence[Any], lengths: Sequence[int]) -> None:
        """Rows were given to requests, which have so many entries from the prefix cache, or go on with a chunk."""
        new = []
        for request, length in zip(requests, lengths, strict=True):
            number = request.kv.req_pool_idx
            generation = int(self.rows.req_generation[number])
            if self._generations.get(number) == generation:
                continue  # the next chunk of a row that is there
            self._generations[number] = generation
            if self._reweighted and length:
                held = self.canary.groups[0].records[self.rows.req_to_token[number, :length].to(torch.int64)]
                self._older += ((held[:, STEP_SITE] & MASK_32) <= self._reweighted).sum()
            if not are_named(request):
                self.canary.coverage.skip(UNNAMED, 1)
            new.append((number, request.rid, tokens_of(request, self.name_offset), int(length), identity_of(request)))
        if new and self._samples is not None:
            self._samples.begun([row[0] for row in new])
        if new:
            if self.tier is not None:
                self.tier.admitted(new)
            self._uids.update(zip([row[0] for row in new], self.canary.admit(new), strict=True))

    def _entries_of(self, batch: Any, new: NDArray[np.integer]) -> FedForward:
        """new: by row, entries that are written; the last ones of the row."""
        rows = np.repeat(np.arange(len(new)), new)
        total = len(rows)
        entries = Entries(list(batch.rids), rows, batch.positions[:total], batch.out_cache_loc[:total])
        return FedForward(entries, new, batch.input_ids[:total], batch.seq_lens, batch.seq_lens_cpu)

    def _known(self, fed: FedForward, requests: Mapping[str, Any]) -> Tensor:
        """[n] tokens that should be fed, UNKNOWN where the host does not know them (yet)."""
        wanted = np.full(len(fed.entries.rows), UNKNOWN)
        if fed.ends is not None:
            ends = fed.ends.tolist()
            last = np.cumsum(fed.new)
            for row, (name, end) in enumerate(zip(fed.entries.requests, ends, strict=True)):
                start, end = end - fed.new[row] + self.token_offset, end + self.token_offset
                own = (tokens_of(requests[name], start, end) if name in requests else None) or []
                first = last[row] - fed.new[row]
                wanted[first : first + len(own)] = own
                if name in self._ends:
                    wanted[first + max(self._ends[name] - start, 0) : last[row]] = NOTHING
        return self.canary.memory.upload(torch.from_numpy(wanted))

    def _empty_forward(self) -> Forward:
        none = np.empty(0, dtype=np.int64)
        return self._made([], none, ("decode", 0), torch.empty(0, dtype=torch.int64), 0)

    def _made(
        self, names: list[str], numbers: NDArray[np.integer], site: tuple[str, int], ends: Tensor, num_tokens: int
    ) -> Forward:
        given = self._given
        return Forward(
            names, numbers, site, ends, num_tokens, given.tables, given.lengths, given.starts, given.tokens,
            given.positions, given.slots, in_place=True,
        )  # fmt: skip


def _of_window(verified: Verified, entry: int, slot: int) -> str | None:
    """Whose window of a verify a slot lies in."""
    [places] = (verified.slots == slot).nonzero(as_tuple=True)
    names = verified.batch.rids
    return names[int(places[0]) * len(names) // len(verified.slots)] if len(places) else None
