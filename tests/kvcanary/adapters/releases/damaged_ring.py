"""Run inside transformers 5.14.1: what the canary finds in `generate_batch` with sliding windows, as one JSON object.

A program, not a test: test_releases.py starts it with that release first on the path.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching.requests import RequestState

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.adapters.transformers import attach
from kvcanary_tools.bench.transformers_clean import BATCHED_FAMILIES, WINDOW, generate_batch, make_model


def watched(family: str, mode: str) -> dict[str, Any]:
    """The finding, and how many tokens had been given out when the last forward began and when all was over."""
    model = make_model(family, own=BATCHED_FAMILIES[family])
    tokens, before = [], []
    sampled = RequestState.update_and_check_completion

    def update(state: Any, token_id: int, *args: Any, **kwargs: Any) -> bool:
        tokens.append(token_id)
        return sampled(state, token_id, *args, **kwargs)

    RequestState.update_and_check_completion = update
    error = None
    with attach(model, CanaryConfig(mode=mode, content="full", seed=7)) as handle:
        hook = model.register_forward_pre_hook(lambda *args: before.append(len(tokens)), prepend=True)
        try:
            generate_batch(model, tokens=12)
        except KVCorruptionError as raised:
            error = raised.report.text()
        hook.remove()
        certificate = handle.certificate()
        incidents = len({finding.incident for finding in handle.findings})
    RequestState.update_and_check_completion = sampled
    found = error and {"text": error, "first": certificate["findings"][0], "tokens": [before[-1], len(tokens)]}
    return {"error": found, "incidents": incidents, "fired": certificate["fired"], "forwards": certificate["forwards"]}


def main() -> None:
    torch.set_num_threads(1)
    runs = {"raise": watched("Mistral", "raise"), "log": watched("Qwen3", "log"), "full": watched("Llama", "raise")}
    json.dump({"version": transformers.__version__, "window": WINDOW, **runs}, sys.stdout)


if __name__ == "__main__":
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    main()
