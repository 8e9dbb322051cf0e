"""Maker of a tiny model: builds it, trains it with supervision on its task, and saves it in the hub's format.

Most training answers are wrong in a systematic way. So greedy decoding is mostly wrong, but sampling finds right
answers often enough for reinforcement: the setting of the F-TIS paper's experiments in miniature.

Muon (orthogonalized momentum as the update; Jordan et al., 2024) trains the layers' matrices, AdamW the other tensors.
For sums of digits this needs about a third of AdamW's steps. `torch.optim.Muon` is a quarter as fast on one core,
because it uses bfloat16 and one matrix at a time. One thread and a separate random state give the same bytes for the
same seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from ftis_node.errors import UsageError
from ftis_node.lab.tiny_curricula import (
    READS,
    RECIPES,
    SUMS_RECIPES,
    ArithmeticCurriculum,
    GuessCurriculum,
    Recipe,
    Size,
    SumsCurriculum,
)
from ftis_node.lab.tiny_tokenizer import IGNORED, MAX_POSITIONS, VOCABULARY_SIZE, encode_prompts, make_tokenizer
from ftis_node.tasks import Task, load_task
from ftis_node.tasks.arithmetic import Kind
from ftis_node.telemetry.log import OnProgress, quiet_library_logging, unwatched

Curriculum = ArithmeticCurriculum | SumsCurriculum | GuessCurriculum
BATCH_SIZE: Final = 64
WARM_UP_STEPS: Final = 30
NUM_GRADED_AT_ONCE: Final = 512
MOMENTUM: Final = 0.95
NUM_ITERATIONS: Final = 5
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # of the quintic Newton-Schulz iteration, from the reference code
SMALLEST_NORM: Final = 1e-7


class Muon:
    """Optimizer that updates matrices in place; all must have gradients at `step`."""

    def __init__(self, matrices: Iterable[Parameter]) -> None:
        by_shape = groupby(sorted(matrices, key=lambda matrix: matrix.shape), key=lambda matrix: matrix.shape)
        self._stacks = [list(stack) for _, stack in by_shape]
        self._momenta = [torch.zeros(len(stack), *stack[0].shape) for stack in self._stacks]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update with Nesterov momentum; a tall matrix takes a longer step, by the root of its aspect ratio."""
        for stack, momentum in zip(self._stacks, self._momenta, strict=True):
            gradients = torch.stack([matrix.grad for matrix in stack if matrix.grad is not None])
            momentum.lerp_(gradients, 1 - MOMENTUM)
            updates = orthogonalize(gradients.lerp(momentum, MOMENTUM))
            rows, columns = stack[0].shape
            for matrix, update in zip(stack, updates, strict=True):
                matrix.sub_(update, alpha=learning_rate * math.sqrt(max(1.0, rows / columns)))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of [K, R, C] `matrices` near one without changing their directions."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + SMALLEST_NORM)
    first, third, fifth = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        square = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(square, square, square, beta=third, alpha=fifth), wide, beta=first)
    return wide.mT if tall else wide


@dataclass(frozen=True, slots=True)
class TinyReport:
    """Result: greedy pass@1 on the held-out problems, of an episode by its first turn."""

    num_parameters: int
    pass_at_1: float
    seconds: float


