"""Window pools, split pools and host tiers whose books are wrong.

Each case: a check, arguments that break its rule, arguments that just do not, the type, the words.
"""

from kvcanary import invariants

CASES = [
    (
        invariants.check_window_pages,
        (3, 2, 7),
        (2, 2, 7),
        invariants.PoolExhaustedError,
        "3 window pages needed, 2 of 7 free: raise the window pool or lower max_running_requests",
    ),
    (
        invariants.check_protected,
        ("req-3", 6, 4),
        ("req-3", 8, 4),
        invariants.WindowMapError,
        "req-3: protected length 6 must be whole pages of 4 slots",
    ),
    (
        invariants.check_window_slide,
        ("req-3", 8, 7, 20),
        ("req-3", 8, 8, 8),
        invariants.WindowMapError,
        "req-3: evicted 8 <= committed 7 <= allocated 20 is broken: slide by the length that the host has committed",
    ),
    (
        invariants.check_window_mapped,
        ("req-3", [5, 6, 7], {5, 7}, 7, 4),
        ("req-3", [5, 6, 7], {6, 7}, 4, 4),
        invariants.WindowMapError,
        "req-3: page 6 of positions [4, 8) has no window page, but readers see positions from 7 on",
    ),
    (
        invariants.check_resident,
        ("req-3", [7, 8, 9], {7}),
        ("req-3", [7], {7}),
        invariants.ResidencyError,
        "req-3: 2 of 3 tokens are not on the device, the first is logical slot 8: swap them in and wait for it",
    ),
    (
        invariants.check_hot_room,
        ("req-3", 3, 2, 8),
        ("req-3", 3, 3, 8),
        invariants.ResidencyError,
        "req-3: 3 tokens wanted on the device, its 8 hot slots have room for 2: the others are wanted too, "
        "or not saved yet; raise hot_pages or save more often",
    ),
    (
        invariants.check_verify_width,
        ("req-3", 5, 0, 4),
        ("req-3", 4, 0, 4),
        invariants.ResidencyError,
        "req-3: 5 verify tokens for an extra page of 4 slots, 0 slots are taken already: "
        "settle the last verify first, and draft no more than a page holds",
    ),
    (
        invariants.check_hot_slots,
        ("req-3", 3, 4, 8),
        ("req-3", 4, 4, 8),
        invariants.ResidencyError,
        "req-3: 3 hot slots free + 4 resident != 8 in all",
    ),
    (
        invariants.check_host_capacity,
        (9, 8),
        (8, 8),
        invariants.HostCapacityError,
        "9 pages offloaded at once, the host tier has 8: raise its size, or recompute them",
    ),
    (
        invariants.check_host_block,
        ("host block 2", False, 3, 3),
        ("host block 2", True, 3, 3),
        invariants.HostBlockError,
        "host block 2 restored, but it was dropped or evicted: ask holds() first, or recompute it",
    ),
    (
        invariants.check_host_block,
        ("host block 2", True, 3, 2),
        ("host block 2", True, 2, 2),
        invariants.HostBlockError,
        "host block 2 of 3 pages restored into 2: allocate as many as were offloaded",
    ),
]
