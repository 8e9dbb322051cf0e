"""Find, load and fingerprint a model and its tokenizer.

Every process reads models through this package, so that all read the same files in the same way. Its import is fast:
torch and transformers are imported inside the functions that need them, and `resolve_model` needs neither.
"""

from __future__ import annotations

from ftis_node.models.accelerators import list_accelerators, pick_device
from ftis_node.models.chat_template import PromptSettings
from ftis_node.models.fingerprint import model_fingerprint
from ftis_node.models.loading import load_causal_lm
from ftis_node.models.shape import ModelShape, parameter_count, published_qwen25, read_shape, shape_of
from ftis_node.models.source import ModelSource, resolve_model
from ftis_node.models.tokenizer import PromptTokenizer, load_tokenizer

__all__ = [
    "ModelShape",
    "ModelSource",
    "PromptSettings",
    "PromptTokenizer",
    "list_accelerators",
    "load_causal_lm",
    "load_tokenizer",
    "model_fingerprint",
    "parameter_count",
    "pick_device",
    "published_qwen25",
    "read_shape",
    "resolve_model",
    "shape_of",
]
