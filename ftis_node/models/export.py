"""Export of a model in the hub's format, which other tools can load.

The folder is written beside its place and renamed, so that only a complete one has its name.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from ftis_node.models.tokenizer import PromptTokenizer

READABLE = 0o644


def export_model(
    model: Any, tokenizer: PromptTokenizer, out: Path, *, dtype: torch.dtype, write: Callable[[Path], None]
) -> None:
    """Write a folder with the configuration, the generation configuration and the tokenizer of `model`.

    `write` puts the weights there as safetensors of `dtype`; it may omit a tied output head. Raises ConfigError if
    `out` exists and is not an empty folder.
    """
    with _whole_folder(out) as folder:
        write(folder)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = dtype
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save(folder)


def export_adapter(
    adapted_model: Any, tokenizer: PromptTokenizer, out: Path, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the LoRA adapter of a peft model, and the tokenizer. Raises ConfigError as `export_model` does.

    `state_dict` replaces the model's own weights, for a model that several processes share.
    """
    with _whole_folder(out) as folder:
        # "auto" would ask the hub whether the embedding was resized; adapters here never touch it.
        adapted_model.save_pretrained(folder, save_embedding_layers=False, state_dict=state_dict)
        tokenizer.save(folder)


def tied_names(model: Any) -> frozenset[str]:
    """Return the names of tensors that alias another tensor of the model, such as a tied output head."""
    return frozenset(model.all_tied_weights_keys)


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    out = out.expanduser().absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder: choose another with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        for file in filter(Path.is_file, partial.rglob("*")):
            file.chmod(READABLE)  # another user may serve the model
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
