"""A finding in a watched pool leaves a file, and the file answers what people ask."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load as load_arrays

from kvcanary.adapters.observed.recent_steps import RecentSteps
from kvcanary.adapters.observed.report import RIGHT_AGAIN
from kvcanary.dumps.watched_reading import WatchedDump, read_any
from kvcanary.manager.dump_trigger import MOST_DUMPS
from kvcanary_tools.cli import main
from kvcanary_tools.dumps.watched import explain_watched

from .incident import dumped, incident, overwrite, running
from .served import Served, go_on, load

pytestmark = pytest.mark.usefixtures("host")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where dumps go."""
    monkeypatch.setenv("KVCANARY_DUMP", str(tmp_path / "dumps"))
    return tmp_path / "dumps"


def read(path: Path) -> WatchedDump:
    dump = read_any(path)
    assert isinstance(dump, WatchedDump)
    return dump


def test_the_file_says_who_had_the_block_and_whose_bytes_lie_there(serve, folder) -> None:
    """Owner before, writer, bytes of another request, the row with the wrong entry marked, and where all this ran."""
    path = incident(serve)
    dump = read(path)
    assert [p.name for p in folder.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    facts = explain_watched(dump, 0)
    assert (facts["finding"]["code"], facts["finding"]["reader"], facts["finding"]["position"]) == ("R9", "late", 10)
    told = " | ".join(line["text"] for line in facts["story"])
    assert re.search(r"granted to 'first' for positions \d+ to \d+ \| .*given up by 'first', which ended", told)
    assert "granted to 'late' for positions 8 to 11 | positions 8 to 11 written by 'late', prefill" in told
    answers = " | ".join(facts["answers"])
    assert re.search(r"before that block \d+ was granted to 'first'", answers)
    assert "the slot was last written as position 10 of 'late', prefill" in answers
    assert "its bytes are those of position 6 of 'beside', written in step" in answers
    [marked] = [entry for entry in facts["row"] if entry["marked"]]
    assert (marked["position"], marked["bytes"]) == (10, "other, in 2 layers")
    assert {entry["bytes"] for entry in facts["row"] if not entry["marked"]} == {"as written"}
    assert dump.manifest["environment"].keys() >= {"engine", "version", "runner", "torch", "device"}
    assert dump.manifest["environment"]["version"] == "0.26.0"


def test_a_wrong_block_table_shows_in_the_row(serve, folder) -> None:
    """Exchanged entries of a block table: the row names the positions that lie there."""

    def swap(served: Served) -> None:
        number = served.runner.req_states.req_id_to_index["late"]
        line = served.runner.block_tables.block_tables[0].gpu[number]
        line[[1, 3]] = line[[3, 1]]

    facts = explain_watched(read(dumped(running(serve), swap)), 0)
    assert (facts["finding"]["code"], facts["finding"]["position"]) == ("R4", 4)
    [marked] = [entry for entry in facts["row"] if entry["marked"]]
    assert marked["holds"].startswith("position 12 of 'late'")


def test_moved_blocks_are_part_of_the_story(serve, folder) -> None:
    """Zeroing and copies are told, in the blocks of tables."""
    served = running(serve, num_blocks=10, zeroes=True)
    source = served.running[-1].blocks[0]
    target = served.free[0]
    served.extra = {"kv_cache_block_copies": [(source, target)]}
    served.step()
    dump = read(dumped(served, lambda served: overwrite(served, ("late", 10), ("beside", 6), ("l1",))))
    events = [event for step in dump.steps for event in step["events"]]
    assert ["copied", 0, [2 * source, 2 * source + 1], [2 * target, 2 * target + 1]] in events
    zeroed = [block for kind, *facts in events if kind == "zeroed" for block in facts[1]]
    assert 2 * target in zeroed
    assert any(kind == "ended" and facts == ["first"] for kind, *facts in events)


def test_no_token_and_no_key_leaves(serve, folder, monkeypatch) -> None:
    """Token ids, the seed and fingerprints are replaced; with dump_content ids are as they are, and bytes are there."""
    hidden = dumped(running(serve), lambda served: overwrite(served, ("late", 10), ("beside", 6), ("l0",)))
    own = [(5 * n + 1) % 97 for n in range(14)]
    assert read(hidden).rows["late"]["tokens"][:14] != own
    with zipfile.ZipFile(hidden) as archive:
        text = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(("json", "jsonl"))).decode()
    assert "seed" not in text
    assert len(set(read(hidden).rows["late"]["tokens"][:14])) == len(set(own))


