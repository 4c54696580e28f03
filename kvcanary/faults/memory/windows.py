"""Rings that are too short, windows that end in the wrong place, and ids of one pool in another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.harmless import edit_behind_the_end, lengthen_plans, map_nothing_elsewhere
from kvcanary.faults.helpers.reach import (
    Place,
    any_reader,
    leave_a_map_entry,
    read_other,
    redirect,
    row_start,
    strike_forward,
    written_of,
)
from kvcanary.faults.strike import need
from kvcanary.faults.target import Call, Target

if TYPE_CHECKING:
    from torch import Tensor

SEEN = 8  # tokens, by a layer that should see all


def _as_they_are(own: Tensor, *, full: Tensor, num_slots: int) -> Tensor:
    return full % num_slots


def _limited(window: int | None) -> int:
    return SEEN


def _wrap(target: Target) -> None:
    """A ring of too few slots: the oldest entries were overwritten by those a ring's length behind them."""
    reader = any_reader(target)
    ring = reader.committed_len // 2
    need(int(reader.slots[0]) != int(reader.slots[ring]))
    lost = target.rng.randrange(1, ring)
    reader.slots[:lost] = reader.slots[ring : ring + lost].clone()
    target.record(reader=reader.request_id, position=0, slot=int(reader.slots[0]))


def _roll_too_early(target: Target) -> None:
    """A cache rolls when its length equals the window, and not when it exceeds it: its first entry is gone."""

    def roll(call: Call) -> Place:
        number = target.rng.randrange(len(call.read.requests))
        start, length = row_start(call, number), int(call.read.prefix_lens[number])
        read_other(call, slice(start, start + length - 1), call.read.indices[start + 1 : start + length])
        return {"reader": call.read.requests[number], "position": 0, "slot": int(call.read.indices[start])}

    strike_forward(target, roll)


def _write_in_a_circle(target: Target) -> None:
    """A token goes to its position modulo a window, into a block that prefixes still name."""

    def write(call: Call) -> Place | None:
        size, requests = target.setup.page_size, list(enumerate(call.read.requests))
        target.rng.shuffle(requests)
        for number, name in requests:
            final = target.canary.session.ledger.request(name).final_pages * size
            if final:
                slot = int(call.read.indices[row_start(call, number) + target.rng.randrange(final)])
                redirect(call, written_of(call, number).start, slot)
                return {"slot": slot}
        return None

    strike_forward(target, write)


FAULTS = (
    Fault(
        name="windows.untranslated",
        bugs=("sgl-project/sglang#24617", "sgl-project/sglang#24402"),
        story="Layers with a window have a smaller pool of their own, and slots of the full pool are translated into "
        "it. Metadata for drafts went there untranslated: out of range it crashed, in range it read other tokens.",
        expected="R9",
        also=("T1",),
        applies_to="models with a sliding window",
        needs={"window": 16, "prefix_cache": False, "new_tokens": 40},  # past those that lie where the full pool says
        applies=lambda setup: (
            setup.model == "random" and setup.pages is None and setup.backend == "torch" and setup.page_size <= SEEN
        ),
        perturb=_as_they_are,
        quiet=lengthen_plans,
    ),
    Fault(
        name="windows.translation_kept",
        bugs=("sgl-project/sglang#25889",),
        story="Slots of the full pool were translated once for all layers, and the translation was kept when pages "
        "came back from the host and the map was made anew: layers with a window read where something else lies now.",
        expected="R8",
        applies_to="models with a sliding window of two whole pages and more",
        needs={"window": 16, "prefix_cache": False},
        applies=lambda setup: (
            setup.model == "random" and setup.pages is None and setup.backend == "torch" and 2 * setup.page_size <= SEEN
        ),
        strike=leave_a_map_entry,
        quiet=map_nothing_elsewhere,
        cause="addressing",
    ),
    Fault(
        name="windows.ring_too_short",
        bugs=(
            "sgl-project/sglang#34189",
            "sgl-project/sglang#33872",
            "sgl-project/sglang#33800",
            "sgl-project/sglang#32038",
            "sgl-project/sglang#34959",
            "sgl-project/sglang-jax#1487",
            "sgl-project/sglang-jax#1504",
        ),
        story="A ring kept the entries of four drafted tokens, whatever their number. With more of them a later step "
        "read ring slots that held other positions: typos in identifiers, three points of accuracy. It took weeks and "
        "several teams, since the damage did not grow with the depth of drafting.",
        expected="R4",
        strike=_wrap,
        quiet=edit_behind_the_end,
    ),
    Fault(
        name="windows.rolled_too_early",
        bugs=("huggingface/transformers#37574", "huggingface/transformers#38046"),
        story="A cache of a sliding window rolled one step early, for a >= where a > belongs. The reporter wrote down "
        "by hand what should lie there.",
        expected="R4",
        strike=_roll_too_early,
        quiet=lengthen_plans,
    ),
    Fault(
        name="windows.cyclic_over_shared",
        bugs=("NVIDIA/TensorRT-LLM#3424",),
        story="A cyclic window wrote token t to slot t modulo its length, also where a prefix cache still pointed at "
        "the block.",
        expected="W8",
        also=("W3",),
        applies_to="requests of a whole page and more",
        applies=lambda setup: setup.page_size <= setup.prompt_len,
        strike=_write_in_a_circle,
        cause="addressing",
        quiet=lengthen_plans,
    ),
    Fault(
        name="windows.window_on_a_global_layer",
        bugs=("vllm-project/vllm#51756",),
        story="A group of layers with and without a window applied it to all: global layers forgot what is far back. "
        "Every byte was right, every index was right, and the mask was not.",
        expected="other answers: the bytes and indices are right, the mask is not",
        applies_to="the torch backend",
        applies=lambda setup: setup.backend == "torch" and setup.window is None,
        perturb=_limited,
    ),
    Fault(
        name="windows.shifted_twice",
        bugs=(
            "ggml-org/llama.cpp#3825",
            "ggml-org/llama.cpp#3835",
            "ggml-org/llama.cpp#12160",
        ),
        story="Positions of a context that is shifted add up, and the pending rotation was overwritten: the second "
        "shift lost the first. Its sister deleted by the positions of before the shift.",
        expected="R4",
        applies_to="caches that are shifted in place",
        reason="the engine never shifts what it has cached",
    ),
)
