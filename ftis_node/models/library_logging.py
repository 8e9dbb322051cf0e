"""Behavior of the model libraries in this process: less logging, fewer imports.

transformers imports scipy with every model, for the loss of object detection, and vLLM for sound. That takes up to 1 s
of processor time and 35 MB in each worker. transformers asks once whether it is installed, and remembers that.

`AutoTokenizer` imports the configurations of all models, and with them torch: 4 s of processor time and 340 MB. For the
models in CLASSES its choice is known, and that class imports no torch. For any other model, and any other release of
transformers, `AutoTokenizer` chooses.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from ftis_node.models.json_file import CONFIG_FILE, read_json

CHATTY_LOGGERS = ("transformers", "huggingface_hub", "peft", "bitsandbytes", "httpx", "httpx2")
UNUSED = "scipy"
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


@contextmanager
def quiet_library_logging() -> Iterator[None]:
    """Inside the context, the model libraries log only errors and do not warn."""
    loggers = [logging.getLogger(name) for name in CHATTY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def import_quickly(name: str) -> None:
    """Import a module that imports the model libraries, without garbage collections and with scipy as missing.

    Collections take a fifth of the time of vLLM's import, and find nothing. scipy stays usable if it is loaded already.
    """
    if name in sys.modules:
        return
    hides = UNUSED not in sys.modules
    gc.disable()
    try:
        if hides:
            sys.modules[UNUSED] = None  # type: ignore[assignment]  # `find_spec` then finds nothing
            from transformers.utils import is_scipy_available

            is_scipy_available.cache_clear()  # of an import of transformers before this one
            is_scipy_available()
        import_module(name)
    finally:
        if hides:
            del sys.modules[UNUSED]
        gc.freeze()  # later collections do not visit what was imported
        atexit.register(gc.unfreeze)  # else the bindings of Triton report at the end that they leak
        gc.enable()


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
