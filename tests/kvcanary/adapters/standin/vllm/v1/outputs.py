"""What a step gives."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelRunnerOutput:
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)


@dataclass
class SamplerOutput:
    sampled_token_ids: object  # [rows, n] int, on the device
