"""Structs as loops see them: `request_at(address).num_tokens` reads and writes the field of that name (layout.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic

from kvcanary.native import layout


def struct_at(struct: Any) -> Any:
    """The loop that gives a struct by its address."""
    kind = from_dtype(np.dtype([(name, np.int64) for name in struct._fields[:-1]], align=True))

    def at(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    at.__qualname__ = repr(struct)  # loops are compiled again where a field has another place
    return intrinsic(at)


pages_at = struct_at(layout.PAGES)
asked_at = struct_at(layout.ASKED)
books_at = struct_at(layout.BOOKS)
chain_at = struct_at(layout.ROW_CHAIN)
fact_at = struct_at(layout.FACT)
final_at = struct_at(layout.FINAL)
forward_at = struct_at(layout.FORWARD)
line_at = struct_at(layout.LINE)
piece_at = struct_at(layout.PIECE)
pool_at = struct_at(layout.POOL)
queue_at = struct_at(layout.QUEUE)
range_at = struct_at(layout.RANGE)
request_at = struct_at(layout.REQUEST)
row_end_at = struct_at(layout.ROW_END)
run_at = struct_at(layout.RUN)
slice_at = struct_at(layout.SLICE)
spread_at = struct_at(layout.SPREAD)
taken_at = struct_at(layout.TAKEN)
unheard_at = struct_at(layout.UNHEARD)
said_at = struct_at(layout.SAID)
