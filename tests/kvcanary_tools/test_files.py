"""What commands write: refused before they work where it cannot be written, whole or not there, and JSON on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcanary.faults.target import Setup
from kvcanary_tools.campaign.outcome import account as accounts
from kvcanary_tools.campaign.outcome.account import Account
from kvcanary_tools.campaign.runs import Result
from kvcanary_tools.campaign.traffic import Run
from kvcanary_tools.console import UsageFailure
from kvcanary_tools.files import JsonFile, make_folder, write_text


@pytest.mark.parametrize(
    "arguments",
    [
        ("inject", "bits.flip", "--json"),
        ("inject", "bits.flip", "--junit"),
        ("soak", "--json"),
        ("generate", "--prompt", "x", "--kv-canary", "--dump"),
        ("report", "some.kvdump", "-o"),
        ("timeline", "some.kvdump", "-o"),
    ],
    ids=" ".join,
)
def test_a_file_in_no_folder_is_refused_at_once(kvcanary, tmp_path: Path, arguments) -> None:
    """Before anything is run, or read: the sentence names the file, and its folder."""
    refused = kvcanary(*arguments, str(tmp_path / "no" / "file"))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"{tmp_path}/no/file cannot be written: {tmp_path}/no is no folder" in refused.stderr


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    """What cannot be put there leaves what was there, and nothing beside it; and the sentence names the file."""
    path, folder = tmp_path / "told.json", tmp_path / "folder"
    folder.mkdir()
    write_text(path, "one")
    with pytest.raises(UsageFailure, match=r"folder cannot be written: Is a directory"):
        write_text(folder, "two")
    assert path.read_text(encoding="utf-8") == "one"
    assert {file.name for file in tmp_path.iterdir()} == {"told.json", "folder"}


def test_characters_that_cannot_be_encoded_are_written_as_escapes(tmp_path: Path) -> None:
    """Half of a pair, as an argument that is no text has it: JSON that is read again says the same."""
    path = tmp_path / "told.json"
    JsonFile(path).write({"prompt": "two \udc80"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"prompt": "two \udc80"}
    assert [file.name for file in tmp_path.iterdir()] == ["told.json"]


def test_a_row_of_a_table_is_a_line(tmp_path: Path) -> None:
    """A record of thousands of rows stays small, a change of one is one of one line, and so is a list of values."""
    path = tmp_path / "told.json"
    told = {"meta": {"seed": 1, "of": {"two": [2, 3]}}, "rows": [{"fault": "\n", "runs": {"all": 1}}, {"fault": "ö"}]}
    JsonFile(path).write({**told, "none": [], "told": True})
    assert json.loads(path.read_text(encoding="utf-8")) == {**told, "none": [], "told": True}
    assert '"two": [2, 3]\n' in path.read_text(encoding="utf-8")
    assert '  {"fault":"\\n","runs":{"all":1}},\n  {"fault":"ö"}\n' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments", [("inject", "bits.flip", "--dumps"), ("generate", "--prompt", "x", "--kv-canary-dump")], ids=" ".join
)
def test_a_folder_that_cannot_be_made_is_refused_at_once(kvcanary, tmp_path: Path, arguments, monkeypatch) -> None:
    """What a finding leaves behind would be lost: the sentence names the folder, and what stands in its way."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    refused = kvcanary(*arguments, str(tmp_path / "file" / "dumps"))
    assert (refused.exit_code, refused.stdout) == (2, "")
    words = f"{tmp_path}/file/dumps cannot be written into: {tmp_path}/file is no folder"
    assert refused.stderr == f"kvcanary: {words}\n\nhint: name a folder of yours\n"
    monkeypatch.setattr("os.access", lambda *_: False)
    refused = kvcanary(*arguments, str(tmp_path / "dumps"))
    assert f"{tmp_path}/dumps cannot be written into: {tmp_path} is not yours to write" in refused.stderr
    assert not (tmp_path / "dumps").exists()


def test_a_folder_that_is_made_is_told_where_it_cannot_be(tmp_path: Path) -> None:
    """Not every folder that may be written into takes another."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageFailure, match=r"file/dumps cannot be made: Not a directory"):
        make_folder(str(tmp_path / "file" / "dumps"))


@pytest.mark.parametrize(("name", "out", "err"), [("-", '{\n "a": "é"\n}\n', "told\n"), (None, "told\n", "")])
def test_json_on_stdout_stands_alone(capsys, name: str | None, out: str, err: str) -> None:
    """With `-` people are told on stderr; without a file there is no JSON."""
    file = JsonFile(None if name is None else Path(name))
    file.say("told")
    file.write({"a": "é"})
    assert capsys.readouterr() == (out, err)


def test_a_campaign_is_kept_while_it_runs(tmp_path: Path, monkeypatch) -> None:
    """Now and then what has come is written, and says that it is not all; stdout gets nothing before the end."""
    now = 0.0
    monkeypatch.setattr(accounts, "monotonic", lambda: now)
    account = Account(JsonFile(tmp_path / "told.json"), {"config": "quick"}, kept=now)
    result = Result(Run("bits.flip", "a", Setup(), 1), struck=True, found=True)
    seen = []
    for now in (1.0, 31.0, 32.0, 62.0):  # noqa: B007
        account.add(result)
        reported = json.loads(account.file.path.read_text()) if account.file.path.exists() else None
        seen.append(reported and (reported["rows"][0]["runs"], reported["meta"]["complete"]))
    assert seen == [None, (2, False), (2, False), (4, False)]


def test_a_campaign_on_stdout_is_told_at_its_end(capsys) -> None:
    """Half a minute or not: a reader of stdout wants one object."""
    account = Account(JsonFile(Path("-")), {"config": "quick"}, kept=-1e9)
    account.add(Result(Run("bits.flip", "a", Setup(), 1), struck=True, found=True))
    assert capsys.readouterr().out == ""
    account.is_complete = True
    account.keep()
    assert json.loads(capsys.readouterr().out)["meta"]["complete"]
