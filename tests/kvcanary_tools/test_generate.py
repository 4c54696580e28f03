"""`kvcanary generate` on the embedded model: text, JSON, several prompts, findings, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from kvcanary_tools.cli import EXAMPLE
from spec_engine import Engine
from spec_engine.models.embedded import EMBEDDED_MODEL

PROMPT = "def add(a, b):\n    return a"
SHORT = ("--max-new-tokens", "12", "--max-total-tokens", "1024")

CERTIFICATE_KEYS = {
    "mode", "content", "forwards", "slots_checked", "bytes_checked", "live_bytes", "max_unread_steps",
    "freed_unread_bytes", "classes", "unchecked", "findings",
}  # fmt: skip


@pytest.fixture
def flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """After six tokens one bit of layer 3's V of a committed slot is not what it was."""
    step = Engine.step
    done = []

    def step_with_fault(engine: Engine):
        if not done and engine.running and len(engine.running[0].output_ids) >= 6:
            slot = int(engine.request_table.table[engine.running[0].row, 2])
            engine.pools["target"].kv[3, slot, 1].view(torch.uint8)[0, 5] ^= 1
            done.append(slot)
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_with_fault)


def test_generate_without_a_prompt_shows_an_example(kvcanary) -> None:
    """Wrong usage, with a line to copy that works."""
    result = kvcanary("generate")
    assert result.exit_code == 2
    assert result.stderr.startswith("kvcanary: generate needs a prompt: --prompt TEXT or --prompt-file FILE\n\n")
    assert result.stderr.endswith(f"hint: {EXAMPLE}\n")


def test_generate_writes_text_to_stdout_only(kvcanary) -> None:
    """stdout holds the completion, stderr the summary."""
    result = kvcanary("generate", "--prompt", PROMPT, *SHORT)
    expected = json.loads(kvcanary("generate", "--prompt", PROMPT, *SHORT, "--json").stdout)["outputs"][0]["text"]
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected + "\n"
    assert "12 tokens, accepted length" in result.stderr
    assert "tokens/s" in result.stderr


def test_generate_json_has_the_published_keys(kvcanary) -> None:
    """Without a canary its place is null; token ids and text belong together."""
    result = kvcanary("generate", "--prompt", PROMPT, *SHORT, "--json")
    assert result.exit_code == 0, result.stderr
    run = json.loads(result.stdout)
    assert {"outputs", "accepted_length", "tokens_per_second", "canary"} <= set(run)
    [output] = run["outputs"]
    assert {"text", "token_ids", "finish_reason"} <= set(output)
    assert len(output["token_ids"]) == 12
    assert output["finish_reason"] == "length"
    assert run["accepted_length"] >= 1.0
    assert run["tokens_per_second"] > 0
    assert run["canary"] is None


def test_generate_says_what_it_allocated(kvcanary) -> None:
    """A line at the start names row width, pools, table and canary; stdout has no word of it."""
    result = kvcanary("generate", "--prompt", PROMPT, *SHORT, "--kv-canary", "--context-length", "100")
    assert result.stderr.startswith("8 rows of 243 columns (context 100, reserve 128), 64 pages of 16 slots: ")
    line = result.stderr.partition("\n")[0]
    assert [part.split()[-1] for part in line.split(": ")[1].split(", ")] == ["MB", "kB", "kB", "kB"]
    assert [part.rsplit(" ", 2)[0] for part in line.split(": ")[1].split(", ")] == [
        "target pool",
        "draft pool",
        "table",
        "canary",
    ]
    assert "rows of" not in result.stdout


def test_generate_leaves_a_dump_where_it_is_told(kvcanary, tmp_path: Path) -> None:
    """What was recorded of the whole run, which the dump commands read; without a recorder, or a folder, a sentence."""
    path = tmp_path / "run.kvdump"
    assert kvcanary("generate", "--prompt", PROMPT, *SHORT, "--kv-canary", "--dump", str(path)).exit_code == 0
    reported = json.loads(kvcanary("inspect", str(path), "--json").stdout)
    assert (reported["first_step"], reported["findings"]) == (0, [])
    for arguments, words in (
        (["--dump", str(path)], "--dump needs a canary that records, got none"),
        (["--kv-canary", "--dump", str(tmp_path / "no" / "run.kvdump")], "run.kvdump cannot be written: "),
    ):
        refused = kvcanary("generate", "--prompt", PROMPT, *SHORT, *arguments)
        assert refused.exit_code == 2
        assert words in refused.stderr


