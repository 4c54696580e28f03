"""Images behind equal placeholder ids: blocks that were computed with another one are R6 before they are read."""

from __future__ import annotations

from typing import Any

import pytest

from kvcanary import KVCorruptionError

from .served import BLOCK

pytestmark = pytest.mark.usefixtures("host")
TEXT, HOLES = [(3 * n) % 97 for n in range(10)], [0] * 6
PROMPT = [*TEXT, *HOLES, *[(5 * n) % 97 for n in range(14)]]


def image(key: str, start: int = len(TEXT)) -> list[tuple[int, int, str]]:
    return [(start, start + len(HOLES), key)]


def asked(served: Any, name: str, images: list[tuple[int, int, str]]) -> Any:
    """A request from its first token to its last; the first finding, or None."""
    served.ask(name, PROMPT, 5, images=images)
    try:
        served.run()
    except KVCorruptionError as error:
        return error.findings[0]
    return None


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("is_pickled", [False, True])
def test_an_image_in_place_of_another(serve, runner: str, is_pickled: bool) -> None:
    """A cache whose keys are made of ids alone: R6 where the image begins, with the request and both sides."""
    served = serve(settings={"runner": runner}, forgets_images=True, is_pickled=is_pickled)
    assert asked(served, "cat", image("hash of a cat")) is None
    assert asked(served, "cat again", image("hash of a cat")) is None
    found = asked(served, "dog", image("hash of a dog"))
    assert (found.code, found.reader, found.position) == ("R6", "dog", len(TEXT))
    assert "another image or sound from position 10 on, where 'hash of a dog' stands" in found.sentence


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("first", "then"),
    [(image("cat"), []), ([], image("cat")), ([*image("cat", 2), *image("cat")], image("cat", 2))],
    ids=["none", "some", "one fewer"],
)
def test_an_image_and_none(serve, runner: str, first: Any, then: Any) -> None:
    """Where one prompt has an image, the other plain text that looks the same."""
    served = serve(settings={"runner": runner}, forgets_images=True)
    assert asked(served, "first", first) is None
    found = asked(served, "then", then)
    assert (found.code, found.reader) == ("R6", "then")
    assert found.position == min(set(first) ^ set(then))[0]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_right_keys_are_silent(serve, runner: str) -> None:
    """The same images are shared, and so is the text in front of others; preempted requests come back."""
    served = serve(settings={"runner": runner}, num_blocks=14)
    for number in range(12):
        served.ask(f"r{number}", PROMPT[: 18 + number], 6, images=image(("cat", "dog", "bird")[number % 3]))
    served.ask("text", PROMPT, 5)
    served.run()
    assert served.violations > 6  # blocks that were found
    assert served.preemptions > 0
    assert served.wrapper.kvcanary_report()["fired"] == {}


def test_an_image_behind_the_hit_is_nobodys_business(serve) -> None:
    """Blocks end before it begins: they are the same whatever comes."""
    served = serve(forgets_images=True)
    assert asked(served, "cat", image("cat", 24)) is None
    assert asked(served, "dog", image("dog", 24)) is None


def test_of_every_group(serve) -> None:
    """Two groups of layers, one of them with a window."""
    served = serve(groups=(("l0",), ("l1",)), window=12, forgets_images=True)
    assert asked(served, "cat", image("cat")) is None
    found = asked(served, "dog", image("dog"))
    assert (found.code, found.position) == ("R6", len(TEXT))


def test_what_a_window_hides_of_a_hit_is_not_asked(serve) -> None:
    """All layers have one: what the prompt goes on from is the first that is wrong, behind the other image."""
    served = serve(window=12, forgets_images=True)
    assert asked(served, "cat", image("cat")) is None
    found = asked(served, "dog", image("dog"))
    hit = len(PROMPT) // BLOCK * BLOCK
    assert (found.code, found.position) == ("R6", hit + 1 - 12)


def test_who_had_what_is_forgotten_without_a_finding(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that outlives what is remembered of its writer is counted, and not judged."""
    monkeypatch.setattr("kvcanary.adapters.vllm.identity.NAMED_WRITERS", 2)
    served = serve(num_blocks=40)
    assert asked(served, "first", image("cat")) is None
    for number in range(3):
        served.ask(f"other {number}", [(number + 7 * n) % 97 for n in range(20)], 3, images=image("bird", 4))
    served.run()
    assert asked(served, "same again", image("cat")) is None
    unchecked = served.wrapper.kvcanary_report()["unchecked"]
    assert unchecked == {"entries of prefix hits whose writers' images nobody remembers": 24}
