"""Writing a model in the hub's format, so that any other tool can load what was trained here.

The folder appears under its name only when it is whole: it is written beside it and renamed.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from ftis_node.models.tokenizer import PromptTokenizer


def export_model(
    model: Any, tokenizer: PromptTokenizer, out: Path, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write weights (safetensors, in shards where large), configuration, generation configuration and tokenizer.

    `state_dict` stands in for the model's own weights, as where an adapter was merged into them; a tied output head may
    be left out of it. Raises ConfigError where `out` exists and is not an empty folder.
    """
    from huggingface_hub import save_torch_state_dict

    tied = tied_names(model)
    given = model.state_dict() if state_dict is None else state_dict
    weights = {name: tensor for name, tensor in given.items() if name not in tied}
    with _whole_folder(out) as folder:
        save_torch_state_dict(weights, folder)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = next(iter(weights.values())).dtype
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save(folder)


def export_adapter(
    adapted_model: Any, tokenizer: PromptTokenizer, out: Path, *, state_dict: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the LoRA adapter of a peft model, and the tokenizer. Raises ConfigError as `export_model` does.

    `state_dict` stands in for the model's own weights, as where they are spread over processes.
    """
    with _whole_folder(out) as folder:
        # "auto" would ask the hub whether the embedding was resized; adapters here never touch it.
        adapted_model.save_pretrained(folder, save_embedding_layers=False, state_dict=state_dict)
        tokenizer.save(folder)


def tied_names(model: Any) -> frozenset[str]:
    """The names of tensors that are another tensor of the model once more, such as a tied output head."""
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
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
