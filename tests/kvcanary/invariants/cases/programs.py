"""A captured program that no canary could watch.

Each case: a check, arguments that break its rule, arguments that just do not, the type, the words.
"""

from kvcanary import invariants

CASES = [
    (
        invariants.check_hooked,
        ("draft[1]", "draft", 4, False),
        ("draft[1]", "draft", 4, True),
        invariants.MissingHooksError,
        "draft[1] of the draft pool has no hooks in the captured program for 4 requests, the canary counts on those of "
        "every forward: make each by StaticForwards.hook()",
    ),
]
