"""What the runner calls around a forward where bytes come from elsewhere."""

from __future__ import annotations

from typing import Any

from vllm import RELEASE


class KVConnector:
    failed: frozenset[int] = frozenset()  # blocks of the last step's loads

    def before(self, scheduler_output: Any, input_batch: Any) -> None:
        pass

    def post_forward(self, finished_req_ids: set[str]) -> None:
        pass


class _Active(KVConnector):
    """From 0.29 on loads begin behind the forward, unless a request of this very step needs them."""

    def __init__(self, kv_connector: Any) -> None:
        self.kv_connector, self.is_pending = kv_connector, False

    def begin(self, scheduler_output: Any) -> None:
        self.is_pending = RELEASE >= (0, 29) and not scheduler_output.has_sync_kv_loads
        if not self.is_pending:
            self.kv_connector.start_load_kv()

    def post_forward(self, finished_req_ids: set[str]) -> None:
        if self.is_pending:
            self.kv_connector.start_load_kv()
        self.is_pending = False
        self.failed = frozenset(getattr(self.kv_connector, "get_block_ids_with_load_errors", frozenset)())


if RELEASE < (0, 30):

    class ActiveKVConnector(_Active):
        def pre_forward(self, scheduler_output: Any) -> None:
            self.begin(scheduler_output)

        def before(self, scheduler_output: Any, input_batch: Any) -> None:
            self.pre_forward(scheduler_output)
elif RELEASE < (0, 32):

    class ActiveKVConnector(_Active):
        def pre_forward(
            self, scheduler_output: Any, *, request_state_indices=None, request_ids=None, num_tokens=0,
            attn_metadata=None,
        ) -> None:  # fmt: skip
            self.begin(scheduler_output)

        def before(self, scheduler_output: Any, input_batch: Any) -> None:
            self.pre_forward(scheduler_output=scheduler_output, request_ids=input_batch.req_ids, attn_metadata={})
else:

    class ActiveKVConnector(_Active):
        def pre_forward(self, scheduler_output: Any, input_batch: Any = None, attn_metadata: Any = None) -> None:
            self.begin(scheduler_output)

        def before(self, scheduler_output: Any, input_batch: Any) -> None:
            self.pre_forward(scheduler_output, input_batch, attn_metadata={})
