"""The language models of `make results-llm`: SmolLM2-135M after a short supervised training, whole or with layers cut.

    whole-S    all 30 layers (135 M parameters), 3 updates
    cut-S      without layers 10 to 19 (99 M), healed by 80 updates

An update takes 8 training problems of `words:1+words:2`, each answered in one short sentence. The seed S chooses
them. So each seed is another model. Both sizes solve about a third of the problems, so most groups have a signal. After
40 and 200 updates half of the groups had none. A folder is kept if it was trained on the problems of this version.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftis_node.lab.demo import LANGUAGE_MODEL, LANGUAGE_TASK
from ftis_node.models import resolve_model
from ftis_node.tasks import load_task

UPDATES = {"whole": 3, "cut": 80}
CUT_LAYERS = range(10, 20)
TEXTS = 8  # of an update
LEARNING_RATE = 3e-5
FIRST_PROBLEM = 1_000_000  # far from those that trials train on
IGNORED = -100  # the label of a position without a loss, in transformers


def make_missing(folder: Path, *, seeds: int, source: str = LANGUAGE_MODEL) -> None:
    """Make the models of seeds 0 to `seeds` - 1 that `folder` lacks, from the language model `source`."""
    for seed, kind in product(range(seeds), UPDATES):
        model = folder / f"{kind}-{seed}"
        problems = digest(kind, seed)
        if model.exists() and not (model / problems).exists():
            shutil.rmtree(model)
        if not model.exists():
            loss = make(kind, model, seed=seed, source=source, mark=problems)
            sys.stdout.write(f"{model.name}: loss {loss:.3f}\n")
            sys.stdout.flush()


def training_problems(update: int, seed: int) -> list[Any]:
    """Return the problems of an update."""
    task, first = load_task(LANGUAGE_TASK), FIRST_PROBLEM * (seed + 1) + update * TEXTS
    return [task[first + offset] for offset in range(TEXTS)]


def digest(kind: str, seed: int) -> str:
    """Return the name of the file that says which problems a model was trained on."""
    prompts = [problem.prompt for update in range(UPDATES[kind]) for problem in training_problems(update, seed)]
    return f"problems-{hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]}"


def make(kind: str, folder: Path, *, seed: int, source: str, mark: str) -> float:
    """Write one model to `folder`, which appears only when it is complete. Return the mean loss of the last updates."""
    original = resolve_model(source).folder
    tokenizer = AutoTokenizer.from_pretrained(original)
    model: Any = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    if kind == "cut":
        cut(model)
    losses = train(model, tokenizer, updates=UPDATES[kind], seed=seed)
    temporary = folder.with_name(folder.name + ".making")
    model.to(torch.bfloat16).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / mark).touch()
    temporary.rename(folder)
    return sum(losses[-8:]) / len(losses[-8:])


def cut(model: Any) -> None:
    """Remove `CUT_LAYERS` of the decoder."""
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in CUT_LAYERS]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]


def train(model: Any, tokenizer: Any, *, updates: int, seed: int) -> list[float]:
    """Train on right answers; the loss is that of the answers' tokens. Return the loss of each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    model.train()
    for update in range(updates):
        token_ids, labels = batch(training_problems(update, seed), tokenizer)
        loss = model(input_ids=token_ids, attention_mask=token_ids != tokenizer.pad_token_id, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if update % 10 == 0:
            sys.stderr.write(f"update {update} of {updates}: loss {loss.item():.3f}\n")
    return losses


def batch(items: list[Any], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return token ids and labels `[N, T]` of the prompts with their right answers, padded on the right."""
    rows = []
    for item in items:
        text = tokenizer.apply_chat_template(list(item.prompt), tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        answer = tokenizer(f"The answer is {item.answer}.", add_special_tokens=False).input_ids
        rows.append((prompt, [*answer, tokenizer.eos_token_id]))
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    token_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full_like(token_ids, IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return token_ids, labels
