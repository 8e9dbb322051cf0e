"""Tiny models for swarms on two CPU cores: real Qwen2 architecture, partly competent in `arithmetic`, no download.

Both sizes are trained, by supervision, on training problems of `arithmetic` of which most carry a wrong answer: s adds
ten to the result (as if it carried once too often), m adds one. So greedy decoding is mostly wrong in a systematic way
that differs by size, while sampling finds the right answer often enough for reinforcement to build on: the setting of
the F-TIS paper's experiments in miniature.

The matrices of the layers learn by Muon, embedding, biases and norms by AdamW: for sums of digits this needs about a
third of AdamW's steps. Every layer starts by adding nothing to its input, which makes the outcome depend far less on
the seed. One thread, own random state: the same seed gives the same bytes.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from ftis_node.lab.tiny_muon import Muon
from ftis_node.lab.tiny_tokenizer import MAX_POSITIONS, VOCABULARY_SIZE, make_tokenizer
from ftis_node.models.quiet import quiet_libraries
from ftis_node.tasks.arithmetic import PARTS, ArithmeticTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from ftis_node.tasks.arithmetic import Kind, Problem

Size = Literal["s", "sm", "m"]

WRONG_FRACTION: Final = 0.7
EXPERT_WRONG_FRACTION: Final = 0.6  # of the problems that a model is good at: right more often, greedily still wrong
NOVICE_WRONG_FRACTION: Final = 0.85
GRADED_WRONG_FRACTIONS: Final = {"easy": 0.5, "medium": 0.75, "hard": 0.85}  # where difficulty is to follow the parts
NUM_DRAWS: Final = 16384  # of the training split: nearly all of its distinct problems
BATCH_SIZE: Final = 64
WARM_UP_STEPS: Final = 30
MAX_ANSWER_TOKENS: Final = 6
IGNORED: Final = -100  # positions without a loss


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes one size: its shape, how it is trained, and the mistake it learns."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    initializer_range: float
    num_steps: int
    mistake: int
    matrix_learning_rate: float
    vector_learning_rate: float = 4e-3

    @property
    def num_parameters(self) -> int:
        """Of the model that it makes, with the embedding, which is the output head too."""
        hidden, head_size = self.hidden_size, self.hidden_size // self.num_heads
        keys = self.num_key_value_heads * head_size
        attention = hidden * (hidden + 1) + 2 * keys * (hidden + 1) + hidden * hidden  # biases but on the output
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        return VOCABULARY_SIZE * hidden + self.num_layers * layer + hidden


RECIPES: Final[dict[Size, Recipe]] = {
    "s": Recipe(96, 128, 2, 3, 1, initializer_range=0.06, num_steps=360, mistake=10, matrix_learning_rate=0.015),
    # Midway in parameters: one s, one sm and one m cost what three sm cost.
    "sm": Recipe(128, 240, 3, 4, 2, initializer_range=0.04, num_steps=300, mistake=10, matrix_learning_rate=0.02),
    "m": Recipe(128, 512, 3, 4, 2, initializer_range=0.04, num_steps=300, mistake=1, matrix_learning_rate=0.02),
}


@dataclass(frozen=True, slots=True)
class TinyReport:
    """What was made: greedy pass@1 on the held-out problems, and the share of them with the size's own mistake."""

    num_parameters: int
    pass_at_1: float
    mistaken: float
    seconds: float


def make_tiny(
    size: Size,
    out: Path,
    *,
    seed: int = 0,
    scale: float = 1.0,
    expert_in: Kind | None = None,
    mistake: int | None = None,
    graded: bool = False,
    progress: Callable[[float, str], None] = lambda fraction, what: None,
) -> TinyReport:
    """Makes the model of that size and its tokenizer in the folder `out`, in the hub's format.

    With `expert_in` it is better at one kind of problem and worse at the other; `graded`, the better the easier the
    problem's part is. `mistake` is what its wrong answers are off by; None: the size's own. `scale` multiplies the
    training steps; below 1 the model is less competent. `progress` hears how much is done.
    """
    started_at = time.monotonic()
    recipe, tokenizer = RECIPES[size], make_tokenizer()
    with _one_thread_and_own_randomness(seed):
        model = _silent_model(recipe, tokenizer)
        num_steps = max(1, round(scale * recipe.num_steps))
        mistake = recipe.mistake if mistake is None else mistake
        problems = _Problems(tokenizer, mistake, expert_in, graded=graded)
        _train(model, problems, recipe, num_steps=num_steps, seed=seed, progress=progress)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        transformers_logging.disable_progress_bar()
        with quiet_libraries():
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
        transformers_logging.enable_progress_bar()
        right, mistaken = grade(model, tokenizer, mistake=mistake)
    progress(1.0, "done")
    return TinyReport(model.num_parameters(), right, mistaken, time.monotonic() - started_at)