def test_generate_with_adaptive_steps_says_what_it_chose(kvcanary) -> None:
    """Numbers of steps and how often, in JSON and in the summary; without the option its place is null."""
    chains = ("generate", "--prompt", PROMPT, *SHORT, "--topk", "1", "--adaptive-steps", "--num-steps", "3")
    adaptive = json.loads(kvcanary(*chains, "--json").stdout)["adaptive"]
    assert adaptive["switches"] == 0
    [(steps, count)] = adaptive["batches"].items()
    assert steps == "3"
    assert count >= 3
    assert adaptive["ema"] > 0
    assert f"drafts by step: 3 in {count} steps, 0 changes" in kvcanary(*chains).stderr
    assert json.loads(kvcanary(*chains[:-3], "--json").stdout)["adaptive"] is None


def test_generate_drafts_with_a_small_model(kvcanary) -> None:
    """The embedded model as its own standalone draft; without a folder the sentence says what is missing."""
    chains = ("generate", "--prompt", PROMPT, *SHORT, "--topk", "1", "--num-steps", "3", "--draft", "standalone")
    run = json.loads(kvcanary(*chains, "--draft-model", str(EMBEDDED_MODEL), "--kv-canary", "--json").stdout)
    assert run["canary"]["findings"] == []
    assert run["accepted_length"] > 3
    refused = kvcanary(*chains)
    assert refused.exit_code == 2
    assert "draft 'standalone' needs draft_model, got none" in refused.stderr


def test_generate_json_is_alone_on_stdout(kvcanary_process) -> None:
    """As a user pipes it: stdout parses as it is, also when KVCANARY_JSON asked for it."""
    child = kvcanary_process("generate", "--prompt", PROMPT, *SHORT, "--kv-canary", KVCANARY_JSON="1")
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout)["canary"]["mode"] == "raise"


@pytest.mark.parametrize("content", ["write", "rolling", "full"])
def test_generate_with_canary_gives_a_clean_certificate(kvcanary, content: str) -> None:
    """The canary changes no token, finds nothing, and says what it checked."""
    plain = json.loads(kvcanary("generate", "--prompt", PROMPT, *SHORT, "--json").stdout)
    result = kvcanary("generate", "--prompt", PROMPT, *SHORT, "--kv-canary", "--kv-canary-content", content, "--json")
    assert result.exit_code == 0, result.stderr
    run = json.loads(result.stdout)
    assert run["outputs"] == plain["outputs"]
    assert set(run["canary"]) >= CERTIFICATE_KEYS
    assert (run["canary"]["mode"], run["canary"]["content"]) == ("raise", content)
    assert run["canary"]["findings"] == []
    assert run["canary"]["slots_checked"] > 0
    assert (run["canary"]["bytes_checked"] > 0) is (content != "write")


def test_generate_summary_ends_with_the_canary(kvcanary) -> None:
    """In text mode the certificate is one line on stderr."""
    result = kvcanary("generate", "--prompt", PROMPT, *SHORT, "--kv-canary")
    assert result.exit_code == 0, result.stderr
    assert "canary (raise, rolling): " in result.stderr
    assert result.stderr.rstrip().endswith("nothing found")


def test_generate_completes_several_prompts_in_order(kvcanary, tmp_path: Path) -> None:
    """Each --prompt, then each file, whole, is one output; more files may follow the first, as *.py expands."""
    files = [tmp_path / name for name in ("a.py", "b.py")]
    for file in files:
        file.write_text(f"# {file.name}\ndef one():\n    return 1\n\n\ndef two():\n")
    prompts = [PROMPT, *(file.read_text() for file in files)]
    result = kvcanary("generate", "--prompt", PROMPT, "--prompt-file", str(files[0]), str(files[1]), *SHORT, "--json")
    assert result.exit_code == 0, result.stderr
    together = json.loads(result.stdout)["outputs"]
    alone = [kvcanary("generate", "--prompt", prompt, *SHORT, "--json").stdout for prompt in prompts]
    assert [output["token_ids"] for output in together] == [json.loads(a)["outputs"][0]["token_ids"] for a in alone]


def test_generate_shows_several_prompts_under_headings(kvcanary) -> None:
    """Texts of several prompts are told apart by a heading with the prompt's first line."""
    result = kvcanary("generate", "--prompt", PROMPT, "--prompt", "import os\n", *SHORT)
    assert result.exit_code == 0, result.stderr
    headings = [line for line in result.stdout.splitlines() if line.startswith("=== ")]
    assert sorted(headings) == ["=== req-0 (length): def add(a, b):", "=== req-1 (length): import os"]


