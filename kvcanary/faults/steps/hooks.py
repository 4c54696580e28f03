"""The canary's own hooks: called in the wrong order, or not at all. A canary that is silent then is no canary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers import replays
from kvcanary.faults.helpers.reach import submit_prompt
from kvcanary.faults.target import Call, Target

Way = Callable[[Target], None]


def _close_before_open(target: Target) -> None:
    """The hooks of a forward that never began are closed."""
    target.record()
    target.canary.forward("decode", 0, "target").close()


def _never_arm(target: Target) -> None:
    """A canary is attached, warmed up and captured, and never armed; then the first request comes."""
    from kvcanary.manager.manager import CanaryManager

    target.record()
    target.canary.detach()
    CanaryManager(target.canary.config, list(target.pools.values())).admit("late", [1, 2, 3])


def _without_hooks(target: Target, kind: str, pool: str, index: int = 0) -> None:
    """A forward runs, and the canary hears of what it makes final, not of the forward."""
    from kvcanary.manager.substep import WarmupSubstep

    canary, hooks = target.canary, target.canary.forward

    def silent(call: Call) -> bool:
        is_it = (call.pool, call.index) == (pool, index)
        if is_it:
            target.record(pool=pool, site=(kind, index))
            canary.forward = lambda *where, **settings: WarmupSubstep()
        return is_it

    def back(call: Call) -> bool:
        is_it = (call.pool, call.index) == (pool, index)
        if is_it:
            canary.forward = hooks
        return is_it

    target.before(kind, silent)
    target.after(kind, back)


def _draft(target: Target) -> None:
    """One that another follows."""
    _without_hooks(target, "draft", "draft", target.rng.randrange(target.setup.num_steps - 2))


def _last_draft(target: Target) -> None:
    _without_hooks(target, "draft", "draft", target.setup.num_steps - 2)


def _prefill(target: Target) -> None:
    """The draft's, of a new prompt."""
    submit_prompt(target, target.setup.prompt_len)
    _without_hooks(target, "prefill", "draft")


def _lose_hooks(substep: object, *, kind: str, index: int, **where: object) -> object | None:
    """The first draft forward of a captured step is built as if there were no canary."""
    return None if (kind, index) == ("draft", 0) else substep


def _in_their_order(target: Target) -> None:
    """A canary of a pool of its own is armed, and its forwards run between their hooks: nothing is due."""
    target.record(code="")
    replays.replay(target, lambda buffers: None)


def _unheard(name: str, story: str, strike: Way, applies_to: str = "drafting", **settings: Any) -> Fault:
    """One forward that runs without hooks."""
    own: dict[str, Any] = {"applies": lambda setup: setup.drafts, "within": 1, "quiet": _in_their_order}
    return Fault(f"hooks.{name}", story, "H1", applies_to, strike=strike, **(own | settings))


FAULTS = (
    Fault(
        name="hooks.wrong_substep",
        story="A refactored engine closes the hooks of a forward that it never opened: nothing was checked in between.",
        expected="HookOrderError",
        strike=_close_before_open,
        quiet=_in_their_order,
    ),
    Fault(
        name="hooks.not_armed",
        story="The canary is attached for warm-up and graph capture, and nobody arms it: every check would pass.",
        expected="HookOrderError",
        strike=_never_arm,
        quiet=_in_their_order,
    ),
    _unheard(
        "forward_without_hooks",
        "One forward runs past the canary, as a captured graph that lost its hooks does; its entries become final.",
        applies_to="plain decoding",
        needs={"drafts": False, "num_draft_tokens": None},
        applies=lambda setup: not setup.adaptive,
        strike=partial(_without_hooks, kind="decode", pool="target"),
    ),
    _unheard(
        "draft_without_hooks",
        "Every forward of the draft loop needs hooks of its own, by its number: one of them is left out, and the "
        "next one reads what nobody has told of.",
        applies_to="three draft steps and more",
        applies=lambda setup: setup.drafts and setup.num_steps > 2 and not setup.adaptive,
        strike=_draft,
    ),
    _unheard(
        "last_draft_without_hooks",
        "The last forward of the draft loop runs without hooks: nobody reads its entries, and no check of "
        "entries would ever see that it is left out.",
        applies_to="two draft steps and more",
        applies=lambda setup: setup.drafts and setup.num_steps > 1 and not setup.adaptive,
        strike=_last_draft,
    ),
    _unheard(
        "verify_without_hooks",
        "The target's forward over the tree runs without hooks, and what is accepted of it becomes final.",
        strike=partial(_without_hooks, kind="verify", pool="target"),
    ),
    _unheard(
        "extend_without_hooks",
        "The forward in which the draft's pool catches up with what was accepted runs without hooks, when the "
        "step has been judged already.",
        strike=partial(_without_hooks, kind="extend", pool="draft"),
    ),
    _unheard(
        "prefill_without_hooks",
        "The draft's own forward over a prompt, or a chunk of one, runs without hooks.",
        strike=_prefill,
    ),
    Fault(
        name="hooks.captured_without_hooks",
        story="A captured step is built with a draft forward that has no hooks: no replay could ever tell of it.",
        expected="MissingHooksError",
        applies_to="captured steps with two draft steps and more; refused when the engine is built",
        needs={"graphs": True},
        applies=lambda setup: setup.drafts and setup.num_steps > 1 and not setup.adaptive and setup.backend == "torch",
        perturb=_lose_hooks,
        quiet=_in_their_order,
    ),
)
