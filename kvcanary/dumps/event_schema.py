"""Event schema: which events a dump holds, and what each of their fields must be; one table for writer and reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcanary.native.layout import plan_layout
from kvcanary_kernels.record.layout import Identity


def _fields(text: str) -> dict[str, str]:
    """Kinds by name, of `name:kind name:kind`."""
    return dict(field.split(":") for field in text.split())


#: Of a model call, eager or captured. has_lineage: it lies in the place of parents; older dumps have none
_FORWARD = (
    "kind:name index:int pool:name requests:names width:int entries:int rows:int has_parents:flag has_lineage:flag? "
    "has_starts:flag stored:int plan:ints tails:ints whole_rows:ints wholes:ints mask:ints? mask_shape:ints? "
)
#: By event its fields in the order of the manager's arguments, each with its kind; `?` may be left out.
#: name: a text; int: an integer; flag: a boolean; ints: integers; tokens: token ids.
CALLS = {
    event: _fields(text)
    for event, text in {
        "begin_step": "step:int",
        "expect": "kinds:names indices:ints pools:names request_ids:names",  # since version 5
        "check": "",  # up to version 5: the end of a step that was collected at once
        "check_forwards": "",  # since version 5
        "drain": "",
        "judge_copies": "",
        "close": "pool:name",
        "store": "pool:name layer:int",
        "on_cleared": "pools:names",  # since version 8
        "map": "pool:name slots:ints places:ints",
        "admit": "request_id:name token_ids:tokens root:int",
        "reroot": "request_id:name root:int",  # since version 8
        "append": "request_id:name token_ids:tokens",  # this and `commit`: up to version 2
        "append_all": "request_ids:names counts:ints token_ids:tokens",
        "commit": "request_id:name committed_len:int",
        "commit_all": "request_ids:names committed_lens:ints",
        "release": "request_id:name committed_len:int?",
        "on_alloc": "request_id:name pages:ints for_load:flag?",
        "on_alloc_all": "request_ids:names counts:ints pages:ints",  # since version 4
        "on_free": "request_id:name pages:ints",
        "on_share": "request_id:name pages:ints",
        "on_acquire": "request_id:name pages:ints",
        "on_fork": "request_id:name child_id:name pages:ints",
        "on_copy": "request_id:name page:int copy:int",
        "on_deduplicate": "request_id:name page:int kept:int",
        "on_evict": "pages:ints",
        "sweep_cached": "pages:ints",
        "on_map": "group:name pages:ints own_pages:ints",
        "on_unmap": "group:name pages:ints own_pages:ints",
        "on_swap_out": "group:name pages:ints",
        "on_swap_in": "group:name pages:ints parcels:ints?",
        "on_load_begin": "request_id:name pages:ints",
        "on_load_fail": "request_id:name pages:ints",
        "on_load_end": "request_id:name pages:ints length:int parcel:int?",
        "on_restore": "request_id:name pages:ints length:int parcel:int",
        "on_offload": "pages:ints",
        "parcel": "number:int",
        "before_move": "",
        "on_move": "pool:name src:ints dst:ints to:name? guesses:flag?",
        "ticket_issue": "what:name stream:name sequence:int reads:ints read_names:names read_grants:ints? writes:ints "
        "write_names:names write_grants:ints?",
        "ticket_waits": "stream:name other:name sequence:int",
        "ticket_complete": "other:name sequence:int",
        "ticket_renew": "buffer:name generation:int",
        "ticket_use": "what:name stream:name pages:ints names:names grants:ints? writes:flag requests:names",
        "forward": _FORWARD,
        "launch": _FORWARD + "number:int counts:ints reads:int again:ints strays:ints padding:ints accepted:tokens?",
        "end_step": "step:int",  # this and `collect`: since version 6, before that `depart` and `hear`
        "collect": "step:int",
        "depart": "step:int",
        "hear": "step:int",
        "captured_move": "number:int pool:name src:ints dst:ints",
    }.items()
}


#: Of events that are recorded with other arguments than a dump has: a salt leaves as the chain that it begins.
ARGUMENTS = {"admit": ("request_id", "token_ids", *Identity._fields), "reroot": ("request_id", *Identity._fields)}
#: Events of several requests, each with the field in which what they get lies, one behind the other, and its name.
OF_SEVERAL = {"append_all": ("token_ids", "tokens"), "on_alloc_all": ("pages", "pages")}


def named(event: str, args: Sequence[Any]) -> dict[str, Any]:
    """The arguments that an event is recorded with, by their names."""
    return dict(zip(ARGUMENTS.get(event, CALLS[event]), args, strict=False))


def by_request(counts: Sequence[int], values: Sequence[int]) -> list[list[int]]:
    """The tokens or pages of each request, which lie one behind the other."""
    ends = list(accumulate(counts))
    return [[int(value) for value in values[end - count : end]] for count, end in zip(counts, ends, strict=True)]


#: Events that are model calls: eager, and captured.
FORWARDS = frozenset({"forward", "launch"})
_SAFE = (
    "slot slot_map_of writes_in_forward layers position branch owner generation missing written_by_step "
    "written_in_step last_write layers_changed first_different_position length entries rows behind access runs "
    "written read hazard resource reader used_to which waiting verdict parcel page_of_parcel left_from_page "
    "left_in_step came_back_by came_back_in_step into_page bytes_of_parcel bytes_of_page slots_wrong pages_wrong "
    "pools_wrong layers_wrong opened number level alone ranks by_rank"
)
#: Fields of a finding's two sides that say nothing of texts, bytes or keys.
SAFE_VALUES = frozenset(_SAFE.split())
WITHHELD = "withheld"


def plan_part(event: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    """An array of a forward's plan, by its name in `PlanLayout`."""
    return plan_layout(event["entries"], event["rows"], len(event["requests"])).part(event["plan"], name)
