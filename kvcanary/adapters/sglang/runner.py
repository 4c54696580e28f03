"""One model runner of SGLang and the pool that it stores into: what each of its forwards is about to read and write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.hosted.handle import HostHandle
from kvcanary.adapters.observed import moves as paged_moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.inputs import UNKNOWN, Entries, judge_fed
from kvcanary.adapters.observed.state import Forward
from kvcanary.adapters.sglang.layout import parts_of
from kvcanary.config import CanaryConfig
from kvcanary_kernels.record.layout import Identity


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
    token_offset: ClassVar[int] = 0  # the entry of position p holds the token of p + offset

    def __init__(self, runner: Any, config: CanaryConfig, most_tokens: int, width: int) -> None:
        """width: nodes of a tree that is verified; 1: nobody drafts"""
        ranks = import_module("sglang.srt.runtime_context").get_parallel()
        super().__init__(config, ranks.tp_rank, ranks.tp_size == 1)
        self.runner, self.rows, self.nodes = runner, runner.req_to_token_pool, width
        self.num_rows, self.length = self.rows.req_to_token.shape
        pool = runner.token_to_kv_pool
        self.canary = self._adopt(PagedCanary(config, self.num_rows, width, most_tokens, pool.device))
        for number, part in enumerate(parts_of(pool, self.role, self.token_offset)):
            slots, null_slots = part.view.num_slots, part.view.null_slots
            group = self.canary.memory.add_group(number, 1, slots, part.window, null_slots=null_slots)
            self.canary.memory.add_layers(group, part.view, part.names)
        self.owners = self.canary.follow_owners()
        self._given = Given(self.num_rows, most_tokens, len(self.canary.groups), pool.device)
        self._generations: dict[int, int] = {}
        self.verified: Verified | None = None
        self._uids: dict[int, int] = {}  # by row
        self._numbers: dict[str, int] = {}  # rows of the requests that run, by name

    def arm(self) -> None:
        """Compile and capture what every forward launches; from now on forwards are judged."""
        self.canary.prepare(self._empty_forward())
        self._arm(self.canary)

    def forget(self) -> None:
        """Nobody answers for the bytes any more."""
        self.canary.memory.forget()
        self.owners.forget()
        self._generations.clear()

    def flush(self) -> None:
        """Do now what waits for a forward: bytes are about to go."""
        self._flush()

    def sent(self) -> Callable[[], None]:
        """What looks at the counter of findings as it is now, when the step's tokens are there."""
        return functools.partial(self._counted, self.canary.count_to_host(), self.canary.step)

    def _counted(self, count: Callable[[], int], step: int) -> None:
        self._look_at(count(), step)

    def leave(self, request: Any) -> None:
        """A request gives its row back, or loses it."""
        number = request.kv.req_pool_idx
        if self._generations.pop(number, None) is not None:
            self.canary.leave([number], [request.rid])

    def left(self, number: int) -> None:
        """What a row had is free by now, or the prefix cache's."""
        uid = self._uids.pop(number, None)
        if uid is not None:
            self.owners.left(uid)

    def granted(self, requests: Sequence[Any], begins: Sequence[int], ends: Sequence[int]) -> None:
        """Rows have slots for their entries from `begins` to `ends` now."""
        told = []
        for request, begin, end in zip(requests, begins, ends, strict=True):
            number = request.kv.req_pool_idx
            if end > begin and number in self._uids:  # else it ran before there was a canary, and is not followed
                told.append(np.stack(np.broadcast_arrays(number, np.arange(begin, end), self._uids[number])))
        if told:
            rows, places, owners = self.canary.memory.upload(torch.from_numpy(np.concatenate(told, 1)))
            self.owners.granted(self.rows.req_to_token[rows, places].to(torch.int64), owners)

    def shared(self, request: Any) -> None:
        """The prefix cache has taken the beginning of a row."""
        number, length = request.kv.req_pool_idx, request.kv.cache_protected_len
        if length:
            self.owners.shared(self.rows.req_to_token[number, :length].to(torch.int64))

    def moved(self, method: Any, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """The engine moves entries: accepted nodes to the front, the end of a prefix to each branch."""
        row_of = None if self.verified is None else functools.partial(_of_window, self.verified)
        move = functools.partial(method, tgt_loc, src_loc)
        paged_moves.moved(self.canary, self.canary.groups[0], src_loc, tgt_loc, move, row_of)

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
        judge_fed(self.canary, "W6", "token", fed.tokens, self._known(fed, requests), fed.entries, site)
        self.read(fed, batch, site)
        output = method()
        self._wrote()
        return output

    def read(self, fed: FedForward, batch: Any, site: tuple[str, int]) -> None:
        """Record what is about to be written, and judge what is about to be read."""
        ends = fed.lengths if fed.ends is None else fed.ends
        numbers, total = np.array([self._numbers[name] for name in batch.rids]), len(fed.entries.rows)
        self._given.fill(fed, self.canary.memory.upload(torch.from_numpy(np.cumsum([0, *fed.new]))))
        self._read(self._made(list(batch.rids), numbers, site, ends, total))

    def _verify(self, method: Any, batch: Any) -> Any:
        """Nodes of trees have no places of their own yet: what is accepted is recorded when that is known."""
        copies = (own.clone() for own in (batch.input_ids, batch.out_cache_loc, batch.seq_lens))
        self.verified = Verified(batch, *copies)
        return method()

    def accepted(self, result: Any) -> None:
        """What the last verify accepted lies in front of its window now: judge and record it, and read its rows."""
        verified, self.verified = self.verified, None
        if verified is None:
            return
        batch, nodes, slots, before = verified
        n, width = batch.batch_size, self.nodes
        new = np.full(n, width)
        offsets = torch.arange(width, device=nodes.device)
        is_kept = offsets < result.accept_lens[:, None]
        out = result.next_token_ids.view(n, width).to(nodes.dtype)
        tokens = torch.cat((nodes.view(n, width)[:, :1], out[:, :-1]), 1)
        positions = (before[:, None] + offsets).flatten()
        entries = Entries(list(batch.rids), np.repeat(np.arange(n), width), positions, slots)
        path = torch.zeros(n, width, dtype=torch.int64, device=nodes.device)
        path[:, : result.accept_index.shape[1]] = result.accept_index.clamp(min=0)[:, :width]
        fed = torch.where(is_kept, nodes[path], tokens).flatten()
        judge_fed(self.canary, "W6", "token", fed, tokens.flatten(), entries, ("verify", 0))
        ends = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + width
        self.read(FedForward(entries, new, tokens.flatten(), before + width, ends), batch, ("verify", 0))
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
            new.append((number, request.rid, tokens_of(request, self.token_offset), int(length), identity_of(request)))
        if new:
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
        return self.canary.memory.upload(torch.from_numpy(wanted))

    def _empty_forward(self) -> Forward:
        none = np.empty(0, dtype=np.int64)
        return self._made([], none, ("decode", 0), torch.tensor([self.length]), 0)

    def _made(
        self, names: list[str], numbers: NDArray[np.integer], site: tuple[str, int], ends: Tensor, num_tokens: int
    ) -> Forward:
        given, groups = self._given, len(self.canary.groups)
        return Forward(
            names, numbers, site, ends, num_tokens, [self.rows.req_to_token] * groups, given.lengths, given.starts,
            given.tokens, given.positions, given.slots, in_place=True,
        )  # fmt: skip


class WatchedDraft(WatchedRunner):
    """The canary of a draft runner: entries hold the token that follows their position.

    A draft step writes what the extend of the same round writes again, so its bytes are nobody's: its positions and
    slots are judged. What an extend writes is recorded; only what was accepted is read, from the next round on.
    """

    role = "draft"
    token_offset = 1

    def __init__(self, runner: Any, config: CanaryConfig, most_tokens: int, width: int, topk: int, steps: int) -> None:
        super().__init__(runner, config, most_tokens, width)
        self._topk, self._steps, self._page = topk, steps, int(runner.token_to_kv_pool.page_size)
        self._round, self._step = None, 0

    def forward(self, method: Any, batch: Any, requests: Mapping[str, Any]) -> Any:
        mode = batch.forward_mode
        if mode.is_draft_extend_v2():
            fed = self._entries_of(batch, np.full(batch.batch_size, self.nodes))
            self.read(fed, batch, ("extend", 0))
            output = method()
            self._wrote()
            return output
        if mode.is_decode():
            self._draft_step(batch)
            return method()
        return super().forward(method, batch, requests)

    def _draft_step(self, batch: Any) -> None:
        """Entry i of each branch lies i behind the committed ones, in the slots that the row has for this branch."""
        self._step = self._step + 1 if batch is self._round else 0
        self._round = batch
        site, n, lengths = ("draft", self._step), batch.batch_size, batch.seq_lens.to(torch.int64)
        positions = (lengths + self._step).repeat_interleave(self._topk)
        slots, rows = batch.out_cache_loc[: len(positions)], np.repeat(np.arange(n), self._topk)
        entries = Entries(list(batch.rids), rows, positions, slots)
        judge_fed(self.canary, "W5", "position", batch.positions[: len(positions)], positions, entries, site)
        begin, stride, table = self._branches(lengths), self._stride(lengths), self._table_of(batch)
        granted = table.gather(1, begin + self._step).flatten().to(slots.dtype)
        judge_fed(self.canary, "W5", "slot", slots, granted, entries, site)
        if self._step == 0 and self._page > 1 and self._topk > 1:
            self._judge_copies(batch.rids, table, lengths, stride)

    def _table_of(self, batch: Any) -> Tensor:
        """[rows of the batch, length] int64 slots."""
        return self.rows.req_to_token[batch.req_pool_indices.long()].to(torch.int64)

    def _stride(self, lengths: Tensor) -> Tensor:
        """[n] from one branch of a row to the next: whole pages, the first of which begins with the prefix's end."""
        return (lengths % self._page + self._steps + self._page - 1) // self._page * self._page

    def _branches(self, lengths: Tensor) -> Tensor:
        """[n, topk] columns of the table in which the first entry of each branch has its slot."""
        numbers = torch.arange(self._topk, device=lengths.device)
        return lengths[:, None] + numbers * self._stride(lengths)[:, None]

    def _judge_copies(self, names: Iterable[str], table: Tensor, lengths: Tensor, stride: Tensor) -> None:
        """Every branch but the first begins with a copy of the prefix's last page, as far as that is full (T1)."""
        tail = lengths % self._page
        offsets = torch.arange(self._page, device=lengths.device)
        source = (lengths - tail)[:, None, None] + offsets
        numbers = torch.arange(1, self._topk, device=lengths.device)
        target = source + numbers[:, None] * stride[:, None, None]
        is_copied = (offsets < tail[:, None, None]).expand_as(target).flatten()
        wanted, found = (
            table.gather(1, columns.expand_as(target).flatten(1)).flatten() for columns in (source, target)
        )
        names, each = list(names), self._page * (self._topk - 1)
        paged_moves.expect_equal(
            self.canary, self.canary.groups[0], found, wanted, is_copied, "the copy of a prefix's end for a branch",
            lambda entry, slot: names[entry // each],
        )  # fmt: skip


@dataclass(frozen=True)
class FedForward:
    """What one forward writes.

    new:     by row, how many entries
    tokens:  [n];  lengths: [rows] entries of each row, new ones included; ends: the same on the host, if it knows
    """

    entries: Entries
    new: NDArray[np.integer]
    tokens: Tensor
    lengths: Tensor
    ends: Tensor | None


class Given:
    """Tensors that stay where they are, into which those of a batch are copied: launches are captured over them."""

    def __init__(self, num_rows: int, most_tokens: int, num_groups: int, device: torch.device) -> None:
        def new(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.lengths, self.starts = new(num_rows), new(num_rows + 1)
        self.tokens, self.positions = new(most_tokens), new(most_tokens)
        self.slots = [new(most_tokens)] * num_groups

    def fill(self, fed: FedForward, starts: Tensor) -> None:
        n, total, entries = len(fed.new), len(fed.entries.rows), fed.entries
        self.lengths[:n].copy_(fed.lengths)
        self.starts[n:] = total
        self.starts[: n + 1].copy_(starts)
        self.tokens[:total].copy_(fed.tokens)
        self.positions[:total].copy_(entries.positions)
        self.slots[0][:total].copy_(entries.slots)


def _of_window(verified: Verified, entry: int, slot: int) -> str | None:
    """Whose window of a verify a slot lies in."""
    [places] = (verified.slots == slot).nonzero(as_tuple=True)
    names = verified.batch.rids
    return names[int(places[0]) * len(names) // len(verified.slots)] if len(places) else None


def tokens_of(request: Any, start: int, end: int | None = None) -> list[int] | None:
    """Tokens [start, end) of a request as far as the host has them; None: it was given embeddings."""
    if request.input_embeds is not None:
        return None
    prompt, answer = request.origin_input_ids, request.output_ids
    behind = None if end is None else max(end - len(prompt), 0)
    return [*prompt[start:end], *answer[max(start - len(prompt), 0) : behind]]


def identity_of(request: Any) -> Identity:
    """What makes equal tokens mean other K and V: the adapter, and what the client said."""
    adapter, said = (getattr(request, name, None) for name in ("lora_id", "extra_key"))
    return Identity(str(said or ""), str(adapter or ""))
