"""What fired in watched pools: cells of a step become violations, which are told as those of all other pools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.incident import pool_name
from kvcanary.adapters.observed.load_arrival import arrival_of, first_wrong
from kvcanary.adapters.observed.owners import FREE, RETURNED, SHARED, SHARED_WRITER, UNJUDGED
from kvcanary.adapters.observed.state import Event, Group, Layers, Load, Step, depth_of
from kvcanary.calls.violation import Violation
from kvcanary.codes import RANK
from kvcanary.pools.launch_site import unpack_site
from kvcanary.provenance.changed_word import describe_change, fitting_changes
from kvcanary.provenance.not_finite import layers_not_finite
from kvcanary.records.state import PoolState
from kvcanary.report.causes.watched import GRANTED_ANEW, LOAD_FAILED, READ_BEFORE, TAKEN_BACK
from kvcanary.report.watched_evidence import WatchedPool
from kvcanary_kernels.record.layout import MASK_32, REQUEST_GENERATION, TOKEN_POSITION, read_record
from kvcanary_kernels.watch.reread import (
    LAYERS_PER_ENTRY,
    NOT_FINITE,
    NOT_STORED,
    SLOTS_PER_ENTRY,
    are_zeros,
    both_fingerprints,
)
from kvcanary_kernels.watch.walk import NO_VIOLATION, code_of, first_seen, table_slots

SHOWN_LAYERS = 4
RIGHT_AGAIN = (
    "the device found other bytes here when it compared them, and they are right again now: somebody wrote them back, "
    "or only the copy that was read was damaged, on its way from memory"
)
NOT_ARRIVED = "the forward has run, and the slot holds what lay there before it: another token's bytes, or zeros"
STORE_CODES = {NOT_FINITE: "N1", NOT_STORED: "R12"}
OWNED = ("R7", "R8", "W2", "W3", "W7")  # codes that say something of a slot's owner
OWNERLESS = {
    FREE: "the slot was never granted",
    RETURNED: "the slot was given back, and is free",
    SHARED: "the slot is in the prefix cache",
    UNJUDGED: "nobody knows whose the slot is",
}
SHOWN = 8  # slots of one step that were written twice, and are told


def report_step(canary: PagedCanary, step: Step) -> int:
    """Tell of everything that fired in this step, and give its number. KVCorruptionError in mode raise."""
    violations = _leading(_violations(canary, step))
    for violation in violations:
        violation.notes += _row(step, violation)
    canary.read_counters()  # a report ends with them
    canary.response.answer(violations, step.number, canary.coverage)
    return len(violations)


def _violations(canary: PagedCanary, step: Step) -> Iterator[Violation]:
    cells = canary.violations_of(step)
    column = 0
    for place, group in enumerate(canary.groups):
        pool = pool_of(canary, group)
        for kind, violations in ("R", cells["walk"][place]), ("W", cells["write"][place]):
            for row in (violations[: len(step.requests)] != NO_VIOLATION).nonzero()[:, 0].tolist():
                position, code = code_of(int(violations[row]), kind)
                slot = _slot(canary.kept[place], int(step.numbers[row]), position, group)
                violation = Violation(code, pool, slot, position, step.requests[row], step.site, step.number)
                kept = canary.known_tokens(int(step.numbers[row])) if code == "W6" else None
                violation.expected, violation.found = _sides(group, slot, position, kept)
                stored = canary.stored_at(step, group, violation.request_id, position) if kind == "W" else None
                if stored not in (None, slot):
                    violation.slot, violation.expected, violation.found = stored, {"slot": slot}, {"slot": stored}
                violation.notes = (place_of(group, violation.slot), *_owner(canary, group, violation.slot, code))
                violation.notes += _taken_back(step, violation) + _failed_load(canary, group, violation)
                yield violation
        for slot in canary.written_twice(step, group)[:SHOWN]:
            writer = canary.writers.get(int(group.records[slot, REQUEST_GENERATION]) & MASK_32)
            yield Violation("W4", pool, slot, None, writer, step.site, step.number, notes=(place_of(group, slot),))
        for layers in group.layers:
            looks = [(cells["read"][:, column], step.requests, step.site)]
            looks += [(cells["look"][:, n, column], own, ("release", 0)) for n, own in enumerate(step.reread)]
            for look in looks:
                yield from _content(canary, group, layers, *look, step.number)
            column += 1
    yield from _of_stores(canary, step, NOT_FINITE)
    yield from _of_stores(canary, step, NOT_STORED)
    for event in step.events:
        if isinstance(event, Event):
            yield from _of_event(canary, event, step.number)
        else:
            yield from event.violations(step.number)
    for judge in sorted(canary.beside, key=lambda own: own.number):
        yield from judge.violations(step)


class _Stored(NamedTuple):
    """An entry that a forward stored, or should have, and layers in which that went wrong.

    place: where that came: step, whether a draft stores the layer, the numbers in its name, position;  wrong: layers
    """

    place: tuple[int, bool, tuple[int, ...], int]
    group: Group
    layers: Layers
    step: Step
    slot: int
    wrong: tuple[int, ...]


def _of_stores(canary: PagedCanary, step: Step, kind: int) -> Iterator[Violation]:
    """N1 of every request for which a forward stored NaN or Inf, or R12 where nothing was stored: in the first layer,
    at the first position there.

    Late layers of a step are stored behind its count: what they have shown since is told with the next.
    """
    firsts: dict[int, _Stored] = {}
    for group in canary.groups:
        for layers in group.layers:
            for known in [own for own in canary.steps if own.number <= step.number] if layers.is_late else [step]:
                for uid, own in _wrong_stores(canary, group, layers, known, kind):
                    firsts[uid] = min(own, firsts.get(uid, own), key=attrgetter("place"))
    for uid, own in firsts.items():
        position, layers = own.place[-1], own.layers
        notes = [place_of(own.group, own.slot, [layers.names[n] for n in own.wrong])]
        request = canary.writers.get(uid)
        if kind == NOT_STORED:
            notes.append(NOT_ARRIVED)
        elif uid not in canary.launches.told[kind]:
            notes.append(_read_before(canary, own.group, layers, request, position, own.step))
        violation = Violation(
            STORE_CODES[kind], pool_state(canary, own.group, layers), own.slot, position, request,
            ("draft", 0) if layers.is_late else own.step.site, own.step.number, layers=own.wrong,
            notes=tuple(note for note in notes if note),
        )  # fmt: skip
        if kind == NOT_STORED:  # one incident, however many rows and steps
            violation.expected, violation.found = {"layers": len(layers.names)}, {"missing": list(own.wrong)}
            violation.along = ~(len(canary.groups) + own.group.number), step.number
        yield violation
    canary.launches.told[kind] |= firsts.keys()


def _wrong_stores(
    canary: PagedCanary, group: Group, layers: Layers, step: Step, kind: int
) -> Iterator[tuple[int, _Stored]]:
    """By request, entries that a step stored into these layers."""
    first = canary.launches.take_first(step, layers, kind)
    if first is None:
        return
    layer, entry = first
    slots, chains = canary.launches.stored_by(step, group)
    told = torch.tensor(list(canary.launches.told[kind]), dtype=torch.int64, device=slots.device)
    held = group.records[slots.clamp(min=0)]
    is_asked = (slots >= 0) & (layers.stamps[slots.clamp(min=0)] == chains)
    asked = slots[is_asked & ~torch.isin(held[:, REQUEST_GENERATION] & MASK_32, told)]
    found = layers_not_finite(layers.rows, asked) if kind == NOT_FINITE else _layers_of_zeros(layers, group, asked)
    seen = {int(slots[entry]): (layer,)}  # by the device, whatever lies there now
    seen |= {slot: wrong for slot, wrong in zip(asked.tolist(), found, strict=True) if wrong}
    for slot, wrong in seen.items():
        record = read_record(group.records, slot)
        place = step.number, layers.is_late, depth_of(layers.names[wrong[0]]), record.position
        yield record.request, _Stored(place, group, layers, step, slot, wrong)


def _layers_of_zeros(layers: Layers, group: Group, slots: Tensor) -> list[tuple[int, ...]]:
    """By slot [n] the layers in which nothing but zeros was taken, as far as that says anything (`take`)."""
    tokens = group.records[slots, TOKEN_POSITION] & MASK_32
    wrong = are_zeros(layers.fingerprints[:, :, slots], layers.keys) & (layers.zeros[:, None] != tokens + 1)
    wrong[: not layers.reads_hidden] = False
    return [tuple(own.nonzero()[:, 0].tolist()) for own in wrong.T]


def _read_before(
    canary: PagedCanary, group: Group, layers: Layers, request: str | None, position: int, step: Step
) -> str:
    """What the row of a request had before that is not finite either: its first entry, and who stored it."""
    numbers = dict(zip(step.requests, step.numbers.tolist(), strict=True))
    if request not in numbers or not position:
        return ""
    lines, first = canary.kept[group.number], int(first_seen(torch.tensor(position), group.window))
    places = torch.arange(first, position, device=lines.device)
    slots = table_slots(lines[numbers[request]][None], places[None], group.block_size)[0]
    slots = slots[(slots >= 0) & (slots < len(group.records))]
    for slot, wrong in zip(slots.tolist(), layers_not_finite(layers.rows, slots), strict=True):
        held = read_record(group.records, slot)
        if wrong and held.site and held.step < step.number:
            kind, writer = unpack_site(held.site)[0], canary.writers.get(held.request, "a request that is forgotten")
            by = f"by {kind} of {writer!r} at step {held.step}"
            return f"{READ_BEFORE}: position {held.position}, {layers.names[wrong[0]]}, stored {by}"
    return ""


def _row(step: Step, violation: Violation) -> tuple[str, ...]:
    """Which row of the engine's own table a request has, where the canary goes along that, and the page of the slot."""
    rows = dict(zip(step.requests, step.numbers.tolist(), strict=True)) if step.in_place else {}
    if violation.request_id not in rows:
        return ()
    place = "" if violation.slot < 0 else f", page {violation.page} of the pool"
    return (f"row {rows[violation.request_id]} of the table{place}",)


