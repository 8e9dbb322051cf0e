"""The sizes of a model that determine its memory, from its configuration and the headers of its weight files.

They are read without torch or transformers, so that planning needs no heavy import. They describe a decoder with gated
feed-forward blocks (Llama, Qwen2, Qwen3, Mistral and similar models), or with experts in every layer. Others raise an
error of one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from ftis_node.errors import ModelError
from ftis_node.models.model_files import CONFIG_FILE, read_json
from ftis_node.models.source import ModelSource

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
ACTIVE_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
SHARED_KEYS = ("shared_expert_intermediate_size", "shared_intermediate_size")
TYPES_WITH_QKV_BIAS = ("qwen2", "qwen2_moe")  # always, and no key of the configuration says so


def _qwen25(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    """Return `config.json` as on the hub: head and embedding are tied if the vocabulary has 151,936 entries."""
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": vocab == 151936,
    }


_QWEN25 = {
    "0.5B": _qwen25(896, 24, 14, 2, 4864, 151936),
    "1.5B": _qwen25(1536, 28, 12, 2, 8960, 151936),
    "3B": _qwen25(2048, 36, 16, 2, 11008, 151936),
    "7B": _qwen25(3584, 28, 28, 4, 18944, 152064),
    "14B": _qwen25(5120, 48, 40, 8, 13824, 152064),
}


class Experts(NamedTuple):
    """The experts of a layer: their number, those that a token passes through, and the width of each."""

    number: int
    per_token: int
    size: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes in elements. `is_tied`: the output head is the embedding matrix. `stored_as` is the type of all tensors of
    the weight files, as safetensors names it; "" if it is unknown, or there are several.

    With `experts`, `intermediate_size` is the width of the feed-forward block that all tokens share, 0 if there is
    none.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool
    num_parameters: int
    experts: Experts | None = None
    stored_as: str = ""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; a separate output head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a layer; a file or a model holds two thirds of them in one tensor."""
        return 0 if self.experts is None else 3 * self.experts.number * self.experts.size * self.hidden_size

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor: the embedding, or gate and up maps of all experts."""
        return max(self.embedding_parameters, 2 * self.expert_parameters // 3)

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's linear maps with an adapter; in a mixture of experts those of attention."""
        hidden, query, kv, wide = self.hidden_size, self.query_size, self.kv_size, self.intermediate_size
        attention = ((hidden, query), (hidden, kv), (hidden, kv), (query, hidden))
        return attention if self.experts else (*attention, (hidden, wide), (hidden, wide), (wide, hidden))

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of a LoRA adapter (arXiv 2106.09685) on these layers: A and B of rank `rank`."""
        return self.num_layers * rank * sum(inputs + outputs for inputs, outputs in self.linear_layers)


def published_qwen25() -> dict[str, ModelShape]:
    """Return Qwen2.5's dense models of up to 14B by name, from the smallest to the largest."""
    return {f"Qwen2.5-{name}": shape_of(config) for name, config in _QWEN25.items()}


def has_experts(source: ModelSource) -> bool:
    """Return whether the configuration of `source` is that of a mixture of experts. Raises ModelError."""
    config = read_json(source.folder / CONFIG_FILE)
    nested = config.get("text_config")
    return any((config | nested if isinstance(nested, dict) else config).get(key) for key in EXPERT_KEYS)


def read_shape(source: ModelSource) -> ModelShape:
    """Return the shape of `source`. Raises ModelError if the configuration lacks a size or a file is damaged."""
    path, dtypes = source.folder / CONFIG_FILE, source.weight_dtypes
    shape = shape_of(read_json(path), where=str(path), num_parameters=parameter_count(source))
    return replace(shape, stored_as=next(iter(dtypes)) if len(dtypes) == 1 else "")


def shape_of(config: Mapping[str, Any], *, where: str = CONFIG_FILE, num_parameters: int | None = None) -> ModelShape:
    """Return the shape that a configuration describes; `where` names it in errors. Raises ModelError.

    Without `num_parameters` it counts them.
    """
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, dict) else config
    experts, shared = _experts(text, where)
    hidden_size = _size(text, "hidden_size", where)
    num_heads = _size(text, "num_attention_heads", where)
    shape = ModelShape(
        hidden_size=hidden_size,
        num_layers=_size(text, "num_hidden_layers", where),
        num_heads=num_heads,
        num_kv_heads=_size(text, "num_key_value_heads", where, default=num_heads),
        head_size=_size(text, "head_dim", where, default=hidden_size // num_heads),
        intermediate_size=shared if experts else _size(text, "intermediate_size", where),
        vocab_size=_size(text, "vocab_size", where),
        is_tied=bool(text.get("tie_word_embeddings", False)),
        num_parameters=num_parameters or 0,
        experts=experts,
    )
    return shape if num_parameters else _counted(shape, text)


def _experts(config: Mapping[str, Any], where: str) -> tuple[Experts | None, int]:
    """Return the experts of a layer, None without any, and the width of the block beside them that all tokens share."""
    number = next((key for key in EXPERT_KEYS if config.get(key)), None)
    if number is None:
        return None, 0
    active = next((key for key in ACTIVE_KEYS if config.get(key)), ACTIVE_KEYS[0])
    size = _size(config, "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size", where)
    shared = next((key for key in SHARED_KEYS if config.get(key)), None)
    copies = _size(config, "n_shared_experts", where) if config.get("n_shared_experts") else 0
    width = copies * size if shared is None else _size(config, shared, where)
    return Experts(_size(config, number, where), _size(config, active, where), size), width


def _counted(shape: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    has_bias = config.get("attention_bias", config.get("model_type") in TYPES_WITH_QKV_BIAS)
    biases = shape.query_size + 2 * shape.kv_size if has_bias else 0
    hidden = shape.hidden_size
    attention = 2 * hidden * (shape.query_size + shape.kv_size) + biases
    router = 0 if shape.experts is None else hidden * shape.experts.number
    feed_forward = 3 * hidden * shape.intermediate_size + router + shape.expert_parameters
    layer = attention + feed_forward + 2 * hidden
    embeddings = shape.embedding_parameters * (1 if shape.is_tied else 2)
    return replace(shape, num_parameters=embeddings + shape.num_layers * layer + shape.hidden_size)


def _size(config: Mapping[str, Any], key: str, where: str, *, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ModelError(f"{where} has no {key}: the memory of this model cannot be planned")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} is {value!r}, which is not a size")
    return value


def parameter_count(source: ModelSource) -> int:
    """Return the stored parameters; tied weights are stored once. Raises ModelError for a damaged file."""
    return sum(map(prod, source.weight_shapes.values()))
