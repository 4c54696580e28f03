"""Memory of pools that comes and goes: a view lets go of its tensors, and takes others that are laid out alike."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.pools.parts import Part
from kvcanary.pools.views import PoolView

#: Of a view, what stays where its memory changes.
ALIKE = (
    *("name", "page_size", "token_offset", "null_slots", "layout", "group", "window", "ahead", "role"),
    *("num_slots", "num_layers", "device"),
)


class Released:
    """What a view had when it let go: nothing of that is kept alive."""

    def __init__(self, view: PoolView) -> None:
        self._tensors = [[weakref.ref(tensor) for tensor in part.tensors] for part in view.parts]

        bare = [replace(part, tensors=tuple(map(_bare, part.tensors))) for part in view.parts]
        _put(view, bare, [tuple(map(_bare, own)) for own in view.rows.parts], None)

    def again(self, view: PoolView) -> PoolView:
        """A view of the same tensors; PlanError where nobody else has kept them."""
        tensors = [[ref() for ref in own] for own in self._tensors]
        found = [[tensor for tensor in own if tensor is not None] for own in tensors]
        if any(len(own) < len(all_of) for own, all_of in zip(found, tensors, strict=True)):
            raise PlanError(
                f"pool {view.name!r}: the tensors that it was attached with are gone: give on_reallocated() new views"
            )
        return _view_of(view, found)


def rebind(view: PoolView, other: PoolView) -> None:
    """The pool lies where `other` says, from now on. PlanError where it is laid out otherwise."""
    names = [name for name in ALIKE if name != "device" or view.device.type != "meta"]
    differ = [name for name in names if getattr(view, name) != getattr(other, name)]
    differ += [name for name in ("pieces", "dtypes") if getattr(view.rows, name) != getattr(other.rows, name)]
    differ += ["alignment"] if other.rows.alignment % view.rows.alignment else []
    if differ:
        raise PlanError(
            f"pool {view.name!r} must be laid out as before, {', '.join(differ)} differ: detach() this canary and "
            "attach another one to pools of another size or layout"
        )
    view.rows.ptrs.copy_(other.rows.ptrs)
    _put(view, other.parts, other.rows.parts, other.rows.fused)


def _put(view: PoolView, parts: Sequence[Part], words: Sequence[tuple[Tensor, ...]], fused: Tensor | None) -> None:
    k, *others = parts
    v = others.pop(0).tensors if view.v else ()
    extras = {part.name: part.tensors for part in others}
    fields: dict[str, object] = {"k": k.tensors, "v": v, "parts": tuple(parts), "extras": extras}
    for name, value in fields.items():
        object.__setattr__(view, name, value)
    object.__setattr__(view.rows, "parts", tuple(words))
    object.__setattr__(view.rows, "fused", fused)


def _view_of(view: PoolView, tensors: Sequence[Sequence[Tensor]]) -> PoolView:
    """As `view`, of these tensors by part."""
    k, *others = tensors
    v = others.pop(0) if view.v else ()
    names = [part.name for part in view.parts[len(view.parts) - len(others) :]]
    return replace(view, k=k, v=v, extras=dict(zip(names, others, strict=True)))


def _bare(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
