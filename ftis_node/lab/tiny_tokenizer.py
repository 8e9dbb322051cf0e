"""Tokenizer of all tiny models: byte-level BPE, Qwen2's splitting, ChatML.

The alphabet is the 256 bytes, so any text can be encoded. Qwen2's splitting pattern
makes each digit one token, so that a model of two layers can learn column-wise arithmetic. Training takes a fraction
of a second and gives the same merges on every machine. So nodes that make their models themselves have one tokenizer
fingerprint and can exchange token ids.

`tiny_corpus.txt`, from which the merges come, holds instructions of a reasoning model and word problems with solutions.
No model is trained on this text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE: Final = 512
MAX_POSITIONS: Final = 2048
IGNORED: Final = -100  # label of positions that the loss ignores
PAD_TOKEN: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"  # ends every turn, so it is the end-of-sequence token
# The pattern of Qwen2's tokenizer: words with the space before them, single digits, runs of punctuation, white space.
QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In ChatML a role is alone on its line. Each occurs often enough here to become one token.
ROLES: Final = "system\nuser\nassistant\n" * 20


def corpus() -> tuple[str, ...]:
    """Return the texts with unwrapped lines: in running text a word follows a space, not a line break."""
    texts = Path(__file__).with_name("tiny_corpus.txt").read_text(encoding="utf-8").split("\n---\n")
    return (*(" ".join(text.split()) for text in texts), ROLES)


def make_tokenizer(num_entries: int | None = None) -> PreTrainedTokenizerFast:
    """Train and return the shared tokenizer; `save_pretrained` writes it in the hub's format.

    `num_entries` pads the vocabulary. Each added entry has a text, but no text is encoded to it.
    """
    trained = _train_bpe()
    return PreTrainedTokenizerFast(
        tokenizer_object=trained if num_entries is None else _padded(trained, num_entries),
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode_prompts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text as a user's message, up to the start of the assistant's answer."""
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids: list[list[int]] = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return ids


def encode_completions(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text with its end token."""
    encoded = tokenizer(list(texts), add_special_tokens=False)
    return [[*ids, int(tokenizer.eos_token_id)] for ids in encoded["input_ids"]]


def _padded(trained: Tokenizer, num_entries: int) -> Tokenizer:
    content = json.loads(trained.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"<unused{number}>": number for number in range(len(vocabulary), num_entries)}
    return Tokenizer.from_str(json.dumps(content))


def _train_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD_TOKEN, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer
