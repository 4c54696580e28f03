"""What a report says of a trip that went wrong: one sentence for each kind, what speaks for it, expected and found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvcanary.provenance.arrival import MISROUTED, ONE_WORD, SHORT, STALE, UNKNOWN, Arrival, Origin, PoolArrival, Trip

MOST_LINES = 3


def sentence_of(arrival: Arrival, kind: str) -> str:
    """What the trip did to the slots of this kind, in one plain sentence."""
    if kind in arrival.sentences:
        return f"{kind}: {arrival.sentences[kind]}"
    pool, origins = arrival.first(kind)
    text = origins[min(origins)].detail or "the bytes that came back are those of nothing that is known"
    if kind in _SENTENCES:
        text = _SENTENCES[kind](arrival, pool, origins)
    return f"{kind}: {text}{_where(arrival)}"


def evidence_of(arrival: Arrival, kind: str) -> tuple[str, ...]:
    """What was read that speaks for it: of the kind of most slots also the way of the pages."""
    if kind in arrival.evidence:
        return arrival.evidence[kind]
    trip = arrival.trip
    places = {p for pool in arrival.pools for p, origin in pool.origins.items() if origin.kind == kind}
    pages = len({place // trip.page_size for place in places})
    lines = [f"{arrival.kinds[kind]} slots, on {pages} of {len(trip.pages)} pages that came back"]
    if kind != arrival.kind:
        return tuple(lines)
    _, origins = arrival.first(kind)
    lines += _way(trip, origins)
    if kind == UNKNOWN and trip.pages[0][0].number:
        forgotten = f", {arrival.num_forgotten} older ones are forgotten" if arrival.num_forgotten else ""
        lines.append(f"compared with zeros, poison, what lay there before and {arrival.num_known} snapshots{forgotten}")
    sent, number, into = trip.pages[min(origins) // trip.page_size]
    if not sent.number:
        return *lines, f"{_page(trip, min(origins))} was loaded into block {into} by {trip.how} in step {trip.step}"
    left = f"{_page(trip, min(origins))} left from page {sent.pages[number]} in step {sent.step}"
    return *lines, f"{left}, and came back by {trip.how} into page {into} in step {trip.step}"


def expected_of(arrival: Arrival, place: int) -> dict[str, Any]:
    """Of the slot with this number among those of the trip."""
    sent, page, _ = arrival.trip.pages[place // arrival.trip.page_size]
    if not sent.number:
        return {"block_of_row": page, "bytes": "those written here under the same prefix"}
    left = {"left_from_page": sent.pages[page], "left_in_step": sent.step}
    return {"parcel": sent.number, "page_of_parcel": page} | left


def found_of(arrival: Arrival, place: int) -> dict[str, Any]:
    """The same, where the bytes came from and how many slots, pages and layers are wrong."""
    trip, size = arrival.trip, arrival.trip.page_size
    own = [pool for pool in arrival.pools if place in pool.origins] or list(arrival.pools)
    origin = own[0].origins.get(place, Origin(arrival.kind))
    wrong, compared = sum(len(pool.origins) for pool in arrival.pools), sum(len(p.compared) for p in arrival.pools)
    whose = {}
    if origin.sent is not None:
        whose = {"bytes_of_parcel": origin.sent.number, "bytes_of_page": origin.place // size}
    return {
        "verdict": arrival.kind,
        "came_back_by": trip.how,
        "into_page": trip.pages[place // size][2],
        **whose,
        "came_back_in_step": trip.step,
        "slots_wrong": f"{wrong} of {compared}",
        "pages_wrong": f"{arrival.num_pages} of {len(trip.pages)}",
        "pools_wrong": [pool.name for pool in arrival.pools],
        "layers_wrong": sorted({layer for pool in arrival.pools for layer in pool.layers}),
    }


# sentences


def _one_word(arrival: Arrival, pool: PoolArrival, origins: dict[int, Origin]) -> str:
    count, words = arrival.kinds[ONE_WORD], list(arrival.words.values())
    if count > 1 or not words:
        every = [origin for pool in arrival.pools for origin in pool.origins.values()]
        parts = " and ".join(dict.fromkeys(origin.detail for origin in every if origin.kind == ONE_WORD))
        return f"one word of {parts} differs in each wrong layer of {count} slots, all else came back as it left"
    word, page = words[0], _page(arrival.trip, min(origins))
    unit = "word" if word.bit is None else f"bit, bit {word.bit},"
    place = f"of {word.part}, head {word.head}, dim {word.dim}, on {page}"
    return f"one {unit} {place} changed on the way or before it left, all else came back as it left"


def _misrouted(arrival: Arrival, pool: PoolArrival, origins: dict[int, Origin]) -> str:
    known = {place: origin for place, origin in origins.items() if origin.sent is not None}
    trip, size = arrival.trip, arrival.trip.page_size
    if not known:
        return origins[min(origins)].detail
    if shifted := _shifted(trip, known):
        return shifted
    first = min(known)
    here, there = _page(trip, first), _name(trip, known[first])
    slot, other = first % size, known[first].place % size
    if slot != other:
        return f"{here}, slot {slot} came back with the bytes of {there}, slot {other}"
    more = len({place // size for place in known}) - 1
    others = "" if not more else f", and {more} more page{'s'[: more - 1]} with those of others"
    return f"{here} came back with the bytes of {there}{others}"


def _shifted(trip: Trip, known: dict[int, Origin]) -> str:
    """Pages of one snapshot that changed places, or are all shifted by the same number; or ""."""
    size, (sent, first, _) = trip.page_size, trip.pages[0]
    if any(origin.sent is not sent or origin.place % size != place % size for place, origin in known.items()):
        return ""
    ways = {(place // size + first, origin.place // size) for place, origin in known.items()}
    here, total = sorted({page for page, _ in ways}), len(sent.pages)
    if len(here) == 2 and ways == {(here[0], here[1]), (here[1], here[0])}:
        return f"pages {here[0]} and {here[1]} of snapshot {sent.number} changed places"
    shifts = {(there - page) % total for page, there in ways}
    if len(here) < 2 or len(shifts) != 1:
        return ""
    (ahead,) = shifts
    other = f"the page {ahead} behind it" if 2 * ahead <= total else f"the page {total - ahead} before it"
    return f"each of {len(here)} pages came back with the bytes of {other} in snapshot {sent.number}"


def _short(arrival: Arrival, pool: PoolArrival, origins: dict[int, Origin]) -> str:
    trip, first = arrival.trip, min(origins)
    pages = len({place // trip.page_size for place in origins})
    where = f" behind offset {first}" if first > pool.compared[0] else ""
    if sorted(origins) != pool.compared[pool.compared >= first].tolist():
        where = f" in {_page(trip, first)}{' and others' if pages > 1 else ''}"
    details = " or ".join(dict.fromkeys(origin.detail for origin in origins.values()))
    return f"nothing arrived{where}: {pages} of {len(trip.pages)} pages hold {details}"


def _stale(arrival: Arrival, pool: PoolArrival, origins: dict[int, Origin]) -> str:
    here, origin = _page(arrival.trip, min(origins)), origins[min(origins)]
    if origin.detail and origin.sent is not None:
        return f"{here} came back as it was saved in step {origin.sent.step}, and it was {origin.detail}"
    if origin.sent is None:
        return f"{here} was not overwritten, others behind it were: it holds {origin.detail}"
    left = f", an earlier one, which left in step {origin.sent.step}"
    return f"{here} came back with the bytes of {_name(arrival.trip, origin)}{left}"


_SENTENCES = {ONE_WORD: _one_word, MISROUTED: _misrouted, SHORT: _short, STALE: _stale}


# helpers


def _where(arrival: Arrival) -> str:
    """In which pool and layers, where that is not all."""
    if not arrival.intact and all(len(pool.layers) == pool.num_layers for pool in arrival.pools):
        return ""
    return f"; in {' and '.join(_layers(pool) for pool in arrival.pools)} only"


def _layers(pool: PoolArrival) -> str:
    if len(pool.layers) == pool.num_layers:
        return f"the {pool.name} pool"
    return f"layer{'s'[: len(pool.layers) - 1]} {_ranges(pool.layers)} of the {pool.name} pool's {pool.num_layers}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0, 2 to 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _way(trip: Trip, origins: dict[int, Origin]) -> Iterable[str]:
    """Page by page whose bytes they are."""
    size, named = trip.page_size, dict[int, str]()
    for place in sorted(origins):
        origin = origins[place]
        here = trip.pages[place // size][:2]
        if origin.sent is not None and place // size not in named and here != (origin.sent, origin.place // size):
            left = f"left from page {origin.sent.pages[origin.place // size]} in step {origin.sent.step}"
            named[place // size] = f"{_page(trip, place)} holds {_name(trip, origin)}, which {left}"
    return list(named.values())[:MOST_LINES]


def _page(trip: Trip, place: int) -> str:
    """That of the slot with this number among those of the trip."""
    sent, number, _ = trip.pages[place // trip.page_size]
    if not sent.number:
        return f"block {number} of the row"
    return f"page {number} of snapshot {sent.number}"


def _name(trip: Trip, origin: Origin) -> str:
    """`page 2 of the same snapshot`, or of snapshot 7."""
    if origin.sent is None:
        return origin.detail
    page = origin.place // trip.page_size
    is_own = all(sent is origin.sent for sent, _, _ in trip.pages)
    return f"page {page} of the same snapshot" if is_own else f"page {page} of snapshot {origin.sent.number}"
