"""A stand-in of vLLM: the names and signatures that the adapter leans on, over plain torch, and no more.

STANDIN_RELEASE says of which release; what changed between them is where `RELEASE` is asked.
"""

import os

__version__ = os.environ.get("STANDIN_RELEASE", "0.26.0")
RELEASE = tuple(map(int, __version__.split(".")[:2]))
