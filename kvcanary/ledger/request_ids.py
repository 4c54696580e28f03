"""RequestIds: 32-bit names of requests in records, the same on every rank and in every replay."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import structlog

REMEMBERED_UIDS = 4096  # ended requests whose names reports can still tell
_events = structlog.get_logger("kvcanary")


class RequestIds:
    """Uids of the live requests, and the names of those that had one lately.

    A uid is the first of `digest(id, 0)`, `digest(id, 1)`, ... that is not 0 and that no other live request has. So it
    depends on the id alone, unless two live ids collide (a pair does once in 2^32): then the one that was live first
    keeps its digest, and the order of admission decides, which ranks and replays share. No rule over the set of live
    ids can do without that order: a uid is in records already when the second request comes, and must not change.
    """

    def __init__(self) -> None:
        self.live: dict[int, str] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()

    def new(self, request_id: str) -> int:
        """A uid for a request that becomes live; a collision is logged once, as `kvcanary.uid_collision`."""
        attempt, holders = 0, []
        while not (uid := digest(request_id, attempt)) or uid in self.live:
            holders += [self.live[uid]] if uid else []
            attempt += 1
        if holders:
            _events.warning("kvcanary.uid_collision", request=request_id, held_by=holders[0], uid=uid)
        self.live[uid] = request_id
        self._ended.pop(uid, None)
        return uid

    def retire(self, uid: int) -> None:
        """The request is over; its name stays known to reports for a while."""
        self._ended[uid] = self.live.pop(uid)
        while len(self._ended) > REMEMBERED_UIDS:
            self._ended.popitem(last=False)

    def has_ended(self, name: str) -> bool:
        """Whether a request of this name ended lately."""
        return name in self._ended.values()

    def remember(self, uid: int, name: str) -> None:
        """A request that ended earlier; a live one keeps its uid."""
        if uid not in self.live:
            self._ended[uid] = name

    def name(self, uid: int) -> str | None:
        """The request that has this uid, or had it last."""
        return self.live.get(uid, self._ended.get(uid))


def digest(request_id: str, attempt: int) -> int:
    """32 bits of blake2b; another value for every attempt."""
    text = f"{request_id}\0{attempt}" if attempt else request_id
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).digest(), "little")