def test_generate_json_lists_log_probabilities(kvcanary) -> None:
    """With --logprobs each token has its own and the likeliest beside it; without it the key is not there."""
    arguments = ["--prompt", PROMPT, *SHORT, "--json"]
    [output] = json.loads(kvcanary("generate", *arguments, "--logprobs", "2").stdout)["outputs"]
    assert [entry["token_id"] for entry in output["logprobs"]] == output["token_ids"]
    for entry in output["logprobs"]:
        assert entry["top"][0] == [entry["token_id"], entry["logprob"]]
        assert len(entry["top"]) == 2
    [plain] = json.loads(kvcanary("generate", *arguments).stdout)["outputs"]
    assert plain.keys() == {"text", "token_ids", "finish_reason"}


def test_generate_cuts_at_a_stop_string(kvcanary) -> None:
    """The text ends in front of it, whatever was accepted behind it."""
    [plain] = json.loads(kvcanary("generate", "--prompt", PROMPT, *SHORT, "--json").stdout)["outputs"]
    stop = plain["text"][5:8]
    result = kvcanary("generate", "--prompt", PROMPT, *SHORT, "--stop", stop, "--json")
    [output] = json.loads(result.stdout)["outputs"]
    assert (output["text"], output["finish_reason"]) == (plain["text"][: plain["text"].index(stop)], "stop")


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_generate_goes_on_after_a_refused_prompt(kvcanary, as_json: bool) -> None:
    """The others are completed; each refused one has a sentence on stderr, and the exit code is 2."""
    arguments = [part for prompt in ("", PROMPT, "x" * 5000) for part in ("--prompt", prompt)]
    result = kvcanary("generate", *arguments, *SHORT, *(["--json"] if as_json else []))
    assert result.exit_code == 2, result.stderr
    assert "kvcanary: prompt 1 of 3 is refused: a prompt needs at least one token, got an empty one\n" in result.stderr
    assert "kvcanary: prompt 3 of 3 is refused: prompt of " in result.stderr
    assert "\n\nhint: pass some text\nhint: " in result.stderr
    alone = json.loads(kvcanary("generate", "--prompt", PROMPT, *SHORT, "--json").stdout)["outputs"][0]
    if as_json:
        empty, good, long = json.loads(result.stdout)["outputs"]
        assert good == alone
        assert (empty["finish_reason"], empty["error"]) == (
            "refused",
            "a prompt needs at least one token, got an empty one",
        )
        assert (long["finish_reason"], long["token_ids"]) == ("refused", [])
    else:
        assert result.stdout == f"=== req-0 (length): def add(a, b):\n{alone['text']}\n"


def test_generate_reads_stdin(kvcanary) -> None:
    """`--prompt-file -` is the prompt that is piped in."""
    piped = kvcanary("generate", "--prompt-file", "-", *SHORT, "--json", input=PROMPT)
    given = kvcanary("generate", "--prompt", PROMPT, *SHORT, "--json")
    assert json.loads(piped.stdout)["outputs"] == json.loads(given.stdout)["outputs"]


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
@pytest.mark.usefixtures("flipped_bit")
def test_generate_stops_at_a_finding(kvcanary, as_json: bool) -> None:
    """One flipped bit: exit code 1, the finding with its place, and no token after it."""
    arguments = ["--prompt", PROMPT, *SHORT, "--kv-canary", "--kv-canary-content", "full"]
    result = kvcanary("generate", *arguments, *(["--json"] if as_json else []))
    assert result.exit_code == 1, result.stderr
    if as_json:
        run = json.loads(result.stdout)
        assert run["outputs"][0]["finish_reason"] == "kv_corruption"
        assert 6 <= len(run["outputs"][0]["token_ids"]) < 12
        [finding] = run["canary"]["findings"]
        assert (finding["code"], finding["pool"], finding["layer"]) == ("R9", "target", 3)
    else:
        assert "R9" in result.stderr
        assert "layer 3" in result.stderr
        assert "1 finding" in result.stderr


