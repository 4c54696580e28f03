"""The engine with a target whose K and V lie partly on the host: more requests than the device holds, same tokens."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.replay.replayer import replay
from spec_engine import ConfigError, Engine, EngineConfig, SamplingParams
from spec_engine.memory.pools.split_pool import SplitPool
from spec_engine.mock import MockTokenizer, with_random_weights
from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle
from spec_engine.models.standalone import Standalone

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
HEAD = RAW | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
SHARED = torch.randint(0, 97, (12,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = [
    SHARED[: length // 2]
    + torch.randint(0, 97, (length - length // 2,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 17, 40, 24, 9)
]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
LOUD = CanaryConfig(mode="raise", content="full")


def split_engine(draft: str = "eagle", **settings) -> Engine:
    """Two random layers in float64; room for about one and a half of the longest requests on the device."""
    target = with_random_weights(Decoder(parse_config(RAW)), seed=3)
    heads = {
        "none": lambda: None,
        "eagle": lambda: with_random_weights(Eagle(parse_config(HEAD), target), seed=4),
        "standalone": lambda: Standalone(target, target),  # right whenever it drafts
    }
    defaults = {"dtype": "float64", "max_total_tokens": 1024, "max_running_requests": 5, "page_size": 8, "topk": 1}
    defaults |= {"num_steps": 3, "prefill_chunk_tokens": 16, "canary": LOUD, "max_device_tokens": 112, "device_turn": 2}
    config = EngineConfig(draft=draft, **defaults | settings)
    return Engine(config, model=target, draft=heads[draft](), tokenizer=MockTokenizer())


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """What plain decoding with everything on the device says."""
    return tokens_of(split_engine("none", max_device_tokens=None, canary=CanaryConfig(mode="off")))


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "none", "page_size": 1, "max_device_tokens": 80},
        {"draft": "none", "attention_backend": "dense"},
        {"draft": "eagle", "prefix_cache": False},
        {"draft": "eagle", "page_size": 4, "num_steps": 2, "attention_backend": "paged", "max_device_tokens": 88},
        {"draft": "standalone", "attention_backend": "block-table"},
        {"draft": "standalone", "num_steps": 6, "max_device_tokens": 120},
        {"draft": "eagle", "page_size": 16, "adaptive_steps": True, "max_device_tokens": 144},
        {"draft": "standalone", "kv_cache_dtype": "auto", "new_token_ratio": 0.1, "max_total_tokens": 208},
    ],
)
def test_a_split_pool_changes_no_token(expected, schedule, settings):
    """Pages go and come, and each forward reads what was written; the canary, at full coverage, is silent."""
    engine = split_engine(schedule=schedule, **settings)
    assert tokens_of(engine) == expected
    assert engine.split.num_swapped_in > 5
    assert engine.pools["target"].num_slots < engine.config.max_total_tokens
    assert tokens_of(engine) == expected  # prefixes come from the cache, and the cache's pages from the host
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("settings", [{}, {"content": "rolling"}, {"content": "write"}, {"poison": "nan"}], ids=str)
def test_the_canary_is_silent_whatever_it_reads(expected, settings):
    """Rolling checks pass over what lies on the host; free places are poisoned and looked at."""
    engine = split_engine(canary=CanaryConfig(**{"mode": "raise", "content": "full"} | settings))
    assert tokens_of(engine) == expected
    assert engine.canary.certificate()["findings"] == []


def test_a_pool_without_a_canary_says_the_same(expected):
    """And a device that has room for all copies nothing."""
    assert tokens_of(split_engine(canary=CanaryConfig(mode="off"))) == expected
    roomy = split_engine(canary=CanaryConfig(mode="off"), max_device_tokens=4096)
    assert tokens_of(roomy) == expected
    assert (roomy.split.num_swapped_in, roomy.split.num_swapped_out) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("draft", ["none", "eagle3"])
def test_copies_beside_the_forwards_of_a_gpu_change_no_token(toy_model, draft, schedule):
    """On streams of their own, from and to pinned memory; the canary compares every page that comes back."""
    settings = {"model": str(toy_model), "draft": draft, "schedule": schedule, "device": "cuda", "dtype": "float64"}
    settings |= {"page_size": 8, "topk": 1, "num_steps": 3, "max_total_tokens": 1024, "canary": LOUD}
    engine = Engine(EngineConfig(**settings, max_device_tokens=112, device_turn=2))
    assert tokens_of(engine) == tokens_of(Engine(EngineConfig(**settings)))
    assert engine.split.num_swapped_in > 5
    assert engine.canary.certificate()["findings"] == []


def test_more_requests_are_under_way_than_the_device_holds():
    """All five run, a part of them in each step, and every one of them gets on before the first has ended."""
    engine = split_engine("none")
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    ran: list[set[str]] = []
    while len(engine.running) < 5 or all(len(request.output_ids) < 20 for request in engine.running):
        ran.append({event.request_id for event in engine.step()})
        assert engine.split.num_on_device <= 112 // 8
    assert max(map(len, ran)) < 5
    assert min(len(request.output_ids) for request in engine.running) > 8
    assert sum(len(request.pages) for request in engine.running) > 112 // 8
    assert engine.metrics.num_retractions == 0


@pytest.mark.parametrize("when", ["waiting", "away", "on the device"])
def test_cancelled_requests_leave_nothing(expected, when):
    """Wherever their pages are; the others say what they would have said."""
    engine = split_engine()
    names = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    outputs = {name: [] for name in names}
    for _ in range(0 if when == "waiting" else 9):
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
    slot_map = engine.split.slot_map

    def is_here(request) -> bool:
        return bool((slot_map[[page * 8 for page in request.pages]] > 0).all())

    if when == "waiting":
        gone = names[1]
    else:
        gone = next(r.request_id for r in engine.running if is_here(r) == (when == "on the device"))
    engine.cancel(gone)
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
    others = [number for number, name in enumerate(names) if name != gone]
    assert [tuple(outputs[names[number]]) for number in others] == [expected[number] for number in others]
    engine.memory.check_accounting([])


def away(engine: Engine):
    """Run until a request with a whole final page has its first page on the host; it and that page."""
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    while True:
        engine.step()
        for request in engine.running:
            first = request.pages[0] if request.committed_len >= 8 else None
            if first in engine.split._saved and int(engine.split.slot_map[first * 8]) == 0:
                return request, first


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def found(engine: Engine):
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    return caught.value.findings[0]


def test_bytes_that_change_on_the_host_are_found_when_they_come_back():
    """T1 at the slot, layer and position, before a token of that step leaves; its twin is every other test here."""
    engine = split_engine(prefix_cache=False)
    request, page = away(engine)
    engine.split._host.parts[0].view(torch.int64)[page * 8 + 3, 1, 0, 0, 2] ^= 1 << 40
    finding = found(engine)
    assert (finding.code, finding.pool, finding.position, finding.layers) == ("T1", "target", 3, (1,))
    assert (finding.page, finding.owner) == (page, request.request_id)
    assert (finding.part, finding.head, finding.dim, finding.bit) == ("K", 0, 2, 40)
    assert (finding.found["verdict"], finding.found["came_back_by"]) == ("one word", "swap in")


def test_bytes_of_a_page_that_was_written_again_since_are_stale():
    """A page that counts as saved after a forward has written it: T1 when it comes back, and when it was written."""
    engine = split_engine(prefix_cache=False)

    class Kept(dict):
        def pop(self, page, *default):
            return self.get(page, *default)  # it still counts as saved

    engine.split._saved = Kept()
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    finding = found(engine)
    assert (finding.code, finding.found["verdict"]) == ("T1", "stale")
    cause = finding.causes[0]
    assert (cause.family, cause.basis) == ("transfer", "derived")
    number, page, left = (finding.expected[key] for key in ("parcel", "page_of_parcel", "left_in_step"))
    text, _, written = cause.text.rpartition(" ")
    came_back = f"stale: page {page} of snapshot {number} came back as it was saved in step {left}"
    assert text == f"{came_back}, and it was written again in step"
    assert left < int(written) < finding.step


def test_a_dump_of_pages_that_came_and_went_is_replayed(tmp_path):
    """Clean where pages had left before its first step, and with the finding of one that left within it."""
    engine = split_engine(prefix_cache=False, canary=CanaryConfig(mode="raise", content="full", ring=3))
    away(engine)
    for _ in range(8):
        engine.step()
    clean = replay(read_dump(engine.canary.dump(tmp_path / "clean.kvdump")))
    assert (clean.findings, clean.errors) == ([], [])

    engine = split_engine(prefix_cache=False)
    _, page = away(engine)
    engine.split._host.parts[0].view(torch.int64)[page * 8 + 3, 1, 0, 0, 2] ^= 1 << 40
    assert found(engine).code == "T1"
    outcome = replay(read_dump(engine.canary.dump(tmp_path / "faulty.kvdump")))
    assert (outcome.missing, outcome.errors) == ([], [])


def leaving(engine: Engine) -> int:
    """Run until the next step takes the place of a final page of a request that waits; that page."""
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    places = engine.split._places
    while True:
        engine.step()
        wanted = {page for request in engine.scheduler.turn(engine.running) for page in request.pages}
        if len(wanted.difference(places)) > engine.split._device_pages.num_free:
            first = next(page for page in places if page not in wanted)
            if any(first in request.pages[: request.committed_len // 8] for request in engine.running):
                return first


def test_bytes_that_changed_on_the_device_are_found_before_they_leave():
    """R9 at a last re-read, while the map still leads there: the host gets no damaged page in silence."""
    engine = split_engine(prefix_cache=False)
    page = leaving(engine)
    own = int(engine.split.slot_map[page * 8 + 3])
    engine.pools["target"].kv.view(torch.int64)[1, own, 0, 0, 2] ^= 1 << 40
    finding = found(engine)
    assert (finding.code, finding.slot, finding.page, finding.site) == ("R9", own, page, ("release", 1))


def test_the_other_requests_go_on_when_bytes_came_back_changed(expected):
    """Mode abort: the request whose bytes they are ends, everybody else says the same as ever."""
    engine = split_engine(prefix_cache=False, canary=CanaryConfig(mode="abort", content="full"))
    request, page = away(engine)
    engine.split._host.parts[0].view(torch.int64)[page * 8 + 3, 1, 0, 0, 2] ^= 1 << 40
    requests = {other.request_id: other for other in engine.running}
    run(engine)
    assert request.finish_reason == "kv_corruption"
    for name, other in requests.items():
        if other is not request:
            assert tuple(other.output_ids) == expected[int(name.removeprefix("req-"))]


def test_bytes_that_came_back_changed_are_computed_again(expected):
    """Mode heal: everybody says the same as ever, the request whose bytes they were too."""
    engine = split_engine(prefix_cache=False, canary=CanaryConfig(mode="heal", content="full"))
    _, page = away(engine)
    engine.split._host.parts[0].view(torch.int64)[page * 8 + 3, 1, 0, 0, 2] ^= 1 << 40
    requests = {other.request_id: other for other in engine.running}
    run(engine)
    assert {other.finish_reason for other in requests.values()} == {"length"}
    for name, other in requests.items():
        assert tuple(other.output_ids) == expected[int(name.removeprefix("req-"))]
    assert engine.canary.certificate()["healed"] == 1


def test_a_row_that_is_not_brought_is_read_nowhere(monkeypatch):
    """R2 names the slot of the map that leads nowhere: on the host is a legal place, for who does not run."""
    engine = split_engine(prefix_cache=False)
    request, page = away(engine)
    inner = SplitPool.bring

    def bring(pool, what, rows):
        inner(pool, what, [row for row in rows if row.request_id != request.request_id])

    monkeypatch.setattr(SplitPool, "bring", bring)
    finding = found(engine)
    assert (finding.code, finding.reader) == ("R2", request.request_id)
    assert finding.found == {"slot": 0, "slot_map_of": page * 8}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"topk": 2}, "topk must be 1 with max_device_tokens, got 2: the device has no room for the branches"),
        (
            {"page_size": 4},
            "num_draft_tokens must be at most page_size - 1 = 3 with max_device_tokens, got 4: the nodes",
        ),
        ({"host_pages": 8}, "host_pages must be 0 with max_device_tokens, got 8: what has no room on the device"),
        ({"graphs": "on"}, "max_device_tokens must be None with graphs, got 112: a captured step cannot do it yet"),
        (
            {"max_device_tokens": 7},
            "max_device_tokens must hold one request's reserve, got 7: a token and a reserve of 4 slots take 1 pages",
        ),
        ({"max_device_tokens": 0}, "max_device_tokens must be a positive whole number, got 0"),
        ({"device_turn": 0}, "device_turn must be a positive whole number, got 0"),
    ],
)
def test_what_a_split_pool_cannot_do_is_refused(settings, sentence):
    """With the value, the rule and a remedy, at start."""
    with pytest.raises(ConfigError) as caught:
        split_engine(**settings)
    assert sentence in str(caught.value)


def test_a_request_that_never_fits_on_the_device_is_refused():
    """Pages of its longest row, against those of the device; others go on."""
    engine = split_engine(max_device_tokens=56)
    with pytest.raises(ConfigError, match="may need 8 pages of 8 slots, the device has 7"):
        engine.submit(PROMPTS[2], GREEDY)
    assert engine.generate(PROMPTS[:1], GREEDY)[0].finish_reason == "length"


def test_a_window_has_no_pages_on_the_host():
    """A model with a sliding window keeps nothing that nobody sees."""
    windowed = RAW | {"architectures": ["MistralForCausalLM"], "sliding_window": 10}
    target = with_random_weights(Decoder(parse_config(windowed)), seed=3)
    with pytest.raises(ConfigError, match="max_device_tokens needs a model whose layers see everything, got one with"):
        Engine(EngineConfig(draft="none", max_device_tokens=64), model=target, tokenizer=MockTokenizer())
