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
        "req-3: 2 of 3 pages are not on the device, the first is page 8: bring them before the forward",
    ),
    (
        invariants.check_device_room,
        ("verify", 9, 8),
        ("verify", 8, 8),
        invariants.ResidencyError,
        "verify: 9 pages wanted on the device at once, it has 8: run fewer rows at a time",
    ),
    (
        invariants.check_device_pages,
        (3, 5, 4),
        (3, 4, 4),
        invariants.ResidencyError,
        "3 pages lie on the device and 5 on the host, 4 are held: pages that were freed kept their places",
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
