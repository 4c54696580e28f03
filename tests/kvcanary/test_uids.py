"""RequestIds: 32-bit names of requests, equal on every rank and in every replay."""

from __future__ import annotations

import hashlib

import pytest
from structlog.testing import capture_logs

from kvcanary.ledger import request_ids as uids
from kvcanary.ledger.request_ids import REMEMBERED_UIDS, RequestIds, digest

COLLIDING = ("request 77204", "request 193657")  # found by search: their 32 bits are equal


def test_a_uid_is_32_bits_of_blake2b():
    """The same name has the same uid in every process, and 0 means nobody."""
    struct = RequestIds()
    for number in range(2000):
        name = f"request {number}"
        expected = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        assert 0 < struct.new(name) == expected < 1 << 32


def test_the_order_of_admission_does_not_matter():
    """Requests that do not collide have the same uids in any order, whoever came and went before."""
    first, second = RequestIds(), RequestIds()
    names = [f"request {number}" for number in range(50)]
    forward = {name: first.new(name) for name in names}
    second.retire(second.new("somebody"))
    assert {name: second.new(name) for name in reversed(names)} == forward


def test_a_live_collision_is_resolved_and_logged_once():
    """The second of two colliding requests gets its next digest; one event names both."""
    struct = RequestIds()
    with capture_logs() as events:
        taken, other = (struct.new(name) for name in COLLIDING)
    assert taken == digest(COLLIDING[0], 0) == digest(COLLIDING[1], 0)
    assert other == digest(COLLIDING[1], 1) != taken
    assert [struct.name(uid) for uid in (taken, other)] == list(COLLIDING)
    assert events == [
        {
            "event": "kvcanary.uid_collision",
            "log_level": "warning",
            "request": COLLIDING[1],
            "held_by": COLLIDING[0],
            "uid": other,
        }
    ]


def test_an_ended_request_does_not_collide():
    """Only live requests keep a uid from others: a replay that begins later gives the same."""
    struct = RequestIds()
    struct.retire(struct.new(COLLIDING[0]))
    with capture_logs() as events:
        uid = struct.new(COLLIDING[1])
    assert (uid, events) == (digest(COLLIDING[1], 0), [])
    assert struct.name(uid) == COLLIDING[1]


def test_zero_is_never_a_uid(monkeypatch):
    """A digest of 0 is passed over, and that is no collision."""
    monkeypatch.setattr(uids, "digest", lambda request_id, attempt: attempt)
    with capture_logs() as events:
        assert RequestIds().new("only") == 1
    assert events == []


def test_names_of_ended_requests_are_kept_up_to_a_bound():
    """Reports name the requests that ended last; those that live are named however old they are."""
    struct = RequestIds()
    oldest, first = struct.new("lives long"), struct.new("ends first")
    struct.retire(first)
    assert struct.name(first) == "ends first"
    for number in range(REMEMBERED_UIDS):
        struct.retire(struct.new(str(number)))
    assert (struct.name(oldest), struct.name(first)) == ("lives long", None)
    assert struct.name(digest("0", 0)) == "0"


@pytest.mark.parametrize("name", ["", "\ud800", "\0", "naïve"])
def test_any_string_has_a_uid(name):
    """Empty names, lone surrogates and zero bytes are names too."""
    struct = RequestIds()
    uid = struct.new(name)
    assert struct.name(uid) == name
    struct.retire(uid)
    assert struct.new(name) == uid
