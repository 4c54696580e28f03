"""Bytes that change after they were written: from one bit to a whole page, and the canary's own memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.harmless import noise_in_a_free_page
from kvcanary.faults.helpers.reach import (
    Entry,
    any_entry,
    any_layer,
    any_part,
    as_words,
    change,
    entry_at,
    exchange_parts,
    mask_of,
    overwrite,
    own_state,
    part_of,
    root_forward,
    shift_heads,
    words_of,
)
from kvcanary.faults.helpers.recycling import never_granted
from kvcanary.faults.strike import UNDECLARED, need
from kvcanary.faults.target import Call, Target

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32
Damage = Callable[["Target", "Entry", int, "Tensor"], "Tensor"]  # of the words of an entry's row in one layer


def _strike(target: Target, damage: Damage) -> None:
    """Damage the row of a committed entry in one layer, and tell nobody."""
    entry = any_entry(target)
    layer = any_layer(target, entry.pool)
    need(change(entry.pool, layer, entry.slot, partial(damage, target, entry, layer)))
    target.record(UNDECLARED, **entry.place, layer=layer)


def _strike_a_free_slot(target: Target, damage: Damage) -> None:
    """The same in a page that nobody holds, or will be granted: nothing is due."""
    entry = any_entry(target)
    free = target.free_pages()
    need(entry.pool.slot_map is None and free)
    layer, slot = any_layer(target, entry.pool), free[-1] * entry.pool.page_size
    change(entry.pool, layer, slot, partial(damage, target, entry, layer))
    target.record(code="")


def _flip(target: Target, entry: Entry, layer: int, words: Tensor) -> Tensor:
    words[target.rng.randrange(len(words))] ^= mask_of(target.turn % WORD_BITS)
    return words


def _flip_two_signs(target: Target, entry: Entry, layer: int, words: Tensor) -> Tensor:
    """The top bits of two words: their sum mod 2^32 stays what it was."""
    words[target.rng.sample(range(len(words)), 2)] ^= mask_of(WORD_BITS - 1)
    return words


def _zero(target: Target, entry: Entry, layer: int, words: Tensor) -> Tensor:
    words[part_of(entry.pool, any_part(target, entry.pool))] = 0
    return words


def _of_another_slot(target: Target, entry: Entry, layer: int, words: Tensor) -> Tensor:
    return words_of(entry.pool, layer, int(entry.reader.slots[_other_position(target, entry)]))


def _other_position(target: Target, entry: Entry) -> int:
    return (entry.position + target.rng.randrange(1, entry.reader.committed_len)) % entry.reader.committed_len


def _exchange_parts(target: Target, entry: Entry, layer: int, words: Tensor) -> Tensor:
    return exchange_parts(entry.pool, words)


def _shift_a_head(target: Target, entry: Entry, layer: int, words: Tensor) -> Tensor:
    return shift_heads(entry.pool, words, any_part(target, entry.pool))


def _fill(target: Target, entry: Entry, layer: int, words: Tensor, *, value: float) -> Tensor:
    part = part_of(entry.pool, any_part(target, entry.pool))
    words[part] = as_words(entry.pool, value, part.stop - part.start)
    return words


def _swap_rows(target: Target) -> None:
    """Two entries of one request exchange their rows of one layer; the first of them is read first."""
    entry = any_entry(target)
    other = entry_at(entry.pool, entry.reader, _other_position(target, entry))
    first, second = sorted((entry, other), key=lambda one: one.position)
    layer = any_layer(target, entry.pool)
    here, there = (words_of(entry.pool, layer, one.slot) for one in (first, second))
    overwrite(entry.pool, layer, first.slot, there)
    overwrite(entry.pool, layer, second.slot, here)
    target.record(UNDECLARED, **first.place, layer=layer)
    need((here != there).any())


def _overwrite_a_page(target: Target) -> None:
    """All rows of one page in one layer, by those of noise; the page's first committed entry is read first."""
    entry = any_entry(target)
    size, layer = entry.pool.page_size, any_layer(target, entry.pool)
    start = entry.position // size * size
    for position in range(start, min(start + size, entry.reader.committed_len)):
        slot = int(entry.reader.slots[position])
        change(entry.pool, layer, slot, lambda words: words ^ target.rng.randrange(1, 1 << WORD_BITS - 1))
    first = entry_at(entry.pool, entry.reader, start)
    target.record(UNDECLARED, **first.place, layer=layer)


