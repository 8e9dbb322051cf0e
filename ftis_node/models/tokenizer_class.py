"""Choice of the class that reads a tokenizer's files, without torch if the choice is known.

`AutoTokenizer` imports the configurations of all models, and with them torch: 4 s of processor time and 340 MB. For the
models in CLASSES its choice is known, and that class imports no torch. For any other model, and any other release of
transformers, `AutoTokenizer` chooses.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from ftis_node.models.source import CONFIG_FILE, read_json

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
KNOWN_RELEASE = "5.19."
QWEN2 = "transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer"
GENERIC = "transformers.tokenization_utils_tokenizers", "TokenizersBackend"
CLASSES = {
    ("qwen2", "Qwen2Tokenizer"): QWEN2,
    ("qwen2", "Qwen2TokenizerFast"): QWEN2,
    ("qwen2", "PreTrainedTokenizerFast"): QWEN2,
    ("qwen2", "TokenizersBackend"): QWEN2,
    ("qwen3", "Qwen2Tokenizer"): QWEN2,
    ("qwen3", "Qwen2TokenizerFast"): QWEN2,
    ("qwen3", "PreTrainedTokenizerFast"): GENERIC,
    ("qwen3", "TokenizersBackend"): GENERIC,
    ("llama", "PreTrainedTokenizerFast"): GENERIC,
    ("llama", "TokenizersBackend"): GENERIC,
}
"""Module and class by `model_type` in config.json and `tokenizer_class` in tokenizer_config.json."""


def tokenizer_class(folder: Path) -> Any:
    """Return the transformers class whose `from_pretrained(folder)` AutoTokenizer would call, or AutoTokenizer.

    Raises ModelError for a damaged config.json or tokenizer_config.json.
    """
    known = _known_class(folder)
    if known is None:
        from transformers import AutoTokenizer

        return AutoTokenizer
    module, name = known
    return getattr(import_module(module), name)


def _known_class(folder: Path) -> tuple[str, str] | None:
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file() or not metadata.version("transformers").startswith(KNOWN_RELEASE):
        return None
    config = read_json(path)
    if "auto_map" in config:  # the model has its own code, which AutoTokenizer refuses
        return None
    return CLASSES.get((str(read_json(folder / CONFIG_FILE).get("model_type")), str(config.get("tokenizer_class"))))
