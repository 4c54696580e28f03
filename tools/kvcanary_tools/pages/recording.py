"""A recording of `kvcanary demo`: ``python -m kvcanary_tools.pages.recording`` writes docs/pictures/demo.svg.

The command runs in a terminal of its own. What it says becomes text in an SVG that plays by itself, a line as it came,
and needs neither a script nor a font of its own; where less motion is asked for it shows the end.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from kvcanary_tools.pages.walkthrough import environment

PICTURE = Path(__file__).parents[3] / "docs" / "pictures" / "demo.svg"
COMMAND = ("demo",)
COLUMNS, ROWS = 126, 34
WIDTH, LINE, LEFT, TOP = 7.25, 18, 20, 52  # pixels: a column, a line, and where the text begins
SECONDS, HOLD_SECONDS = 26.0, 6.0  # that it plays, and then shows its end
MOST_GAP = 1.2  # seconds: longer waits of the run are shortened to it
STYLES = {"2": "d", "31": "r", "32": "g", "1": "b"}  # by the number that a terminal is sent
SENT = re.compile(r"\x1b\[([0-9;]*)m")
CSS = """
.w{fill:#101317;stroke:#2a2f38}
text{fill:#e6e9ee;font:12px ui-monospace,"SF Mono","Cascadia Mono","Liberation Mono",Menlo,monospace;white-space:pre}
.d,.n{fill:#8b95a3}.g{fill:#5fd39b}.r{fill:#ff8087}.b{font-weight:700}
@media(prefers-color-scheme:light){
.w{fill:#fbfbfc;stroke:#dfe2e7}text{fill:#1b1f26}.d{fill:#667080}.n{fill:#d3d8df}.g{fill:#0c7a4e}.r{fill:#bf1e2e}}
"""


class Line(NamedTuple):
    """A line as it was sent, colours and all, and when it was whole, in seconds since the start."""

    at: float
    text: str


def main() -> None:
    """Run the command, and write what it said."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(recorded()), encoding="utf-8")


def recorded() -> list[Line]:
    """Every line that the command writes into a terminal. RuntimeError where it fails."""
    ours, theirs = pty.openpty()
    own = environment() | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    del own["NO_COLOR"]
    words = [sys.executable, "-m", "kvcanary_tools", *COMMAND]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=own, close_fds=True) as child:
        os.close(theirs)
        lines = list(_lines(ours))
    os.close(ours)
    if child.returncode:
        raise RuntimeError(f"kvcanary {' '.join(COMMAND)} ended in code {child.returncode}")
    return lines


def _lines(terminal: int) -> Iterator[Line]:
    start, rest = time.monotonic(), b""
    while True:
        try:
            rest += os.read(terminal, 65536)
        except OSError:  # the other side has closed it
            break
        *whole, rest = rest.split(b"\r\n")
        yield from (Line(time.monotonic() - start, line.decode()) for line in whole)
    if rest:
        yield Line(time.monotonic() - start, rest.decode())


def plain(text: str) -> str:
    """What a line says, without its colours."""
    return SENT.sub("", text)


def shown(picture: str) -> list[str]:
    """The lines of a drawn recording."""
    found = re.findall(r"<text [^>]*>(.*?)</text>", picture)
    texts = (re.sub(r"<[^>]*>", "", line) for line in found)
    return [text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for text in texts]


def drawn(lines: Sequence[Line]) -> str:
    """The SVG: every line in its place, seen from its time on, and a window of `ROWS` that moves down over them."""
    times = _played([line.at for line in lines])
    last = max(len(lines) - ROWS, 0)
    width, height = round(2 * LEFT + WIDTH * COLUMNS), TOP + LINE * ROWS + 16
    body, title = "\n".join(_texts(lines)), f"A recording of kvcanary {' '.join(COMMAND)}"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    whole = SECONDS + HOLD_SECONDS
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">
<title id="title">{title}</title>
<style>{CSS}
#c{{transform:translateY({-LINE * last}px)}}
@media(prefers-reduced-motion:no-preference){{#c{{animation:s {whole:g}s step-end infinite}}}}
@keyframes s{{{_keyframes(times)}}}
</style>
<rect class="w" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>
<g class="n"><circle cx="24" cy="22" r="6"/><circle cx="44" cy="22" r="6"/><circle cx="64" cy="22" r="6"/></g>
<svg y="{TOP - LINE}" width="{width}" height="{LINE * ROWS}"><g id="c">
{body}
</g></svg>
</svg>
"""


def _played(times: Sequence[float]) -> list[float]:
    """When each line is shown: as it came, but for long waits, and all of it in `SECONDS`."""
    gaps = [min(now - before, MOST_GAP) for before, now in zip([times[0], *times], times, strict=False)]
    scale = SECONDS / max(sum(gaps), 1e-9)
    return [scale * sum(gaps[: number + 1]) for number in range(len(gaps))]


def _keyframes(times: Sequence[float]) -> str:
    """By which share of the time the window has moved how far: its last row is the line that came last."""
    places = {round(100 * at / (SECONDS + HOLD_SECONDS), 1): number for number, at in enumerate(times)}
    moves = {0.0: ROWS} | {share: ROWS - 1 - number for share, number in places.items()}
    return "".join(f"{share:g}%{{transform:translateY({LINE * rows}px)}}" for share, rows in moves.items())


def _texts(lines: Sequence[Line]) -> Iterator[str]:
    """Each line with its colours, which last until the next ones are sent, as in a terminal."""
    styles: frozenset[str] = frozenset()
    for number, line in enumerate(lines):
        runs = []
        for place, part in enumerate(SENT.split(line.text)):
            if place % 2:
                styles = _sent(styles, part)
            elif part:
                runs.append(_run(escape(part, quote=False), styles))
        yield f'<text x="{LEFT}" y="{LINE * (number + 1) - 4}">{"".join(runs)}</text>'


def _sent(styles: frozenset[str], numbers: str) -> frozenset[str]:
    for number in numbers.split(";"):
        styles = styles | {STYLES[number]} if number in STYLES else frozenset()
    return styles


def _run(text: str, styles: frozenset[str]) -> str:
    return f'<tspan class="{" ".join(sorted(styles))}">{text}</tspan>' if styles else text


if __name__ == "__main__":
    main()
