"""Identity beside tokens: versions of weights and adapters, and spans of a prompt that hold images."""

from __future__ import annotations

import random

import pytest
import torch

from kvcanary import KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.errors import PlanError
from kvcanary.pools.spans import SPAN_IDS, embedding_spans, is_span_id, with_spans
from kvcanary.replay.replayer import replay
from kvcanary_kernels.record import layout
from kvcanary_tools.bench.toy.flavoured import FlavouredEngine

TEXT, PAD = list(range(30, 38)), [7] * 8
PROMPT = [*TEXT, *PAD, 40, 41, 42]
CAT, DOG = [(8, 16, "cat")], [(8, 16, "dog")]


def caught(run):
    """The first finding of what it raised."""
    with pytest.raises(KVCorruptionError) as error:
        run()
    return error.value.report.findings[0]


def words(finding) -> str:
    return "; ".join((finding.causes[0].text, *finding.causes[0].evidence))


def test_fields_of_an_identity_are_hashed_apart():
    """No two identities share a root, whatever is moved from one field to the next (vllm#44701)."""
    keys = layout.make_keys(3, 1, 4)
    names = [
        ("", "a"),
        ("a", ""),
        ("", "", "a"),
        ("", "", "", "a"),
        ("a', 'b",),
        ("a", "b"),
        ("", "a", "b"),
        ("b", "a"),
    ]
    assert len({layout.chain_root(keys, "target", *name) for name in names}) == len(names)


@pytest.mark.parametrize("forgets", ["weights", ""])
def test_a_prefix_of_other_weights(forgets):
    """R5 with both versions where the cache forgets the version, nothing where its keys have it (vllm-omni#6739)."""
    engine = FlavouredEngine(forgets=forgets)
    engine.start("before", PROMPT)
    engine.end("before")
    engine.update(clears=False)
    if not forgets:
        engine.start("after", PROMPT)
        return
    finding = caught(lambda: engine.start("after", PROMPT))
    assert (finding.code, finding.causes[0].family) == ("R5", "identity")
    assert "weights were replaced" in words(finding)
    assert "weights none when 'before' wrote it, 1 of the row that reads it" in words(finding)
    assert "another prompt" not in str([cause.text for cause in finding.causes])


def test_weights_that_come_back_come_with_their_cache():
    """A version is a name: under the old one again, what it wrote is right."""
    engine = FlavouredEngine()
    engine.canary.on_weights("a")
    engine.start("before", PROMPT)
    engine.end("before")
    engine.canary.on_weights("b")
    engine.canary.on_weights("a")
    engine.start("after", PROMPT)
    assert engine.lengths["after"] == len(PROMPT)


@pytest.mark.parametrize("keeps", [True, ["runs"], [], ["another"]])
def test_a_mix_is_right_where_it_is_declared(keeps):
    """A request in flight goes on under new weights where it is kept, and is R5 or R6 where nobody said so."""
    engine = FlavouredEngine()
    engine.start("runs", PROMPT)
    engine.update(keeps=keeps)
    if keeps is True or "runs" in keeps:
        for _ in range(9):
            engine.decode()
        return engine.end("runs", shares=False)
    finding = caught(lambda: engine.decode())
    assert finding.code in ("R5", "R6")
    assert "weights were replaced" in words(finding)
    return None


def test_pages_of_a_mix_are_no_hit():
    """What a kept request publishes is of both versions: a prompt of the new one must not begin with it."""
    engine = FlavouredEngine(forgets="weights")
    engine.start("runs", PROMPT)
    engine.update(keeps=True)
    engine.decode()
    engine.end("runs")
    assert "weights were replaced" in words(caught(lambda: engine.start("after", PROMPT)))


@pytest.mark.parametrize("keeps", [True, ()])
def test_a_row_that_is_computed_anew_is_of_the_new_weights(keeps):
    """Preempted and prefilled behind the update, kept or not: its pages are hits for who comes then, forks too."""
    engine = FlavouredEngine()
    engine.start("runs", PROMPT)
    engine.update(keeps=keeps)
    engine.preempt("runs")
    engine.prefill("runs")
    engine.decode()
    engine.end("runs")
    engine.start("after", PROMPT)
    assert engine.cache


