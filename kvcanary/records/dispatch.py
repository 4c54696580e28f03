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
from kvcanary_kernels.content.fingerprint import fingerprint, fingerprint_torch
from kvcanary_kernels.content.finish import finish, finish_torch
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
    fingerprint: Operation
    finish: Operation
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


KERNELS = Ops(
    admit=admit,
    plan=plan,
    chain_scan=chain_scan,
    chain_tree=chain_tree,
    seal=seal,
    verify=verify,
    store=store,
    put=put,
    attest=attest,
    fingerprint=fingerprint,
    finish=finish,
    move=move,
    poison_fill=poison_fill,
    poison_check=poison_check,
    finite_check=finite_check,
    settle=settle,
    count=count,
    post=post,
    advance=advance,
    check_content=check_content,
    judge_reads=judge_reads,
)
REFERENCES = Ops(
    admit=admit_torch,
    plan=plan_torch,
    chain_scan=chain_scan_torch,
    chain_tree=chain_tree_torch,
    seal=seal_torch,
    verify=verify_torch,
    store=store_torch,
    put=put_torch,
    attest=attest_torch,
    fingerprint=fingerprint_torch,
    finish=finish_torch,
    move=move_torch,
    poison_fill=poison_fill_torch,
    poison_check=poison_check_torch,
    finite_check=finite_check_torch,
    settle=settle_torch,
    count=count_torch,
    post=post_torch,
    advance=advance_torch,
    check_content=check_content_torch,
    judge_reads=judge_reads_torch,
)


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
