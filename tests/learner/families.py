"""The families of models that are tested, each as a tiny random model, and what is expected of it.

`test_learner_families.py` tests every row. `python -m tests.documented.families` writes them into docs/train/models.md.
"""

from dataclasses import dataclass, field
from typing import Any

WINDOW = 16  # tokens; the tests' texts are longer
HEAD_SIZE = 32  # vLLM's attention on a CPU takes no smaller one
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.1, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_value_heads": 2, "linear_num_key_heads": 1},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 32},
}
CONVOLUTIONS = {  # the last six are in the hub's files, and only vLLM reads them
    **{"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    **{"block_dim": 64, "conv_dim": 64, "conv_dim_out": 64},
    **{"block_ff_dim": 128, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.0},
}
CPU_FAILS = "^vLLM's CPU build fails on model: use --engine torch "
UPDATE_FAILS = "the engine was closed, or failed"  # vLLM's CPU build cannot take new weights of these experts
DIFFERS = "differs from the learner"
OWN_HEADS = {"head_dim": HEAD_SIZE}
GEMMA = {"query_pre_attn_scalar": 32, "tie_word_embeddings": True, **OWN_HEADS, **WINDOWED}


@dataclass(frozen=True)
class Family:
    """A family, and a configuration of transformers' class `prefix`Config beside `SIZES`.

    `vllm` is a pattern of our error with which vLLM is refused on a CPU; empty if it serves the family. `lora` is False
    if `--lora` is refused.
    """

    name: str
    prefix: str
    settings: dict[str, Any] = field(default_factory=dict)
    packs: bool = True
    vllm: str = ""
    lora: bool = True
    notes: str = ""


FAMILIES = (
    Family("Llama 2, 3", "Llama"),
    Family("Qwen2, Qwen2.5", "Qwen2"),
    Family("Qwen3", "Qwen3", OWN_HEADS),
    Family("Qwen3-MoE", "Qwen3Moe", EXPERTS | OWN_HEADS, notes="mixture of experts"),
    Family("Gemma 2", "Gemma2", GEMMA | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
        notes="soft caps on logits and attention scores; sliding windows"),
    Family("Gemma 3 (text)", "Gemma3Text", GEMMA, notes="sliding windows"),
    Family("Mistral", "Mistral", {"sliding_window": WINDOW} | OWN_HEADS, notes="sliding windows in some versions"),
    Family("Phi-3", "Phi3", {"sliding_window": WINDOW}, notes="sliding windows"),
    Family("Granite 3", "Granite",
        {"logits_scaling": 0.5, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1},
        notes="scaled logits"),
    Family("Command R (Cohere)", "Cohere", {"logit_scale": 2.0, "tie_word_embeddings": True}, notes="scaled logits"),
    Family("SmolLM3", "SmolLM3", {"no_rope_layers": [1, 0]}, notes="layers without positions"),
    Family("OLMo 2", "Olmo2"),
    Family("OLMo 3", "Olmo3", WINDOWED, notes="sliding windows"),
    Family("GLM-4", "Glm4", OWN_HEADS),
    Family("LFM2", "Lfm2", CONVOLUTIONS, packs=False, vllm=DIFFERS, notes="hybrid of convolutions"),
    Family("Qwen3-Next", "Qwen3Next", LINEAR_ATTENTION | EXPERTS | OWN_HEADS, packs=False, vllm=CPU_FAILS,
        notes="hybrid of linear attention; mixture of experts"),
    Family("Mamba-2", "Mamba2", {"state_size": 16, "num_heads": 4, "n_groups": 1, "chunk_size": 16} | OWN_HEADS,
        packs=False, vllm=CPU_FAILS, lora=False, notes="recurrent"),
    Family("gpt-oss", "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2} | WINDOWED | OWN_HEADS,
        packs=False, vllm=UPDATE_FAILS, notes="attention sinks; mixture of experts; unquantized weights only"),
)  # fmt: skip
