"""Summed layouts: bytes that came back in another order, where only their fingerprints' sum over the layers is known.

K and V, heads or layers in another order add up to what each word would add under the key of the place where it should
be. So one table, of what lies here against the keys of there, tells every order of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.pools.slot_maps import Ints
from kvcanary.provenance.changed_word import WordChange, single_words
from kvcanary.provenance.other_layouts import orders_of, turned, turned_back
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import MASK_32, MASK_64, signed

Order = tuple[int, ...]


#: Of sums that are of one entry each.
ONE = np.ones(1, np.int64)


class _Scene(NamedTuple):
    """rows: [layers, n, words] int64, unsigned words as they lie;  keys: [layers, words] int64
    lacks: [n // size] what sums over so many entries at a time lack to be those that are wanted, each entry times
        its weight: [size] int64
    """

    pool: PoolState
    rows: Tensor
    keys: Tensor
    lacks: Ints
    weights: Ints

    def summed(self, values: Ints) -> Ints:
        """[n // size, ...] of [n, ...] int64."""
        by_block = values.reshape(-1, len(self.weights), *values.shape[1:])
        return np.einsum("be...,e->b...", by_block, self.weights)


def layout_of_sums(pool: PoolState, slots: Tensor, wanted: Ints, weights: Ints = ONE) -> str | None:
    """What order explains the bytes of these slots [n], whose fingerprints a should add up to wanted [n] int64.

    weights: [size] int64; sums are over so many slots at a time then, and wanted is [n // size]
    """
    scene = _scene(pool, slots, wanted, weights)
    if (found := _order(_parts_table(scene), iter([(1, 0)]), scene)) is not None:
        return "K and V are exchanged"
    heads = pool.view.parts[0].heads
    for numbers, name in ((0, 1), "K and V"), ((0,), "K"), ((1,), "V"):
        table = _heads_table(scene, numbers, heads)
        if (found := _order(table, orders_of(heads), scene)) is not None:
            return f"heads of {name} are in another order: {', '.join(map(str, found[:16]))}"
    if len(weights) > 1 and (found := _entries_order(scene)) is not None:
        return f"entries of a block are in another order: {', '.join(map(str, found[:16]))}"
    layers = torch.einsum("anw,bw->nab", scene.rows, scene.keys).numpy()
    if (found := _order(layers, orders_of(pool.view.num_layers), scene)) is not None:
        return f"layers are in another order: {', '.join(map(str, found[:16]))}"
    return None


def exchanged_axes(pool: PoolState, slots: Tensor, wanted: Ints, weights: Ints = ONE) -> bool:
    """Whether heads and slots of one page are exchanged; slots: [page size], all of it in order.

    wanted: [page size] int64, as fingerprints a should be, or [1], their sum with weights [page size]
    """
    scene = _scene(pool, slots, wanted, weights)
    for turn in (turned, turned_back):
        total = np.zeros(len(slots), np.int64)
        for layer in range(pool.view.num_layers):
            undone = [
                turn(_part(pool, scene.rows[layer], n).unflatten(1, (part.heads, -1)))
                for n, part in enumerate(pool.view.parts)
            ]
            total += (torch.cat(undone, 1) * scene.keys[layer]).sum(1).numpy()
        if (scene.summed(total + int(pool.keys.start_a.sum())) == wanted).all():
            return True
    return False


def word_of_sums(pool: PoolState, slot: int, wanted: int) -> WordChange | None:
    """The one word of a slot whose change explains the sum; None unless one word of one layer does."""
    where = torch.tensor([slot], device=pool.records.device)
    scene = _scene(pool, where, np.array([wanted], np.int64))
    differs = torch.from_numpy(-scene.lacks).to(where.device)
    fits = []
    for layer in range(pool.view.num_layers):
        rows = pool.rows.gather_layer(layer, where)
        number, changed, _ = single_words(pool.keys, layer, rows, differs)
        if int(number[0]) >= 0:
            new = int(rows[0, int(number[0])]) & MASK_32
            fits.append(WordChange(layer, int(number[0]), new - int(changed[0]), new))
    return fits[0] if len(fits) == 1 else None


def _scene(pool: PoolState, slots: Tensor, wanted: Ints, weights: Ints = ONE) -> _Scene:
    layers = range(pool.view.num_layers)
    rows = torch.stack([pool.rows.gather_layer(layer, slots) for layer in layers]).cpu().to(torch.int64) & MASK_32
    keys = pool.keys.fingerprint_a.cpu().to(torch.int64) & MASK_32
    lies = _sums(pool, rows, keys)
    scene = _Scene(pool, rows, keys, wanted, weights)
    return scene._replace(lacks=wanted - scene.summed(lies))


def _sums(pool: PoolState, rows: Tensor, keys: Tensor) -> Ints:
    """[n] int64: fingerprints a of what lies there, summed over the layers."""
    own: Ints = ((rows * keys[:, None]).sum((0, 2)) + pool.keys.start_a.sum().cpu()).numpy()
    return own


def _entries_order(scene: _Scene) -> Order | None:
    """In which order entries of the first block lie."""
    sums, size = _sums(scene.pool, scene.rows, scene.keys)[: len(scene.weights)], len(scene.weights)
    wanted = int(scene.lacks[0]) + int(scene.summed(sums)[0])
    for order in orders_of(size):
        if int(np.dot(sums, scene.weights[np.array(order)])) == signed(wanted & MASK_64):
            return order
    return None


def _order(table: NDArray[np.int64] | None, orders: Iterator[Order], scene: _Scene) -> Order | None:
    """The first order that explains what is lacking; table: [n, which lies here, whose keys]."""
    if table is None:
        return None
    table = scene.summed(table)
    here = np.arange(table.shape[1])
    right = table[:, here, here].sum(1)
    for order in orders:
        if (table[:, here, np.array(order)].sum(1) - right == scene.lacks).all():
            return order
    return None


def _parts_table(scene: _Scene) -> NDArray[np.int64] | None:
    """[n, 2, 2] of K and V; None where they are not alike."""
    pieces = scene.pool.rows.pieces
    if len(pieces) < 2 or not scene.pool.view.v or pieces[0].words != pieces[1].words:
        return None
    rows = torch.stack([_part(scene.pool, scene.rows, part) for part in (0, 1)])
    keys = torch.stack([_part(scene.pool, scene.keys, part) for part in (0, 1)])
    return torch.einsum("alnw,blw->nab", rows, keys).numpy()


def _heads_table(scene: _Scene, numbers: tuple[int, ...], heads: int) -> NDArray[np.int64] | None:
    """[n, heads, heads] of these parts; None where one has another number of heads, or there is one head."""
    pool, tables = scene.pool, []
    for number in numbers:
        words = pool.rows.pieces[number].words if number < len(pool.view.parts) else 1
        if heads < 2 or number >= len(pool.view.parts) or pool.view.parts[number].heads != heads or words % heads:
            return None
        rows = _part(pool, scene.rows, number).unflatten(-1, (heads, -1))
        keys = _part(pool, scene.keys, number).unflatten(-1, (heads, -1))
        tables.append(torch.einsum("lnaw,lbw->nab", rows, keys).numpy())
    return np.sum(tables, axis=0)


def _part(pool: PoolState, words: Tensor, number: int) -> Tensor:
    """Words of one part out of [..., words]."""
    piece = pool.rows.pieces[number]
    return words[..., piece.first : piece.first + piece.words]