def _silent_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A new model whose layers add nothing yet: their last matrices are zero."""
    model = Qwen2ForCausalLM(_config(recipe, tokenizer))
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def _config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


class _Problems:
    """Training problems as tensors, each with its right and with its mistaken answer.

    `token_ids` and `labels` are [2, P, T] integers: first right, then mistaken; labels are IGNORED outside the answer.
    `wrong_fraction` [P] says how often a problem comes with its mistaken answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, mistake: int, expert_in: Kind | None, *, graded: bool
    ) -> None:
        task = ArithmeticTask("train")
        problems = sorted({task.problem(index) for index in range(NUM_DRAWS)})
        prompts = _encode_prompts(tokenizer, [problem.text for problem in problems])
        answers = [_encode_answers(tokenizer, [problem.answer + off for problem in problems]) for off in (0, mistake)]
        rows = [list(zip(prompts, kind, strict=True)) for kind in answers]
        width = max(len(prompt) + len(answer) for row in rows for prompt, answer in row)
        pad_id = int(tokenizer.pad_token_id)
        self.token_ids = torch.tensor([[_fill(prompt + answer, pad_id, width) for prompt, answer in r] for r in rows])
        self.labels = torch.tensor(
            [[_fill([IGNORED] * len(prompt) + answer, IGNORED, width) for prompt, answer in row] for row in rows]
        )
        self.wrong_fraction = torch.tensor([_wrong_fraction(each, expert_in, graded=graded) for each in problems])


def _wrong_fraction(problem: Problem, expert_in: Kind | None, *, graded: bool) -> float:
    if graded:
        parts = (part for part in GRADED_WRONG_FRACTIONS if PARTS[part].asks(problem))
        return GRADED_WRONG_FRACTIONS.get(next(parts, ""), WRONG_FRACTION)
    if expert_in is None:
        return WRONG_FRACTION
    return EXPERT_WRONG_FRACTION if problem.kind == expert_in else NOVICE_WRONG_FRACTION


def _fill(ids: list[int], filler: int, width: int) -> list[int]:
    return ids + [filler] * (width - len(ids))


def _encode_prompts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids: list[list[int]] = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return ids


def _encode_answers(tokenizer: PreTrainedTokenizerFast, answers: Sequence[int]) -> list[list[int]]:
    encoded = tokenizer([str(answer) for answer in answers], add_special_tokens=False)
    return [[*ids, int(tokenizer.eos_token_id)] for ids in encoded["input_ids"]]


def _train(
    model: Qwen2ForCausalLM,
    problems: _Problems,
    recipe: Recipe,
    *,
    num_steps: int,
    seed: int,
    progress: Callable[[float, str], None],
) -> None:
    """Supervised steps with a learning rate that rises, then falls to nearly nothing in a straight line."""
    generator = torch.Generator().manual_seed(seed)
    muon, adam = _optimizers(model)
    num_problems = problems.token_ids.shape[1]
    for step in range(num_steps):
        factor = min(1.0, (step + 1) / WARM_UP_STEPS) * (1.0 - 0.98 * step / num_steps)
        chosen = torch.randint(num_problems, (BATCH_SIZE,), generator=generator)
        kind = (torch.rand(BATCH_SIZE, generator=generator) < problems.wrong_fraction[chosen]).long()
        loss = _answer_loss(model, problems.token_ids[kind, chosen], problems.labels[kind, chosen])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(recipe.matrix_learning_rate * factor)
        adam.param_groups[0]["lr"] = recipe.vector_learning_rate * factor
        adam.step()
        model.zero_grad()
        progress(step / num_steps, f"step {step} of {num_steps}")


def _optimizers(model: Qwen2ForCausalLM) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the layers' matrices, AdamW for all the rest; the learning rates are set at each step."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.99), weight_decay=0.0)


def _answer_loss(model: Qwen2ForCausalLM, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' tokens; the output head runs on their positions alone."""
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
    answered = labels[:, 1:] != IGNORED
    return cross_entropy(model.lm_head(hidden[answered]), labels[:, 1:][answered])


@torch.no_grad()
def grade(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, mistake: int) -> tuple[float, float]:
    """Shares of held-out problems that greedy decoding answers rightly, and with the systematic mistake."""
    task = ArithmeticTask("test")
    problems = [task.problem(index) for index in range(len(task))]
    texts = _decode_greedily(model, tokenizer, _encode_prompts(tokenizer, [problem.text for problem in problems]))
    right = sum(text == str(problem.answer) for text, problem in zip(texts, problems, strict=True))
    mistaken = sum(text == str(problem.answer + mistake) for text, problem in zip(texts, problems, strict=True))
    return right / len(problems), mistaken / len(problems)


def _decode_greedily(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[int]]
) -> list[str]:
    batch: Any = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    answers = out[:, batch["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


@contextmanager
def _one_thread_and_own_randomness(seed: int) -> Iterator[None]:
    """One core, and random numbers that neither depend on nor disturb anybody else's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
