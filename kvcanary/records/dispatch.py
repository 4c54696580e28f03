"""The operations of the device path: Triton kernels for tensors on a GPU, their torch twins for those on a CPU.

The only place where the canary chooses. Both take equal arguments and give equal bits. The twins may allocate and read
tensors; the kernels do neither, so that a CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvcanary_kernels.content.attest import attest
from kvcanary_kernels.content.check import check_content
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.content.finite import finite_check
from kvcanary_kernels.content.poison import poison_check, poison_fill
from kvcanary_kernels.content.put import put
from kvcanary_kernels.content.reads import judge_reads
from kvcanary_kernels.content.store import store
from kvcanary_kernels.judge.admit import admit
from kvcanary_kernels.judge.advance import advance
from kvcanary_kernels.judge.count import count
from kvcanary_kernels.judge.move import move
from kvcanary_kernels.judge.plan import plan
from kvcanary_kernels.judge.post import post
from kvcanary_kernels.judge.settle import settle
from kvcanary_kernels.judge.verify import verify
from kvcanary_kernels.record.chain import chain_scan, chain_tree
from kvcanary_kernels.record.seal import seal
from kvcanary_kernels.watch.advance import advance as advance_watched
from kvcanary_kernels.watch.begin import begin
from kvcanary_kernels.watch.drafted_states import choose, note_accepted, note_drafted
from kvcanary_kernels.watch.fetch import fetch, keep, send
from kvcanary_kernels.watch.grant import grant
from kvcanary_kernels.watch.reread import reread, take
from kvcanary_kernels.watch.state_rows import describe, follow, note_left
from kvcanary_kernels.watch.states import leave_states, take_states
from kvcanary_kernels.watch.walk import walk

Operation = Callable[..., None]


@dataclass(frozen=True)
class Ops:
    """One implementation of every operation that a substep needs: the kernels."""

    admit: Operation = admit
    plan: Operation = plan
    chain_scan: Operation = chain_scan
    chain_tree: Operation = chain_tree
    seal: Operation = seal
    verify: Operation = verify
    store: Operation = store
    put: Operation = put
    attest: Operation = attest
    move: Operation = move
    poison_fill: Operation = poison_fill
    poison_check: Operation = poison_check
    finite_check: Operation = finite_check
    settle: Operation = settle
    count: Operation = count
    post: Operation = post
    advance: Operation = advance
    check_content: Operation = check_content
    judge_reads: Operation = judge_reads


@dataclass(frozen=True)
class WatchOps:
    """The same over pools that are only watched."""

    advance: Operation = advance_watched
    begin: Operation = begin
    choose: Operation = choose
    describe: Operation = describe
    fetch: Operation = fetch
    fingerprint: Operation = fingerprint
    follow: Operation = follow
    grant: Operation = grant
    keep: Operation = keep
    leave_states: Operation = leave_states
    note_accepted: Operation = note_accepted
    note_drafted: Operation = note_drafted
    note_left: Operation = note_left
    reread: Operation = reread
    send: Operation = send
    take: Operation = take
    take_states: Operation = take_states
    walk: Operation = walk


def _in_torch(operations: Ops | WatchOps) -> dict[str, Operation]:
    return {name: partial(operation, launches=False) for name, operation in vars(operations).items()}


KERNELS, WATCH_KERNELS = Ops(), WatchOps()
REFERENCES, WATCH_REFERENCES = Ops(**_in_torch(KERNELS)), WatchOps(**_in_torch(WATCH_KERNELS))


def ops_for(device: torch.device) -> Ops:
    """Kernels where they run, else references."""
    return KERNELS if device.type == "cuda" else REFERENCES


def watch_ops_for(device: torch.device) -> WatchOps:
    """The same for pools that are only watched."""
    return WATCH_KERNELS if device.type == "cuda" else WATCH_REFERENCES
