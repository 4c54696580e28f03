"""The operations of the device path: Triton kernels for tensors on a GPU, their torch twins for those on a CPU.

The only place where the canary chooses. Both take equal arguments and give equal bits. The twins may allocate and read
tensors; the kernels do neither, so that a CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Callable

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


class Ops:
    """One implementation of every operation that a substep needs."""

    def __init__(self, *, are_kernels: bool) -> None:
        chosen = _one_of(are_kernels)
        self.admit = chosen(admit, admit_torch)
        self.plan = chosen(plan, plan_torch)
        self.chain_scan = chosen(chain_scan, chain_scan_torch)
        self.chain_tree = chosen(chain_tree, chain_tree_torch)
        self.seal = chosen(seal, seal_torch)
        self.verify = chosen(verify, verify_torch)
        self.store = chosen(store, store_torch)
        self.put = chosen(put, put_torch)
        self.attest = chosen(attest, attest_torch)
        self.move = chosen(move, move_torch)
        self.poison_fill = chosen(poison_fill, poison_fill_torch)
        self.poison_check = chosen(poison_check, poison_check_torch)
        self.finite_check = chosen(finite_check, finite_check_torch)
        self.settle = chosen(settle, settle_torch)
        self.count = chosen(count, count_torch)
        self.post = chosen(post, post_torch)
        self.advance = chosen(advance, advance_torch)
        self.check_content = chosen(check_content, check_content_torch)
        self.judge_reads = chosen(judge_reads, judge_reads_torch)


class WatchOps:
    """One implementation of every operation over pools that are only watched."""

    def __init__(self, *, are_kernels: bool) -> None:
        chosen = _one_of(are_kernels)
        self.advance = chosen(advance_watched, advance_watched_torch)
        self.begin = chosen(begin, begin_torch)
        self.fetch = chosen(fetch, fetch_torch)
        self.keep = chosen(keep, keep_torch)
        self.reread = chosen(reread, reread_torch)
        self.send = chosen(send, send_torch)
        self.take = chosen(take, take_torch)
        self.walk = chosen(walk, walk_torch)


def _one_of(are_kernels: bool) -> Callable[[Operation, Operation], Operation]:
    return lambda kernel, twin: kernel if are_kernels else twin


KERNELS, REFERENCES = Ops(are_kernels=True), Ops(are_kernels=False)


def ops_for(device: torch.device) -> Ops:
    """Kernels where they run, else references."""
    return KERNELS if device.type == "cuda" else REFERENCES


def watch_ops_for(device: torch.device) -> WatchOps:
    """The same for pools that are only watched."""
    return WatchOps(are_kernels=device.type == "cuda")
