"""Rows that read shared pages which they do not hold, in eager forwards and in captured ones."""

from __future__ import annotations

import pytest

from two_ways import SIZE, TwoWays

PROMPT, OTHER = list(range(100, 110)), list(range(200, 210))


def two(way: str, other: list[int] = OTHER, **settings: object) -> TwoWays:
    """Two requests of two full pages and a half, 'a' on pages 1 to 3 and 'b' on pages 4 to 6."""
    rows = TwoWays(way, **settings)
    rows.begin("a", PROMPT, [1, 2, 3])
    rows.begin("b", other, [4, 5, 6])
    return rows


def publish(rows: TwoWays) -> None:
    """A cache takes the full pages of both."""
    rows.canary.on_share("a", [1, 2])
    rows.canary.on_share("b", [4, 5])


def fork(rows: TwoWays) -> None:
    """Another row of each has the same pages."""
    for name in ("a", "b"):
        rows.fork(name, f"{name} again")
        copy = {"a": 7, "b": 8}[name]
        rows.canary.on_copy(name, rows.tables[name][2], copy)
        rows.copy(rows.tables[name][2], copy)
        rows.tables[name][2] = copy


@pytest.mark.parametrize("share", [publish, fork])
@pytest.mark.parametrize("place", [0, 1])
def test_an_entry_that_names_a_shared_page_of_another_row(way, share, place):
    """R8 at the wrong entry itself, with the page that was granted there, and nothing at the pages behind it."""
    rows = two(way)
    share(rows)
    rows.decode("a", "b")
    rows.tables["a"][place] = rows.tables["b"][place]
    rows.decode("a", "b")
    assert rows.found() == [("R8", (4 + place) * SIZE, place * SIZE, "a", "addressing")]
    (finding,) = rows.canary.findings
    assert (finding.expected["page"], finding.found["page"]) == (1 + place, 4 + place)
    assert "'b'" in finding.found["held_by"]


def test_a_page_of_the_cache_alone(way):
    """The same where no row has the page any more."""
    rows = two(way)
    publish(rows)
    rows.end("b")
    rows.tables["a"][0] = 4
    rows.decode("a")
    assert rows.found() == [("R8", 4 * SIZE, 0, "a", "addressing")]
    assert rows.canary.findings[0].found["held_by"] == "a prefix cache"


def test_pages_of_equal_tokens_are_not_the_rows_own():
    """Nobody declared that the row takes the page that holds the same: it may be evicted under the row."""
    rows = two("eager", other=PROMPT)
    publish(rows)
    rows.tables["a"][0] = 4
    rows.decode("a")
    assert rows.found() == [("R8", 4 * SIZE, 0, "a", "addressing")]


@pytest.mark.parametrize("place", [0, 1])
def test_a_published_page_that_was_given_back_is_read_on(way, place):
    """R7 though the cache still holds it: the reader released it."""
    rows = two(way)
    publish(rows)
    rows.decode("a", "b")
    rows.canary.on_free("a", [1 + place])
    rows.decode("a", "b")
    assert rows.found() == [("R7", (1 + place) * SIZE, place * SIZE, "a", "lifetime")]
    assert "released by 'a' at step 3" in rows.canary.findings[0].causes[0].evidence


def test_the_last_page_of_a_row_that_goes_on_behind_it(way):
    """R7 though the next page that the row was granted takes its place in the row."""
    rows = TwoWays(way)
    rows.begin("a", PROMPT[: 2 * SIZE], [1, 2])
    rows.canary.on_share("a", [1, 2])
    rows.canary.on_free("a", [2])
    rows.canary.append("a", [9])
    rows.forward({"a": [9]}, commits=False)
    assert ("R7", 2 * SIZE, SIZE, "a", "lifetime") in rows.found()


@pytest.mark.parametrize("reader", ["a", "b"])
def test_a_page_of_two_rows_that_one_has_given_back(way, reader):
    """R7 for the one that gave it back, be it the one that wrote the page or the one that acquired it."""
    rows = TwoWays(way)
    rows.begin("a", PROMPT, [1, 2, 3])
    rows.canary.on_share("a", [1, 2])
    rows.begin("b", [*PROMPT[: 2 * SIZE], 7], [4], cached=[1, 2])
    rows.decode("a", "b")
    rows.canary.on_free(reader, [2])
    rows.decode("a", "b")
    assert rows.found() == [("R7", 2 * SIZE, SIZE, reader, "lifetime")]


def test_a_child_of_a_fork_gave_a_page_back(way):
    """R7 while the other two rows of the fork hold it."""
    rows = TwoWays(way)
    rows.begin("a", PROMPT[: 2 * SIZE], [1, 2])
    for child, page in (("b", 3), ("c", 4)):
        rows.fork("a", child)
        rows.canary.on_alloc(child, [page])
        rows.tables[child].append(page)
    rows.canary.on_alloc("a", [5])
    rows.tables["a"].append(5)
    rows.decode("a", "b", "c")
    rows.canary.on_free("b", [1])
    rows.decode("a", "b", "c")
    assert rows.found() == [("R7", SIZE, 0, "b", "lifetime")]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_row_may_read_is_silent(way, is_late):
    """Acquired, forked, copied and shared pages, a row that took another's equal page, and one that begins anew."""
    rows = TwoWays(way, is_late, content="full")
    rows.begin("a", PROMPT, [1, 2, 3])
    rows.canary.on_share("a", [1, 2])
    rows.begin("b", [*PROMPT[: 2 * SIZE], 7], [4], cached=[1, 2])
    rows.begin("twin", PROMPT, [5, 6, 7])
    for page, kept in ((5, 1), (6, 2)):
        rows.canary.on_deduplicate("twin", page, kept)
    rows.tables["twin"][:2] = [1, 2]
    rows.decode("a", "b", "twin")
    rows.fork("b", "c")
    rows.canary.on_copy("c", 4, 8)
    rows.copy(4, 8)
    rows.tables["c"][2] = 8
    rows.decode("a", "c", "twin", "b")
    rows.end("a")
    rows.decode("c", "twin", "b")
    rows.canary.on_free("twin", rows.tables["twin"])  # retracted: it begins anew
    rows.decode("c", "b")
    rows.canary.on_alloc("twin", [9, 10, 11])
    rows.tables["twin"] = [9, 10, 11]
    tokens, rows.fed["twin"] = rows.fed["twin"], []
    rows.forward({"twin": tokens})
    rows.decode("c", "twin", "b")
    for name in ("b", "c", "twin"):
        rows.end(name)
    rows.canary.on_evict([1, 2])
    assert rows.found() == []


def test_a_request_may_end_while_a_forward_that_reads_it_runs():
    """Pages are given back behind the launch, and the forward of before is heard later."""
    rows = two("captured", is_late=True)
    publish(rows)
    rows.decode("a", "b")
    rows.decode("a", "b")
    rows.end("a")
    rows.decode("b")
    assert rows.found() == []


@pytest.mark.parametrize("is_late", [False, True])
def test_a_retracted_request_reads_on(way, is_late):
    """All its pages are back, some in a cache: what it reads of them is stale."""
    rows = two(way, is_late=is_late)
    publish(rows)
    rows.decode("a", "b")
    rows.canary.on_free("a", rows.tables["a"])
    rows.canary.append("a", [9])
    rows.forward({"a": [9]}, commits=False)
    reported = {(code, slot, family) for code, slot, _, _, family in rows.found()}
    assert ("W2", 3 * SIZE + 3, "lifetime") in reported
    assert any(line.startswith("R7") for finding in rows.canary.findings for line in finding.evidence)
