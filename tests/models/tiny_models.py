"""Models small enough to train in a test: random Qwen2 weights and a real byte-level BPE tokenizer.

The libraries are imported with this file, so that their import does not count toward the time limit of a test.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

VOCAB_SIZE = 300
EMBEDDING_ROWS = 320  # padded, as real models' embeddings are

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "What is 12 + 30? The answer is 42. Take the first number, then count on by the second.",
    "What is 99 - 9? <think> subtract the ones from the ones </think> <answer> 90 </answer>",
]


def make_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Return a Qwen2 tokenizer with 300 ids, trained on a few sentences."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = Qwen2Tokenizer(
        vocab=backend.get_vocab(),
        merges=[tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]],
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(*, tied: bool = True, seed: int = 0, hidden_size: int = 64) -> Any:
    """Return a random two-layer Qwen2 in float32. Its weights are so large that log-probs differ between tokens."""
    config = Qwen2Config(
        vocab_size=EMBEDDING_ROWS,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def save_tiny(
    folder: Path,
    *,
    tied: bool = True,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    seed: int = 0,
    hidden_size: int = 64,
) -> Path:
    """Write such a model with its tokenizer to `folder`, in the layout of the hub."""
    model = make_model(tied=tied, seed=seed, hidden_size=hidden_size).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(folder)
    return folder


def give_sampling_values(folder: Path) -> None:
    """Add values to the generation config of a model that transformers loads and refuses to save."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.9, "top_p": 0.6, "pad_token_id": -1}))


def save_adapter(folder: Path, base: Path, **changes: Any) -> Path:
    """Write a LoRA adapter of `base` that changes its log-probs, as peft saves it. `changes` are of its LoraConfig."""
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj", "up_proj"]}
    model = Qwen2ForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings | changes))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                value.add_(0.1 * torch.randn_like(value))
    adapted.save_pretrained(folder)
    return folder
