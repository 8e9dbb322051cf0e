"""Random mixtures of experts of two layers, with the tokenizer of `tiny_models`."""

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.models.tiny_models import EMBEDDING_ROWS, make_tokenizer

SIZES = {
    "vocab_size": EMBEDDING_ROWS, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "max_position_embeddings": 1024, "initializer_range": 0.1, "eos_token_id": 2, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, head_dim=32),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, num_experts=4, shared_expert_intermediate_size=32),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        **LATENT,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def save_experts(folder: Path, family: str) -> Path:
    """Write such a model with its tokenizer to `folder`, by the hub's names of its tensors."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
