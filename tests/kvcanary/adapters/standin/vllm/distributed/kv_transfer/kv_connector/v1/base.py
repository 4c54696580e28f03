"""What a connector is asked for."""

from __future__ import annotations


class KVConnectorBase_V1:
    def start_load_kv(self) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()
