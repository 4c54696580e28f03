"""The story of a finding in a pool that was only watched: history of its block, the row around it, whose bytes."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kvcanary.dumps.watched_events import Line, story_of_block
from kvcanary.dumps.watched_reading import WatchedDump
from kvcanary.pools.launch_site import site_name
from kvcanary_tools.console import numbered
from kvcanary_tools.dumps.explaining import advice_of, command_line, why_and_next
from kvcanary_tools.dumps.tables import table

WRONG = ">"  # before the entry of a row that a finding is about


def explain_watched(dump: WatchedDump, number: int) -> dict[str, Any]:
    """The story of one finding, plain JSON; IndexError where there is none of that number."""
    finding = dump.findings[number]
    is_place = is_slot(dump, finding["pool"], finding["slot"])
    advice, commands = _advice(dump, finding), list(_commands(dump, finding))
    return {
        "finding": finding,
        "environment": dump.manifest["environment"],
        "pools": list(dump.pools),
        "now": truth_of_slot(dump, finding["pool"], finding["slot"]) if is_place else None,
        "story": [line._asdict() for line in story_of_slot(dump, finding["pool"], finding["slot"])] if is_place else [],
        "row": _row(dump, number, finding),
        "answers": list(_answers(dump, number, finding)) if is_place else [],
        "causes": finding["causes"],
        "advice": advice,
        "commands": commands,
        "next": [*advice, *map(command_line, commands)],
    }


def is_slot(dump: WatchedDump, pool: str, slot: int) -> bool:
    return pool in dump.pools and 0 <= slot < dump.group_of(pool)["num_slots"]


def story_of_slot(dump: WatchedDump, pool: str, slot: int) -> list[Line]:
    """Everything that the dump knows of a slot's block, oldest first, and what was found in the block."""
    group = dump.group_of(pool)
    block, place = slot // group["block_size"], dump.manifest["groups"].index(group)
    rows = {name: row["tables"][place] for name, row in dump.rows.items() if place < len(row["tables"])}
    lines = story_of_block(dump.steps, group["number"], block, group["block_size"], rows)
    found = [
        Line(
            f["step"], "found", f"{f['code']} {f['name']} at offset {f['slot'] % group['block_size']}: {f['sentence']}"
        )
        for f in dump.findings
        if is_slot(dump, f["pool"], f["slot"]) and dump.group_of(f["pool"]) is group
        if f["slot"] // group["block_size"] == block
    ]
    return sorted([*lines, *found], key=lambda line: line.step)


def truth_of_slot(dump: WatchedDump, pool: str, slot: int) -> dict[str, Any]:
    """Where a slot is, and what was read of it; `read`: whether anything was, which only slots around findings are."""
    group = dump.group_of(pool)
    seen = next((s for s in dump.slots if (s["group"], s["slot"]) == (group["number"], slot)), None)
    block = slot // group["block_size"]
    return {
        "pool": pool,
        "slot": slot,
        "group": group["number"],
        "block": block,
        "offset": slot % group["block_size"],
        "rows": [name for name, row in dump.rows.items() if block in _table(dump, row, group)],
        "read": seen is not None,
        "written": None if seen is None else seen["record"],
        "bytes": "not read" if seen is None else bytes_of(seen),
        "same": [] if seen is None else seen["same"],
    }


def _table(dump: WatchedDump, row: Mapping[str, Any], group: Mapping[str, Any]) -> Sequence[int]:
    place = dump.manifest["groups"].index(group)
    tables: Sequence[Sequence[int]] = row["tables"]
    return tables[place] if place < len(tables) else ()


