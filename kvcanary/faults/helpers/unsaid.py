"""What a token does not say: weights, adapters, images and memory that change under an engine which does not look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcanary.faults.strike import need

if TYPE_CHECKING:
    from kvcanary.faults.target import Target
    from kvcanary.pools.views import PoolView

Told = Callable[[int, int], dict[str, Any]]  # of tokens that are cached, and of all, what `admit` is told


def replace_weights(target: Target, keeps: bool) -> bool:
    """The engine's weights are others, and requests go on; `keeps`: as a mix that is meant."""
    names = frozenset(one.request_id for one in target.running())
    need(names)
    target.canary.on_weights(f"struck in step {target.step}", keeps)
    _record(target, "" if keeps else None, {} if keeps else {"reader": names})
    return True


def hit_behind_new_weights(target: Target, is_back: bool) -> bool:
    """A prompt is found in a prefix cache that was not reset; `is_back`: the weights are the ones before again."""
    tokens, _ = _cached_prompt(target)
    before = target.canary.session.ledger.book.weights
    target.canary.on_weights(f"struck in step {target.step}", keeps=True)
    if is_back:
        target.canary.on_weights(before, keeps=True)
    _submit(target, tokens, dict, "" if is_back else None)
    return True


def admit_as(target: Target, told: Told, is_harmless: bool) -> bool:
    """A prompt that is cached comes again, and something is told of it that the key of the cache leaves out."""
    tokens, cached_len = _cached_prompt(target)
    _submit(target, tokens, lambda: told(cached_len, len(tokens)), "" if is_harmless else None)
    return True


def clear_pools(target: Target, keeps_bytes: bool) -> bool:
    """The pools' memory is given back and taken anew, and rows go on; `keeps_bytes`: it was copied along."""
    names, views = frozenset(one.request_id for one in target.running()), _views(target)
    need(names)
    if not keeps_bytes:
        target.canary.on_cleared()
        for view in views:
            for part in view.parts:
                for tensor in part.tensors:
                    tensor.zero_()
    target.canary.on_reallocated(views, keeps_bytes)
    _record(target, "" if keeps_bytes else None, {} if keeps_bytes else {"reader": names})
    return True


def move_pools(target: Target, is_short: bool) -> bool:
    """The pools lie elsewhere, with all that was in them; `is_short`: the copy left out one slot of a running row."""
    rows = [one for one in target.running() if one.committed_len > 1]
    need(rows)
    row = target.rng.choice(rows)
    slot, views = int(row.slots[target.rng.randrange(row.committed_len - 1)]), _views(target)
    if is_short:
        view = target.pools["target"]
        for layer in range(view.num_layers):
            where = row.slots.new_tensor([slot])
            words = view.rows.gather_layer(layer, where)
            view.rows.scatter_layer(layer, where, words * 0)
    target.canary.on_reallocated(views, keeps_bytes=True)
    _record(target, None if is_short else "", {"pool": "target", "slot": slot} if is_short else {})
    return True


def _record(target: Target, code: str | None, place: dict[str, Any]) -> None:
    target.record(None, code, **place)


def _views(target: Target) -> list[PoolView]:
    """Those of the pools, as an engine would make them again."""
    return [replace(view) for view in target.pools.values()]


def _cached_prompt(target: Target) -> tuple[list[int], int]:
    """A beginning of a running request whose pages are published, three tokens more, and how many are cached.

    The first of the three is another than the request's own, whose pages may be published until the prompt comes.
    """
    ledger, size = target.canary.session.ledger, target.setup.page_size
    known = []
    for one in target.running():
        request = ledger.request(one.request_id)
        is_cached = [page >= 0 and ledger.pages.published[page] for page in request.pages[: request.final_pages]]
        count = [*is_cached, False].index(False)
        end = count * size
        tokens = request.tokens[: end + 3].tolist()
        others = [token for token in tokens if token != tokens[min(end, len(tokens) - 1)]]
        if count and len(tokens) == end + 3 and others and request.given is None:
            known.append(([*tokens[:end], others[0], *tokens[end + 1 :]], end))
    need(known)
    return target.rng.choice(known)


def _submit(target: Target, tokens: list[int], told: Callable[[], dict[str, Any]], code: str | None) -> None:
    """A request, of which this is told when it is admitted; the strike is the step in which that comes."""
    canary: Any = target.canary
    own, names = canary.admit, list[str]()

    def admit(request_id: str, token_ids: Any, *args: Any, **kwargs: Any) -> None:
        if request_id not in names:
            return own(request_id, token_ids, *args, **kwargs)
        canary.admit = own
        _record(target, code, {"reader": request_id} if code is None else {})
        given = dict(zip(("salt", "adapter"), args, strict=False)) | kwargs | told()
        return own(request_id, token_ids, **given)

    canary.admit = admit
    names.append(target.submit(tokens, target.setup.new_tokens))


def image(name: str, first: float) -> Told:
    """An image over part of what is cached: from this share of it to its end."""
    return lambda cached, count: {"spans": [(int(first * cached), cached, name)]}


def behind(name: str) -> Told:
    """The same image, but behind all that is cached, and behind the token that a draft's last cached entry holds."""
    return lambda cached, count: {"spans": [(cached + 1, count, name)]}
