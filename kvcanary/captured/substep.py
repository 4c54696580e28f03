"""CapturedSubstep: the hooks of one forward that a CUDA graph can hold: fixed addresses, counts read on the device.

No hook allocates, waits for the device or looks at a device value. What fires is counted on the device and read by
`SubstepRegistry.read_back` after the step.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from kvcanary.captured.buffers import StaticBuffers
from kvcanary.captured.kernel_launches import Launches, Settings, Shared, Workspace
from kvcanary.errors import HookOrderError, PlanError
from kvcanary.native.layout import KINDS, LINE, NOWHERE, OTHER, filled
from kvcanary.pools.launch_site import SUBSTEP_KINDS, site_name
from kvcanary.records.mailbox import NUM_MESSAGES, Packed, PackedMask
from kvcanary.records.state import PoolState
from kvcanary_kernels.content.reads import ReadSums
from kvcanary_kernels.judge.forward import ForwardPlan, Room
from kvcanary_kernels.judge.plan import NO_CLAIM

#: Of what `CapturedSubstep.written` sends: where rows begin, slots that may be written, words of masks, entries that
#: are wrong, the header.
ROW_STARTS, SAFE, MASKS, VIOLATIONS, HEADER_PART = 1, 7, -3, -2, -1


class CapturedSubstep:
    """One forward of one pool in one bucket, of a `SubstepRegistry`: open(), store() of each layer, close(), and again.

    forward: its inputs; buffers: the same, where they are ours to fill, else None
    work:    its outputs. `work.row_violations` may ride with the tokens of the step
    slots:   [entries] int64, where these are stored
    number:  of the substep in its registry; None: its forward comes once
    layers:  that the body has stored, in its order
    judges_bytes: what attention reads is compared as it is read; the body asks for `reads` of every layer
    width:   rows a request
    is_deferred: admit() comes before open(), and it is judged beside a later forward of another pool, or at a join
    before:  work of the draft forward before it, whose branches the forward's lineage names; None: it has none
    depth, masks: of trees, in steps, and what attention lets each node see; None: no trees
    written: what the host learns of a run: what `DecodedForward` takes of its plan, masks, `row_violations`, the header
    num_kept: numbers of that which are kept where it is clean: all up to the masks
    message_struct_at: address of where parts of that begin, LINE (native/layout.py)
    """

    def __init__(
        self,
        shared: Shared,
        pool: PoolState,
        site: tuple[str, int],
        inputs: StaticBuffers | ForwardPlan,
        header: Tensor,
        number: int | None,
        settings: Settings,
        room: Room | None = None,
    ) -> None:
        """`header`: [HEADER] int64 zeros: counts by bit of both sides, then what has run. `room`: as of `Workspace`."""
        if site[0] not in SUBSTEP_KINDS:
            raise PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {site[0]!r}")
        self.pool, self.site, self.number, self.step = pool, site, number, shared.step
        self.buffers = inputs if isinstance(inputs, StaticBuffers) else None
        self.forward = inputs.plan() if isinstance(inputs, StaticBuffers) else inputs
        with torch.inference_mode(False):
            self.work = Workspace(self.forward, pool, settings, room)
        self.slots, self._twice = self.work.planned.safe_slots, self.work.twice
        self._claims, self._side_stream = shared.claims[pool.name], shared.side_stream
        self._launch = Launches(shared, pool, site, self.forward, self.work, header, settings)
        self.width, self.depth, self._puts = settings.width, settings.max_depth, settings.puts
        self.is_deferred, self.before = settings.is_deferred, settings.before
        self.masks = None if settings.tree_mask is None else PackedMask(settings.tree_mask)
        num_messages = 1 if number is None else NUM_MESSAGES
        self.written = Packed(self._parts(header), shared.step, self._launch.post, num_messages)
        self.num_kept = int(self.written.message_of(0).where[MASKS].stop)
        self._num_layers = pool.view.num_layers
        self.layers: tuple[int, ...] = ()
        keys, self._num_read = settings.read_keys, 0
        self._reads = [] if keys is None else [keys.of(layer, self.work.sums) for layer in range(self._num_layers)]
        self.judges_bytes = bool(self._reads)
        self._stores: int | None = None  # that a body has when it runs; None: none has run yet
        self._opened = shared.opened
        self._is_admitted = self._has_verified = self._has_judged = False
        self._message_struct = message_struct(self)
        self.message_struct_at = self._message_struct.buffer_info()[0]

    def __str__(self) -> str:
        return f"{site_name(*self.site)} of the {self.pool.name} pool, bucket of {self.forward.num_rows} rows"

    @property
    def is_open(self) -> bool:
        """Whether it is between open() and close()."""
        return self in self._opened

    @property
    def last_turn(self) -> int:
        """In which it was launched last."""
        return self._message_struct[LINE.turn]

    def admit(self) -> None:
        """Where a postponed forward may write: before its open(), when its slots and rows are on the device."""
        self._is_admitted = True
        with self._side_stream.behind():
            self._launch.admit()

    def open(self) -> None:
        """Before the body: judge, beside what it does before its first store, what the forward writes and where."""
        if self.is_open:
            raise HookOrderError(f"open() must follow close(): {self} is open")
        if self.is_deferred and not self._is_admitted:
            raise HookOrderError(f"open() must follow admit(): nobody says where {self} may write")
        self._has_verified = self._has_judged = False
        self._opened.add(self)
        self.layers = ()
        self._num_read = 0
        if self.is_deferred:
            self._is_admitted = False
            return
        if self._puts:  # the first store waits for all of it: nothing runs beside
            self._plan_and_seal()
            return
        with self._side_stream.behind():  # of all that forwards before it have sealed
            if self._side_stream.owes(self.pool.name):
                self._side_stream.catch_up()
            self._launch.plan()

    def store(
        self, layer: int, k: Tensor, v: Tensor | None = None, *extras: Tensor, slots: Tensor | None = None
    ) -> None:
        """Write one layer's K, V and extras [entries, ...] into the pool and fingerprint them; v None for latent rows.

        slots: [entries] int64, where the engine would store them, in its own words; None: where they were planned
        """
        if not self.is_open:
            raise HookOrderError(f"store(layer={layer}) belongs between open() and close(): {self} is closed")
        if not 0 <= layer < self._num_layers:
            raise PlanError(f"layer must be in [0, {self._num_layers}) for {self}, got {layer}")
        if self._has_judged:
            raise HookOrderError(f"a captured body must store as often as before its capture, got more for {self}")
        waited = not self.layers and self._side_stream.join()  # for the plan, which says where
        where = self.slots if slots is None else slots
        if self._puts:
            self._launch.put(layer, where, k, v, extras=extras, twice=self._twice)
        else:  # where it goes by plan, and how often it came, may be known since before the last launch
            is_ready = slots is None and not waited and (bool(self.layers) or self.is_deferred)
            is_ready = is_ready and layer not in self.layers
            self._launch.store(layer, where, k, v, extras=extras, is_ready=is_ready)
        self.layers += (layer,)
        if self.is_deferred:
            return
        is_last = not self._reads  # this layer's attention is still to come
        is_last = is_last and len(self.layers) == self._stores and self._side_stream.is_captured
        # a graph that begins with branches begins late
        begins = layer >= self._num_layers // 2 and not self._has_verified
        if is_last or begins:
            room = self._num_layers - 1 - layer  # layers whose attention leaves room for what was postponed
            with self._side_stream.behind():
                if is_last or not self._side_stream.catch_up(among=room):
                    self._verify_prefixes()
                if is_last:
                    self._judge()

    def reads(self, layer: int) -> ReadSums | None:
        """For this layer's attention, behind its store: by which it fingerprints every row that it reads, once."""
        if not self._reads:
            return None
        if not self.is_open or not 0 <= layer < self._num_layers:
            state = "open" if self.is_open else "closed"
            raise HookOrderError(f"reads(layer={layer}) belongs between open() and close(): {self} is {state}")
        self._num_read += 1
        return self._reads[layer]

    def close(self, joins: bool = True) -> None:
        """After the body: fingerprints, layers and own entries are judged, what fired and what has run is counted.

        In a capture that came behind the last store: it runs beside what that layer does with what it stored.
        joins: what is launched next follows that; else `SubstepRegistry.join` must come, and before a graph's end
        """
        if not self.is_open:
            raise HookOrderError(f"close() must follow open(): {self} is closed")
        if self._reads and self._num_read != self._num_layers:
            raise HookOrderError(
                f"reads() must come once for each of {self._num_layers} layers: {self} was read {self._num_read} times"
            )
        self._opened.remove(self)
        self._stores = len(self.layers)
        if self.is_deferred:
            self._side_stream.defer(self.pool.name, self._plan_and_seal, self._judge_rows, self._count)
        elif not self._has_judged:
            with self._side_stream.behind():
                self._verify_prefixes()
                self._judge()
        if joins:
            self._side_stream.finish()

    def abandon(self) -> None:
        """The body raised: the forward is not judged, and the next open() starts afresh.

        What it sealed and did not store is R12 to whoever reads it; what was expected of it is H1.
        """
        if self.is_open:
            self._opened.remove(self)
            if not self.is_deferred:
                with self._side_stream.behind():
                    self._verify_prefixes()
            self._side_stream.finish()
            self._claims.fill_(NO_CLAIM)
            self.work.times.zero_()
            self.work.sums.zero_()

    def _plan_and_seal(self) -> None:
        self._launch.plan()
        self._seal()

    # beside the body, or a later one

    def _verify_prefixes(self) -> None:
        """Once: what was postponed; then seal what the forward writes, judge what its rows read of earlier forwards."""
        if self._has_verified:
            return
        self._has_verified = True
        self._side_stream.catch_up()
        if not self._puts:
            self._seal()
        self._launch.verify_prefixes()

    def _seal(self) -> None:
        self._launch.chain()
        self._launch.seal()

    def _judge(self) -> None:
        self._has_judged = True
        self._settle()
        self._count()

    def _settle(self) -> None:
        """When all is stored: fingerprints, layers and own entries."""
        self._launch.attest()
        self._launch.verify_own()
        self._launch.settle()
        self._launch.judge_reads()

    def _count(self) -> None:
        """What fired and what has run."""
        self._launch.count_planned()
        self._launch.count_read()
        if self.masks is not None:
            self.masks.pack()
        self.written.pack()

    def _judge_rows(self) -> None:
        """Of a postponed forward, of which only stores have been launched."""
        self._launch.verify_prefixes()
        self._settle()

    def _parts(self, header: Tensor) -> tuple[Tensor, ...]:
        plan, planned = self.forward, self.work.planned
        parents = next((one for one in (plan.parents, plan.lineage) if one is not None), plan.slots[:0])
        own = plan.bounds, plan.row_starts, plan.row_ends, plan.slots, plan.tokens, plan.positions, parents
        words = plan.slots[:0] if self.masks is None else self.masks.words
        return *own, planned.safe_slots, planned.ancestors, words, planned.row_violations, header


def message_struct(substep: CapturedSubstep) -> array[int]:
    """LINE (native/layout.py)."""
    message = substep.written.message_of(0)
    where = [part.start if part.stop > part.start else NOWHERE for part in message.where]
    bounds, starts, ends, _, tokens, _, parents, safe, _, mask, *_ = where
    parents = parents if substep.forward.lineage is None else NOWHERE  # the part holds that
    nodes = 0 if substep.masks is None else substep.masks.device.shape[-1]
    kind, number = KINDS.get(substep.site[0], OTHER), NOWHERE if substep.number is None else substep.number
    parts = {"bounds": bounds, "starts": starts, "ends": ends, "tokens": tokens, "parents": parents, "safe": safe}
    parts |= {"mask": mask, "header": message.where[HEADER_PART].start, "step": len(message.numbers) - 1}
    sizes = {"entries": substep.forward.num_entries, "width": substep.width, "nodes": nodes}
    return filled(LINE, pool=substep.pool.struct_at, kind=kind, number=number, **parts, **sizes)
