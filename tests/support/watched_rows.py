"""Four rows of an engine that is watched, and what the kernels of `kvcanary_kernels.watch` make of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcanary_kernels.record.layout import Keys, make_keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows
from kvcanary_kernels.watch import advance as writes_of
from kvcanary_kernels.watch import reread as fingerprints_of
from kvcanary_kernels.watch import walk as rows_of
from kvcanary_kernels.watch.advance import Fed, Overwritten
from kvcanary_kernels.watch.reread import Before
from kvcanary_kernels.watch.walk import NO_VIOLATION, Rows, Truth, Watched, code_of

BLOCK_SIZE, BLOCKS, WIDTH, LAYERS, RING = 4, 90, 60, 2, 3
ROOTS = [77, -5, 77, 1 << 62]


@dataclass
class Rig:
    """Four rows of an engine's state, their tokens, and the canary's memory."""

    device: str
    suffix: str
    tokens: list[list[int]] = field(default_factory=lambda: [[], [], [], []])
    null_slots: int = BLOCK_SIZE
    in_place: bool = False
    owners: Tensor | None = None
    asks_finite: bool = True
    asks_stored: bool = False

    def __post_init__(self) -> None:
        device = self.device
        self.keys: Keys = make_keys(11, LAYERS, 12, device)
        shape = (BLOCKS, 2, BLOCK_SIZE, 6)  # K and V packed in the last axis, as 3 words each
        data = torch.randint(0, 2**31 - 1, (LAYERS, *shape), generator=torch.Generator().manual_seed(3))
        self.kv = [layer.float().to(device) for layer in data]
        k, v = [kv[..., :3] for kv in self.kv], [kv[..., 3:] for kv in self.kv]
        self.pool: PoolRows = pool_rows(k, v, layout="HND", page_size=BLOCK_SIZE)
        slots = BLOCKS * BLOCK_SIZE
        self.records = torch.zeros(slots, 8, dtype=torch.int64, device=device)
        self.fingerprints = torch.zeros(2, LAYERS, slots, dtype=torch.int64, device=device)
        self.stamps = torch.zeros(slots, dtype=torch.int64, device=device)
        stamps = torch.zeros_like(self.stamps), self.stamps  # of another pool of these slots, which nobody stores into
        self.overwritten = Overwritten.of(stamps, RING, 300)
        self.before = Before(self.overwritten.is_another, 1, torch.zeros(LAYERS, dtype=torch.int64, device=device))
        self.table = torch.zeros(4, WIDTH, dtype=torch.int32, device=device)
        blocks = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(5)) + 1
        for row in range(4):
            self.table[row, :20] = blocks[20 * row : 20 * row + 20].to(torch.int32)
        lines = [[0, 1, root, 1 + row, 0, root, *[0] * 4] for row, root in enumerate(ROOTS)]
        self.truth = Truth(torch.tensor(lines, device=device))
        self.total = torch.zeros(1, dtype=torch.int64, device=device)
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)  # by walk, by reread
        self.seeds = torch.zeros(4, 2, dtype=torch.int64, device=device)
        self.slots, self.chains = (torch.full((RING, 300), -9, dtype=torch.int64, device=device) for _ in range(2))
        self.step = 0

    def call(self, module, name: str, *arguments, **keywords) -> None:
        getattr(module, name + self.suffix)(*arguments, **keywords)

    def rows(self, batch: dict[int, list[int]], accepted: dict[int, int]) -> Rows:
        starts, lengths = [0], []
        for row, new in batch.items():
            starts.append(starts[-1] + len(new))
            lengths.append(accepted.get(row, len(self.tokens[row])) + len(new))
        make = lambda values: torch.tensor(values, dtype=torch.int32, device=self.device)  # noqa: E731
        padding = 4 - len(batch)
        numbers, lengths, starts = [*batch, *[9] * padding], lengths + [9] * padding, starts + starts[-1:] * padding
        table = self.table if self.in_place else self.table[list(batch)].contiguous()
        return Rows(make(numbers), table, make(lengths), make(starts), self.in_place)

    def forward(self, batch: dict[int, list[int]], accepted: dict[int, int] | None = None, **changes) -> tuple:
        """Violations of walk, reread and advance of one forward; `accepted`: how much of a row is left of the last
        one.
        """
        self.step += 1
        for row, length in (accepted or {}).items():
            del self.tokens[row][length:]
        rows = self.rows(batch, accepted or {})
        window = changes.pop("window", 0)
        fed = self.fed(batch, rows, **changes)
        walked, written, read, self.firsts = self.cells(4), self.cells(4), self.cells(2, 4), self.cells(2)
        watched = self.watched(self.records, len(batch), len(fed.tokens), window)
        overwritten, before = (self.overwritten, self.before) if self.asks_stored else (None, None)
        self.call(writes_of, "advance", watched, rows, fed, self.truth, seeds=self.seeds,
                  slots=self.slots, chains=self.chains, violations=written, overwritten=overwritten)  # fmt: skip
        self.call(
            rows_of, "walk", watched, rows, self.truth, seeds=self.seeds, violations=walked, counted=self.counted[:1]
        )
        self.reread(watched, rows, stride=1, whole=False, violations=read)
        self.call(fingerprints_of, "take", watched, self.pool, self.slots, self.chains, self.keys,
                  fingerprints=self.fingerprints, stamps=self.stamps,
                  firsts=self.firsts, asks_finite=self.asks_finite, before=before)  # fmt: skip
        self.violations = torch.cat((walked, written, *read.unbind(1)))
        walked, written, (read, self.places) = (violations[self.step % RING] for violations in (walked, written, read))
        for row, new in batch.items():
            self.tokens[row] += new
        walked, read, written = (violations[: len(batch)] for violations in (walked, read, written))
        return self.codes(walked, "R"), self.named(read, 128), self.codes(written, "W")

    def watched(self, records: Tensor, num_rows: int, num_tokens: int, window: int = 0) -> Watched:
        now = torch.tensor([num_rows, num_tokens, self.step, 2, self.step % RING], device=self.device)
        return Watched(records, self.keys, BLOCK_SIZE, window, now, self.total, self.null_slots, self.owners)

    def reread(self, watched: Watched, rows: Rows, **keywords) -> None:
        self.call(fingerprints_of, "reread", watched, self.pool, rows, self.keys, fingerprints=self.fingerprints,
                  stamps=self.stamps,
                  truth=self.truth, counted=self.counted[1:], **keywords)  # fmt: skip

    def cells(self, *shape: int) -> Tensor:
        return torch.full((RING, *shape), NO_VIOLATION, device=self.device)

    def codes(self, violations: Tensor, kind: str) -> list:
        return [
            None if violation == NO_VIOLATION else code_of(violation, kind)[::-1] for violation in violations.tolist()
        ]

    def named(self, violations: Tensor, unit: int) -> list:
        return [
            None if violation == NO_VIOLATION else (violation % unit, violation // unit)
            for violation in violations.tolist()
        ]

    def slot(self, row: int, position: int) -> int:
        return int(self.table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE

    def fed(self, batch: dict[int, list[int]], rows: Rows, slots: dict[int, int] | None = None, **changes) -> Fed:
        places, positions = [], []
        for row, length in zip(batch, rows.lengths.tolist(), strict=False):
            positions += range(length - len(batch[row]), length)
            places += [self.slot(row, p) for p in range(length - len(batch[row]), length)]
        for index, slot in (slots or {}).items():
            places[index] = slot
        tokens = [token for new in batch.values() for token in new]
        make = lambda values, kind=torch.int64: torch.tensor(values, dtype=kind, device=self.device)  # noqa: E731
        known = changes.get("known")
        extra = () if known is None else (make(known, torch.int32), make([len(row) for row in known], torch.int32))
        fed = Fed(make(tokens, torch.int32), make(positions), make(places), *extra)
        return fed._replace(ahead=changes.get("ahead", 0))