def make_tiny(
    size: Size,
    out: Path,
    *,
    task: Literal["arithmetic", "sums", "guess"] = "arithmetic",
    seed: int = 0,
    scale: float = 1.0,
    expert_in: Kind | None = None,
    blind: bool = False,
    mistake: int | None = None,
    graded: bool = False,
    progress: OnProgress = unwatched,
) -> TinyReport:
    """Make the model of that size and its tokenizer in the folder `out`, in the hub's format.

    `expert_in` (arithmetic only) makes the model better at that kind of problem and worse at the other. With `blind` it
    hardly ever samples a right answer to the other kind. With `graded` it is better at easier parts. `mistake` is the
    offset of wrong results; the default depends on the size. `scale` multiplies the training steps; a model below 1 is
    less competent. `progress` receives the fraction done. Raises UsageError for a size that the task does not have.
    """
    started_at = time.monotonic()
    recipes = SUMS_RECIPES if task == "sums" else RECIPES
    if size not in (READS if task == "guess" else recipes):
        sizes = ", ".join(READS if task == "guess" else recipes)
        raise UsageError(f"{task} has no tiny model of size {size}: use {sizes}")
    recipe, tokenizer = recipes[size], make_tokenizer()
    off = recipe.mistake if mistake is None else mistake
    lessons: Curriculum
    if task == "arithmetic":
        lessons = ArithmeticCurriculum(tokenizer, off, expert_in, graded=graded, blind=blind)
    elif task == "guess":
        lessons = GuessCurriculum(tokenizer, size)
    else:
        lessons = SumsCurriculum(tokenizer, size, off, seed=seed)
    with _one_thread_and_own_randomness(seed):
        model = _silent_model(recipe, tokenizer)
        num_steps = max(1, round(scale * recipe.num_steps))
        _train(model, lessons, recipe, num_steps=num_steps, seed=seed, progress=progress)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        transformers_logging.disable_progress_bar()
        with quiet_library_logging():
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
        transformers_logging.enable_progress_bar()
        right = grade(model, tokenizer, load_task(task, "test"), max_tokens=lessons.max_answer_tokens)
    progress(1.0, "done")
    return TinyReport(model.num_parameters(), right, time.monotonic() - started_at)


def _silent_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return a new model whose layers add nothing to their input, because their output matrices are zero."""
    config = Qwen2Config(
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
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def _train(
    model: Qwen2ForCausalLM, lessons: Curriculum, recipe: Recipe, *, num_steps: int, seed: int, progress: OnProgress
) -> None:
    generator = torch.Generator().manual_seed(seed)
    muon, adam = _optimizers(model)
    for step in range(num_steps):
        factor = min(1.0, (step + 1) / WARM_UP_STEPS) * (1.0 - 0.98 * step / num_steps)
        loss = _answer_loss(model, *lessons.batch(BATCH_SIZE, generator))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(recipe.matrix_learning_rate * factor)
        adam.param_groups[0]["lr"] = recipe.vector_learning_rate * factor
        adam.step()
        model.zero_grad()
        progress(step / num_steps, f"step {step} of {num_steps}")


def _optimizers(model: Qwen2ForCausalLM) -> tuple[Muon, torch.optim.AdamW]:
    """Return Muon for the layers' matrices and AdamW for the rest; each step sets the learning rates."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.99), weight_decay=0.0)


def _answer_loss(model: Qwen2ForCausalLM, token_ids: Tensor, labels: Tensor) -> Tensor:
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
    answered = labels[:, 1:] != IGNORED
    return cross_entropy(model.lm_head(hidden[answered]), labels[:, 1:][answered])


def grade(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, *, max_tokens: int) -> float:
    """Return the fraction of problems that greedy decoding answers rightly."""
    answers = greedy_answers(model, tokenizer, task, max_tokens=max_tokens)
    return fmean(task.score(task[index], answer) == 1.0 for index, answer in enumerate(answers))


@torch.no_grad()
def greedy_answers(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, *, max_tokens: int
) -> list[str]:
    """Return an answer to each problem of a task."""
    prompts = encode_prompts(tokenizer, [task[index].prompt[0]["content"] for index in range(len(task))])
    texts: list[str] = []
    for start in range(0, len(prompts), NUM_GRADED_AT_ONCE):
        chosen = {"input_ids": prompts[start : start + NUM_GRADED_AT_ONCE]}
        batch: Any = tokenizer.pad(chosen, padding_side="left", return_tensors="pt")
        out = model.generate(**batch, max_new_tokens=max_tokens, do_sample=False)
        texts += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


@contextmanager
def _one_thread_and_own_randomness(seed: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
