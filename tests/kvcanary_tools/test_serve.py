"""`kvcanary serve` and `kvcanary top`, as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from kvcanary.ranks import RanksDisagreeError
from kvcanary_tools import console
from kvcanary_tools.commands.serve import _tell
from kvcanary_tools.watching import draw, look
from spec_engine.server.options import ServerOptions

ARGUMENTS = ["--port", "0", "--max-total-tokens", "2048", "--kv-canary", "log", "--api-key", "k", "--allow-faults"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server in a child process, with the lines that it printed."""
    command = [sys.executable, "-m", "kvcanary_tools", "serve", *ARGUMENTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [child.stdout.readline() for _ in range(4)]
    yield child, lines
    child.kill()
    child.communicate()


def url_of(served) -> str:
    return re.search(r"http://127\.0\.0\.1:\d+", served[1][1])[0]


def wait_until_it_answers(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            time.sleep(0.05)


def test_it_says_how_to_reach_it(served) -> None:
    """Model, URL, debug pages and a curl line, whose body is answered."""
    model, url, debug, line = served[1]
    assert model == "model   embedded, canary log\n"
    assert url == f"url     {url_of(served)}/v1\n"
    assert "/debug/kvcanary" in debug
    wait_until_it_answers(url_of(served))
    body = line.rstrip().partition(" -d '")[2].removesuffix("'")
    headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url_of(served)}/v1/completions", body.encode(), headers)
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["choices"][0]["text"].startswith("    ")


def test_what_is_loaded_is_not_looked_through_again(kvcanary, monkeypatch) -> None:
    """A collection of all that a server has loaded stops a step for many times its length: none comes later."""
    order: list[str] = []

    def serve(server, listening) -> None:
        listening.close()
        order.append("served")

    canary = SimpleNamespace(mode="off")
    engine = SimpleNamespace(config=SimpleNamespace(canary=canary))
    server = SimpleNamespace(options=ServerOptions(), model_name="m", worker=SimpleNamespace(engine=engine))
    monkeypatch.setattr("spec_engine.Engine", lambda config: order.append("loaded"))
    monkeypatch.setattr("spec_engine.server.serving.Server", lambda *arguments: server)
    monkeypatch.setattr("spec_engine.server.serving.serve", serve)
    monkeypatch.setattr("gc.freeze", lambda: order.append("frozen"))
    assert kvcanary("serve", "--port", "0").exit_code == 0
    assert order == ["loaded", "frozen", "served"]


def test_a_busy_port_is_one_sentence(served, kvcanary) -> None:
    """Before anything is loaded; exit code 2."""
    port = url_of(served).rpartition(":")[2]
    result = kvcanary("serve", "--port", port)
    assert result.exit_code == 2
    assert result.stderr == (
        f"kvcanary: cannot listen on 127.0.0.1:{port}: Address already in use\n\n"
        "hint: choose another --host or --port; port 0 is any free one\n"
    )


def test_top_shows_what_there_is(served, kvcanary) -> None:
    """Speed, pages and, with the key, requests and findings; without it the rest."""
    url = url_of(served)
    wait_until_it_answers(url)
    result = kvcanary("top", url, "--once", "--api-key", "k")
    assert result.exit_code == 0
    for words in ("canary log rolling", "no findings", "accepted length", "─ pages ─", "checks active."):
        assert words in result.stdout
    for empty in ("─ requests ─", "─ findings", "incident"):
        assert empty not in result.stdout
    result = kvcanary("top", url, "--once")
    assert result.exit_code == 0
    assert "slots checked when they were read." in result.stdout
    assert "checks active." not in result.stdout


def test_top_draws_findings_and_rates(served) -> None:
    """Two looks make rates; findings are listed, and counted where they may not be seen one by one."""
    wait_until_it_answers(url_of(served))
    now = look(url_of(served), "k")
    found = {"code": "R9", "name": "content changed", "pool": "target", "slot": 7, "page": 0, "layer": 3, "step": 5}
    found |= {"incident": 1}
    now.state["findings"].append(found | {"site": ["verify", 0], "action": "logged; the engine goes on"})
    now.state["requests"].append(
        {"request_id": "req-9", "state": "running", "prompt_len": 4, "output_len": 5, "max_new_tokens": 9, "pages": [1]}
    )
    now.metrics["kvcanary_findings_total"] = {(("code", "R9"), ("site", "verify")): 3.0}
    before = look(url_of(served), None)
    screen = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    screen.print(draw(now, before), draw(before, None))
    text = screen.export_text()
    screen.file.close()
    for words in ("3 findings of 1 incident", "─ 1 incident ─", "slot 7 (page 0), layer 3", "req-9", "step 5, verify"):
        assert words in text


def test_inject_reaches_a_running_server(served, kvcanary) -> None:
    """A fault in the state waits for a request, and is then found; what is refused is a sentence."""
    url = url_of(served)
    wait_until_it_answers(url)
    result = kvcanary("inject", "bits.flip", "--url", url, "--api-key", "k")
    assert (result.exit_code, result.stdout) == (0, f"bits.flip strikes as soon as a request runs at {url}\n")
    body = {"model": "embedded", "prompt": "def f(x):\n", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)).close()
    assert look(url).num_findings > 0
    for arguments, words in (
        (["no.such", "--url", url, "--api-key", "k"], "fault must be one of the catalogue"),
        (["bits.flip", "--url", url], "the debug pages need the API key"),
        (["bits.flip", "--url", "http://127.0.0.1:9"], "nobody takes faults at http://127.0.0.1:9/debug"),
        (["--url", url], "--url takes the name of one fault, got 0"),
        (
            ["bits.flip", "--url", url, "--runs", "3"],
            "--url strikes once, in a running server, --runs is for campaigns",
        ),
    ):
        refused = kvcanary("inject", *arguments)
        assert refused.exit_code == 2
        assert words in refused.stderr


