"""Find, load and fingerprint a model and its tokenizer.

Every process reads models through this package, so that all read the same files in the same way. Its import is fast:
torch and transformers are imported inside the functions that need them, and `resolve_model` needs neither.
"""

from __future__ import annotations

from ftis_node.models.fingerprint import model_fingerprint, other_model
from ftis_node.models.library_logging import skip_unused_packages
from ftis_node.models.loading import (
    Accelerator,
    Device,
    Dtype,
    WeightRows,
    empty_causal_lm,
    export_adapter,
    export_model,
    has_gpu,
    list_accelerators,
    load_causal_lm,
    pick_device,
    tied_names,
)
from ftis_node.models.safetensors_file import read_header
from ftis_node.models.shape import ModelShape, parameter_count, published_qwen25, read_shape, shape_of
from ftis_node.models.source import ModelSource, check_name, read_json, resolve_model
from ftis_node.models.tokenizer import PromptTokenizer, load_tokenizer

__all__ = [
    "Accelerator",
    "Device",
    "Dtype",
    "ModelShape",
    "ModelSource",
    "PromptTokenizer",
    "WeightRows",
    "check_name",
    "empty_causal_lm",
    "export_adapter",
    "export_model",
    "has_gpu",
    "list_accelerators",
    "load_causal_lm",
    "load_tokenizer",
    "model_fingerprint",
    "other_model",
    "parameter_count",
    "pick_device",
    "published_qwen25",
    "read_header",
    "read_json",
    "read_shape",
    "resolve_model",
    "shape_of",
    "skip_unused_packages",
    "tied_names",
]
