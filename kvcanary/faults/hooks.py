"""The canary's own hooks: called in the wrong order, or not at all. A canary that is silent then is no canary."""

from __future__ import annotations

from kvcanary.faults import replays
from kvcanary.faults.fault import Fault
from kvcanary.faults.target import Call, Target


def _close_before_open(target: Target) -> bool:
    """The hooks of a forward that never began are closed."""
    target.record()
    target.canary.substep("decode", 0, "target").close()
    return True


def _never_arm(target: Target) -> bool:
    """A canary is attached, warmed up and captured, and never armed; then the first request comes."""
    from kvcanary.manager import CanaryManager

    target.record()
    target.canary.detach()
    CanaryManager(target.canary.config, list(target.pools.values())).admit("late", [1, 2, 3])
    return True


def _run_without_hooks(target: Target) -> bool:
    """A forward runs, and the canary hears of what it made final, not of the forward."""
    from kvcanary.substep import WarmupSubstep

    canary, substep = target.canary, target.canary.substep

    def silent(call: Call) -> bool:
        if call.pool != "target":
            return False
        target.record(pool="target")
        canary.substep = lambda *where, **settings: WarmupSubstep()  # type: ignore[method-assign]
        return True

    def back(call: Call) -> bool:
        canary.substep = substep  # type: ignore[method-assign]
        return True

    target.before("decode", silent)
    target.after("decode", back)
    return True


def _in_their_order(target: Target) -> bool:
    """A canary of a pool of its own is armed, and its forwards run between their hooks: nothing is due."""
    target.record(code="")
    replays.replay(target, lambda buffers: None)
    return True


FAULTS = (
    Fault(
        name="hooks.wrong_substep",
        story="A refactored engine closes the hooks of a forward that it never opened: nothing was checked in between.",
        expected="HookOrderError",
        applies_to="everything",
        strike=_close_before_open,
        quiet=_in_their_order,
    ),
    Fault(
        name="hooks.not_armed",
        story="The canary is attached for warm-up and graph capture, and nobody arms it: every check would pass.",
        expected="HookOrderError",
        applies_to="everything",
        strike=_never_arm,
        quiet=_in_their_order,
    ),
    Fault(
        name="hooks.forward_without_hooks",
        story="One forward runs past the canary, as a captured graph that lost its hooks does; its entries become "
        "final.",
        expected="R12",
        also=("H1",),
        applies_to="plain decoding; what is read next speaks first, and H1 is its evidence",
        needs={"drafts": False, "num_draft_tokens": None},
        applies=lambda setup: not setup.adaptive,
        strike=_run_without_hooks,
        exposes=True,  # what runs without hooks is seen by the next forward
        quiet=_in_their_order,
    ),
)