def _lose_a_row(target: Target, again: bool = False) -> None:
    """A layer's store of one new entry never arrives: what lay there before lies there still.

    again: it is made a second time, with what arrived: nothing is due
    """
    view, kind = target.pools["target"], root_forward(target)
    need(target.running())
    layer, kept = any_layer(target, view), []

    def keep(call: Call) -> bool:
        kept.append((int(call.write.slots[0]), words_of(view, layer, int(call.write.slots[0]))))
        return True

    def put_back(call: Call) -> bool:
        slot, words = kept[0]
        if again:
            overwrite(view, layer, slot, words_of(view, layer, slot))
            target.record(code="")
            return True
        overwrite(view, layer, slot, words)
        target.record(UNDECLARED, pool=view.name, slot=slot, position=int(call.write.positions[0]), layer=layer)
        return True

    target.before(kind, keep)
    target.after(kind, put_back)


def _sealed_entry(target: Target) -> Entry:
    """A committed entry whose record is surely written: those of the last step may be sealed with the next."""
    entry = any_entry(target)
    sealed = entry.reader.committed_len - target.setup.most_accepted
    return entry_at(entry.pool, entry.reader, entry.position % sealed)


def _damage_record(target: Target) -> None:
    """A bit of the canary's own record: token, position, chain, request, generation or step."""
    entry = _sealed_entry(target)
    record = own_state(target, entry.pool).records[entry.slot]
    record[target.rng.randrange(4)] ^= 1 << target.rng.randrange(62)
    target.record(UNDECLARED, **entry.place)


def _damage_fingerprint(target: Target) -> None:
    """A bit of a layer's first fingerprint; the bytes are right, and so is their second fingerprint."""
    entry = _sealed_entry(target)
    layer = any_layer(target, entry.pool)
    fingerprints = own_state(target, entry.pool).content_a[layer]
    fingerprints[entry.slot] ^= 1 << target.rng.randrange(62)
    target.record(UNDECLARED, **entry.place, layer=layer)


def _damage_a_blank(target: Target, fingerprint: bool) -> None:
    """The same in a record, or a first fingerprint, of a page that nobody has had: nothing is due."""
    view, page = target.pools["target"], never_granted(target)
    state, slot = own_state(target, view), page * view.page_size
    words = state.content_a[any_layer(target, view)] if fingerprint else state.records[slot]
    words[slot if fingerprint else 0] ^= 1 << target.rng.randrange(62)
    target.record(code="")


def _in_one_row(name: str, story: str, damage: Damage, cause: str = "", **settings: Any) -> Fault:
    return Fault(
        name=f"bits.{name}",
        story=story,
        expected="R9",
        strike=partial(_strike, damage=damage),
        quiet=partial(_strike_a_free_slot, damage=damage),
        cause=cause,
        **settings,
    )


FAULTS = (
    _in_one_row("flip", "One bit of one word of K or V turns over; the campaign takes each of the 32 in turn.", _flip),
    _in_one_row(
        "two_sign_bits",
        "The top bits of two words of a row turn over, which a sum of 32 bits does not see.",
        _flip_two_signs,
    ),
    _in_one_row("zeroed_row", "K or V of an entry is cleared in one layer, as by a late memset.", _zero, "order"),
    _in_one_row(
        "row_of_another_slot", "A row holds the bytes of another entry of its request.", _of_another_slot, "transfer"
    ),
    _in_one_row("k_and_v_swapped", "K lies where V belongs, and V where K does.", _exchange_parts, "transfer"),
    _in_one_row(
        "shifted_by_a_head",
        "The heads of K or V lie one place too far.",
        _shift_a_head,
        "transfer",
        applies_to="models with several heads of K and V",
        applies=lambda setup: setup.model != "embedded",
    ),
    _in_one_row("nan_row", "K or V of an entry is NaN in one layer.", partial(_fill, value=float("nan")), also=("N1",)),
    _in_one_row(
        "inf_row", "K or V of an entry is infinite in one layer.", partial(_fill, value=float("inf")), also=("N1",)
    ),
    Fault(
        name="bits.rows_swapped",
        story="Two entries of a request exchange their rows in one layer: all bytes are there, none where they belong.",
        expected="R9",
        strike=_swap_rows,
        quiet=noise_in_a_free_page,
        cause="addressing",
    ),
    Fault(
        name="bits.page_overwritten",
        story="A stray write goes over all rows of one page in one layer.",
        expected="R9",
        strike=_overwrite_a_page,
        quiet=noise_in_a_free_page,
    ),
    Fault(
        name="bits.row_lost",
        story="The store of a new entry never arrives in one layer, and says so to nobody.",
        expected="R9",
        strike=_lose_a_row,
        cause="uninitialised",
        quiet=partial(_lose_a_row, again=True),
    ),
    Fault(
        name="bits.record_damaged",
        story="A stray write hits the canary's own record of an entry.",
        expected="R3",
        strike=_damage_record,
        quiet=partial(_damage_a_blank, fingerprint=False),
    ),
    Fault(
        name="bits.fingerprint_damaged",
        story="A stray write hits the canary's own fingerprint of an entry: the bytes are right, and it must say so.",
        expected="R3",
        strike=_damage_fingerprint,
        quiet=partial(_damage_a_blank, fingerprint=True),
    ),
)
