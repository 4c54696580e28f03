"""How faults come at what they break: a committed entry of a running request, and the words of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

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


def any_reader(target: Target) -> Running | None:
    """A running request, drawn; None where none runs."""
    running = target.running()
    return target.rng.choice(list(running)) if running else None


def private_page(target: Target) -> tuple[Running | None, int, int]:
    """A private page of final entries: its reader, its number, its first position."""
    size, owner_of = target.setup.page_size, target.canary.session.ledger.owner_of
    for reader in target.running():
        whole = range(reader.committed_len // size)
        own = [place for place in whole if owner_of(int(reader.slots[place * size]) // size) == reader.request_id]
        if own:
            place = target.rng.choice(own)
            return reader, int(reader.slots[place * size]) // size, place * size
    return None, 0, 0


def any_entry(target: Target, pool: str | None = None) -> Entry | None:
    """A committed entry of a running request in this pool, or in one that is drawn; None where none runs."""
    reader = any_reader(target)
    if reader is None:
        return None
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


def root_forward(target: Target) -> str:
    """The kind of forward that writes an entry which is surely committed."""
    return "verify" if target.setup.drafts else "decode"


Place = Mapping[str, Any]  # what a finding must name, as in `Strike.place`; a "writer" is one too


def strike_forward(
    target: Target, change: Callable[[Call], Place | None], pool: str = "target", requests: int = 1
) -> bool:
    """Change a forward of this pool that goes on with everybody, the next one that has so many requests.

    change: puts other plans into the call, and says where; None: not in this forward, ask again before the next
    """
    if len(target.running()) < requests:
        return False

    def strike(call: Call) -> bool:
        if call.pool != pool or len(call.read.requests) < requests:
            return False
        place = change(call)
        if place is not None:
            target.record(**({"pool": pool} | dict(place)))
        return place is not None

    target.before(root_forward(target), strike)
    return True


def row_start(call: Call, number: int) -> int:
    """Where the row of a request begins in the index array; the first one, where it has several."""
    return int(call.read.indptr[number * call.read.rows_per_request])


def read_entry(call: Call, number: int, position: int, slot: int) -> None:
    """A row of a request reads another slot at this position."""
    indices = call.read.indices.clone()
    indices[row_start(call, number) + position] = slot
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


def redirect(call: Call, entry: int, slot: int) -> None:
    """One entry of a forward is written to, and read from, another slot."""
    slots, indices = call.write.slots.clone(), call.read.indices.clone()
    indices[indices == slots[entry]] = slot
    slots[entry] = slot
    call.write = replace(call.write, slots=slots)
    call.read = replace(call.read, indices=indices)


def redirect_row(call: Call, reader: int, other: int) -> tuple[int, int] | None:
    """The prefix of one request is read by the row of another; the first position and slot that are not its own.

    None: all that they have is shared.
    """
    starts = call.read.indptr[:: call.read.rows_per_request].tolist()
    length = min(int(call.read.prefix_lens[reader]), int(call.read.prefix_lens[other]))
    indices = call.read.indices.clone()
    mine = slice(starts[reader], starts[reader] + length)
    theirs = indices[starts[other] : starts[other] + length].clone()
    differs = (theirs != indices[mine]).nonzero().flatten()
    if not len(differs):
        return None
    indices[mine] = theirs
    call.read = replace(call.read, indices=indices)
    return int(differs[0]), int(theirs[differs[0]])


def leave_a_map_entry(target: Target) -> bool:
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

    return strike_forward(target, leave)


def row_of(slot: int) -> Tensor:
    import torch

    return torch.tensor([slot])


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
