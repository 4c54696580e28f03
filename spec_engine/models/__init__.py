"""Models from Hugging Face folders: llama-family decoders, and the EAGLE heads or small models that draft for them."""

from spec_engine.models.config import CheckpointError, ModelConfig, load_config
from spec_engine.models.decoder import Decoder, DecoderOutput, KVAccess
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3
from spec_engine.models.loader import load_draft, load_standalone, load_target
from spec_engine.models.standalone import Standalone

__all__ = [
    "CheckpointError",
    "Decoder",
    "DecoderOutput",
    "Eagle",
    "Eagle3",
    "KVAccess",
    "ModelConfig",
    "Standalone",
    "load_config",
    "load_draft",
    "load_standalone",
    "load_target",
]
