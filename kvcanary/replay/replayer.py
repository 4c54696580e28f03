"""Replayer: the events of a dump once more, through the same checks, over stand-in bytes on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from kvcanary.calls.forward import Ints
from kvcanary.captured.in_flight import InFlight
from kvcanary.dumps.container import told
from kvcanary.dumps.event_schema import OF_SEVERAL, by_request, plan_part
from kvcanary.dumps.reading import Call, Dump
from kvcanary.dumps.writing import salt_of
from kvcanary.errors import DumpError, KVCanaryError, KVCorruptionError
from kvcanary.manager.substep import SubstepCanary, WarmupSubstep
from kvcanary.pools.plans import ReadPlan, WritePlan
from kvcanary.pools.slot_maps import slots_in, slots_of_pages
from kvcanary.records.state import PoolState
from kvcanary.replay.captured import advanced, captured_batch, read_mask, record_accepted, run_captured
from kvcanary.replay.damage import Damager
from kvcanary.replay.stage import Stage
from kvcanary.report.finding import Finding
from kvcanary.transfers.async_ops import AsyncOp
from kvcanary.transfers.async_tracker import Resources
from kvcanary.transfers.snapshots import PageSnapshot
from kvcanary_kernels.record.layout import Identity

#: Of a forward between open and close the slots of the pool, [n] int64, that it writes; -1: none there.
Open = tuple[SubstepCanary | WarmupSubstep, Tensor]
#: What was put away: the canary's snapshot, and by pool, layer and part the bytes.
Put = tuple[PageSnapshot, dict[str, list[list[Tensor]]]]
#: What makes two findings one and the same.
PLACE = ("code", "pool", "page", "slot", "offset", "position", "layers", "site", "step", "reader", "writer")
WORD = ("part", "head", "dim", "byte", "bit")
#: Calls before which bytes come to other places: what was found damaged there is so from then on.
DAMAGED_LATER = frozenset({"captured_move", "on_move", "on_swap_in", "on_load_end", "on_restore"})
#: Findings of hooks that a recording does not hold.
NOT_RECORDED = {
    "H1": "the counters of captured graphs",
    "H2": "the order of hooks",
    "L1": "plans that contradict themselves",
}


def not_recorded(dump: Dump, finding: Mapping[str, Any]) -> str:
    """What a finding comes from that no recording has; empty: it is to be reached."""
    if finding["pool"] not in dump.pools:
        return "recurrent states, which are not recorded"
    return NOT_RECORDED.get(finding["code"], "")


@dataclass
class Outcome:
    """What a replay came to.

    step:     of the last event that was run
    findings: of the replay, in order; `error`: a typed error in which an event ended, as it did in the engine
    missing:  findings of the dump that the replay did not reach
    """

    step: int = 0
    num_events: int = 0
    findings: list[Finding] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)

    @property
    def first_bad_step(self) -> int | None:
        return min((finding.first_bad_step for finding in self.findings), default=None)


def replay(dump: Dump, until: int | None = None, code: str | None = None) -> Outcome:
    """Run the events of all steps, or up to and with one. `code`: only findings of this check are compared.

    DumpError where the dump cannot be replayed; nothing that it says is executed.
    """
    with structlog.testing.capture_logs(), torch.inference_mode(), np.errstate(over="ignore"):  # of absurd numbers
        return Replayer(dump).run(until, code)


class Replayer:
    """One manager, and the calls that it is told of; `run` comes once."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        try:
            self._stage = Stage(dump)
        except DumpError:
            raise
        except (KVCanaryError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise _contradiction(dump, error) from error
        self.manager, self._manager_state = self._stage.manager, self._stage.manager_state
        self._damage = Damager(self._stage).bring_about
        self._open: dict[str, Open] = {}
        self._snapshots: dict[int, Put] = {}
        self._new_puts: deque[Put] = deque()  # whose numbers the next events tell
        self._async_ops: dict[tuple[str, int], AsyncOp] = {}
        self._flights: dict[int, InFlight] = {}
        self._accepted: dict[str, list[int]] = {}  # by request, in its last captured step

    def run(self, until: int | None, code: str | None) -> Outcome:
        outcome = Outcome(self._dump.manifest["first_step"])
        for step, event in self._dump.stepped():
            if until is not None and step > until:
                break
            outcome.step, outcome.num_events = step, outcome.num_events + 1
            if not self._survives(event, outcome):
                break
        outcome.findings = [finding for finding in self.manager.findings if code in (None, finding.code)]
        reported = [finding for finding in self._dump.findings if code in (None, finding["code"])]
        reported = [finding for finding in reported if until is None or finding["step"] <= until]
        here = [finding.to_dict() for finding in outcome.findings]
        outcome.missing = [one for one in reported if not any(self._is_same(one, other) for other in here)]
        return outcome

    def _survives(self, event: Call, outcome: Outcome) -> bool:
        """Run one event, as a method here or of the manager; whether the engine went on after it."""
        try:
            if event["call"] not in DAMAGED_LATER:
                self._damage(event)
            own: Callable[[Call], None] | None = getattr(self, f"_{event['call']}", None)
            if own is None:
                getattr(self.manager, event["call"])(*_arguments(event))
            else:
                own(event)
        except KVCorruptionError:
            return False
        except KVCanaryError as error:
            outcome.errors.append(f"{event['call']}: {type(error).__name__}: {error}")
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise _contradiction(self._dump, error) from error
        return True

    # events that are more than a call

    def _admit(self, event: Call) -> None:
        self.manager.admit(event["request_id"], event["token_ids"].tolist(), salt_of(event["root"]))

    def _reroot(self, event: Call) -> None:
        book = self._manager_state.ledger.book
        book.change_identity(book.request(event["request_id"]), Identity(salt_of(event["root"])))

    def _on_cleared(self, event: Call) -> None:
        """What stands in for the bytes stays."""
        self.manager.transfers.forget_bytes_of(event["pools"])

    def _map(self, event: Call) -> None:
        slot_map = self._stage.pool(event["pool"]).view.slot_map
        if slot_map is None:
            raise ValueError(f"pool {event['pool']!r} has no map")
        slot_map[_tensor(event["slots"])] = _tensor(event["places"])

    def _forward(self, event: Call) -> None:
        read, write = self._plans(event)
        pool = self._stage.pool(event["pool"])
        substep = self.manager.forward(event["kind"], event["index"], event["pool"])
        _, slots = substep.open(read, write)
        self._open[pool.name] = substep, _tensor(slots_in(pool.view, slots.numpy()))
        for layer in range(pool.view.num_layers):
            if event["stored"] >> layer & 1:
                self._store({"pool": pool.name, "layer": layer})

    def _expect(self, event: Call) -> None:
        forwards = zip(event["kinds"], event["indices"].tolist(), event["pools"], strict=True)
        self.manager.expect([*forwards], event["request_ids"])

    def _launch(self, event: Call) -> None:
        read, write = self._plans(event)
        substep, names, counts = self._stage.captured[event["number"]], event["requests"], event["counts"]
        acceptance = self._stage.acceptance if "accepted" in event else None
        if acceptance is None:
            truth = self.manager.launch(substep, names, counts.tolist(), event["reads"])
        else:
            truth = self.manager.launch_accepted(substep, names, event["reads"], acceptance)
        truth = advanced(truth, substep.pool, [self._accepted.get(name, []) for name in names])
        run_captured(self._stage, substep, event, captured_batch(substep, event, read, write, truth))
        if acceptance is not None:
            accepted = by_request(counts, event["accepted"])
            self._accepted |= dict(zip(names, accepted, strict=True))
            record_accepted(acceptance, accepted)

    def _check(self, event: Call) -> None:
        self.manager.collect(self.manager.end_step())

    def _end_step(self, event: Call) -> None:
        self._flights[event["step"]] = self.manager.end_step()

    def _collect(self, event: Call) -> None:
        """What ended before the recording has landed in its beginning."""
        flight = self._flights.get(event["step"])
        if flight is None:
            flight = InFlight(event["step"], None, [])
            flight.is_collected = True
        self.manager.collect(flight)

    _depart, _hear = _end_step, _collect  # up to version 5

    def _captured_move(self, event: Call) -> None:
        move = self._stage.moves[event["number"]]
        self._move(move.pool, move.pool, event["src"], event["dst"])
        self._damage(event)
        source, destination = (torch.zeros_like(move.src) for _ in range(2))
        count = len(event["src"])
        source[:count], destination[:count] = _tensor(event["src"]), _tensor(event["dst"])
        self.manager.launch_move(move)
        move.record(source, destination, torch.arange(len(source)) < count)

    def _store(self, event: Call) -> None:
        pool, (substep, slots) = self._stage.pool(event["pool"]), self._open[event["pool"]]
        self._stage.store(substep.store, pool, event["layer"], slots, slots >= 0)

    def _close(self, event: Call) -> None:
        self._open.pop(event["pool"])[0].close()

    def _on_move(self, event: Call) -> None:
        source = self._stage.pool(event["pool"])
        target = self._stage.pool(event.get("to") or event["pool"])
        src, dst = slots_in(source.view, event["src"]), slots_in(target.view, event["dst"])
        lies = (src >= 0) & (dst >= 0) & (src < source.view.num_slots) & (dst < target.view.num_slots)
        src, dst = src[lies], dst[lies]
        self._damage({"damage": _taken_along(event, source, np.setdiff1d(src, dst) if source is target else src)})
        self._move(source, target, src, dst)
        self._damage(event)
        self.manager.on_move(
            event["pool"], _tensor(event["src"]), _tensor(event["dst"]), event.get("to"), event.get("guesses", False)
        )

    def _on_offload(self, event: Call) -> None:
        pages = event["pages"]
        snapshot = self.manager.on_offload(pages.tolist())
        self._new_puts.append((snapshot, self._values(self._manager_state.state.pools, pages)))

    def _on_swap_out(self, event: Call) -> None:
        pages, pools = event["pages"], self._manager_state.state.pools_of(event["group"])
        snapshots = self.manager.on_swap_out(event["group"], pages.tolist())
        self._new_puts += [(snapshot, self._values(pools, pages[n : n + 1])) for n, snapshot in enumerate(snapshots)]

    def _on_swap_in(self, event: Call) -> None:
        """Pages that left before the recording are adopted as they lie."""
        known, strange = [], []
        numbers = event.get("parcels", np.full(len(event["pages"]), -1))
        for page, number in zip(event["pages"], numbers.tolist(), strict=True):
            put = self._snapshots.get(number)
            if put is None:
                strange.append(int(page))
            else:
                self._bring_back(put, np.array([page]))
                known.append((int(page), put[0]))
        self._damage(event)
        if strange:
            self.manager.on_swap_in(event["group"], strange, None)
        if known:
            self.manager.on_swap_in(event["group"], *map(list, zip(*known, strict=True)))

    def _parcel(self, event: Call) -> None:
        if self._new_puts:
            self._snapshots[event["number"]] = self._new_puts.popleft()

    def _come_back(self, event: Call) -> None:
        """Bytes that were put away lie in other pages; what left before the recording is adopted as it lies."""
        put, pages = self._snapshots.get(event.get("parcel", -1)), event["pages"]
        if put is not None:
            self._bring_back(put, pages)
        self._damage(event)
        arrived = event["request_id"], pages.tolist(), event["length"]
        if put is None:
            self.manager.on_load_end(*arrived)
        else:
            getattr(self.manager, event["call"])(*arrived, put[0])

    _on_load_end = _on_restore = _come_back

    def _ticket_issue(self, event: Call) -> None:
        reads = _resources(event["reads"], event["read_names"], event.get("read_grants"))
        writes = _resources(event["writes"], event["write_names"], event.get("write_grants"))
        op = self.manager.async_tracker.issue(event["what"], event["stream"], reads, writes)
        self._async_ops[event["stream"], event["sequence"]] = op

    def _ticket_waits(self, event: Call) -> None:
        op = self._async_ops.get((event["other"], event["sequence"]))
        if op is not None:
            self.manager.async_tracker.waits(event["stream"], op)

    def _ticket_complete(self, event: Call) -> None:
        op = self._async_ops.get((event["other"], event["sequence"]))
        if op is not None:
            self.manager.async_tracker.complete(op)

    def _ticket_use(self, event: Call) -> None:
        resources = _resources(event["pages"], event["names"], event.get("grants"))
        self.manager.async_tracker.use(event["what"], event["stream"], resources, event["writes"], event["requests"])

    def _ticket_renew(self, event: Call) -> None:
        self.manager.async_tracker.renew(event["buffer"], event["generation"])

    # helpers

    def _values(self, pools: Iterable[PoolState], pages: Ints) -> dict[str, list[list[Tensor]]]:
        return {pool.name: self._stage.take(pool, self._slots(pool, pages)) for pool in pools}

    def _bring_back(self, put: Put, pages: Ints) -> None:
        _, by_pool = put
        for name, layers in by_pool.items():
            pool = self._stage.pool(name)
            for layer, values in enumerate(layers):
                self._stage.put(pool, layer, self._slots(pool, pages), values)

    def _slots(self, pool: PoolState, pages: Ints) -> Tensor:
        slots = slots_in(pool.view, slots_of_pages(pages, self._manager_state.state.page_size))
        return _tensor(slots[slots >= 0])

    def _move(self, source: PoolState, target: PoolState, src: Ints, dst: Ints) -> None:
        goes_to = dict(zip(src.tolist(), dst.tolist(), strict=True))
        damaged = {
            (target.name, goes_to[slot], layer)
            for name, slot, layer in self._stage.damaged
            if name == source.name and slot in goes_to and layer >= 0
        }
        for layer, values in enumerate(self._stage.take(source, _tensor(src))):
            self._stage.put(target, layer, _tensor(dst), values)
        self._stage.damaged |= damaged

    def _plans(self, event: Call) -> tuple[ReadPlan, WritePlan]:
        own = (_tensor(plan_part(event, name)) for name in ("slots", "tokens", "positions", "parents"))
        slots, tokens, positions, parents = own
        of_rows = (plan_part(event, name) for name in ("bounds", "written", "starts", "prefixes"))
        bounds, written, starts, prefixes = of_rows
        read = ReadPlan(
            indptr=_tensor(bounds),
            indices=_tensor(self._indices(event, bounds, starts, prefixes)),
            requests=tuple(event["requests"]),
            rows_per_request=event["width"],
            prefix_lens=_tensor(prefixes),
            num_written=_tensor(written),
            tree_mask=read_mask(event),
            starts=_tensor(starts) if event["has_starts"] else None,
        )
        parts = parents if event["has_parents"] else None, parents if event.get("has_lineage") else None
        return read, WritePlan(slots, tokens, positions, *parts)

    def _indices(self, event: Call, bounds: Ints, starts: Ints, prefixes: Ints) -> Ints:
        """What every row read: as granted up to its prefix, unless the dump has the row whole."""
        whole_rows, at, ends = {}, 0, bounds.tolist()
        for row in event["whole_rows"].tolist():
            length = ends[row + 1] - ends[row]
            whole_rows[row] = event["wholes"][at : at + length]
            at += length
        parts, at = [], 0
        for row in range(event["rows"]):
            start, prefix = int(starts[row]), int(prefixes[row // event["width"]])
            known, length = max(0, prefix - start), ends[row + 1] - ends[row]
            tail = event["tails"][at : at + length - known]
            at += length - known
            if row in whole_rows:
                parts.append(whole_rows[row])
                continue
            request = self._manager_state.ledger.request(event["requests"][row // event["width"]])
            parts += [request.slots[start : start + known], tail]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _is_same(self, reported: dict[str, Any], here: dict[str, Any]) -> bool:
        keys = (*PLACE, *WORD) if self._stage.is_exact else PLACE
        return all(_plain(reported.get(key)) == _plain(here[key]) for key in keys)


def _taken_along(event: Call, source: PoolState, leaving: Ints) -> list[dict[str, Any]]:
    """Damage in slots that a move reads, and does not write, was there before it."""
    reported = (damage for damage in event.get("damage", ()) if (damage["code"], damage["pool"]) == ("R9", source.name))
    return [damage for damage in reported if damage["slot"] in leaving]


def _arguments(event: Call) -> list[Any]:
    """Those of a call, in its order; of several requests what each of them gets."""
    if event["call"] in OF_SEVERAL:
        field, _ = OF_SEVERAL[event["call"]]
        return [event["request_ids"], by_request(event["counts"], event[field])]
    values = [value for key, value in event.items() if key not in ("n", "call", "damage")]
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _resources(pages: Ints, names: list[str], grants: Ints | None) -> Resources:
    """Of an operation: as they are now, or under these generations."""
    resources: list[int | str] = [*pages.tolist(), *names]
    if grants is None:
        return resources
    planned = [None if grant < 0 else grant for grant in grants.tolist()]
    return dict(zip(resources, planned, strict=True))


def _tensor(values: Ints) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))


def _contradiction(dump: Dump, error: Exception) -> DumpError:
    return DumpError(f"{dump.path} is damaged: its events contradict each other, {told(error)}")
