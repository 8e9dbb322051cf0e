"""The class of transformers that reads a model's tokenizer.

`AutoTokenizer` imports the configurations of all models, and with them torch: 4 s of processor time and 340 MB. For the
models in CLASSES its choice is known, and that class imports no torch. For any other model, and any other release of
transformers, `AutoTokenizer` chooses.
"""

from __future__ import annotations

from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from ftis_node.models.model_files import CONFIG_FILE, read_json

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
KNOWN_RELEASE = "5.19."
QWEN2 = "transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer"
GENERIC = "transformers.tokenization_utils_tokenizers", "TokenizersBackend"
OWN_NAMES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
GENERIC_NAMES = ("PreTrainedTokenizerFast", "TokenizersBackend")
CLASSES = {
    **{("qwen2", name): QWEN2 for name in OWN_NAMES + GENERIC_NAMES},
    **{("qwen3", name): QWEN2 for name in OWN_NAMES},
    **{(family, name): GENERIC for family in ("qwen3", "llama") for name in GENERIC_NAMES},
}
"""Module and class by `model_type` in config.json and `tokenizer_class` in tokenizer_config.json."""


def tokenizer_class(folder: Path, tokenizer_folder: Path | None = None) -> Any:
    """Return the transformers class whose `from_pretrained` AutoTokenizer would call, or AutoTokenizer itself.

    `folder` has the model's configuration, and the tokenizer's unless `tokenizer_folder` has it. Raises ModelError for
    a damaged config.json or tokenizer_config.json.
    """
    path = (tokenizer_folder or folder) / TOKENIZER_CONFIG_FILE
    if path.is_file() and metadata.version("transformers").startswith(KNOWN_RELEASE):
        config = read_json(path)
        kind = str(read_json(folder / CONFIG_FILE).get("model_type")), str(config.get("tokenizer_class"))
        if kind in CLASSES and "auto_map" not in config:  # the model's own code, which AutoTokenizer refuses
            module, name = CLASSES[kind]
            return getattr(import_module(module), name)
    from transformers import AutoTokenizer

    return AutoTokenizer
