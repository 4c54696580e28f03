"""Names of contents that outlive a process: what the bytes of a block were when somebody wrote its prefix."""

from kvcanary.names.opening import store_at
from kvcanary.names.published import Published
from kvcanary.names.store import MOST_WAYS, Named, NameStore

__all__ = ["MOST_WAYS", "NameStore", "Named", "Published", "store_at"]
