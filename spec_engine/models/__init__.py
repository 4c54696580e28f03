"""Models: llama-family decoders and the EAGLE and EAGLE-3 heads that draft for them, from Hugging Face folders."""

from spec_engine.models.config import CheckpointError, ModelConfig, load_config
from spec_engine.models.decoder import Decoder, DecoderOutput, KVAccess
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3
from spec_engine.models.loader import load_draft, load_target

__all__ = [
    "CheckpointError",
    "Decoder",
    "DecoderOutput",
    "Eagle",
    "Eagle3",
    "KVAccess",
    "ModelConfig",
    "load_config",
    "load_draft",
    "load_target",
]
