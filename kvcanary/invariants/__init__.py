"""Always-on host checks: each broken rule has a type and a message that shows both sides of it.

They are exceptions, not ``assert``, so that ``python -O`` keeps them; they are pure functions of plain numbers, cost a
few comparisons a step and stay on with the canary off. What only the device can see is a check of the canary.

An engine imports them from here: every check and error of these files. Each error stands above the first check that
raises it.
"""

from __future__ import annotations

from kvcanary.invariants.drafting import *
from kvcanary.invariants.pages import *
from kvcanary.invariants.rows import *
from kvcanary.invariants.standstill import *
from kvcanary.invariants.tiers import *
