"""Lengths and page counts that are kept twice, or counted in two ways, and drift apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.harmless import come_and_go, lengthen_plans
from kvcanary.faults.helpers.reach import Place, any_reader, strike_row, submit_prompt, write_other, written_of
from kvcanary.faults.steps.draft import CHUNK
from kvcanary.faults.target import Call, Setup, Target
from kvcanary.invariants import MOST_STILL_STEPS

if TYPE_CHECKING:
    from kvcanary.pools.plans import ReadPlan


def _worst_case(pages: int, *, worst_case: Callable[[], int]) -> int:
    return worst_case()


def _not_raised(pages: list[int], *, num_held: int) -> list[int]:
    return pages if num_held == 0 else []


def _without_the_last(pages: Sequence[int]) -> Sequence[int]:
    return pages[:-1]


def _one_less(committed_len: int) -> int:
    return committed_len - 1


def _believe(target: Target, change: int) -> None:
    """The next forward of everyone believes another length of one request than is committed."""
    _misbelieve(target, "", any_reader(target).request_id, change)


def _read_past_the_chunk(target: Target) -> None:
    """The second chunk of a new prompt is told the length of the whole prompt."""
    _misbelieve(target, "prefill", submit_prompt(target, 3 * CHUNK), CHUNK)


def _misbelieve(target: Target, kind: str, request_id: str, change: int) -> None:
    def believing(call: Call, number: int) -> Place | None:
        lens = call.read.prefix_lens.clone()
        length = int(lens[number])
        if kind == "prefill" and not length:
            return None
        lens[number] += change
        call.read = replace(call.read, prefix_lens=lens)
        if change > 0:
            call.read = _with_rejected(call, number, change)
            own = written_of(call, number)
            write_other(call, own, positions=call.write.positions[own] + change)
        return {"reader": request_id, "position": length if change > 0 else length + change - 1}

    strike_row(target, request_id, believing, kind=kind)


def _with_rejected(call: Call, number: int, count: int) -> ReadPlan:
    """The read plan in which the row of one request has so many more entries between its prefix and its own."""
    import torch

    read, row = call.read, number * call.read.rows_per_request
    start, end = read.indptr[row : row + 2].tolist()
    written = written_of(call, number)
    own = end - start - (written.stop - written.start)
    kept = read.indices[end - 1 : end].expand(count)
    indptr = read.indptr.clone()
    indptr[row + 1 :] += count
    indices = torch.cat((read.indices[: start + own], kept, read.indices[start + own :]))
    return replace(read, indptr=indptr, indices=indices)


def _stands_still(setup: Setup) -> bool:
    """Whether this pool holds requests by admission's estimate, and not by a whole reserve of a tree for each."""
    is_pressed = setup.model == "random" and (setup.prompt_len, setup.new_tokens) == (24, 20)
    return is_pressed and setup.drafts and setup.topk == 2


PRESSED = {"page_size": 16, "pages": 40, "batch": 8, "new_token_ratio": 0.0}
FAULTS = (
    Fault(
        name="lengths.worst_case_estimate",
        bugs=("sgl-project/sglang#22406",),
        story="The pages of the next decode step were estimated as a whole reserve for every request, although most "
        "own their pages already: under pressure requests gave up pages that nobody needed. Where pages that come back "
        "wait in a quarantine, as with any canary, the step that retracts cannot decode; the next one admits the same "
        "request again and computes it, the one behind it retracts it, and so on for ever.",
        expected="StalledError",
        otherwise="needless retractions and the same tokens: always where freed pages do not wait (no canary, or its "
        "quarantine 0), and else where enough others were free",
        applies_to="a pool under pressure, draft trees and a quarantine: new_token_ratio below 1",
        needs=PRESSED,
        applies=_stands_still,
        perturb=_worst_case,
        quiet_needs={"quarantine": 0},
        spares_tokens=True,
        within=2 * MOST_STILL_STEPS,  # it strikes in the first decode step, and most of the answers may come before
    ),
    Fault(
        name="lengths.watermark_not_raised",
        bugs=("sgl-project/sglang#13826", "sgl-project/sglang-jax#1147"),
        story="Pages of a decode step were taken, and the request's allocated length stayed what it was: its end gave "
        "back less than it had, until nothing was left. The port to another framework has the same omission.",
        expected="EstimateError",
        perturb=_not_raised,
        quiet_needs={"page_size": 128, "drafts": False},
    ),
    Fault(
        name="lengths.unaligned_release",
        bugs=("sgl-project/sglang#31616",),
        story="The allocated length was noted without rounding up to whole pages, which is what the allocator hands "
        "out: the last page of every request stayed behind.",
        expected="PageLeakError",
        applies_to="pages of several slots: on smaller ones there is nothing to round",
        applies=lambda setup: setup.page_size > 1,
        perturb=_without_the_last,
        quiet=partial(come_and_go, pages=2),
    ),
    Fault(
        name="lengths.rewound_by_another_count",
        bugs=("NVIDIA/TensorRT-LLM#19120",),
        story="A row grew by one count of drafted tokens and was rewound by another, so that its capacity fell below "
        "what it had committed. The engine died of an assertion far away.",
        expected="CommitError",
        perturb=_one_less,
        alone="a commit has one right length",
    ),
    Fault(
        name="lengths.past_the_chunk",
        bugs=("GeeeekExplorer/nano-vllm#212", "GeeeekExplorer/nano-vllm#213"),
        story="While a prompt was prefilled in chunks, attention was given the length of the whole prompt and read "
        "slots that no chunk had written yet.",
        expected="R4",
        applies_to="prompts in chunks",
        needs={"chunk": CHUNK},
        applies=lambda setup: setup.pages is None,
        strike=_read_past_the_chunk,
        quiet=partial(lengthen_plans, kind="prefill", prompt=3 * CHUNK),
    ),
    Fault(
        name="lengths.window_for_length",
        bugs=("huggingface/transformers#38156", "huggingface/transformers#31661"),
        story="The length of a hybrid cache was asked of its first layer, whose window holds no more than so many "
        "entries: the sequence seemed shorter than it was.",
        expected="R10",
        strike=partial(_believe, change=-1),
        quiet=lengthen_plans,
    ),
    Fault(
        name="lengths.crop_is_no_op",
        bugs=("huggingface/transformers#47433", "ml-explore/mlx-lm#1109"),
        story="A cache was told to drop rejected tokens, dropped fewer or none, and nobody looked at what it had done: "
        "they counted as part of the sequence from then on.",
        expected="R4",
        strike=partial(_believe, change=1),
        quiet=lengthen_plans,
    ),
)
