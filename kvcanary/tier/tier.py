"""Tier: the guard of whoever keeps KV outside of an engine's pools, in host memory, in files or in a store."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.violation import Violation
from kvcanary.config import CanaryConfig
from kvcanary.errors import ForeignSnapshotError, PlanError, SealError
from kvcanary.provenance.arrival import MISROUTED, NEVER_ISSUED, SHORT, STALE
from kvcanary.report.certificate import certificate
from kvcanary.report.describe import Describer
from kvcanary.report.finding import Finding
from kvcanary.report.respond import Response
from kvcanary.report.watched_evidence import CacheView, WatchedEvidence, WatchedPool
from kvcanary.tier.arrival import SITE, Loaded, bare_violation, violation_of
from kvcanary.tier.came import came_back
from kvcanary.tier.recent import Load, RecentPuts
from kvcanary.tier.row_sums import RowSums
from kvcanary.tier.tensors import Tensors, flats_of
from kvcanary.tier.whose import Origin, Whose
from kvcanary.transfers.object_seals import ObjectSeal
from kvcanary.transfers.seal import Seal
from kvcanary_kernels.record.layout import seed_id

FED = frozenset({"T1", "L1"})


class Tier:
    """Seals objects as they leave (`put`) and compares them as they come back (`check`), in any process of one seed.

    A key is text, bytes, a number, or anything else whose repr names it. Objects are tensors, arrays or bytes on any
    device, contiguous or not, alone or in mappings and sequences: `{"k": [one a layer], "v": [one a layer]}`, a list of
    layers, one tensor for all. Their bytes are compared, in the order of their elements. May be called from any thread.
    """

    def __init__(self, seed: int | None = None, *, name: str = "tier", **settings: Any) -> None:
        """seed: of the keys, the same in every process that puts or checks; None: KVCANARY_SEED, or a secret
        one that nobody else has.  name: what findings call the tier
        settings: of `CanaryConfig` (mode, model, ...); those that are not given are read from the environment.
        """
        given = {} if seed is None else {"seed": seed}
        self.config = config = CanaryConfig.from_env(**(given | settings))
        self.name, self.coverage = name, Coverage()
        seed = config.drawn_seed()
        self.seed_id, self._origin = seed_id(seed), secrets.token_hex(8)
        self._sums, self._recent, self._loads = RowSums(seed), RecentPuts(), dict[str, Load]()
        self._lock, self._num_puts, self._num_checks = threading.RLock(), 0, 0
        self._is_told_of_loads = self._is_told_of_landings = False
        self._response = Response(config, Describer(WatchedEvidence({}, _history).read, config.show_tokens))

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return self._response.log.findings

    def put(self, key: object, tensors: Tensors, identity: Mapping[str, str] | None = None) -> Seal:
        """Seal an object that leaves under this key. Keep the seal with it, or anywhere else (`Seal.to_bytes`).

        tensors:  as they are now: call before they may be overwritten, and behind the copy that made them
        identity: what else the bytes belong to (adapter, salt, revision), to be compared where `check` is given it
        PlanError for what has no bytes.
        """
        with self._lock:
            self._num_puts += 1
            number = self._num_puts
        flats = flats_of(tensors) if self.config.enabled else []
        cards = tuple(flat.card() for flat in flats)
        fingerprints = tuple(self._sums.of(flat, card.row_bytes) for flat, card in zip(flats, cards, strict=True))
        named = tuple(sorted((identity or {}).items()))
        seal = ObjectSeal(
            self.seed_id, self.config.model, name_of(key), number, self._origin, named, cards, fingerprints
        )
        with self._lock:
            self.coverage.slots_sealed += sum(card.num_rows for card in cards)
            self._recent.remember(seal)
        return seal

    def check(
        self, key: object, tensors: Tensors, seal: Seal | bytes | None = None, identity: Mapping[str, str] | None = None
    ) -> bool:
        """Whether these are the bytes that were put under this key, with this seal; else T1, once, as the mode says.

        seal: as `put` gave it or as its bytes; None: of the last put of this key here, and where there was none the
              object is counted as not judged, and True
        False in the modes that go on: treat the load as a miss. KVCorruptionError in mode `raise`.
        A seal of another seed, model or identity is a ForeignSnapshotError in mode `raise`, else an L1 and False.
        """
        with self._lock:
            self._num_checks += 1
            loaded = Loaded(self.name, name_of(key), self._num_checks)
            load = self._loads.pop(loaded.key, None)
        if not self._compares:
            return True
        try:
            own = self._seal(loaded.key, seal, identity or {})
        except (SealError, ForeignSnapshotError) as error:
            return self._refuse(loaded, error)
        if own is None or not own.cards:
            self._count("objects without a seal")
            return True
        violation = self._compare(loaded, own, tensors, load)
        return violation is None or self._tell(violation)

    def issued(self, key: object) -> None:
        """A load of this key is on its way. Who calls this once calls it for every load."""
        with self._lock:
            self._is_told_of_loads = True
            newest = self._recent.newest.get(name_of(key))
            self._loads[name_of(key)] = Load(0 if newest is None else newest.number)

    def landed(self, key: object) -> bool:
        """It has arrived, as the transfer says; T1 and False where it was never issued."""
        name = name_of(key)
        with self._lock:
            load, self._is_told_of_landings = self._loads.get(name), True
            if load is not None:
                self._loads[name] = load._replace(has_landed=True)
            self._num_checks += load is None
            loaded = Loaded(self.name, name, self._num_checks)
        if load is not None or not self._is_told_of_loads or not self._compares:
            return True
        text = f"a load of {name!r} is said to have landed, and was never issued"
        return self._tell(bare_violation(loaded, Origin(NEVER_ISSUED, text)))

    def certificate(self) -> dict[str, Any]:
        """What was sealed and compared, and what not and why; `seed_id` names the seed."""
        with self._lock:
            own = {"puts": self._num_puts, "checks": self._num_checks}
            return own | certificate(self.config, self.coverage, 0, self.seed_id, self._response.log, FED)

    # helpers

    @property
    def _compares(self) -> bool:
        return self.config.enabled and self.config.content != "write" and "T1" not in self.config.disable

    def _seal(self, key: str, seal: Seal | bytes | None, identity: Mapping[str, str]) -> ObjectSeal | None:
        """The seal to compare with, of this seed, model and identity."""
        if seal is None:
            return self._recent.newest.get(key)
        if isinstance(seal, bytes | bytearray | memoryview):
            seal = Seal.from_bytes(seal)
        if not isinstance(seal, Seal):
            raise PlanError(f"seal must be what put() returned, or its bytes, got {type(seal).__name__}")
        seal.expect(self.seed_id, self.config.model)
        if not isinstance(seal, ObjectSeal):
            raise ForeignSnapshotError(
                f"an object must come back with a {ObjectSeal.of}, got a {seal.of}: give what put() returned for it",
                expected=ObjectSeal.of,
                found=seal.of,
            )
        _expect_identity(dict(seal.identity), identity)
        return seal

    def _compare(self, loaded: Loaded, seal: ObjectSeal, tensors: Tensors, load: Load | None) -> Violation | None:
        came, surplus = came_back(self._sums, seal, flats_of(tensors))
        with self._lock:
            self.coverage.slots_checked += sum(one.card.num_rows for one in came)
            self.coverage.bytes_checked += seal.num_bytes
            others, newer = list(self._recent.last), self._recent.newer(seal, None if load is None else load.newest)
        is_wrong = any(one.wrong or one.text for one in came)
        first = self._first(loaded, seal, newer, load, is_wrong)
        if first is None and not is_wrong:
            return None
        return violation_of(loaded, seal, came, Whose(self._sums, seal, came, surplus, others), first)

    def _first(
        self, loaded: Loaded, seal: ObjectSeal, newer: ObjectSeal | None, load: Load | None, is_wrong: bool
    ) -> Origin | None:
        """What explains all of it, whatever the bytes are; None: they speak for themselves."""
        if seal.key != loaded.key:
            return Origin(MISROUTED, f"{loaded.key!r} came back with the seal of {seal.key!r}")
        if newer is not None and not is_wrong:
            old = f"put {seal.number} of {seal.key!r} left it, and put {newer.number} followed"
            return Origin(STALE, f"the object came back as {old}")
        if is_wrong and self._is_told_of_loads and load is None:
            return Origin(NEVER_ISSUED, f"no load of {loaded.key!r} was issued")
        if is_wrong and load is not None and self._is_told_of_landings and not load.has_landed:
            text = f"the load of {loaded.key!r} was issued and had not landed when its bytes were used"
            return Origin(SHORT, text)
        return None

    def _refuse(self, loaded: Loaded, error: SealError | ForeignSnapshotError) -> bool:
        """A seal that cannot be read came back wrong itself; one of another seed, model or identity is no finding of
        these bytes, and stops only those who asked to be stopped.
        """
        if isinstance(error, SealError):
            text = f"the seal of {loaded.key!r} did not come back whole: {error}"
            return self._tell(bare_violation(loaded, Origin(SHORT, text)))
        if self.config.mode == "raise":
            raise error
        pool = WatchedPool.of(CacheView(self.name, 1), loaded.number)
        return self._tell(Violation("L1", pool, -1, None, loaded.key, SITE, loaded.number, message=str(error)))

    def _tell(self, violation: Violation) -> bool:
        with self._lock:
            self._response.answer([violation], violation.step, self.coverage)
        return False

    def _count(self, reason: str) -> None:
        with self._lock:
            self.coverage.skip(reason, 1)


def name_of(key: object) -> str:
    """What seals and findings call a key; PlanError where it has no name that another process would give it."""
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):
        return key.hex()
    if type(key).__repr__ is object.__repr__:
        raise PlanError(
            f"a key must be text, bytes, or have a repr that names it, got {type(key).__name__}: give its text"
        )
    return repr(key)


def _expect_identity(sealed: Mapping[str, str], given: Mapping[str, str]) -> None:
    for name, value in given.items():
        if sealed.get(name) != value:
            found = sealed.get(name, "")
            raise ForeignSnapshotError(
                f"an object must come back to the {name} that it left, got one of {found!r} for {value!r}: the bytes "
                "mean something else there, compute them again",
                expected=value,
                found=found,
            )


def _history(violation: Violation) -> tuple[str, ...]:
    return (f"object {violation.request_id!r} of {violation.pool.name}",)
