"""Part: one kind of bytes in the rows of a pool, K, V or an extra, and what tensors of it must look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.errors import PlanError

LAYOUTS = ("NHD", "HND")
ELEMENT_SIZES = (1, 2, 4, 8)

Extras = Mapping[str, Sequence[Tensor]] | Sequence[Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Part:
    """K, V or an extra.

    name:    what a report calls it: "K", "V", the engine's name of an extra, or "extra 0"
    tensors: one a layer
    shape:   of one slot's value in one layer: heads, then dim; an extra may have no dim, or neither
    """

    name: str
    tensors: tuple[Tensor, ...]
    shape: tuple[int, ...]

    @property
    def argument(self) -> str:
        """What the engine calls it where it gives it: k, v, or the name of the extra."""
        return self.name.lower() if self.name in ("K", "V") else self.name

    @property
    def heads(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return torch.Size(self.shape[1:]).numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def element_size(self) -> int:
        return self.tensors[0].element_size()


def describe_parts(
    k: Sequence[Tensor], v: Sequence[Tensor] | None, extras: Extras, layout: str, page_size: int
) -> tuple[Part, ...]:
    """K, V and extras in the order of the row; PlanError where they are no tensors of one pool.

    All of them have pages if K has: a fourth dimension, or the HND layout. V may have another dim than K.
    """
    if layout not in LAYOUTS:
        raise PlanError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}: name the one its rows lie in")
    k, v, named = list(k), list(v or ()), _named(extras)
    if not k or len(v) not in (0, len(k)):
        raise PlanError(
            f"k and v must have one tensor a layer, got {len(k)} and {len(v)}: leave v empty only where rows are latent"
        )
    for name, tensors in named.items():
        if len(tensors) != len(k):
            raise PlanError(f"extra {name!r} must have one tensor a layer, {len(k)}, got {len(tensors)}: give all")
    given = {"k": k, **({"v": v} if v else {}), **named}
    _check_tensors(given)
    paged = layout == "HND" or k[0].dim() == 4
    split = {name: _split(name, tensors[0], layout, page_size, paged) for name, tensors in given.items()}
    _check_shapes(split)
    names = {"k": "K", "v": "V"}
    return tuple(Part(names.get(name, name), tuple(given[name]), tail) for name, (_, tail) in split.items())


def _named(extras: Extras) -> dict[str, list[Tensor]]:
    if not isinstance(extras, Mapping):
        extras = {f"extra {number}": tensors for number, tensors in enumerate(extras)}
    if not {"K", "V", "k", "v"}.isdisjoint(extras):
        raise PlanError(f"extras must not be named k or v, got {', '.join(extras)}: choose other names")
    return {name: list(tensors) for name, tensors in extras.items()}


def _check_tensors(given: Mapping[str, Sequence[Tensor]]) -> None:
    """Tensors on one device, K and V of one type, the layers of a part alike."""
    first = given["k"][0]
    for name, tensors in given.items():
        for layer, tensor in enumerate(tensors):
            where = f"{name}[{layer}]"
            if not isinstance(tensor, Tensor):
                raise PlanError(f"{where} must be a tensor, got {type(tensor).__name__}: give one a layer")
            if tensor.device != first.device:
                raise PlanError(f"{where} is on {tensor.device}, k[0] on {first.device}: a pool lies on one device")
            like = "k" if name == "v" else name
            if tensor.dtype is not given[like][0].dtype or tensor.shape != tensors[0].shape:
                other = given[like][0] if tensor.dtype is not given[like][0].dtype else tensors[0]
                raise PlanError(f"{where} is {_described(tensor)}, {like}[0] is {_described(other)}: layers are alike")
    for name, (tensor, *_) in given.items():
        if not _is_number(tensor.dtype):
            sizes = ", ".join(map(str, ELEMENT_SIZES))
            raise PlanError(
                f"elements of {name} must be numbers of {sizes} bytes, got {tensor.dtype}: view it as bytes"
            )


def _is_number(dtype: torch.dtype) -> bool:
    """Whether a report can say what the bits of an element mean."""
    if dtype.is_complex or dtype.itemsize not in ELEMENT_SIZES:
        return False
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(torch.float64)
    except (RuntimeError, TypeError):
        return False
    return True


def _split(
    name: str, tensor: Tensor, layout: str, page_size: int, paged: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(pages and page_size, or num_slots) and the shape of one slot's value."""
    shape, place = tuple(tensor.shape), 2 if layout == "HND" else 1
    is_extra = name not in ("k", "v")
    wanted = _wanted(layout, paged, is_extra)
    rank_fits = len(shape) >= (place + 1 if paged else 1) if is_extra else len(shape) == (4 if paged else 3)
    if not rank_fits:
        remedy = "a latent row has one head, k.unsqueeze(-2) gives it" if name == "k" else "lay it out like k"
        raise PlanError(f"{name}[0] must be {wanted}, got {list(shape)}: {remedy}")
    if not paged:
        return shape[:1], shape[1:]
    if shape[place] != page_size:
        raise PlanError(
            f"{name}[0] must be {wanted} with page_size {page_size}, got {list(shape)}: "
            f"the layout is {layout}, name the other one or the page_size that the tensors have"
        )
    return (shape[0], page_size), shape[1:place] + shape[place + 1 :]


def _wanted(layout: str, paged: bool, is_extra: bool) -> str:
    """The shape in words."""
    if layout == "HND":
        dims = ["pages", "kv_heads", "page_size", "head_dim"]
    else:
        dims = [*(["pages", "page_size"] if paged else ["num_slots"]), "kv_heads", "head_dim"]
    return f"[{', '.join([*dims[:-1], '...'] if is_extra else dims)}]"


def _check_shapes(split: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """All parts have the slots of K, none is empty, and V has the heads of K."""
    slots, (heads, _) = split["k"]
    for name, (own, tail) in split.items():
        if own != slots:
            raise PlanError(f"{name} has {list(own)} slots, k has {list(slots)}: parts of a pool have the same")
        if 0 in own or 0 in tail:
            raise PlanError(f"{name}[0] must not be empty, got {list(own)} slots of {list(tail)}: leave it out")
    if "v" in split and split["v"][1][0] != heads:
        raise PlanError(f"v[0] must have the heads of k, {heads}, got {split['v'][1][0]}: only their dim may differ")


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
