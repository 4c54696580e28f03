"""Faults that mode `heal` makes good, and how long that takes: ``python -m kvcanary_tools.bench.embedded.heal``.

Each fault strikes a run of its own, of three requests over a small random model in float64, with both schedules, with
trees of drafts and without, greedy and sampled. The tokens must be those of the same run without a fault. A word of
32 bits is changed, a page is overwritten in all layers of a pool, a record is overwritten, or a word changes on a page
that only the prefix cache has; or a block of host memory changes before it is loaded back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from structlog.testing import capture_logs

from kvcanary import CanaryConfig
from kvcanary_tools.bench.common import machine, progress, save
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock import KnownDraft, KnownText, MockTokenizer, known_text, random_model
from spec_engine.models.decoder import Decoder

FAULTS = 200  # of each kind
VOCAB, NEW_TOKENS, PAGE_SIZE = 31, 12, 4
PROMPT_LENS = 9, 17, 22
TREE = {"topk": 2, "num_steps": 3, "num_draft_tokens": 6}
HOST_PAGES = 64
#: Slots of a pool in which a request is retracted, by schedule, without drafts and with.
PRESSED = {"sync": (80, 112), "overlap": (80, 120)}
LAST_STEP = 200


class Setting(NamedTuple):
    schedule: str
    drafts: bool
    temperature: float


SETTINGS = [Setting(*each) for each in product(("sync", "overlap"), (False, True), (0.0, 1.0))]


@dataclass
class Run:
    """What left, and what the canary says: codes that were found, ms and steps of each heal, and how it was done."""

    outputs: list[tuple[tuple[int, ...], str]]
    codes: list[str]
    heals: list[dict]
    healed: int
    num_steps: int


Fault = Callable[[Engine, random.Random], bool]


def main() -> None:
    torch.set_num_threads(1)
    result = measure(FAULTS)
    save("heal", result)
    for row in result["rows"]:
        ms, steps = row["ms"], row["steps"]
        print(
            f"{row['kind']:14} {row['faults']:4} faults   {row['equal']:4} equal   {row['found']:4} found   "
            f"{row['healed']:4} healed   {ms['median']:7.2f} ms ({ms['min']:.2f} to {ms['max']:.2f}), "
            f"{steps['median']:.0f} steps ({steps['min']} to {steps['max']})"
        )


def measure(faults: int) -> dict:
    """All kinds of faults, so many of each."""
    return {
        "what": "faults in runs of mode heal: tokens equal to a run without the fault, and the time of a heal",
        "machine": machine(),
        "dtype": "float64",
        "settings": [setting._asdict() for setting in SETTINGS],
        "clean": [clean(setting, kind == "bad load").healed for setting in SETTINGS for kind in ("", "bad load")],
        "rows": [row_of(kind, faults) for kind in KINDS],
    }


def row_of(kind: str, faults: int) -> dict:
    runs = list(struck(kind, range(faults)))
    heals = [heal for _, run in runs for heal in run.heals]
    row = {
        "kind": kind,
        "faults": len(runs),
        "equal": sum(run.outputs == expected.outputs for expected, run in runs),
        "found": sum(bool(run.codes) for _, run in runs),
        "healed": sum(bool(run.healed) for _, run in runs),
        "codes": sorted({code for _, run in runs for code in run.codes}),
        "ms": _spread([heal["ms"] for heal in heals]),
        "steps": _spread([heal["steps"] for heal in heals]),
    }
    progress(str(row))
    return row


def struck(kind: str, seeds: Sequence[int] | range) -> Iterator[tuple[Run, Run]]:
    """By seed the clean run of its setting, and the same with a fault."""
    for seed in seeds:
        setting = SETTINGS[seed % len(SETTINGS)]
        yield clean(setting, kind == "bad load"), run(setting, kind, seed)


@cache
def clean(setting: Setting, is_pressed: bool = False) -> Run:
    return run(setting, "bad load" if is_pressed else "", None)


def run(setting: Setting, kind: str, seed: int | None) -> Run:
    """Three requests, then the first prompt once more; a fault of this kind where there is a seed."""
    draw, engine = random.Random(seed), make_engine(setting, kind == "bad load")
    if seed is not None and kind == "bad load":
        change_block(engine, draw)
        strike = None
    else:
        strike = None if seed is None else KINDS[kind]
    is_at_once = strike is None or strike is change_cached
    at = 0 if is_at_once else draw.randrange(2, clean(setting).num_steps - 2)
    with capture_logs() as events:
        outputs = play(engine, setting, strike, at, draw)
    heals = [event for event in events if event["event"] == "kvcanary.healed"]
    codes = [finding.code for finding in engine.canary.findings]
    return Run(outputs, codes, heals, engine.canary.certificate()["healed"], engine.metrics.num_steps)


def play(
    engine: Engine, setting: Setting, strike: Fault | None, at: int, draw: random.Random
) -> list[tuple[tuple[int, ...], str]]:
    """Tokens and last words of every request, in the order of their coming; the fault comes from step ``at`` on."""
    outputs: dict[str, tuple[list[int], str]] = {}

    def submit(number: int) -> None:
        params = SamplingParams(
            max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=setting.temperature, seed=7 + number
        )
        outputs[engine.submit(texts()[number].tokens[: PROMPT_LENS[number]], params)] = [], ""

    for number in range(len(PROMPT_LENS)):
        submit(number)
    step, is_second = 0, False
    while engine.has_work or not is_second:
        if not engine.has_work:
            submit(2)
            is_second = True
        if strike is not None and step >= at and strike(engine, draw):
            strike = None
        for event in engine.step():
            tokens, _ = outputs[event.request_id]
            outputs[event.request_id] = tokens + list(event.token_ids), event.finish_reason or ""
        step += 1
        if step > LAST_STEP:
            raise RuntimeError("the requests did not end")
    return [(tuple(tokens), reason) for tokens, reason in outputs.values()]


def make_engine(setting: Setting, is_pressed: bool, **more: object) -> Engine:
    """``more``: settings of the engine in the place of these."""
    draft, settings = None, {"draft": "none"}
    if setting.drafts:
        draft, settings = KnownDraft(model(), texts(), lambda *place: 1 + sum(place) % 4), {"draft": "auto", **TREE}
    if is_pressed:
        settings |= {"host_pages": HOST_PAGES, "prefix_cache": False, "new_token_ratio": 0.0}
    settings |= {
        "schedule": setting.schedule,
        "page_size": PAGE_SIZE,
        "dtype": "float64",
        "max_total_tokens": PRESSED[setting.schedule][setting.drafts] if is_pressed else 512,
        "max_running_requests": 4,
        "context_length": 64,
        "canary": CanaryConfig(mode="heal", content="full"),
    }
    return Engine(EngineConfig(**settings | more), model=model(), draft=draft, tokenizer=MockTokenizer())


@cache
def model() -> Decoder:
    return random_model(6, vocab_size=VOCAB)


@cache
def texts() -> list[KnownText]:
    """Prompts that begin alike."""
    tokens = torch.randint(VOCAB, (max(PROMPT_LENS),), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [[*tokens[: length - 2], length % VOCAB, 3] for length in PROMPT_LENS]
    return [known_text(model(), prompt, NEW_TOKENS + 8) for prompt in prompts]


# faults


def change_word(engine: Engine, draw: random.Random) -> bool:
    """A word of a final entry of a running request."""
    return _at_some_entry(engine, draw, lambda pool, slot: _change_word(engine.pools[pool].kv[:, slot], draw))


def overwrite_page(engine: Engine, draw: random.Random) -> bool:
    """All bytes of a page that has a final entry of a running request."""

    def overwrite(pool: str, slot: int) -> None:
        first = slot // PAGE_SIZE * PAGE_SIZE
        page = engine.pools[pool].kv[:, first : first + PAGE_SIZE]
        page.copy_(torch.randn(page.shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))))

    return _at_some_entry(engine, draw, overwrite)


def change_record(engine: Engine, draw: random.Random) -> bool:
    """A bit of the record of a final entry of a running request."""

    def change(pool: str, slot: int) -> None:
        engine.canary.session.state.by_name[pool].records[slot, draw.randrange(2)] ^= 1 << draw.randrange(60)

    return _at_some_entry(engine, draw, change)


def change_cached(engine: Engine, draw: random.Random) -> bool:
    """A word on a page of the last prompt that only the prefix cache has."""
    prompt = texts()[2].tokens[: PROMPT_LENS[2]]
    if engine.running or not (pages := sorted(engine.memory.cache.tree.match(prompt, "", "").pages)):
        return False
    slot = draw.choice(pages) * PAGE_SIZE + draw.randrange(PAGE_SIZE)
    _change_word(engine.pools[draw.choice(sorted(engine.pools))].kv[:, slot], draw)
    return True


def change_block(engine: Engine, draw: random.Random) -> None:
    """A word of the first block that waits on the host changes."""
    tier, inner = engine.memory.tier, engine.memory.tier.wait

    def wait(block: object) -> None:
        inner(block)
        if block.number == 1:
            position, rows = draw.randrange(block.length), draw.choice(tier._rows)
            place = block.places[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            _change_word(draw.choice(rows.parts)[place], draw)

    tier.wait = wait


KINDS: dict[str, Fault | None] = {
    "flipped word": change_word,
    "damaged page": overwrite_page,
    "bad load": None,
    "damaged record": change_record,
    "cached word": change_cached,
}


def _at_some_entry(engine: Engine, draw: random.Random, change: Callable[[str, int], None]) -> bool:
    running = [request for request in engine.running if request.is_prefilled and request.committed_len]
    if not running:
        return False
    request = draw.choice(running)
    slot = int(engine.request_table.table[request.row, draw.randrange(request.committed_len)])
    change(draw.choice(sorted(engine.pools)), slot)
    return True


def _change_word(row: torch.Tensor, draw: random.Random) -> None:
    """XOR one 32-bit word of a strided row."""
    place = tuple(draw.randrange(size) for size in row.shape)
    words = row[place].clone().view(1).view(torch.int32)
    words[draw.randrange(len(words))] ^= draw.randrange(1, 1 << 31)
    row[place] = words.view(row.dtype)[0]


def _spread(values: Sequence[float]) -> dict:
    return {"median": median(values), "min": min(values), "max": max(values)} if values else {}


if __name__ == "__main__":
    main()
