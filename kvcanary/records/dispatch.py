"""The operations of the device path: Triton kernels for tensors on a GPU, their torch twins for those on a CPU.

The only place where the canary chooses. Both take equal arguments and give equal bits. The twins may allocate and read
tensors; the kernels do neither, so that a CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcanary_kernels.content.attest import attest, attest_torch
from kvcanary_kernels.content.check import check_content, check_content_torch
from kvcanary_kernels.content.finite import finite_check, finite_check_torch
from kvcanary_kernels.content.poison import poison_check, poison_check_torch, poison_fill, poison_fill_torch
from kvcanary_kernels.content.put import put, put_torch
from kvcanary_kernels.content.reads import judge_reads, judge_reads_torch
from kvcanary_kernels.content.store import store, store_torch
from kvcanary_kernels.judge.admit import admit, admit_torch
from kvcanary_kernels.judge.advance import advance, advance_torch
from kvcanary_kernels.judge.count import count, count_torch
from kvcanary_kernels.judge.move import move, move_torch
from kvcanary_kernels.judge.plan import plan, plan_torch
from kvcanary_kernels.judge.post import post, post_torch
from kvcanary_kernels.judge.settle import settle, settle_torch
from kvcanary_kernels.judge.verify import verify, verify_torch
from kvcanary_kernels.record.chain import chain_scan, chain_scan_torch, chain_tree, chain_tree_torch
from kvcanary_kernels.record.seal import seal, seal_torch
from kvcanary_kernels.watch.advance import advance as advance_watched
from kvcanary_kernels.watch.advance import advance_torch as advance_watched_torch
from kvcanary_kernels.watch.begin import begin, begin_torch
from kvcanary_kernels.watch.fetch import fetch, fetch_torch, keep, keep_torch, send, send_torch
from kvcanary_kernels.watch.reread import reread, reread_torch, take, take_torch
from kvcanary_kernels.watch.walk import walk, walk_torch

Operation = Callable[..., None]


@dataclass(frozen=True)
class Ops:
    """One implementation of every operation that a substep needs."""

    admit: Operation
    plan: Operation
    chain_scan: Operation
    chain_tree: Operation
    seal: Operation
    verify: Operation
    store: Operation
    put: Operation
    attest: Operation
    move: Operation
    poison_fill: Operation
    poison_check: Operation
    finite_check: Operation
    settle: Operation
    count: Operation
    post: Operation
    advance: Operation
    check_content: Operation
    judge_reads: Operation


#: By name each operation's kernel, and its twin.
_BOTH: dict[str, tuple[Operation, Operation]] = {
    "admit": (admit, admit_torch),
    "plan": (plan, plan_torch),
    "chain_scan": (chain_scan, chain_scan_torch),
    "chain_tree": (chain_tree, chain_tree_torch),
    "seal": (seal, seal_torch),
    "verify": (verify, verify_torch),
    "store": (store, store_torch),
    "put": (put, put_torch),
    "attest": (attest, attest_torch),
    "move": (move, move_torch),
    "poison_fill": (poison_fill, poison_fill_torch),
    "poison_check": (poison_check, poison_check_torch),
    "finite_check": (finite_check, finite_check_torch),
    "settle": (settle, settle_torch),
    "count": (count, count_torch),
    "post": (post, post_torch),
    "advance": (advance, advance_torch),
    "check_content": (check_content, check_content_torch),
    "judge_reads": (judge_reads, judge_reads_torch),
}
KERNELS, REFERENCES = (Ops(**{name: both[which] for name, both in _BOTH.items()}) for which in (0, 1))


@dataclass(frozen=True)
class WatchOps:
    """One implementation of every operation over pools that are only watched."""

    advance: Operation
    begin: Operation
    fetch: Operation
    keep: Operation
    reread: Operation
    send: Operation
    take: Operation
    walk: Operation


WATCH_KERNELS = WatchOps(
    advance=advance_watched, begin=begin, fetch=fetch, keep=keep, reread=reread, send=send, take=take, walk=walk
)
WATCH_REFERENCES = WatchOps(
    advance=advance_watched_torch,
    begin=begin_torch,
    fetch=fetch_torch,
    keep=keep_torch,
    reread=reread_torch,
    send=send_torch,
    take=take_torch,
    walk=walk_torch,
)


def ops_for(device: torch.device) -> Ops:
    """Kernels where they run, else references."""
    return KERNELS if device.type == "cuda" else REFERENCES


def watch_ops_for(device: torch.device) -> WatchOps:
    """The same for pools that are only watched."""
    return WATCH_KERNELS if device.type == "cuda" else WATCH_REFERENCES
