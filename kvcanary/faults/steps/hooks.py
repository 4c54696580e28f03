"""The canary's own hooks: called in the wrong order, or not at all. A canary that is silent then is no canary."""

from __future__ import annotations

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers import replays
from kvcanary.faults.helpers.reach import submit_prompt
from kvcanary.faults.target import Call, Target


def _close_before_open(target: Target) -> bool:
    """The hooks of a forward that never began are closed."""
    target.record()
    target.canary.forward("decode", 0, "target").close()
    return True


def _never_arm(target: Target) -> bool:
    """A canary is attached, warmed up and captured, and never armed; then the first request comes."""
    from kvcanary.manager.manager import CanaryManager

    target.record()
    target.canary.detach()
    CanaryManager(target.canary.config, list(target.pools.values())).admit("late", [1, 2, 3])
    return True


def _without_hooks(target: Target, kind: str, pool: str, index: int = 0) -> bool:
    """A forward runs, and the canary hears of what it makes final, not of the forward."""
    from kvcanary.manager.substep import WarmupSubstep

    canary, hooks = target.canary, target.canary.forward

    def silent(call: Call) -> bool:
        if (call.pool, call.index) != (pool, index):
            return False
        target.record(pool=pool, site=(kind, index))
        canary.forward = lambda *where, **settings: WarmupSubstep()
        return True

    def back(call: Call) -> bool:
        if (call.pool, call.index) != (pool, index):
            return False
        canary.forward = hooks
        return True

    target.before(kind, silent)
    target.after(kind, back)
    return True


def _decode(target: Target) -> bool:
    return _without_hooks(target, "decode", "target")


def _draft(target: Target) -> bool:
    """One that another follows."""
    return _without_hooks(target, "draft", "draft", target.rng.randrange(target.setup.num_steps - 2))


def _last_draft(target: Target) -> bool:
    return _without_hooks(target, "draft", "draft", target.setup.num_steps - 2)


def _verify(target: Target) -> bool:
    return _without_hooks(target, "verify", "target")


def _extend(target: Target) -> bool:
    return _without_hooks(target, "extend", "draft")


def _prefill(target: Target) -> bool:
    """The draft's, of a new prompt."""
    submit_prompt(target, target.setup.prompt_len)
    return _without_hooks(target, "prefill", "draft")


def _lose_hooks(substep: object, *, kind: str, index: int, **where: object) -> object | None:
    """The first draft forward of a captured step is built as if there were no canary."""
    return None if (kind, index) == ("draft", 0) else substep


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
    Fault(
        name="hooks.forward_without_hooks",
        story="One forward runs past the canary, as a captured graph that lost its hooks does; its entries become "
        "final.",
        expected="H1",
        applies_to="plain decoding",
        needs={"drafts": False, "num_draft_tokens": None},
        applies=lambda setup: not setup.adaptive,
        strike=_decode,
        within=1,
        quiet=_in_their_order,
    ),
    Fault(
        name="hooks.draft_without_hooks",
        story="Every forward of the draft loop needs hooks of its own, by its number: one of them is left out, and the "
        "next one reads what nobody has told of.",
        expected="H1",
        applies_to="three draft steps and more",
        applies=lambda setup: setup.drafts and setup.num_steps > 2 and not setup.adaptive,
        strike=_draft,
        within=1,
        quiet=_in_their_order,
    ),
    Fault(
        name="hooks.last_draft_without_hooks",
        story="The last forward of the draft loop runs without hooks: nobody reads its entries, and no check of "
        "entries would ever see that it is left out.",
        expected="H1",
        applies_to="two draft steps and more",
        applies=lambda setup: setup.drafts and setup.num_steps > 1 and not setup.adaptive,
        strike=_last_draft,
        within=1,
        quiet=_in_their_order,
    ),
    Fault(
        name="hooks.verify_without_hooks",
        story="The target's forward over the tree runs without hooks, and what is accepted of it becomes final.",
        expected="H1",
        applies_to="drafting",
        applies=lambda setup: setup.drafts,
        strike=_verify,
        within=1,
        quiet=_in_their_order,
    ),
    Fault(
        name="hooks.extend_without_hooks",
        story="The forward in which the draft's pool catches up with what was accepted runs without hooks, when the "
        "step has been judged already.",
        expected="H1",
        applies_to="drafting",
        applies=lambda setup: setup.drafts,
        strike=_extend,
        within=1,
        quiet=_in_their_order,
    ),
    Fault(
        name="hooks.prefill_without_hooks",
        story="The draft's own forward over a prompt, or a chunk of one, runs without hooks.",
        expected="H1",
        applies_to="drafting",
        applies=lambda setup: setup.drafts,
        strike=_prefill,
        within=1,
        quiet=_in_their_order,
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