def test_a_request_that_waits_is_of_the_weights_that_compute_it():
    """It has no entry when they change: nobody need keep it."""
    engine = FlavouredEngine()
    engine.canary.admit("waits", PROMPT)
    engine.tokens["waits"], engine.spans["waits"], engine.adapters["waits"] = list(PROMPT), [], ""
    engine.update(keeps=True)
    engine.tables["waits"] = []
    engine.prefill("waits")
    engine.end("waits")
    engine.start("after", PROMPT)


@pytest.mark.parametrize("version", ["1", "2"])
def test_an_adapter_that_is_loaded_again(version):
    """With other weights it is R5, which says so; with the same ones, under whatever number, it is nothing."""
    engine = FlavouredEngine()
    engine.canary.on_adapter("lora", 1)
    engine.start("before", PROMPT, adapter="lora")
    engine.start("plain", [50, *PROMPT])
    engine.end("before")
    engine.canary.on_adapter("lora", version, keeps=["plain"])
    engine.decode("plain")
    if version == "1":
        return engine.start("after", PROMPT, adapter="lora")
    finding = caught(lambda: engine.start("after", PROMPT, adapter="lora"))
    assert "loaded anew" in words(finding)
    assert "adapter version 1 when 'before' wrote it, 2 of the row" in words(finding)
    return None


def test_requests_without_the_adapter_are_not_asked():
    """Others go on as they are when an adapter changes."""
    engine = FlavouredEngine()
    engine.start("plain", PROMPT)
    engine.canary.on_adapter("lora", 2)
    engine.decode("plain")


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [({"adapter": "x"}, {}, "the adapter differs"), ({"salt": "x"}, {"salt": "y"}, "the salt differs")],
)
def test_the_part_that_differs_is_named(one, other, text):
    """And a salt is never shown."""
    engine = FlavouredEngine()
    engine.start("one", PROMPT, **one)
    pages = engine.tables["one"][:2]
    engine.canary.on_share("one", pages)
    engine.key = lambda name, end: end
    engine.cache = {4: pages[0], 8: pages[1]}
    finding = caught(lambda: engine.start("two", PROMPT, **other))
    assert text in words(finding)
    assert "salt x" not in words(finding)


def test_a_thousand_updates_with_requests_in_flight():
    """As a training loop with rollouts that go on: kept, preempted, waiting and new ones, hits between updates."""
    engine, draw = FlavouredEngine(pages=64, content="rolling"), random.Random(3)
    prompts = [[*TEXT, n] * 2 for n in range(3)]
    for number in range(1000):
        name = f"r{number}"
        engine.start(name, draw.choice(prompts))
        running = list(engine.tables)
        engine.decode(*running)
        if len(running) > 2:
            version = engine.canary.session.ledger.request(running[0]).identity.weights
            engine.end(running[0], shares=version == str(engine.version))
        dropped = [own for own in engine.tables if draw.random() < 0.2]
        engine.update(keeps=True if not dropped else [own for own in engine.tables if own not in dropped])
        for own in dropped:
            engine.preempt(own)
            engine.prefill(own)
    assert engine.version == 1000
    assert not engine.canary.findings


def test_a_fork_of_a_mix_is_the_same_mix():
    """The child of a request that was kept goes on with what its parent keeps."""
    engine = FlavouredEngine()
    engine.start("runs", PROMPT[:16])
    engine.update(keeps=True)
    engine.canary.admit("child", engine.tokens["runs"])
    engine.canary.on_fork("runs", "child", engine.tables["runs"])
    for book in (engine.tokens, engine.tables, engine.spans):
        book["child"] = list(book["runs"])
    engine.lengths["child"], engine.adapters["child"] = 16, ""
    engine.decode("runs", "child")
    assert engine.lengths["child"] == 17


# spans