def _row(dump: WatchedDump, number: int, finding: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries around a finding as they were read, the one that it is about marked."""
    seen = [slot for slot in dump.slots if slot["finding"] == number]
    sizes = {group["number"]: group["block_size"] for group in dump.manifest["groups"]}
    return [
        slot
        | {
            "block": slot["slot"] // sizes[slot["group"]],
            "offset": slot["slot"] % sizes[slot["group"]],
            "marked": slot["slot"] == finding["slot"] and slot["position"] in (finding["position"], None),
            "holds": record_text(slot["record"]),
            "bytes": bytes_of(slot),
        }
        for slot in seen
    ]


def record_text(record: Mapping[str, Any] | None) -> str:
    """`position 18 of 'c', decode, step 11`."""
    if record is None:
        return "nothing that was written"
    return f"position {record['position']} of {_name(record)}, {record['site']}, step {record['step']}"


def same_text(other: Mapping[str, Any]) -> str:
    """Of a slot for which the same bytes were written."""
    return f"position {other['position']} of {_name(other)}, written in step {other['step']} to slot {other['slot']}"


def _name(held: Mapping[str, Any]) -> str:
    return "a request that ended long ago" if held["request"] is None else repr(held["request"])


def bytes_of(seen: Mapping[str, Any]) -> str:
    """What the bytes are, against those that were taken under the same record."""
    if not seen["is_taken"]:
        return "never taken"
    if not seen["wrong"]:
        return "as written"
    names = seen["wrong"]
    return f"other, in {names[0]}" if len(names) == 1 else f"other, in {len(names)} layers"


def _answers(dump: WatchedDump, number: int, finding: Mapping[str, Any]) -> Iterator[str]:
    """What people want to know first, each a sentence."""
    group, slot = dump.group_of(finding["pool"]), finding["slot"]
    story = story_of_slot(dump, finding["pool"], slot)
    seen = next((s for s in dump.slots if s["finding"] == number and s["slot"] == slot), None)
    owners = [line for line in story if line.kind == "born"]
    before = owners[-2:-1]
    block = f"block {slot // group['block_size']}"
    yield from (f"before that {block} was {line.text}, in step {line.step}" for line in before)
    if not owners:
        yield f"{block} was granted before the first step that this dump has, {dump.manifest['first_step']}"
    if seen is None:
        return
    yield f"the slot was last written as {record_text(seen['record'])}" if seen["record"] else "nobody wrote the slot"
    yield from _whose(seen)


def _whose(seen: Mapping[str, Any]) -> Iterator[str]:
    if not seen["is_taken"]:
        return
    if not seen["wrong"]:
        yield "its bytes are those that were stored"
        return
    yield from (f"its bytes are those of {same_text(other)}" for other in seen["same"])
    if not seen["same"]:
        yield "its bytes are those of no entry that this canary has recorded"


def _commands(dump: WatchedDump, finding: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    if finding["pool"] in dump.pools:
        place = f"{shlex.quote(str(dump.path))} {finding['slot']} --pool {shlex.quote(finding['pool'])}"
        yield {"command": f"kvcanary why-slot {place}", "purpose": "tells of this slot alone"}


def _advice(dump: WatchedDump, finding: Mapping[str, Any]) -> list[str]:
    again = "run the same requests again with KVCANARY_CONTENT=full: the first step that reads it wrongly is told then"
    is_late = finding["code"] == "R9" and dump.manifest["config"].get("content") != "full"
    return [*advice_of(finding, is_replayed=False), *[again] * is_late]


# for people


def explain_watched_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    finding, now = facts["finding"], facts["now"]
    yield f"{finding['name']} ({finding['code']}): {_place(finding, now, facts['pools'])}"
    yield f"  {finding['sentence']}"
    yield f"  step {finding['step']}, {site_name(*finding['site'])}{_reader(finding)}"
    if finding["readers"]:
        yield f"  touches {', '.join(finding['readers'])}"
    yield f"  in {environment_text(facts['environment'])}"
    yield ""
    yield "what happened" + ("" if now is None else f" to block {now['block']}")
    yield from (f"  step {line['step']:>6}  {line['text']}" for line in facts["story"])
    if not facts["story"]:
        yield "  nothing that these steps tell"
    yield from (f"  {text}" for text in facts["answers"])
    if facts["row"]:
        yield ""
        yield from row_lines(finding, facts["row"])
    yield from why_and_next(facts)


def _place(finding: Mapping[str, Any], now: Mapping[str, Any] | None, pools: Collection[str]) -> str:
    """`target pool, slot 74 (group 0, block 18, offset 2), layer 1, V, head 1, dim 3, bit 9`."""
    where = f"{finding['pool']} pool, slot {finding['slot']}"
    if now is not None:
        where += f" (group {now['group']}, block {now['block']}, offset {now['offset']})"
    elif finding["pool"] not in pools:
        where = f"{finding['pool']}, row {finding['page']}, position {finding['position']}"
    layers = finding["layers"]
    if layers:
        where += f", layer{'s'[: len(layers) - 1]} {', '.join(map(str, layers[:4]))}"
        where += f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    if finding["part"] is not None:
        where += f", {finding['part']}, head {finding['head']}, dim {finding['dim']}"
        where += f", bit {finding['bit']}" if finding["bit"] is not None else f", byte {finding['byte']}"
    return where


def _reader(finding: Mapping[str, Any]) -> str:
    if finding["reader"] is None:
        return "" if finding["writer"] is None else f"; written by {finding['writer']!r}"
    position = "" if finding["position"] is None else f" as position {finding['position']}"
    return f"; read by {finding['reader']!r}{position}"


def environment_text(environment: Mapping[str, Any]) -> str:
    """`vllm 0.32.0 (runner V2), torch 2.11.0, on NVIDIA H100, rank 1`."""
    known = dict(environment)
    engine = f"{known.pop('engine', 'an engine')} {known.pop('version', '')}".strip()
    runner, rank = known.pop("runner", None), known.pop("rank", None)
    text = engine + (f" (runner {runner})" if runner else "")
    text += f", torch {known['torch']}, on {known['device']}" if "torch" in known else ""
    return text + (f", rank {rank}" if rank is not None else "")


def row_lines(finding: Mapping[str, Any], row: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The row around it as columns, the wrong entry marked."""
    who = finding["writer"] if finding["code"].startswith("W") else finding["reader"]
    yield "the block around it" if who is None else f"the row of {who!r} around it"
    heads = ("", "position", "slot", "block", "offset", "holds", "bytes")
    cells = [
        [WRONG if e["marked"] else "", e["position"], e["slot"], e["block"], e["offset"], e["holds"], e["bytes"]]
        for e in row
    ]
    yield from (f"  {line}" for line in table(heads, cells))


def slot_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """`why-slot` for people; facts: `truth_of_slot`, and its story."""
    group = f"group {facts['group']}, block {facts['block']}, offset {facts['offset']}"
    yield f"{facts['pool']} pool, slot {facts['slot']}: {group}"
    yield f"  rows      {', '.join(map(repr, facts['rows'])) or 'no row that a finding is about names it'}"
    if facts["read"]:
        yield f"  holds     {record_text(facts['written'])}"
        yield f"  bytes     {facts['bytes']}"
    else:
        yield "  holds     not read: a dump of a watched pool has the slots around its findings alone"
    for other in facts["same"]:
        yield f"  bytes of  {same_text(other)}"
    yield from (f"  step {line['step']:>6}  {line['text']}" for line in facts["story"])


def watched_summary(dump: WatchedDump) -> dict[str, Any]:
    """What is in such a dump, plain JSON."""
    manifest = dump.manifest
    keys = ("version", "kind", "kvcanary", "created", "trigger", "step", "first_step", "device", "environment")
    pool_keys = ("name", "layers", "num_slots", "slot_bytes", "window")
    return {
        "dump": str(dump.path),
        **{key: manifest[key] for key in keys},
        "tokens": manifest["tokens"],
        "content": manifest["content"],
        "config": manifest["config"],
        "pools": [
            {key: pool.get(key) for key in pool_keys}
            | {"group": pool["of_group"]["number"], "window": pool["of_group"]["window"] or None}
            for pool in dump.pools.values()
        ],
        "steps": len(dump.steps),
        "requests": [{"request_id": name, "tokens": len(row["tokens"])} for name, row in dump.rows.items()],
        "findings": [
            {key: finding[key] for key in ("code", "name", "pool", "page", "slot", "position", "layer", "step")}
            for finding in dump.findings
        ],
        "replayable": False,
    }


def _seen(window: int | None) -> str:
    """What attention sees; window: as of kvcanary_kernels.watch.walk.Watched, None as 0."""
    if not window:
        return "all"
    return str(window) if window > 0 else f"chunks of {-window}"


def watched_summary_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{facts['dump']}: version {facts['version']}, written by kvcanary {facts['kvcanary']} at {facts['created']}"
    yield f"because of a finding in a pool that was only watched, in {environment_text(facts['environment'])}"
    steps = numbered(facts["steps"], "step")
    yield f"{steps}, {facts['first_step']} to {facts['step']}; token ids {facts['tokens']}; it cannot be replayed"
    yield ""
    pools = [[p["name"], p["group"], p["layers"], p["num_slots"], _seen(p["window"])] for p in facts["pools"]]
    yield from table(("pool", "group", "layers", "slots", "sees"), pools)
    yield ""
    found = [
        [f["code"], f["name"], f["pool"], f["page"], f["slot"], f["position"], f["step"]] for f in facts["findings"]
    ]
    yield from table(("code", "what", "pool", "block", "slot", "position", "step"), found)
