"""How faults come at what they break: a committed entry of a running request, and the words of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvcanary.faults.strike import NotNow, need
from kvcanary.faults.target import Call, Running, Target

if TYPE_CHECKING:
    from torch import Tensor

    from kvcanary.pools.views import PoolView
    from kvcanary.records.state import PoolState

Option = TypeVar("Option")
SIGN_BIT = 31
SPREAD_BITS = 22  # of a word that changes: what lies there stays finite
WORD_BYTES = 4


@dataclass(frozen=True, eq=False)
class Entry:
    """One committed entry: its pool, request, position and slot."""

    pool: PoolView
    reader: Running
    position: int
    slot: int

    @property
    def place(self) -> dict[str, Any]:
        """As a finding must name it."""
        return {"pool": self.pool.name, "slot": self.slot, "position": self.position}


def any_reader(target: Target) -> Running:
    """A running request, drawn; NotNow where none runs."""
    running = target.running()
    need(running)
    return target.rng.choice(list(running))


def private_page(target: Target) -> tuple[Running, int, int]:
    """A private page of final entries: its reader, its number, its first position; NotNow where there is none."""
    size, owner_of = target.setup.page_size, target.canary.session.ledger.owner_of
    for reader in target.running():
        whole = range(reader.committed_len // size)
        own = [place for place in whole if owner_of(int(reader.slots[place * size]) // size) == reader.request_id]
        if own:
            place = target.rng.choice(own)
            return reader, int(reader.slots[place * size]) // size, place * size
    raise NotNow


def any_entry(target: Target, pool: str | None = None) -> Entry:
    """A committed entry of a running request in this pool, or in one that is drawn; NotNow where none runs."""
    reader = any_reader(target)
    view = target.pools[choose(target, "pool", sorted(target.pools)) if pool is None else pool]
    return entry_at(view, reader, target.rng.randrange(reader.committed_len))


def entry_at(view: PoolView, reader: Running, position: int) -> Entry:
    return Entry(view, reader, position, int(reader.slots[position]))


def any_layer(target: Target, view: PoolView) -> int:
    return choose(target, "layer", range(view.num_layers))


def any_part(target: Target, view: PoolView) -> int:
    """0: K, 1: V."""
    return choose(target, "part", range(min(2, len(view.rows.pieces))))


def choose(target: Target, what: str, options: Sequence[Option]) -> Option:
    """What the caller has chosen, or one of the options, drawn."""
    return target.chosen.get(what, target.rng.choice(list(options)))


def words_of(view: PoolView, layer: int, slot: int) -> Tensor:
    """[words_per_row] int32: K, V and extras of one slot and layer, copied; `part_of` says where each lies."""
    return view.rows.gather_layer(layer, _one(view, slot))[0]


def overwrite(view: PoolView, layer: int, slot: int, words: Tensor) -> None:
    """Put [words_per_row] int32 there, in whatever layout the pool has, and tell nobody."""
    view.rows.scatter_layer(layer, _one(view, slot), words[None])


def change(view: PoolView, layer: int, slot: int, how: Callable[[Tensor], Tensor]) -> bool:
    """Overwrite a row with ``how(its words)``; whether that changed a bit."""
    before = words_of(view, layer, slot)
    after = how(before.clone())
    overwrite(view, layer, slot, after)
    return bool((before != after).any())


def part_of(view: PoolView, part: int) -> slice:
    """Words of part 0 (K) or 1 (V) in a row."""
    piece = view.rows.pieces[part]
    return slice(piece.first, piece.first + piece.words)


def exchange_parts(view: PoolView, words: Tensor) -> Tensor:
    """K where V belongs, and V where K does."""
    k, v = (words[part_of(view, part)].clone() for part in (0, 1))
    words[part_of(view, 0)], words[part_of(view, 1)] = v, k
    return words


def shift_heads(view: PoolView, words: Tensor, part: int = 0) -> Tensor:
    """The heads of a part lie one place too far."""
    own = part_of(view, part)
    words[own] = words[own].view(view.kv_heads, -1).roll(1, 0).flatten()
    return words


def root_forward(target: Target) -> str:
    """The kind of forward that writes an entry which is surely committed."""
    return "verify" if target.setup.drafts else "decode"


Place = Mapping[str, Any]  # what a finding must name, as in `Strike.place`; a "writer" is one too


def strike_forward(
    target: Target, change: Callable[[Call], Place | None], pool: str = "target", requests: int = 1, kind: str = ""
) -> None:
    """Change a forward of this pool that goes on with everybody, or of this kind; the next that has so many requests.

    change: puts other plans into the call, and says where; None: not in this forward, ask again before the next
    """
    need(len(target.running()) >= requests)

    def strike(call: Call) -> bool:
        if call.pool != pool or len(call.read.requests) < requests:
            return False
        place = change(call)
        if place is not None:
            target.record(**({"pool": pool} | dict(place)))
        return place is not None

    target.before(kind or root_forward(target), strike)


def strike_row(
    target: Target,
    request_id: str,
    change: Callable[[Call, int], Place | None],
    pool: str = "target",
    kind: str = "",
) -> None:
    """The same of the next forward that has this request; `change` is given its number in the batch, too."""

    def strike(call: Call) -> Place | None:
        requests = call.read.requests
        return change(call, requests.index(request_id)) if request_id in requests else None

    strike_forward(target, strike, pool, 0, kind)


def row_start(call: Call, number: int) -> int:
    """Where the row of a request begins in the index array; the first one, where it has several."""
    return int(call.read.indptr[number * call.read.rows_per_request])


def read_entry(call: Call, number: int, position: int, slot: int) -> None:
    """A row of a request reads another slot at this position."""
    read_other(call, row_start(call, number) + position, slot)


def read_other(call: Call, entries: int | slice | Tensor, slots: int | Tensor) -> None:
    """A forward reads other slots at these entries of its index array."""
    indices = call.read.indices.clone()
    indices[entries] = slots
    call.read = replace(call.read, indices=indices)


def submit_prompt(target: Target, length: int) -> str:
    """A new request with a prompt that nobody has cached; `target.prompts` has it."""
    vocab_size = target.pools["target"].vocab_size or 2
    return target.submit([target.rng.randrange(vocab_size) for _ in range(length)], target.setup.new_tokens)


def written_of(call: Call, request: int) -> slice:
    """Entries of a write plan that are of this request, by its number in the batch."""
    per_row = call.read.num_written
    if isinstance(per_row, int):
        width = per_row * call.read.rows_per_request
        return slice(request * width, (request + 1) * width)
    ends = [0, *per_row.cumsum(0).tolist()]
    rows = call.read.rows_per_request
    return slice(ends[request * rows], ends[(request + 1) * rows])


def write_other(call: Call, entries: int | slice, **values: Any) -> None:
    """Entries of a forward's write plan have other slots, tokens or positions."""
    changed = {name: getattr(call.write, name).clone() for name in values}
    for name, value in values.items():
        changed[name][entries] = value
    call.write = replace(call.write, **changed)


