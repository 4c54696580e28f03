"""Positions and weights of forwards that are attached to: chat loops without generate(), padding, crops, updates."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError

transformers = pytest.importorskip("transformers")

from kvcanary.adapters.transformers import attach  # noqa: E402
from kvcanary.adapters.transformers.positions import Fed, RowPositions, fed_by  # noqa: E402
from kvcanary.adapters.transformers.unwatched import cache_argument  # noqa: E402

FULL = CanaryConfig(content="full", seed=7)
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])


def turn(model, cache, ids, shift=0, **more):
    """One plain forward of only new tokens; positions as the cache's length says, and `shift` more."""
    start = cache.get_seq_length()
    places = (torch.arange(ids.shape[1]) + start + shift)[None].expand(len(ids), -1)
    return model(ids, **{cache_argument(type(model)): cache, "position_ids": places} | more).logits[:, -1:].argmax(-1)


def chat(model, shift_at=None, shift=5):
    """Three turns of a chat, each decoded by a loop of its own."""
    cache, number = transformers.DynamicCache(config=model.config), 0
    for _ in range(3):
        ids = PROMPT
        for _ in range(4):
            ids = turn(model, cache, ids, shift if number == shift_at else 0)
            number += 1
    return cache


def caught(run):
    with pytest.raises(KVCorruptionError) as error:
        run()
    return error.value.report.findings[0]


@pytest.mark.parametrize(("at", "position"), [(1, 10), (4, 13), (10, 37)])
def test_a_chat_loop_without_generate(models, at: int, position: int) -> None:
    """W5 at the first entry whose position is not the cache's, decode or chunk (mlx-node#33); else nothing."""
    model = models("Llama")
    with attach(model, FULL) as handle, torch.no_grad():
        chat(model)
        assert handle.certificate()["findings"] == []
        finding = caught(lambda: chat(model, at))
    assert (finding.code, finding.position, finding.causes[0].text) == ("W5", position, "positions are off by +5")
    assert "W5" in handle.certificate()["classes"]


def test_a_chunk_whose_offset_is_counted_twice(models) -> None:
    model = models("Llama")
    with attach(model, FULL), torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        turn(model, cache, PROMPT)
        finding = caught(lambda: turn(model, cache, PROMPT, shift=10))
    assert (finding.code, finding.causes[0].text) == ("W5", "the cached length was counted twice")


def test_plain_calls_are_followed_as_rows(models) -> None:
    """What a loop has fed is known to a generate() over the same cache: other tokens in its place are R6."""
    model = models("Llama")
    with attach(model, FULL), torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        turn(model, cache, PROMPT)
        turn(model, cache, PROMPT)
        whole = torch.cat((PROMPT, PROMPT, torch.tensor([[5]])), 1)
        model.generate(whole, max_new_tokens=2, do_sample=False, **{cache_argument(type(model)): cache})
        cache = transformers.DynamicCache(config=model.config)
        turn(model, cache, PROMPT)
        turn(model, cache, PROMPT.flip(1))
        finding = caught(
            lambda: model.generate(whole, max_new_tokens=2, do_sample=False, **{cache_argument(type(model)): cache})
        )
    assert (finding.code, finding.position) == ("R6", 10)


@pytest.mark.parametrize("given", ["positions", "none"])
def test_left_padding_by_hand(models, given: str) -> None:
    """Rows begin behind their padding, and go on from there; positions that count padding are W5."""
    model, ids = models("Llama"), torch.cat((PROMPT, PROMPT))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with attach(model, FULL) as handle, torch.no_grad():

        def loop(counts_padding: bool) -> None:
            cache, fed, seen = transformers.DynamicCache(config=model.config), ids, mask
            for number in range(4):
                places = ((torch.ones_like(seen) if counts_padding and number else seen).cumsum(1) - 1).clamp(min=0)
                own = {"position_ids": places[:, -fed.shape[1] :]} if given == "positions" else {}
                out = model(fed, **{cache_argument(type(model)): cache, "attention_mask": seen} | own)
                fed = out.logits[:, -1:].argmax(-1)
                seen = torch.cat((seen, torch.ones(2, 1, dtype=seen.dtype)), 1)

        loop(False)
        assert handle.certificate()["findings"] == []
        if given == "positions":
            finding = caught(lambda: loop(True))
            assert (finding.code, finding.writer, finding.found["position"]) == ("W5", "row 1", 10)


def test_a_row_goes_on_behind_a_crop(models) -> None:
    """What was cropped is fed again at its own positions; at those behind it, it is W5."""
    model = models("Llama")
    with attach(model, FULL), torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        turn(model, cache, PROMPT)
        cache.crop(-3)
        turn(model, cache, PROMPT[:, -3:])
        cache.crop(-3)
        assert caught(lambda: turn(model, cache, PROMPT[:, -3:], shift=3)).code == "W5"


def test_positions_of_several_axes() -> None:
    """Of four axes the first counts text; of three none does, and nothing is judged."""
    ids, places = torch.zeros(2, 3, dtype=torch.int64), torch.arange(3).expand(2, 3)
    assert fed_by({"input_ids": ids, "position_ids": places.expand(3, 2, 3)}, 0) is None
    four = torch.stack((places, *[places * 0] * 3))
    assert torch.equal(fed_by({"input_ids": ids, "position_ids": four}, 0).positions, places)


