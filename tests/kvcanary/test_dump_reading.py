"""Files that are no dumps, or dumps made to harm: one sentence, nothing executed, bounded memory."""

from __future__ import annotations

import inspect
import io
import json
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from kvcanary import CanaryConfig, CanaryManager, KVCorruptionError, PoolView
from kvcanary.captured.buffers import Batch, StaticBuffers
from kvcanary.dumps.container import MEMBERS, VERSION
from kvcanary.dumps.event_schema import ARGUMENTS, CALLS, OF_SEVERAL
from kvcanary.dumps.reading import read_dump
from kvcanary.errors import DumpError
from kvcanary.manager.lifecycle import Lifecycle
from kvcanary.manager.mapped_groups import MappedGroups
from kvcanary.manager.transfers import Transfers
from kvcanary.replay.replayer import replay
from kvcanary_kernels.record.layout import Identity
from kvcanary_tools.bench.toy.engine import ToyEngine

SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
EXAMPLES = [40, pytest.param(4000, marks=pytest.mark.slow)]  # of each fuzzer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of a short clean run."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full", seed=7))
        engine.start("only", 9)
        engine.draft()
        return engine.canary.dump(tmp_path_factory.mktemp("dumps") / "good.kvdump")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of a tree that was verified in a captured forward, and of its move."""
    return captured_step().dump(tmp_path_factory.mktemp("dumps") / "captured.kvdump")


def captured_step() -> CanaryManager:
    """The canary of such a step."""
    with torch.inference_mode():
        k = torch.zeros(32, 1, 4)
        canary = CanaryManager(CanaryConfig(seed=7), [PoolView("target", [k], [k.clone()], 4)])
        buffers = StaticBuffers.allocate(2, 4, 16, is_tree=True, has_truths=True, has_roots=True)
        mask = torch.ones(2, 2, 2, dtype=torch.bool).tril()
        substep = canary.registry.add("target", "verify", 0, buffers, max_depth=2, tree_mask=mask)
        move = canary.registry.add_move("target", 2)
        canary.arm()
        canary.admit("only", [50])
        canary.on_alloc("only", [1])
        canary.begin_step(1)
        reported = canary.launch(substep, ["only"], [2], 2)
        truth = {name: getattr(reported, name) for name in ("uids", "prefix_lens", "truths", "roots")}
        ints = {"indptr": [0, 2], "indices": [4, 5], "bounds": [0, 2], "slots": [4, 5], "tokens": [50, 51]}
        ints |= {"positions": [0, 1], "parents": [-1, 0], **truth}
        buffers.fill(Batch(**{name: torch.tensor(values) for name, values in ints.items()}))
        substep.open()
        substep.store(0, *torch.ones(2, 4, 1, 4))
        substep.close()
        canary.launch_move(move)
        move.record(torch.tensor([5, 0]), torch.tensor([5, 0]), torch.tensor([True, False]))
        canary.collect(canary.end_step())
        assert canary.findings == []
        return canary


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of a run that a changed value has stopped."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full", seed=7, dump_dir=str(tmp_path_factory.mktemp("dumps"))))
        engine.start("only", 9)
        engine.pools["target"].kv[1, int(engine.rows["only"].slots[3]), 1] += 1.0
        with pytest.raises(KVCorruptionError) as caught:
            engine.draft()
        return Path(caught.value.report.dump)


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, parts: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DumpError) as caught:
        read_dump(path)
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


def changed(good: Path, path: Path, **keys: object) -> Path:
    """The dump with other values in its manifest."""
    parts = members(good)
    manifest = json.loads(parts["manifest.json"])
    manifest.update(keys)
    return packed(path, parts | {"manifest.json": json.dumps(manifest).encode()})


def test_a_good_dump_is_read(good):
    """What was written is what is read, twice the same."""
    dump, again = read_dump(good), read_dump(str(good))
    assert [event["call"] for event in dump.events] == [event["call"] for event in again.events]
    assert dump.manifest["step"] == 2
    assert [request["request_id"] for request in dump.now] == ["only"]


def test_files_that_are_none(good, tmp_path):
    """Missing, a folder, empty, text, cut short, or a zip of something else."""
    assert "cannot be read: No such file" in refusal(tmp_path / "absent")
    assert "is no file" in refusal(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    assert "0 bytes are too few" in refusal(tmp_path / "empty")
    (tmp_path / "text").write_text("import os; os.system('true')\n" * 9)
    assert "it does not end as one" in refusal(tmp_path / "text")
    (tmp_path / "cut").write_bytes(good.read_bytes()[:-100])
    assert "damaged or no dump" in refusal(tmp_path / "cut")
    assert "it holds 'a.txt'" in refusal(packed(tmp_path / "zip", {"a.txt": b"x"}))


def test_newer_versions_say_so(good, tmp_path):
    """Whatever a newer version holds, its number is what the sentence is about."""
    path = changed(good, tmp_path / "newer", version=VERSION + 1)
    words = f"has version {VERSION + 1}, this kvcanary reads up to {VERSION}: read it with the one that wrote it"
    assert words in refusal(path)
    parts = members(path) | {"novelty.bin": b""}
    assert f"has version {VERSION + 1}" in refusal(packed(path, parts))
    assert "its manifest says" in refusal(changed(good, tmp_path / "foreign", format="other"))
    assert "its version is 'one'" in refusal(changed(good, tmp_path / "strange", version="one"))


def test_names_lead_nowhere(good, tmp_path):
    """Members with paths, and members twice, are refused; nothing is ever written."""
    for name in ("../../evil", "/etc/evil", "manifest.json/x"):
        assert "no dump of kvcanary" in refusal(packed(tmp_path / "path", members(good) | {name: b"x"}))
    packed(tmp_path / "twice", members(good))
    with zipfile.ZipFile(tmp_path / "twice", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("findings.jsonl", b"")
    assert "a member is there twice" in refusal(tmp_path / "twice")
    without = {name: data for name, data in members(good).items() if name != "history.jsonl"}
    assert "history.jsonl is missing" in refusal(packed(tmp_path / "less", without))


def test_bombs_are_not_unpacked(good, tmp_path):
    """A member of gigabytes, or one that says it is short, and a directory of very many: little memory is taken."""
    bomb = packed(tmp_path / "bomb", members(good) | {"findings.jsonl": b"\0" * (MEMBERS["findings.jsonl"] + 1)})
    data = bytearray(bomb.read_bytes())
    liar = tmp_path / "liar"
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = data.find(signature)
        while place >= 0:
            if struct.unpack_from("<I", data, place + offset)[0] == MEMBERS["findings.jsonl"] + 1:
                struct.pack_into("<I", data, place + offset, 100)
            place = data.find(signature, place + 4)
    liar.write_bytes(data)
    many = tmp_path / "many"
    packed(many, {f"member {number}": b"" for number in range(5000)})
    tracemalloc.start()
    assert "unpacked, it may have" in refusal(bomb)
    assert "damaged" in refusal(liar)
    assert "it has 5000 members" in refusal(many)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"captured": 5}, "captured is no list"),
        ({"rows": 1 << 40}, "rows of a captured forward is 1099511627776"),
        ({"nodes": 4000}, "a captured forward has no such sizes"),
        ({"pool": "other"}, "what is captured is of no pool"),
        ({"kind": "import"}, "a captured forward has no such sizes"),
        ({"entries": 1}, "a launch does not fit into its captured forward"),
        ({"indices": 1}, "a launch does not fit into its captured forward"),
        ({"has_roots": 1}, "has_roots of a captured forward is no flag"),
        ({"judges_bytes": 1}, "judges_bytes of a captured forward is no flag"),
        ({"has_parents": False}, "a launch does not fit into its captured forward"),
    ],
)
def test_captured_forwards_have_bounds(captured, tmp_path, changes, words):
    """Buffers of absurd size are never made, and a launch lies within its own."""
    own = json.loads(members(captured)["manifest.json"])["captured"]
    wrong = changes.get("captured", [own[0] | changes])
    assert words in refusal(changed(captured, tmp_path / "captured", captured=wrong))


@pytest.mark.parametrize(
    ("seats", "num_accepted", "words"),
    [
        ([0, 3], None, "seats are none"),
        ([4, 1 << 40], None, "seats are none"),
        ([4, 3, 1], None, "seats are none"),
        ([4, 3], 2, None),
        (None, 2, "a launch does not fit into its captured forward"),
        ([4, 1], 2, "a launch does not fit into its captured forward"),
        ([4, 3], 1, "a launch does not fit into its captured forward"),
    ],
)
def test_what_was_accepted_has_bounds(captured, tmp_path, seats, num_accepted, words):
    """As many tokens as are counted, two here, and no more a request than there are places."""
    parts = members(captured)
    manifest = json.loads(parts["manifest.json"]) | {"seats": seats}
    events = [json.loads(line) for line in parts["events.jsonl"].splitlines()]
    if num_accepted is not None:
        (launch,) = [event for event in events if event["call"] == "launch"]
        launch["accepted"] = [launch["plan"][0], num_accepted]
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    path = packed(tmp_path / "seats", parts | {"manifest.json": json.dumps(manifest).encode(), "events.jsonl": lines})
    if words is not None:
        assert words in refusal(path)
    else:
        assert "accepted" in next(event for event in read_dump(path).events if event["call"] == "launch")


def test_a_captured_dump_is_read_and_replayed(captured):
    """What the fuzzers damage is whole."""
    outcome = replay(read_dump(captured))
    assert (outcome.findings, outcome.missing, outcome.errors) == ([], [], [])
    assert {"launch", "captured_move"} <= {event["call"] for event in read_dump(captured).events}


def test_a_large_captured_forward_is_packed_at_once(tmp_path, monkeypatch):
    """It takes less room than one that waits for somebody to ask, and is the same in a dump."""
    waits = captured_step()
    monkeypatch.setattr("kvcanary.recorder.kept_forwards.MOST_UNPACKED", 0)
    monkeypatch.setattr("kvcanary.recorder.forward_events.MOST_KEPT", 0)
    packed_one = captured_step()
    assert packed_one.recorder.num_bytes < waits.recorder.num_bytes
    later, at_once = (
        next(event for event in read_dump(canary.dump(tmp_path / name)).events if event["call"] == "launch")
        for name, canary in (("waits", waits), ("packed", packed_one))
    )
    for launch in (later, at_once):
        launch["plan"] = np.delete(launch["plan"], [2, 3])  # the tokens, under another bijection in each dump
    assert str(later) == str(at_once)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"call": "__import__"}, "which nobody knows"),
        ({"call": ["check"]}, "which nobody knows"),
        ({"call": "commit", "request_id": "only"}, "has no committed_len"),
        ({"call": "commit", "request_id": "only", "committed_len": True}, "no integer of that size"),
        ({"call": "commit", "request_id": "x" * 5000, "committed_len": 1}, "a name is no text, or too long"),
        ({"call": "on_free", "request_id": "only", "pages": [0, 1 << 60]}, "where there are none"),
        ({"call": "on_free", "request_id": "only", "pages": [-5, 3]}, "where there are none"),
        ({"call": "on_free", "request_id": "only", "pages": "all"}, "is a, no integer"),
        (
            {"call": "append_all", "request_ids": ["only", "other"], "counts": [0, 1], "token_ids": [0, 1]},
            "tokens are not those of requests",
        ),
        (
            {"call": "on_alloc_all", "request_ids": ["only", "other"], "counts": [0, 1], "pages": [0, 2]},
            "pages are not those of requests",
        ),
        (
            {"call": "on_alloc_all", "request_ids": ["only"], "counts": [0, 1], "pages": [0, 1]},
            "pages are not those of requests",
        ),
    ],
)
def test_events_are_of_their_kind(good, tmp_path, line, words):
    """A call nobody knows is not looked up, and fields have their types and places."""
    parts = members(good) | {"events.jsonl": json.dumps(line).encode() + b"\n"}
    assert words in refusal(packed(tmp_path / "event", parts))


def test_absurd_shapes(good, tmp_path):
    """Pools, layers and rows of absurd size are refused before anything is allocated for them."""
    pools = json.loads(members(good)["manifest.json"])["pools"]
    for key, value in (("num_slots", 1 << 40), ("layers", 5000), ("slot_bytes", -1), ("vocab_size", 0)):
        path = changed(good, tmp_path / "shape", pools=[pools[0] | {key: value}, pools[1]])
        assert str(value) in refusal(path)
    part = pools[0]["parts"][0]
    for wrong in ({"shape": [1 << 30, 1 << 30]}, {"shape": [0]}, {"dtype": "object"}):
        refusal(changed(good, tmp_path / "part", pools=[pools[0] | {"parts": [part | wrong]}, pools[1]]))
    refusal(changed(good, tmp_path / "pages", num_pages=1 << 23))
    arrays = load(members(good)["arrays.safetensors"])
    for wrong in ({"start.states": np.zeros(3, np.int64)}, {"ints": np.zeros((2, 2), np.int64)}):
        refusal(packed(tmp_path / "array", members(good) | {"arrays.safetensors": save(arrays | wrong)}))


def test_deep_json(good, tmp_path):
    """JSON nested a million deep, and a number of a million digits, are a sentence as well."""
    for text in (b"[" * 1_000_000, b'{"call":' + b"9" * 1_000_000 + b"}"):
        assert "is no JSON" in refusal(packed(tmp_path / "deep", members(good) | {"events.jsonl": text}))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_bytes(tmp_path, examples):
    """No bytes do more than raise DumpError."""

    @settings(max_examples=examples, **SETTINGS)
    @given(data=st.binary(max_size=400))
    def fuzz(data):
        path = tmp_path / "any"
        path.write_bytes(data)
        with pytest.raises(DumpError):
            read_dump(path)

    fuzz()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("whole", ["good", "captured"])
def test_any_damage_of_the_file(request, tmp_path, whole, examples):
    """A dump with some bytes replaced is read, replayed, or refused in a sentence; never anything else."""
    content = request.getfixturevalue(whole).read_bytes()

    @settings(max_examples=examples, **SETTINGS)
    @given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8))
    def fuzz(changes):
        data = bytearray(content)
        for place, byte in changes:
            data[place % len(data)] = byte
        attempt(tmp_path / "damaged", bytes(data))

    fuzz()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("whole", ["good", "captured"])
def test_any_damage_of_a_member(request, tmp_path, whole, examples):
    """The same for what is packed, with right checksums: digits, brackets and quotes anywhere."""
    parts = members(request.getfixturevalue(whole))
    place = st.tuples(st.integers(0, 1 << 20), st.sampled_from(b'0123456789-"[]{},:ntf e'))

    @settings(max_examples=examples, **SETTINGS)
    @given(name=st.sampled_from(sorted(parts)), changes=st.lists(place, min_size=1, max_size=6))
    def fuzz(name, changes):
        data = bytearray(parts[name])
        for where, byte in changes:
            if data:
                data[where % len(data)] = byte
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for member, content in (parts | {name: bytes(data)}).items():
                archive.writestr(member, content)
        attempt(tmp_path / "member", file.getvalue())

    fuzz()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("whole", ["good", "captured", "struck"])
def test_any_number_anywhere(request, tmp_path, whole, examples):
    """The same for one number of an event: it fits all the same, is refused, or replays to something."""
    parts = members(request.getfixturevalue(whole))
    arrays = load(parts["arrays.safetensors"])
    numbers = st.sampled_from([-(1 << 63), -1, 0, 1, 2, 3, 7, 255, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1])

    @settings(max_examples=examples, **SETTINGS)
    @given(where=st.integers(0, 1 << 20), number=numbers)
    def fuzz(where, number):
        ints = arrays["ints"].copy()
        ints[where % len(ints)] = number
        packed(tmp_path / "number", parts | {"arrays.safetensors": save(arrays | {"ints": ints})})
        event(say(tmp_path / "number"))

    fuzz()


def attempt(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    event(say(path))


def say(path: Path) -> str:
    """What a damaged dump replays to: it is refused, or each of its findings is reached or named as missing.

    Where nothing is missing and no call ended in an error, all that it tells of has run, up to what was found.
    """
    try:
        dump = read_dump(path)
        outcome = replay(dump)
    except DumpError:
        return "refused"
    reported = [[finding[key] for key in ("code", "slot", "step")] for finding in dump.findings]
    missing = [[finding[key] for key in ("code", "slot", "step")] for finding in outcome.missing]
    reached = [[finding.code, finding.slot, finding.step] for finding in outcome.findings]
    assert all(finding in missing or finding in reached for finding in reported)
    assert all(finding in reported for finding in missing)
    said = "missing" if missing else "errors" if outcome.errors else "found" if reached else "clean"
    if said == "clean":
        assert outcome.num_events == len(dump.events)
    return said


def test_each_kind_of_replay_is_said(good, struck, tmp_path):
    """Nothing to find, a finding reached, one that its events do not lead to, events that contradict each other."""
    assert say(good) == "clean"
    assert say(struck) == "found"
    events = [json.loads(line) for line in members(struck)["events.jsonl"].splitlines()]
    for key, said in (("damage", "missing"), ("request_id", "refused")):
        lines = b"\n".join(json.dumps({name: one[name] for name in one if name != key}).encode() for one in events)
        packed(tmp_path / key, members(struck) | {"events.jsonl": lines})
        assert say(tmp_path / key) == said


def test_events_have_the_arguments_of_the_methods_that_tell_them():
    """A dump names them in the manager's order; what is told of several requests at once is laid out by itself.

    An admission is recorded as what it comes to: ids of spans among its tokens, and the identity of its rows.
    """
    parts = Lifecycle, MappedGroups, Transfers
    methods = {name: getattr(part, name) for part in parts for name in CALLS.keys() - OF_SEVERAL if hasattr(part, name)}
    as_dumped = {"snapshot": "parcel", "snapshots": "parcels"}
    reported = {
        name: [as_dumped.get(each, each) for each in [*inspect.signature(method).parameters][1:]]
        for name, method in methods.items()
    }
    assert len(reported) > 15
    named = {name: [*ARGUMENTS.get(name, CALLS[name])] for name in reported}
    assert named.pop("admit") == ["request_id", "token_ids", *Identity._fields]
    del reported["admit"]
    assert named == reported