def another_token(target: Target, call: Call, entry: int) -> int:
    """Than the one that this entry should have."""
    return (int(call.write.tokens[entry]) + 1) % (target.pools["target"].vocab_size or 2)


def redirect(call: Call, entry: int, slot: int) -> None:
    """One entry of a forward is written to, and read from, another slot."""
    read_other(call, call.read.indices == call.write.slots[entry], slot)
    write_other(call, entry, slots=slot)


def redirect_row(call: Call, reader: int, other: int) -> Place | None:
    """The prefix of one request is read by the row of another; where it first reads what is not its own.

    None: all that they have is shared.
    """
    starts = call.read.indptr[:: call.read.rows_per_request].tolist()
    length = min(int(call.read.prefix_lens[reader]), int(call.read.prefix_lens[other]))
    mine = slice(starts[reader], starts[reader] + length)
    theirs = call.read.indices[starts[other] : starts[other] + length]
    differs = (theirs != call.read.indices[mine]).nonzero().flatten()
    if not len(differs):
        return None
    read_other(call, mine, theirs)
    position = int(differs[0])
    return {"reader": call.read.requests[reader], "position": position, "slot": int(theirs[position])}


def leave_a_map_entry(target: Target) -> None:
    """The map of a page that is seen leads to where the page behind it lies, as if it had not been written anew."""
    size, window = target.setup.page_size, target.setup.window

    def leave(call: Call) -> Place | None:
        view, number = target.pools["target"], target.rng.randrange(len(call.read.requests))
        start, length = row_start(call, number), int(call.read.prefix_lens[number])
        seen = range(-(-max(0, length + 1 - (window or length + 1)) // size), length // size - 1)
        if view.slot_map is None or not seen:
            return None
        first = target.rng.choice(seen) * size
        page, behind = call.read.indices[start + first : start + first + 2 * size].split(size)
        view.slot_map[page] = view.slot_map[behind]
        return {"slot": int(view.slot_map[page[0]]), "position": frozenset({first, first + size})}

    strike_forward(target, leave)


def own_state(target: Target, view: PoolView) -> PoolState:
    """The canary's own records and fingerprints of a pool."""
    return target.canary.session.state.by_name[view.name]


def generation_of(pool: PoolState, slot: int) -> int:
    """The grant under which the slot was last written; 0: never."""
    from kvcanary_kernels.record.layout import read_record

    return read_record(pool.records, slot).generation


def is_private(target: Target, page: int) -> bool:
    """Whether the page is one request's alone, and no cache's."""
    from kvcanary_kernels.record.layout import SHARED

    return int(target.canary.session.state.page_states[page]) != SHARED


def mask_of(bit: int) -> int:
    """One bit of a signed 32-bit word."""
    return 1 << bit if bit < SIGN_BIT else -(1 << bit)


def as_words(view: PoolView, value: float, num_words: int) -> Tensor:
    """[num_words] int32: this number in every element of a row, in the pool's type."""
    import torch

    size = view.dtype.itemsize
    return torch.full((num_words * WORD_BYTES // size,), value, dtype=view.dtype, device=view.device).view(torch.int32)


def _one(view: PoolView, slot: int) -> Tensor:
    import torch

    return torch.tensor([slot], device=view.device)