@pytest.mark.parametrize("forgets", ["images", ""])
def test_another_image_behind_the_same_text(forgets):
    """R6 that names the span where keys are ids alone (LMCache#4183); with images in them, the text is shared."""
    engine = FlavouredEngine(forgets=forgets)
    engine.start("cat", PROMPT, CAT)
    engine.end("cat")
    if not forgets:
        engine.start("dog", PROMPT, DOG)
        engine.start("cat again", PROMPT, CAT)
        assert [len({*engine.tables[name]} & {1, 2, 3, 4}) for name in ("dog", "cat again")] == [2, 4]
        return
    finding = caught(lambda: engine.start("dog", PROMPT, DOG))
    assert finding.code == "R6"
    assert "an image, sound or embedding of another prompt" in words(finding)
    assert "from position 8 on" in words(finding)


def test_many_images_behind_shared_text():
    """300 prompts in turn about a few images, hits of text and of text with image: nothing is found."""
    engine, draw = FlavouredEngine(pages=48), random.Random(4)
    for number in range(300):
        spans = [(8, 16, draw.randrange(4)), (19, 22, draw.randrange(2))]
        engine.start(f"r{number}", [*PROMPT, 7, 7, 7, 50], spans)
        engine.decode()
        engine.end(f"r{number}")
        while len(engine.free) < 12:
            key = next(reversed(engine.cache))
            page = engine.cache.pop(key)
            engine.canary.on_evict([page])
            engine.free.append(page)
    assert not engine.canary.findings


def test_a_forward_that_is_fed_something_else_within_a_span():
    """Ids of spans stand for the tokens that were given: another token in their place is W6 still."""
    engine = FlavouredEngine()
    own = engine.forward
    engine.forward = lambda fed, kind: own({name: [*tokens[:9], 8, *tokens[10:]] for name, tokens in fed.items()}, kind)
    assert caught(lambda: engine.start("cat", PROMPT, CAT)).code == "W6"


def test_ids_of_spans():
    """They are 32-bit, no vocabulary has them, and they differ by content, place and token; text stays."""
    ids = {content: with_spans(PROMPT, [(8, 16, content)]) for content in ("cat", "dog", 1, b"1")}
    assert all(number in SPAN_IDS for own in ids.values() for number in own[8:16].tolist())
    assert all(is_span_id(own).sum() == 8 for own in ids.values())
    assert all(own[:8].tolist() == TEXT and len({*own[8:16].tolist()}) == 8 for own in ids.values())
    assert len({tuple(own.tolist()) for own in ids.values()}) == 4
    assert SPAN_IDS.stop < 1 << 31


@pytest.mark.parametrize("span", [(8, 8, "x"), (-1, 3, "x"), (3, 99, "x")])
def test_a_span_outside_its_prompt(span):
    with pytest.raises(PlanError, match=r"a span must be a part of its 19 tokens, got \["):
        FlavouredEngine().start("cat", PROMPT, [span])


def test_embeddings_name_themselves():
    """Where nobody knows a content id: rows of equal bytes are equal spans, others are others."""
    rows = torch.randn(3, 5).bfloat16()
    one, same, other = (with_spans([7] * 8, embedding_spans(own, 2)) for own in (rows, rows.clone(), rows + 1))
    assert one.tolist() == same.tolist()
    assert (one == other).tolist() == [True, True, False, False, False, True, True, True]


@pytest.mark.parametrize("kind", ["weights", "images"])
def test_a_dump_replays_what_identities_are(tmp_path, kind):
    """A replay knows no version and no image, and reaches the same finding."""
    engine = FlavouredEngine(forgets=kind, ring=8, dump_dir=str(tmp_path))
    engine.start("runs", [60, 61, 62])
    engine.start("cat", PROMPT, CAT)
    engine.end("cat")
    if kind == "weights":
        engine.update(keeps=["runs"], clears=False)
        engine.decode("runs")
        engine.preempt("runs")
        engine.prefill("runs")
    with pytest.raises(KVCorruptionError) as error:
        engine.start("dog", PROMPT, CAT if kind == "weights" else DOG)
    outcome = replay(read_dump(error.value.report.dump))
    assert (outcome.missing, outcome.errors) == ([], [])
    assert [finding.code for finding in outcome.findings] == [error.value.report.findings[0].code]