def test_a_row_knows_its_tokens_where_they_may_leave(serve, folder, monkeypatch) -> None:
    """With dump_content: ids as they are, and the bytes of the slot that was found."""
    from kvcanary.adapters.vllm import worker as attaching

    monkeypatch.setattr(
        attaching.CanaryConfig,
        "from_env",
        classmethod(lambda cls: cls(content="full", dump_dir=str(folder), dump_content=True)),
    )
    served = running(serve)
    path = dumped(served, lambda served: overwrite(served, ("late", 10), ("beside", 6), ("l0",)))
    assert read(path).rows["late"]["tokens"][:14] == [(5 * n + 1) % 97 for n in range(14)]
    with zipfile.ZipFile(path) as archive:
        [(name, words)] = load_arrays(archive.read("content.safetensors")).items()
    block, offset = served.place("late", 10)
    assert name == f"target.{block * 4 + offset}"
    half = served.caches["l1"][block, :, offset]
    assert np.array_equal(words[1], torch.cat((half[:, :8].flatten(), half[:, 8:].flatten())).view(torch.int32).numpy())


def test_log_mode_writes_one_file_an_incident_and_no_more_than_sixteen(serve, folder, monkeypatch) -> None:
    """A fault that is read in every step leaves one file; a flood leaves MOST_DUMPS."""
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = running(serve, num_blocks=24)
    overwrite(served, ("late", 10), ("beside", 6), ("l0",))
    go_on(served, 4)
    assert len(list(folder.iterdir())) == 1
    for position in reversed(range(18)):  # the first wrong entry of a row is told
        overwrite(served, ("beside", position), ("late", 1), ("l0",))
        served.step()
    assert len(list(folder.iterdir())) == MOST_DUMPS


def test_clean_serving_writes_nothing(serve, folder) -> None:
    """The clean twin: a whole run, and no file."""
    served = serve()
    load(served)
    served.run()
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_hides_no_finding(serve, folder) -> None:
    """The finding is raised all the same, without a file."""
    folder.parent.joinpath("dumps").write_text("no folder")
    path = dumped(running(serve), lambda served: overwrite(served, ("late", 10), ("beside", 6), ("l0",)))
    assert str(path) == "None"


def test_runner_v1_leaves_the_same(serve, folder) -> None:
    """Rows that move in the batch have numbers of the canary's own: the dump follows the request."""
    served = serve(settings={"runner": "v1"})
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    served.ask("b", [(3 * n) % 97 for n in range(17)] + [5, 6, 7], 40)
    go_on(served, 6)
    batch = served.runner.input_batch
    name, line = batch.req_ids[0], batch.block_table[0].block_table.gpu[0].clone()

    def flip(served: Served) -> None:
        served.caches["l1"].view(torch.int32)[int(line[4]), 1, 2, 8 + 3] ^= 1 << 9

    dump = read(dumped(served, flip, steps=1))
    facts = explain_watched(dump, 0)
    [marked] = [entry for entry in facts["row"] if entry["marked"]]
    assert (marked["position"], marked["block"], marked["offset"]) == (18, int(line[4]), 2)
    assert dump.manifest["environment"]["runner"] == "V1"
    assert f"granted to {name!r}" in " ".join(line["text"] for line in facts["story"])


def test_several_groups_are_told_apart(serve, folder) -> None:
    """The pool's name, the report and the dump say which group, its window, block, offset, layers and the writer."""
    served = serve(layers=("l0", "s0"), groups=(("l0",), ("s0",)), window=12)
    served.ask("a", [(3 * n) % 97 for n in range(20)], 30)
    go_on(served, 4)
    block, offset = served.place("a", 19, group=1)

    def flip(served: Served) -> None:
        served.caches["s0"].view(torch.int32)[block, 1, offset, 3] ^= 1

    dump = read(dumped(served, flip))
    [finding] = dump.findings
    assert finding["pool"] == "group 1 target"
    assert finding["evidence"][0] == f"group 1 with a window of 12, block {block}, offset {offset}; layer s0"
    assert finding["writer"] == "a"
    facts = explain_watched(dump, 0)
    assert (facts["now"]["group"], facts["now"]["block"], facts["now"]["offset"]) == (1, block, offset)


