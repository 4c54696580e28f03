"""What the attention of a model really reads: a few forwards in which every key, query and value is known.

For these forwards the projections of each attention give what the probe says: one of two keys for every token, the same
vector as its query, and a value that names the position. Behind the rotation a query is then the key of its own
position. So what attention must give follows from the cache alone, whatever the rotation: softmax of keys times keys,
over values. A query that was rotated for another position, keys or queries that were rotated in part, a missing scale,
a mask that hides entries or lets others in give something else.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcanary.adapters.transformers.judging import dense_violation
from kvcanary.adapters.transformers.unwatched import cache_argument
from kvcanary.calls.violation import Violation

#: Tokens of the forwards: a prompt, one token, a few, some that go beyond a window, and some whose keys name the
#: positions behind these.
CHUNKS, ASKED = (5, 1, 3, 8, 1, 2, 4), 20
WINDOW = 16  # entries that a layer with a window sees meanwhile, its own included
PADDING = 3  # tokens in front of a row, where a batch is padded
#: Of the largest value, in what attention gives: what a type rounds scores, weights and sums by is less.
NEAR, NEAR_IN_BFLOAT16 = 0.02, 0.06
SHARPNESS = 3.0  # score of a query with its own key
EVERY = 4  # of so many tokens the last has the other key: of one key alone, what rotations add cancels out
NEEDED = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling", "layer_idx")
#: Types of models whose attention was tried, and is the function that is expected here.
UNDERSTOOD = frozenset(
    (
        *("arcee", "bamba", "cohere", "cwm", "ernie4_5", "ernie4_5_moe"),
        *("gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe"),
        *("helium", "jais2", "llama", "ministral", "mistral", "mixtral"),
        *("phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
        *("stablelm",),
    )
)
#: What makes attention of such a type another function: of a module, and of a configuration.
OTHERWISE = ("sinks", "qk_norm", "q_layernorm", "k_layernorm")
CONFIGURED = ("attn_logit_softcapping", "clip_qkv")


class Misread(NamedTuple):
    """Of one layer: the position of the query, and family and text of what attention did instead.

    rotated_for: the position for which the query was rotated; None: that is not what was wrong
    """

    layer: int
    position: int
    family: str
    text: str
    rotated_for: int | None = None


class Asked(NamedTuple):
    """Of one layer: by forward, what each token of the probe got [tokens, heads, dim], by key, a query over it
    [2, kv_heads, 1], and the keys and values that were stored [kv_heads, tokens, dim]; of the last row of the batch.

    window: entries that a token sees; 0: all
    padded: so many tokens of the row are padding, which nobody sees
    """

    module: Any
    outputs: list[Tensor]
    sharpness: list[Tensor]
    stored: list[tuple[Tensor, Tensor]]
    window: int
    padded: int


def why_not(model: Any) -> str | None:
    """Why this model cannot be asked; None: it can."""
    config, modules = model.config, attentions(model)
    if config.model_type not in UNDERSTOOD:
        return f"that of a {config.model_type} was not tried"
    if not modules or len({one.layer_idx for one in modules}) != len(modules):
        return "no attention, or several of one layer, with projections of its own for queries, keys and values"
    odd = [name for name in OTHERWISE if any(getattr(one, name, None) is not None for one in modules)]
    odd += [name for name in CONFIGURED if getattr(config, name, None)]
    if odd:
        return f"it has {odd[0]}"
    devices = {parameter.device for parameter in model.parameters()}
    if model.training or len(devices) != 1 or "meta" in {device.type for device in devices}:
        return "it trains, or does not lie on one device"
    return None


def attentions(model: Any) -> list[Any]:
    """The attentions whose projections can be replaced, by layer."""
    return [one for one in model.modules() if all(getattr(one, name, None) is not None for name in NEEDED)]


@torch.no_grad()
def probe(model: Any) -> Misread | None:
    """The first token that got something else than its cache says; None: all is right.

    model: one of which `why_not` says nothing
    """
    from transformers import DynamicCache, StaticCache

    caches = [DynamicCache]
    is_cast = torch.is_autocast_enabled(model.device.type)  # static layers take one type alone
    if getattr(model, "_can_compile_fullgraph", False) and not is_cast:
        caches.append(functools.partial(StaticCache, max_cache_len=sum(CHUNKS)))
    with _narrowed(model):
        found = (
            _asked(model, kind(config=model.config), padded) for kind, padded in itertools.product(caches, (0, PADDING))
        )
        return next((misread for misread in found if misread is not None), None)


def _asked(model: Any, cache: Any, padded: int) -> Misread | None:
    """As `probe`, over a cache that holds nothing; padded: tokens in front of the second of two rows, 0: one row."""
    asked = {one.layer_idx: Asked(one, [], [], [], _window(cache, one.layer_idx), padded) for one in attentions(model)}
    device, update = next(model.parameters()).device, cache.update
    is_token = torch.ones(1 + bool(padded), sum(CHUNKS), dtype=torch.int64, device=device)
    is_token[-1, :padded] = 0

    def stored(keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in asked:
            asked[layer_idx].stored.append((keys[-1].cpu(), values[-1].cpu()))
        return update(keys, values, layer_idx, *args, **kwargs)

    cache.update = stored
    with ExitStack() as stack:
        for own in asked.values():
            stack.enter_context(_answering(own))
        for count, end in zip(CHUNKS, itertools.accumulate(CHUNKS), strict=True):
            given: dict[str, Any] = {cache_argument(model): cache}
            if padded:
                given["attention_mask"] = is_token[:, :end]
            model(input_ids=torch.ones_like(is_token[:, :count]), use_cache=True, **given)
    judged = (_judged(layer, own) for layer, own in sorted(asked.items()))
    return next((found for found in judged if found is not None), None)


def _window(cache: Any, layer: int) -> int:
    """Entries that a token sees in a layer of a cache; 0: all."""
    own = cache.layers[layer] if layer < len(cache.layers) else None
    return WINDOW if getattr(own, "is_sliding", False) else 0


@contextmanager
def _narrowed(model: Any) -> Iterator[None]:
    """Windows are few entries wide meanwhile, so that few tokens reach beyond them."""
    owners: dict[int, Any] = {
        id(own): own for module in model.modules() for own in (module, getattr(module, "config", None))
    }
    held = [(own, own.sliding_window) for own in owners.values() if getattr(own, "sliding_window", None)]
    for own, _ in held:
        own.sliding_window = WINDOW
    try:
        yield
    finally:
        for own, width in held:
            own.sliding_window = width


def misread_violation(found: Misread) -> Violation:
    """R4 (E1): what a query has read is not what its position says."""
    read = found.position if found.rotated_for is None else found.rotated_for
    sides = {"position": found.position}, {"position": read} if read != found.position else {"reads": found.text}
    misread = found.family, found.text, ("by a probe, before the model was watched",)
    return dense_violation("R4", (found.layer,), 0, found.position, ("decode", 0), sides, misread=misread)


@contextmanager
def _answering(own: Asked) -> Iterator[None]:
    """The projections of one attention give what the probe says, and what goes into the last one is kept."""
    module, known = own.module, dict[str, Tensor]()
    norm = getattr(module, "q_norm", None)

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if "keys" not in known:
            key = module.k_proj(hidden[:1, :1]).view(-1, module.head_dim)
            known["keys"] = torch.stack((key, key.roll(1, -1)))

    def which(output: Tensor) -> Tensor:
        """[tokens] of a forward: the number of its key."""
        first = sum(map(len, own.outputs))
        return _key_of(torch.arange(first, first + output.shape[1], device=output.device))

    def key(_: Any, args: Any, output: Tensor) -> Tensor:
        return (
            output if "keys" not in known else known["keys"][which(output)].reshape(output[0].shape).expand_as(output)
        )

    def query(_: Any, args: Any, output: Tensor) -> Tensor:
        """Behind the norm of queries, where there is one."""
        held = known["keys"] if norm is None else module.k_norm(known["keys"])
        times = SHARPNESS / (module.scaling * (held.float() ** 2).sum(-1, keepdim=True))  # heads may differ much
        own.sharpness.append(times.cpu())
        asked = output.view(*output.shape[:2], -1, module.head_dim)
        each = (held * times).to(output).repeat_interleave(asked.shape[2] // held.shape[1], 1)
        return each[which(output)].reshape(output[0].shape).expand_as(output)

    def value(_: Any, args: Any, output: Tensor) -> Tensor:
        drawn = torch.Generator().manual_seed(len(own.outputs))
        return (torch.rand(output.shape, generator=drawn) - 0.5).to(output)

    def given(_: Any, args: Any) -> None:
        own.outputs.append(args[0][-1].view(args[0].shape[1], -1, module.head_dim).cpu())

    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True), module.k_proj.register_forward_hook(key)]
    hooks += [(module.q_proj if norm is None else norm).register_forward_hook(query)]
    hooks += [module.v_proj.register_forward_hook(value), module.o_proj.register_forward_pre_hook(given)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _judged(layer: int, own: Asked) -> Misread | None:
    near = NEAR_IN_BFLOAT16 if own.outputs[0].dtype is torch.bfloat16 else NEAR
    keys, values = (torch.cat(held, 1).float() for held in zip(*own.stored, strict=True))
    scales = own.module.scaling * own.sharpness[0]
    for position, got in enumerate(torch.cat(own.outputs)[:ASKED].float()):
        if position < own.padded:
            continue
        first = max(own.padded, position + 1 - own.window if own.window else 0)
        wanted = functools.partial(_attended, keys, values, scale=scales[_key_of(position)])
        if _off(got, wanted(position, position + 1, first=first)) > near:
            return Misread(layer, position, *_named(position, first, got, wanted, len(keys[0]), own, near))
    return None


def _key_of(position: Any) -> Any:
    """The number of the key of a token, or [n] of tokens."""
    return (position % EVERY) // (EVERY - 1)


def _attended(keys: Tensor, values: Tensor, query: int, end: int, scale: Tensor, first: int = 0) -> Tensor:
    """[kv_heads, dim] what a query that is the key of one position gets of the entries [first, end).

    scale: [kv_heads, 1]
    """
    scores = scale * (keys[:, first:end] @ keys[:, query, :, None])[..., 0]
    return (scores.softmax(-1)[:, None] @ values[:, first:end])[:, 0]


def _off(got: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value, inf where something is not finite.

    got: [heads, dim], of several heads to each of `wanted` [kv_heads, dim]
    """
    off = (got - wanted.repeat_interleave(len(got) // len(wanted), 0)).abs().max() / wanted.abs().max()
    return float(off) if bool(torch.isfinite(off)) else torch.inf


def _named(
    position: int, first: int, got: Tensor, wanted: Callable[..., Tensor], count: int, own: Asked, near: float
) -> tuple[str, str, int | None]:
    """What attention did instead, by what would give this; of several the nearest.

    first: that the token sees
    """
    end, at = position + 1, f"at position {position}"
    tried: list[tuple[Tensor, tuple[str, str, int | None]]] = []
    for other in (*range(position), *range(end, count)):
        told = "addressing", f"the query {at} was rotated for position {other}", other
        tried.append((wanted(other, end, first=first), told))
    for begin, stop in itertools.combinations(range(count + 1), 2):
        if begin < end and (begin, stop) != (first, end):
            padding = ", padding among them" if begin < own.padded else ""
            read = "lengths", f"attention {at} {_instead(begin - first, stop - end)}{padding}", None
            tried.append((wanted(position, stop, first=begin), read))
    unscaled = wanted(position, end, first=first, scale=own.sharpness[0][_key_of(position)])
    tried.append((unscaled, ("scales", "the scale of the scores is missing", None)))
    nearest, named = min(((_off(got, given), named) for given, named in tried), key=lambda one: one[0])
    return named if nearest <= near else ("scales", "entries weigh otherwise than their keys and the query say", None)


def _instead(begins: int, ends: int) -> str:
    """In words: entries that were read begin, and end, so many further behind than they should."""
    told = []
    if begins:
        told.append(
            f"left out the first {begins} entries" if begins > 0 else f"read {-begins} entries in front as well"
        )
    if ends:
        told.append(f"read {ends} entries behind it as well" if ends > 0 else f"left out the last {-ends} entries")
    return " and ".join(told)
