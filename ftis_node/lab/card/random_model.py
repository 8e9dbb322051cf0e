"""Models with realistic shapes and random weights, for measurements without downloads.

`2m`, `12m`, `12m-wide` (fewer and wider layers, for the learner) and `110m` run on a CPU. `0.5b`, `1.5b`, `3b` and `7b`
have the shapes of Qwen2.5's models. `0.5b-narrow` has the layers of `0.5b` with tiny widths. The tokenizer is that of
the tiny models. On request it has an entry for each row of the embedding.
"""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from ftis_node.lab.tiny_tokenizer import make_tokenizer
from ftis_node.telemetry.log import quiet_library_logging

SHARD_SIZE: Final = "2GB"
KEPT_MODELS: Final = Path(tempfile.gettempdir()) / "ftis-bench-models"  # vLLM's compiled code is for a model's path


SIZES: Final = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)


def _shape(*sizes: int, is_tied: bool = True) -> dict[str, Any]:
    return dict(zip(SIZES, sizes, strict=True)) | {"tie_word_embeddings": is_tied}


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "2m": _shape(8192, 128, 256, 4, 4, 2),
    "12m": _shape(8192, 256, 1408, 8, 4, 2),
    "12m-wide": _shape(8192, 256, 1920, 6, 4, 2),
    "110m": _shape(32768, 768, 2048, 12, 12, 4),
    "0.5b-narrow": _shape(512, 64, 128, 24, 4, 2),
    "0.5b": _shape(151936, 896, 4864, 24, 14, 2),
    "1.5b": _shape(151936, 1536, 8960, 28, 12, 2),
    "3b": _shape(151936, 2048, 11008, 36, 16, 2),
    "7b": _shape(152064, 3584, 18944, 28, 28, 4, is_tied=False),
}


def kept_model(
    shape: str, *, dtype: torch.dtype = torch.bfloat16, pads_tokenizer: bool = False, device: str = "cpu"
) -> Path:
    """Return the folder of a random model, and write it if no earlier measurement did. Processes may ask together."""
    name = f"{shape}-{str(dtype).removeprefix('torch.')}{'-padded' if pads_tokenizer else ''}"
    folder = KEPT_MODELS / name
    KEPT_MODELS.mkdir(exist_ok=True)
    with (KEPT_MODELS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=KEPT_MODELS) as scratch:
                made = Path(scratch) / "model"
                save_random_model(shape, made, dtype=dtype, pads_tokenizer=pads_tokenizer, device=device)
                made.rename(folder)
    return folder


def save_random_model(
    shape: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    pads_tokenizer: bool = False,
    device: str = "cpu",
) -> int:
    """Write a model folder of that shape in the hub's format. `vocab_size` None means that of the shape.

    The weights are created in `dtype` on `device`, so memory holds them only once. `pads_tokenizer` gives every token
    id of the embedding a text, as in a real model. Return the number of parameters.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = SHAPES[shape] | ({} if vocab_size is None else {"vocab_size": vocab_size})
    tokenizer = make_tokenizer(sizes["vocab_size"] if pads_tokenizer else None)
    config = Qwen2Config(**sizes, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with quiet_library_logging():
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        tokenizer.save_pretrained(folder)
    return int(model.num_parameters())