def _owner(canary: PagedCanary, group: Group, slot: int, code: str) -> tuple[str, ...]:
    """Who has a slot now, for checks that ask for it."""
    if group.owners is not None and code == "R12":
        return _granted_anew(canary, group, slot)
    if group.owners is None or code not in OWNED or not 0 <= slot < len(group.owners.slots):
        return ()
    uid, told = int(group.owners.slots[slot]), group.owners.told_of(slot)
    if uid in OWNERLESS:
        return "the slot is free" if told and uid == FREE else OWNERLESS[uid], *told
    name = canary.writers.get(uid if uid > 0 else SHARED_WRITER - uid, "a request that is forgotten")
    also = "" if uid > 0 else ", and others may read it"
    return f"the slot was granted to {name!r}{also}", *told


def _taken_back(step: Step, violation: Violation) -> tuple[str, ...]:
    """Where the row was taken back before this very forward; what goes wrong later has other causes."""
    ends = step.taken_back.get(violation.request_id or "")
    return () if ends is None else (f"{TAKEN_BACK} from entry {ends[0]} to {ends[1]} before step {step.number}",)


def _failed_load(canary: PagedCanary, group: Group, violation: Violation) -> tuple[str, ...]:
    """Of a slot where nothing is recorded: what its connector said of it."""
    block = violation.slot // group.block_size
    known = canary.failed_loads.get((group.number, block)) if violation.code == "R12" else None
    return () if known is None else (f"{LOAD_FAILED}, {known[0]} said in step {known[1]}: block {block}",)


