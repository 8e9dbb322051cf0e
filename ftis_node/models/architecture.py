"""Properties of an architecture that decide how its attention is computed and what its cache holds."""

from __future__ import annotations

from typing import Any

# Layer types of transformers' configurations whose state is not one key and value for each token.
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"})


def attention_of(config: Any) -> str | None:
    """Return the attention that transformers must use for `config`; None: its choice, SDPA if the model has it.

    SDPA ignores a soft cap on attention scores, without an error.
    """
    return "eager" if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) else None


def is_recurrent(causal_lm: Any) -> bool:
    """Return whether a layer of a transformers model has a state that depends on all tokens before."""
    layer_types = getattr(causal_lm.config.get_text_config(decoder=True), "layer_types", None) or ()
    return bool(causal_lm._is_stateful or RECURRENT_LAYERS & set(layer_types))