def test_dump_commands_take_a_running_server(served, kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a dump is expected a URL is what the server has recorded by now; its key comes from the environment."""
    url = url_of(served)
    wait_until_it_answers(url)
    refused = kvcanary("inspect", url)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "gives no dump: the debug pages need the API key" in refused.stderr
    monkeypatch.setenv("KVCANARY_API_KEY", "k")
    shown = kvcanary("inspect", url).stdout
    assert shown.startswith(f"{url}: version ")
    assert "because of a command, steps 0 to" in shown
    same = kvcanary("diff", url, url)
    assert (same.exit_code, same.stdout) == (0, "the runs are the same, event by event\n")
    nobody = kvcanary("diff", url, "http://127.0.0.1:9")
    assert nobody.exit_code == 2
    assert "nobody gives a dump at http://127.0.0.1:9/debug/kvcanary/dump" in nobody.stderr


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "a server's URL is http:// and its host, got '127.0.0.1:8000'"),
        ("http://[::1", "a server's URL is http:// and its host, got 'http://[::1'"),
        ("http://", "a server's URL is http:// and its host, got 'http://'"),
        ("http://a/\u00e9", "a server's URL is http:// and its host, got 'http://a/\u00e9'"),
        ("http://127.0.0.1:9", "nobody answers at http://127.0.0.1:9/metrics"),
    ],
)
def test_top_refuses_what_is_no_server(kvcanary, url: str, words: str) -> None:
    """One sentence and a hint, exit code 2."""
    result = kvcanary("top", url, "--once")
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize("arguments", [("inject", "bits.flip", "--url", "foo"), ("explain", "http://[::1")])
def test_what_is_no_url_is_one_sentence(kvcanary, arguments: tuple[str, ...]) -> None:
    """Whoever asks a server."""
    result = kvcanary(*arguments)
    assert result.exit_code == 2
    assert f"a server's URL is http:// and its host, got '{arguments[-1]}'" in result.stderr


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"no HTTP\r\n\r\n"])
def test_a_server_of_somebody_else_is_one_sentence(kvcanary, answer: bytes) -> None:
    """It answers, but not as ours does; or not in HTTP at all."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        threading.Thread(target=_answer_once, args=(listening, answer), daemon=True).start()
        result = kvcanary("inject", "bits.flip", "--url", url)
    assert result.exit_code == 2
    assert f"nobody takes faults at {url}/debug/kvcanary/faults" in result.stderr


def _answer_once(listening: socket.socket, answer: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


def test_a_signal_ends_it_cleanly(served) -> None:
    """SIGTERM: it says that it has stopped, and the exit code is 0."""
    child, _ = served
    wait_until_it_answers(url_of(served))
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0
    assert "kvcanary: stopped" in child.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:0"),
        (["--allow-faults", "--host", "0.0.0.0", "--api-key", "k"], "allow_faults needs a loopback address"),
        (["--debug"], "the debug pages need an api_key"),
    ],
)
def test_what_cannot_be_served_is_refused(kvcanary, arguments: list[str], words: str) -> None:
    """Exit code 2 and a sentence."""
    result = kvcanary("serve", "--port", "0", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_what_stopped_the_engine_decides_the_exit_code(capsys) -> None:
    """70 with the report for a finding, 70 for a broken rule, 3 for a defect of our own."""
    from kvcanary import CanaryConfig, KVCorruptionError
    from kvcanary.invariants import PageLeakError
    from spec_engine import Engine, EngineConfig, SamplingParams

    engine = Engine(EngineConfig(max_total_tokens=1024, canary=CanaryConfig(mode="raise", content="full")))
    engine.submit("def f(x):\n", SamplingParams(max_new_tokens=32))
    engine.step()
    slot = int(engine.request_table.table[engine.running[0].row, 1])
    engine.pools["target"].kv[2, slot, 0].view(torch.uint8)[0, 3] ^= 1
    with pytest.raises(KVCorruptionError) as found:
        engine.step()
    assert _tell(None) == console.EXIT_CLEAN
    assert _tell(found.value) == 70
    assert "content changed (R9): target pool" in capsys.readouterr().err
    assert _tell(PageLeakError("3 pages are gone")) == 70
    assert _tell(RanksDisagreeError("they differ", step=3)) == 70
    with pytest.raises(ZeroDivisionError):
        _tell(ZeroDivisionError())


def test_mode_raise_leaves_a_dump_that_the_report_names(tmp_path, kvcanary) -> None:
    """A fault in the running server stops it: the report on stderr, a dump in the default folder, exit code 70."""
    arguments = ["--port", "0", "--max-total-tokens", "2048", "--api-key", "k", "--allow-faults"]
    settings = ["--kv-canary", "raise", "--kv-canary-content", "full"]
    command = [sys.executable, "-m", "kvcanary_tools", "serve", *arguments, *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, **streams) as child:
        try:
            child.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", child.stdout.readline())[0]
            wait_until_it_answers(url)
            assert kvcanary("inject", "bits.flip", "--url", url, "--api-key", "k").exit_code == 0
            body = {"model": "embedded", "prompt": "def f(x):\n", "max_tokens": 64, "temperature": 0}
            headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
            with contextlib.suppress(OSError):  # the answer may not come any more
                urllib.request.urlopen(request).close()
            report = child.communicate(timeout=60)[1]
        finally:
            child.kill()
    assert child.returncode == 70
    [path] = re.findall(r"^  dump +(kvcanary-dumps/\S+\.kvdump)$", report, re.M)
    reported = kvcanary("explain", str(tmp_path / path))
    assert reported.exit_code == 1
    assert "content changed (R9)" in reported.stdout


def test_binding_finds_a_free_port() -> None:
    """Port 0 is any, and the URL has the one that it became."""
    from spec_engine.server.options import ServerOptions
    from spec_engine.server.serving import bind, url_of

    with bind(ServerOptions(port=0)) as listening:
        assert isinstance(listening, socket.socket)
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", url_of(listening))