def test_rows_are_followed_from_where_they_were_seen_first() -> None:
    """They may begin anywhere; a first forward that does not count in a line is followed by nobody."""
    rows, real = RowPositions(), torch.ones(2, 3, dtype=torch.bool)
    assert rows.follow(Fed(torch.tensor([[7, 8, 9], [0, 0, 1]]), real)) == []
    wrong = rows.follow(Fed(torch.tensor([[10, 11, 13], [9, 10, 11]]), real))
    assert [tuple(one) for one in wrong] == [(0, 2, 12, 13)]
    rows.selected(torch.tensor([1, 0]))
    assert [tuple(one) for one in rows.follow(Fed(torch.tensor([[3, 4, 5], [14, 15, 16]]), real))] == [(0, 0, 12, 3)]


def test_a_mask_that_hides_what_was_counted() -> None:
    """A row that goes on behind padding of its own may count what the mask shows, or go on where it ended."""
    for start in (2, 5):
        rows, real = RowPositions(), torch.ones(1, 5, dtype=torch.bool)
        rows.follow(Fed(torch.arange(5)[None], real))
        shown = torch.tensor([[2, 3]])
        assert rows.follow(Fed(torch.tensor([[start, start + 1]]), real[:, :2], shown)) == []
        assert len(rows.follow(Fed(torch.tensor([[9]]), real[:, :1], torch.tensor([[4]])))) == 1


@pytest.mark.parametrize("way", ["load", "in place", "data", "told", "none"])
def test_weights_that_are_replaced_behind_a_cache(models, way: str) -> None:
    """R6 where a turn of a chat reads what other weights wrote; nothing where they are the same or the cache is new."""
    model = models("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with attach(model, FULL) as handle, torch.no_grad():
            cache = transformers.DynamicCache(config=model.config)
            ids = turn(model, cache, PROMPT)
            if way == "load":
                model.load_state_dict({name: value * 1.5 for name, value in before.items()})
            elif way == "in place":
                next(model.parameters()).mul_(2)
            elif way == "data":
                next(model.parameters()).data.mul_(2)
            elif way == "told":
                handle.on_weights()
            turn(model, transformers.DynamicCache(config=model.config), PROMPT)
            if way == "none":
                turn(model, cache, ids)
                return
            finding = caught(lambda: turn(model, cache, torch.cat((ids, ids), 1)))
            assert (finding.code, finding.causes[0].family) == ("R6", "identity")
            assert "weights were replaced" in finding.causes[0].text
    finally:
        model.load_state_dict(before)


def test_a_mix_of_weights_that_is_meant(models) -> None:
    """`keeps`: caches of now go on, once."""
    model = models("Llama")
    with attach(model, FULL) as handle, torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        ids = turn(model, cache, PROMPT)
        next(model.parameters()).mul_(1)
        handle.on_weights(keeps=True)
        ids = turn(model, cache, ids)
        next(model.parameters()).mul_(1)
        assert caught(lambda: turn(model, cache, ids)).code == "R6"


def test_a_training_loop(models) -> None:
    """Weights change between generations with caches of their own: nothing."""
    model = models("Llama")
    with attach(model, FULL) as handle:
        for _ in range(3):
            model.generate(PROMPT, max_new_tokens=3, do_sample=False)
            with torch.no_grad():
                next(model.parameters()).mul_(1)
        assert handle.certificate()["findings"] == []


def _fed(positions: list[int], shown: str) -> Fed:
    """What a row is fed last; `shown`: of all its entries, 1 or 0."""
    mask, given = torch.tensor([[int(one) for one in shown]]), torch.tensor([positions])
    found = fed_by({"input_ids": given, "position_ids": given, "attention_mask": mask}, len(shown) - len(positions))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ([([0, 1, 2], "111"), ([3, 4], "10"), ([5], "1")], []),  # a token that looks like padding, which counts
        ([([0, 1, 2], "111"), ([3, 4], "10"), ([4], "1")], []),  # one that does not
        ([([0, 1, 2], "111"), ([3, 4], "00"), ([5, 6], "01")], []),  # nothing but such, and one in front
        ([([0, 1, 2], "111"), ([1, 1], "00"), ([3], "1")], []),
        ([([0, 1, 2], "111"), ([3, 4, 5], "101"), ([6], "1")], []),
        ([([0, 1, 2], "111"), ([3, 1, 4], "101"), ([5], "1")], []),
        ([([0, 1, 2], "111"), ([3, 4], "10"), ([6], "1")], [(0, 5, 6)]),
        ([([0, 1, 2], "111"), ([3, 5, 5], "101")], [(2, 4, 5)]),
    ],
)
def test_padding_inside_of_a_row_is_counted_or_not(
    parts: list[tuple[list[int], str]], wrong: list[tuple[int, ...]]
) -> None:
    """What a mask hides behind a row's first token, as the pad token that an assistant has drawn: both ways go on."""
    rows, found, shown = RowPositions(), list[tuple[int, ...]](), ""
    for positions, more in parts:
        shown += more
        found += [(own.entry, own.wanted, own.found) for own in rows.follow(_fed(positions, shown))]
    assert found == wrong


def test_an_assistant_that_draws_the_pad_token_is_sound(models) -> None:
    """transformers takes such tokens for padding when an assistant goes on, and counts them."""
    model, assistant, hidden = models(), models(), 0
    drawn = model.generate(PROMPT, max_new_tokens=12, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    follow = RowPositions.follow

    with attach(assistant, FULL) as handle, pytest.MonkeyPatch.context() as patch:

        def noted(rows: RowPositions, fed: Fed | None) -> list:
            nonlocal hidden
            hidden += fed is not None and not bool(fed.is_real.all())
            return follow(rows, fed)

        patch.setattr(RowPositions, "follow", noted)
        for token in {*drawn} - {*PROMPT[0].tolist()}:
            model.generation_config.pad_token_id = assistant.generation_config.pad_token_id = token
            model.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=assistant)
    assert handle.findings == []
    assert hidden or transformers.__version__ < "5.20"  # which hide none of them