def test_bytes_that_are_right_again_are_told_so(serve, folder) -> None:
    """The device found them wrong; when the host reads them they are as they were written."""
    served = running(serve)
    block, offset = served.place("late", 10)
    cache = served.caches["l0"]
    execute = served.wrapper.execute_model

    def execute_model(output: Any) -> Any:
        right = cache[block, :, offset].clone()
        cache[block, :, offset] += 1
        result = execute(output)
        cache[block, :, offset] = right
        return result

    served.wrapper.execute_model = execute_model
    dump = read(dumped(served, lambda served: None, steps=1))
    assert RIGHT_AGAIN in dump.findings[0]["evidence"]
    assert "its bytes are those that were stored" in explain_watched(dump, 0)["answers"]


def test_steps_are_kept_within_bounds() -> None:
    """No more than were asked for, and nothing where none are."""
    for most in (0, 3):
        recent = RecentSteps(most)
        for step in range(5):
            recent.ran((step, ("decode", 0), ["a"], np.array([0]), 1), np.array([step]), 0)
        assert [step["step"] for step in recent.told()] == list(range(5))[5 - most :]


@pytest.mark.parametrize("most", [0, 3])
def test_what_happened_before_steps_that_repeat_the_last_is_kept_within_bounds(most: int) -> None:
    """A decode that goes on for ever, with a block for a row in every step: of the last steps alone."""
    recent = RecentSteps(most)
    recent.ran((0, ("decode", 0), ["a"], np.array([0]), 1), np.array([1]), 0)
    cached = SimpleNamespace(req_ids=["a"], num_computed_tokens=[1])
    for step in range(1, 40):
        cached.new_block_ids = [([step],)]
        output = SimpleNamespace(finished_req_ids=(), preempted_req_ids=(), scheduled_new_reqs=[])
        output.scheduled_cached_reqs = cached
        recent.scheduled(output)
        recent.goes_on(step)
    recent.ratios = [1]
    assert len(recent._own) <= most
    assert [step["events"][0][2] for step in recent.told()] == [[[step]] for step in range(40)][40 - most :]


def test_a_row_that_another_request_has_taken_is_not_shown_as_its_own() -> None:
    """Its number is nobody's any more."""
    recent = RecentSteps(8)
    for step, name in enumerate(("a", "a", "b")):
        recent.ran((step, ("decode", 0), [name], np.array([3]), 1), np.zeros(4, np.int64), 0)
    assert (recent.number_of("a"), recent.number_of("b")) == (None, 3)


def test_the_json_is_what_the_text_says(serve, folder) -> None:
    """`--json` of explain and of why-slot."""
    path = incident(serve)
    facts = json.loads(CliRunner().invoke(main, ["explain", str(path), "--json"]).stdout)
    assert facts["answers"] == explain_watched(read(path), 0)["answers"]
    slot = str(facts["finding"]["slot"])
    told = json.loads(CliRunner().invoke(main, ["why-slot", str(path), slot, "--json"]).stdout)
    assert told["same"][0]["request"] == "beside"
    far = CliRunner().invoke(main, ["why-slot", str(path), "0"])
    assert "not read" in far.stdout


def test_a_dense_cache_leaves_its_findings(models, tmp_path) -> None:
    """Caches of transformers have no slots: the file has the finding, the certificate and the release."""
    from kvcanary import CanaryConfig, KVCorruptionError
    from kvcanary.adapters.transformers import attach

    model = models("Llama")
    forward, calls = model.forward, []

    def harmed(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs.get("cache", kwargs.get("past_key_values")))
        if len(calls) == 4:
            calls[-1].layers[1].values[0, 0, 4, 3] += 1
        return forward(*args, **kwargs)

    model.forward = harmed
    with (
        attach(model, CanaryConfig(content="full", dump_dir=str(tmp_path))),
        pytest.raises(KVCorruptionError) as raised,
    ):
        model.generate(torch.tensor([[5, 6, 7, 8, 9, 10]]), max_new_tokens=8, do_sample=False)
    assert raised.value.report is not None
    dump = read(Path(str(raised.value.report.dump)))
    assert dump.manifest["environment"]["engine"] == "transformers"
    assert dump.manifest["certificate"]["forwards"] > 0
    shown = CliRunner().invoke(main, ["explain", str(dump.path)])
    assert shown.stdout.startswith(
        "content changed (R9): cache, row 0, position 4, layer 1, V, head 0, dim 3, byte 0\n"
    )
    assert CliRunner().invoke(main, ["why-slot", str(dump.path), "4"]).exit_code == 2