def _granted_anew(canary: PagedCanary, group: Group, slot: int) -> tuple[str, ...]:
    """What lay in a slot before it was granted to whom it belongs now, where nobody has stored there since."""
    held, owners = read_record(group.records, slot), group.owners
    owner = None if owners is None else canary.writers.get(int(owners.slots[slot]))
    if held.site or not held.request or owner is None:
        return ()
    before = canary.writers.get(held.request, "a request that is forgotten")
    return (f"{GRANTED_ANEW}, to {owner!r}: position {held.position} of {before!r} lay there",)


def _sides(group: Group, slot: int, position: int, kept: Sequence[int] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What should lie in a slot, and what its record says, where somebody has written.

    kept: the tokens that the engine keeps of the row, where the token is what is wrong
    """
    held = read_record(group.records, slot) if 0 <= slot < len(group.records) else None
    if held is None or not held.site:
        return {"position": position}, {}
    if kept is None:
        return {"position": position}, {"position": held.position, "chain": f"0x{held.chain:016x}"}
    fed = held.token - (held.token >> 31 << 32)  # int32, as engines have tokens
    own = kept[position] if position < len(kept) else fed
    return {"token": None if own == fed else own}, {"token": fed}  # the same: there was none yet when this was fed


def _content(
    canary: PagedCanary,
    group: Group,
    layers: Layers,
    cells: Tensor,
    requests: Sequence[str],
    site: tuple[str, int],
    step: int,
) -> Iterator[Violation]:
    """cells: [2, >= rows], as `reread` gives them."""
    for row in (cells[0, : len(requests)] != NO_VIOLATION).nonzero()[:, 0].tolist():
        (position, layer), slot = divmod(int(cells[0, row]), LAYERS_PER_ENTRY), int(cells[1, row]) % SLOTS_PER_ENTRY
        place = {"position": position, "request_id": requests[row], "site": site, "step": step}
        yield _of_bytes(canary, "R9", group, layers, slot, (layer,), place)


def _of_event(canary: PagedCanary, event: Event, step: int) -> Iterator[Violation]:
    if event.load is not None:
        yield from _of_load(canary, event, event.load, step)
        return
    wrong = (event.mismatch != 0).any(1).nonzero()[:, 0].tolist()
    for entry in wrong[:1]:
        bits = [int(word) & (1 << 64) - 1 for word in event.mismatch[entry]]
        seen = tuple(n for n in range(len(event.layers.names)) if bits[n // 64] >> n % 64 & 1)
        slot, message = int(event.slots[entry]), f"{event.what}, {len(wrong)} of {len(event.slots)} slots differ"
        request = event.requests.get(slot // event.group.block_size)
        rows = [event.row_of(n, int(event.slots[n])) for n in wrong] if event.row_of is not None else [request]
        position = entry if event.is_by_position else None
        place = {"position": position, "request_id": rows[0], "site": (event.site, 0), "step": step, "message": message}
        violation = _of_bytes(canary, event.code, event.group, event.layers, slot, seen, place, event.by_record)
        violation.others = tuple(dict.fromkeys(name for name in rows if name not in (None, rows[0])))
        violation.along = None if event.row_of is None else (~event.group.number, step)
        yield violation


def _of_load(canary: PagedCanary, event: Event, load: Load, step: int) -> Iterator[Violation]:
    """T1 of the first wrong entry of a load, with what the connector did to it."""
    group, layers, pool = event.group, event.layers, pool_state(canary, event.group, event.layers)
    arrival = arrival_of(pool, group, layers, load, canary.writers)
    [own] = arrival.pools
    place, entry = first_wrong(own, load, group)
    slot = int(load.slots[entry])
    count = f"{len(own.origins)} of {int(load.is_known.sum())} entries that were compared differ"
    yield Violation(
        event.code, pool, slot, int(load.positions[entry]), load.request, ("load", 0), step, own.layers,
        arrival=arrival, arrived_as=place, message=f"{event.what}, {count}",
        word=arrival.words.get((pool.pool_id, slot)),
        notes=(place_of(group, slot, [layers.names[n] for n in own.layers]), *_stored_by(load)),
    )  # fmt: skip


def _stored_by(load: Load) -> Iterator[str]:
    """Who wrote the first wrong block, as the store of names has it."""
    for block in load.blocks[:1]:
        first = int(load.positions[block.entries[0]])
        who = " and ".join(sorted(set(block.ways.values())))
        yield f"the block at position {first} was written by {who}, as {load.names.store} says"


def _of_bytes(
    canary: PagedCanary,
    code: str,
    group: Group,
    layers: Layers,
    slot: int,
    seen: tuple[int, ...],
    place: dict[str, Any],
    by_record: bool = True,
) -> Violation:
    """With every layer that differs now, and the one word that changed if it is one; `seen`: layers that differed.

    by_record: False: they differed from other bytes than those that are recorded here
    """
    where = torch.tensor([slot], device=layers.fingerprints.device)
    differs = both_fingerprints(layers.rows, where, layers.keys)[:, :, 0] - layers.fingerprints[:, :, slot]
    wrong = tuple(differs[0].nonzero()[:, 0].tolist()) if by_record else ()
    pool, shown = pool_state(canary, group, layers), wrong or seen
    fits = fitting_changes(pool, slot, wrong[0], *differs[:, wrong[0]].tolist()) if len(wrong) == 1 else []
    notes: tuple[str, ...] = (place_of(group, slot, [layers.names[n] for n in shown]),)
    if not wrong and code == "R9":
        notes += (RIGHT_AGAIN,)
    word = describe_change(pool, slot, fits[0]) if len(fits) == 1 else None
    return Violation(code, pool, slot, **place, layers=shown, word=word, notes=notes)


def pool_of(canary: PagedCanary, group: Group) -> PoolState:
    """What stands for the first pool of a group."""
    return pool_state(canary, group, group.layers[0])


def pool_state(canary: PagedCanary, group: Group, layers: Layers) -> PoolState:
    """What stands for the pool of layers that are alike."""
    name, stored = pool_name(canary, group, layers), layers.fingerprints[0]
    return WatchedPool.of(layers.view, group.number, group.records, layers.keys, name, stored)


def place_of(group: Group, slot: int, names: Sequence[str] = ()) -> str:
    """`group 1 with a window of 8, block 5, offset 2; layers model.3.attn, model.5.attn and 4 more`.

    Where tables name entries, pages are those of the pool.
    """
    window = f" with a window of {group.window}" if group.window > 0 else ""
    if group.window < 0:
        window = f" with chunks of {-group.window}"
    what, size = "block", group.block_size
    if size == 1:
        what, size = "page", group.layers[0].view.page_size
    place = f"group {group.number}{window}, {what} {slot // size}, offset {slot % size}"
    if not names:
        return place
    more = f" and {len(names) - SHOWN_LAYERS} more" if len(names) > SHOWN_LAYERS else ""
    return f"{place}; layer{'s'[: len(names) - 1]} {', '.join(names[:SHOWN_LAYERS])}{more}"


def _slot(lines: Tensor, line: int, position: int, group: Group) -> int:
    place = torch.tensor([[position]], device=lines.device)
    return int(table_slots(lines[line : line + 1], place, group.block_size)[0, 0])


def _leading(violations: Iterable[Violation]) -> list[Violation]:
    """The earliest of each row, and what belongs to none: what follows in a row, or in other pools, follows from it."""
    leading: dict[tuple[str | None, int], Violation] = {}
    for violation in sorted(violations, key=lambda violation: (violation.position or 0, RANK[violation.code])):
        is_of_row = violation.request_id is not None and violation.code != "W4"
        leading.setdefault((violation.request_id, 0 if is_of_row else violation.slot), violation)
    return list(leading.values())
