"""A first hour, as a new user would spend it: ``python -m kvcanary_tools.pages.walkthrough > docs/walkthrough.md``.

Everything that the page shows is run here, in a folder of its own: a server in a child process, OpenAI's client against
it, a fault that is injected from outside, and the commands that read what it left behind. The page is what was said.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

SERVE = "kvcanary serve --kv-canary abort --kv-canary-content full --kv-canary-dump dumps --allow-faults"
SEED = ("--kv-canary-seed", "7")
KEY = "secret"
SHOWN_URL, WAIT_SECONDS = "http://127.0.0.1:8000", 120
ASK = """\
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="secret")
prompts = ["def fibonacci(n):\\n", "class Stack:\\n    def __init__(self):\\n"]


def ask():
    return client.completions.create(model="embedded", prompt=prompts, max_tokens=48, temperature=0).choices


before = ask()
for choice in before:
    print(choice.finish_reason, choice.text.splitlines()[:2])
"""
ASK_AGAIN = """\
for old, new in zip(before, ask()):
    print(new.finish_reason, "as before" if new.text == old.text else f"{len(new.text)} of {len(old.text)} characters")
"""


def main() -> None:
    """Write the page to stdout."""
    for line in page():
        print(line)


def page() -> Iterator[str]:
    """The page, block by block; what is run leaves nothing behind."""
    with TemporaryDirectory() as folder, running(folder, SERVE) as (greeting, url, child):
        reported = _Session(Path(folder), url)
        yield "# A first hour"
        yield _said("Serve the embedded model with the canary on. It only completes Python, but it is here already.")
        yield "The key opens the debug pages, and `--allow-faults` lets this machine damage the cache on purpose."
        yield _block("console", f"$ export KVCANARY_API_KEY={KEY}\n$ {SERVE}\n{reported.shown(greeting)}")
        yield _said("Two prompts in one request, by OpenAI's client:")
        yield _block("python", ASK)
        yield _block("text", reported.python(ASK))
        yield _said("Now flip one bit of the running cache, at a random place:")
        yield reported.command(f"kvcanary inject bits.flip --url {SHOWN_URL}")
        yield _said("The same request again. One of its two sequences is hit and ends; the other is not affected:")
        yield _block("python", ASK_AGAIN)
        yield _block("text", reported.python(ASK_AGAIN))
        yield _said("The server goes on, and reports what happened:")
        yield reported.fetched("/health")
        yield reported.command(f"kvcanary top {SHOWN_URL} --once")
        yield _said("Two findings of one incident: the forward that read the bit reported it, and so did the last")
        yield "check of all bytes of the request when it ended."
        dump = sorted((Path(folder) / "dumps").iterdir())[0].relative_to(folder)
        yield _said("The finding has left a dump, without a token of the prompts in it. Its story:")
        yield reported.command(f"kvcanary explain {dump}")
        yield _said("The same steps again, through the same checks, on any machine; and the first bad one:")
        yield reported.command(f"kvcanary replay {dump}")
        yield reported.command(f"kvcanary bisect {dump}")
        yield _said("A page to send to a colleague, and a trace for ui.perfetto.dev:")
        yield reported.command(f"kvcanary report {dump} -o report.html")
        yield reported.command(f"kvcanary timeline {dump} -o trace.json")
        yield _said("Ctrl-C ends the server when what runs has finished:")
        child.terminate()
        yield _block("text", child.communicate(timeout=WAIT_SECONDS)[1].strip().splitlines()[-1])
        yield _said("Next: [what a finding does in each mode](serving.md), [all commands](commands.md), and")
        yield "[the same in your own tests](pytest.md)."
        yield _said(
            "This page is what `python -m kvcanary_tools.pages.walkthrough` printed. Its server took any free port, and"
        )
        yield f"`{' '.join(SEED)}`, from which the place of the fault follows too."


class _Session:
    """What a user types, and what is said; ``url`` is where the server really is."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._names: dict[str, object] = {}

    def python(self, code: str) -> str:
        """What the code prints; names stay for the next one."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(self._real(code), self._names)
        return said.getvalue()

    def command(self, line: str) -> str:
        """A block with the command and all that it says."""
        words = shlex.split(self._real(line))
        words[:1] = [sys.executable, "-m", "kvcanary_tools"]
        done = subprocess.run(words, cwd=self._folder, env=environment(), capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{line} ended in code {done.returncode}: {done.stderr}")
        return _block("console", f"$ {line}\n{self.shown(done.stdout + done.stderr)}")

    def fetched(self, path: str) -> str:
        with urlopen(self._url + path) as answer:
            return _block("console", f"$ curl {SHOWN_URL}{path}\n{answer.read().decode()}")

    def shown(self, text: str) -> str:
        return text.replace(self._url, SHOWN_URL)

    def _real(self, text: str) -> str:
        return text.replace(SHOWN_URL, self._url)


@contextmanager
def running(folder: str, line: str) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """A server started by this line: what it says when it is there, its URL and its process."""
    words = [sys.executable, "-m", "kvcanary_tools", *shlex.split(line)[1:], "--port", "0", *SEED]
    with subprocess.Popen(
        words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            greeting = "".join(child.stdout.readline() for _ in range(4)) if child.stdout else ""
            found = re.search(r"http://127\.0\.0\.1:\d+", greeting)
            if found is None:
                raise RuntimeError(f"the server did not start: {child.communicate()[1]}")
            _wait(found[0])
            yield greeting, found[0], child
        finally:
            child.kill()


def _wait(url: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            urlopen(f"{url}/health").close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def environment() -> dict[str, str]:
    """A new user's, without settings of this process."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVCANARY_")}
    return own | {"KVCANARY_API_KEY": KEY, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "100"}


def _said(text: str) -> str:
    """A paragraph."""
    return f"\n{text}"


def _block(language: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.rstrip().splitlines())
    return f"\n```{language}\n{lines}\n```"


if __name__ == "__main__":
    main()