@pytest.mark.usefixtures("flipped_bit")
def test_generate_goes_on_in_log_mode(kvcanary) -> None:
    """`log` completes everything, and still ends with 1."""
    arguments = ["--prompt", PROMPT, *SHORT, "--kv-canary", "log", "--kv-canary-content", "full", "--json"]
    result = kvcanary("generate", *arguments)
    assert result.exit_code == 1, result.stderr
    assert "content changed" in result.stderr
    run = json.loads(result.stdout)
    assert len(run["outputs"][0]["token_ids"]) == 12
    assert {finding["code"] for finding in run["canary"]["findings"]} == {"R9"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt-file", "/no/such/file"], "cannot read the prompt file '/no/such/file': No such file or directory"),
        (["stray"], "generate takes options, got the bare word 'stray'"),
        (["--prompt", ""], "a prompt needs at least one token, got an empty one"),
        (["--prompt", PROMPT, "--model", "/no/such/folder"], "/no/such/folder"),
        (["--prompt", PROMPT, "--max-new-tokens", "100000"], "exceeds the context length"),
        (["--prompt", PROMPT, "--max-total-tokens", "32", "--page-size", "16"], "the pool has 2"),
        (["--prompt", PROMPT, "--device", "cuda:99"], "cuda:99"),
        (["--prompt", PROMPT, "--prompt", "", "--stop-token-id", "99999"], "stop_token_ids names token 99999, the "),
    ],
)
def test_generate_refuses_with_a_sentence(kvcanary, arguments: list[str], sentence: str) -> None:
    """What cannot be done is said in one sentence with a hint; exit code 2."""
    result = kvcanary("generate", *arguments)
    assert result.exit_code == 2, result.stderr
    assert sentence in result.stderr
    assert "\n\nhint: " in result.stderr
    assert "Traceback" not in result.stderr


def test_generate_refuses_a_file_that_is_no_text(kvcanary, tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are no prompt."""
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    result = kvcanary("generate", "--prompt-file", str(tmp_path / "x.bin"))
    assert result.exit_code == 2
    assert "it is not UTF-8 text" in result.stderr


PRESSED = ("--max-total-tokens", "448", "--new-token-ratio", "0", "--host-pages", "64")


@pytest.mark.parametrize("canary", [(), ("--kv-canary",)], ids=["off", "raise"])
def test_generate_retracts_and_restores(kvcanary, canary: tuple[str, ...]) -> None:
    """Options for a pool that cannot hold everybody: texts as of one that can, and the JSON says what it took."""
    prompts = [part for text in ("def f(x):", "class A:", "import os") for part in ("--prompt", text)]
    wide = kvcanary("generate", *prompts, "--max-new-tokens", "40", "--json")
    tight = kvcanary("generate", *prompts, "--max-new-tokens", "40", *PRESSED, *canary, "--json")
    assert (wide.exit_code, tight.exit_code) == (0, 0)
    wide_run, tight_run = json.loads(wide.stdout), json.loads(tight.stdout)
    assert (wide_run["num_retractions"], wide_run["restored_tokens"]) == (0, 0)
    assert tight_run["num_retractions"] > 0
    assert tight_run["restored_tokens"] > 0
    assert tight_run["outputs"] == wide_run["outputs"]


def test_generate_takes_pressure_from_the_environment(kvcanary) -> None:
    """SPEC_ENGINE_NEW_TOKEN_RATIO and SPEC_ENGINE_HOST_PAGES stand for the options; the summary has both counts."""
    prompts = [part for text in ("def f(x):", "class A:", "import os") for part in ("--prompt", text)]
    settings = {
        "SPEC_ENGINE_NEW_TOKEN_RATIO": "0",
        "SPEC_ENGINE_HOST_PAGES": "64",
        "SPEC_ENGINE_MAX_TOTAL_TOKENS": "448",
    }
    result = kvcanary("generate", *prompts, "--max-new-tokens", "40", env=settings)
    assert result.exit_code == 0
    assert re.search(r"[1-9]\d* retractions? for want of pages, [1-9]\d* tokens restored from the host", result.stderr)


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("serve",)], ids=["generate", "serve"])
@pytest.mark.parametrize(
    ("option", "said", "hint"),
    [
        (("--new-token-ratio", "1.5"), "new_token_ratio must lie in [0, 1], got 1.5", "0 admits by prompts alone"),
        (("--new-token-ratio", "nan"), "new_token_ratio must lie in [0, 1], got nan", "0 admits by prompts alone"),
        (("--host-pages", "-2"), "host_pages must be a whole number, 0 or more, got -2", "0 keeps nothing on the host"),
    ],
)
def test_wrong_pressure_is_wrong_usage(kvcanary, command, option, said: str, hint: str) -> None:
    """Value, rule and remedy, before a model is loaded."""
    result = kvcanary(*command, *option)
    assert result.exit_code == 2
    assert f"kvcanary: {said}" in result.stderr
    assert f"hint: {hint}" in result.stderr or hint in result.stderr.partition("hint: ")[2]


def test_host_pages_that_nobody_can_use_are_told_of(kvcanary) -> None:
    """Where nobody is retracted they stay empty; with a lower ratio nothing is said."""
    arguments = ("generate", "--prompt", PROMPT, *SHORT, "--host-pages", "8")
    assert "host_pages 8 will stay empty: with new_token_ratio 1 nobody is" in kvcanary(*arguments).stderr
    assert "stay empty" not in kvcanary(*arguments, "--new-token-ratio", "0.5").stderr
