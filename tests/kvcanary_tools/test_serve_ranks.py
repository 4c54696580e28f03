"""`torchrun -m kvcanary_tools serve`: one server over several processes, each with a part of the model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo here")
RANKS = 3  # the embedded model has three heads, and one KV head that each of them holds
ASKED = [("def fibonacci(n):\n", 0.0), ("class Stack:\n", 0.8), ("import os\n", 0.8), ("for i in range(", 0.0)]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The processes, and where the first of them answers."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    serve = ["-m", "kvcanary_tools", "serve", "--port", "0", "--max-total-tokens", "2048", "--kv-canary", "raise"]
    serve += ["--dtype", "float64"]  # in float32 sums over ranks round otherwise, and a coin may fall otherwise
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, *launch, *serve], env=environment, **streams)
    urls = (re.search(r"^url +(http://[\d.:]+)/v1", line) for line in child.stdout)
    url = next((found[1] for found in urls if found), None)
    assert url, child.communicate()[1]
    yield child, url
    child.kill()
    child.communicate()


def complete(url: str, prompt: str, temperature: float) -> str:
    body = {"model": "embedded", "prompt": prompt, "max_tokens": 24, "temperature": temperature, "seed": 5}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def test_answers_are_those_of_one_process(served) -> None:
    """Greedy and sampled, with drafts, four clients at once; ranks are compared, and nothing is found."""
    _, url = served
    engine = Engine(EngineConfig(max_total_tokens=2048, dtype="float64", canary=CanaryConfig(mode="off")))
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=5) for _, temperature in ASKED]
    expected = [engine.generate([prompt], own)[0].text for (prompt, _), own in zip(ASKED, params, strict=True)]
    with ThreadPoolExecutor(len(ASKED)) as clients:
        assert list(clients.map(lambda asked: complete(url, *asked), ASKED)) == expected
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        canary = json.load(answer)["canary"]
    assert (canary["mode"], canary["findings"]) == ("raise", 0)


def test_a_signal_ends_all_of_them(served) -> None:
    """The first rank finishes and says so; the others end with it."""
    child, _ = served
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert "kvcanary: stopped" in errors


@pytest.mark.parametrize("option", ["--role decode", "--replicas 2", "--allow-faults"])
def test_what_other_ranks_would_not_hear_of_is_refused(kvcanary, option) -> None:
    """Before anybody is waited for."""
    done = kvcanary("serve", *option.split(), env={"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"})
    assert done.exit_code == 2
    assert f"{option.split()[0]} is of a server of one process: start it without torchrun" in done.stderr
