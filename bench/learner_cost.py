"""Cost of a learner's step: seconds and peak memory against tokens a step, and against the vocabulary.

    python bench/learner_cost.py [--quick] [--plot docs/assets/learner-cost.png] [--threads 2]

The model is a Qwen2 shape of 12M parameters, with full training in float32. Groups have 6 completions with 1,024 tokens
together and a prompt of 112 tokens. Tokens go from 1k to 64k (the number of groups), the vocabulary from 8k to 128k.
Each point is a separate process. A micro-batch holds one group, so that even the smallest step fills one: above that
size memory is constant.

`head_bytes` is the memory traffic of one logit of the output head in a step on a GPU, with operations and with fused
kernels. It is computed, not measured.

A straight line is fitted to each curve. `r2` is the explained fraction of the variance. `largest_deviation` is the
largest error of the line, relative to the value there; for a flat curve `r2` alone means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers.utils import logging

from ftis_node.learner.messages import TrainGroup
from learner_sides.batch import count, even_groups, spread, with_logprobs
from learner_sides.job import Job, read_groups, write_groups
from learner_sides.process import take_turns
from stubs.random_models import save_random_model

SHAPE = "12m-wide"
GROUP_TOKENS, GROUP_SIZE, PROMPT_TOKENS = 1024, 6, 112
MICRO_BATCH_TOKENS = GROUP_TOKENS + PROMPT_TOKENS
BASE_GROUPS, BASE_VOCABULARY = 8, 8192  # the fixed value while the other one grows
GROUPS = (1, 2, 4, 8, 16, 32, 64)
VOCABULARIES = (8192, 16384, 32768, 65536, 131072)
QUICK_GROUPS, QUICK_VOCABULARIES = (1, 2, 3), (8192, 16384)
STEPS, QUICK_STEPS = 2, 1
CURVES = {"tokens": "completion tokens a step", "vocabulary": "tokens in the vocabulary"}
# Tensors of logits that the output head reads and writes, in float32 (4 bytes) or as bfloat16 (2). The last two read
# the scores for the gradients of the hidden states and of the weight.
HEAD_BYTES = {
    "operations": {
        "forward": {"product": 4, "largest": 4, "subtract": 4 + 4, "exponential": 4 + 4, "sum": 4},
        "backward": {"product": 4, "subtract": 4 + 4, "exponential": 4 + 4, "scale": 4 + 4, "round": 4 + 2},
        "products": {"hidden": 2, "weight": 2},
    },
    "fused": {
        "forward": {"product": 4, "log-sum-exp": 4},
        "backward": {"product": 4, "gradient": 4 + 2},
        "products": {"hidden": 2, "weight": 2},
    },
}
VALUES = {"step_s": "seconds a step", "peak_gb": "peak memory, GB"}


def main() -> None:
    """Measure both curves, plot them if requested, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few small points, to check the program")
    parser.add_argument("--plot", type=Path, help="write the curves to this image")
    parser.add_argument("--steps", type=int, help=f"that count; {STEPS} unless given")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--micro-batch-tokens", type=int, default=MICRO_BATCH_TOKENS)
    options = parser.parse_args()
    logging.disable_progress_bar()
    options.steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    with tempfile.TemporaryDirectory() as folder:
        curves = measure(Path(folder), options)
    fits = {
        f"{value}_by_{curve}": fit([point[curve] for point in points], [point[value] for point in points])
        for curve, points in curves.items()
        for value in VALUES
    }
    if options.plot:
        draw(curves, fits, options.plot)
    traffic = {form: sum(sum(part.values()) for part in parts.values()) for form, parts in HEAD_BYTES.items()}
    sys.stderr.write(f"bytes a logit: {traffic['operations']} by operations, {traffic['fused']} fused\n")
    setting = {"head_bytes": traffic, "threads": options.threads, "steps": options.steps, "torch": torch.__version__}
    sys.stdout.write(json.dumps({"bench": "learner_cost", **setting, **fits, "points": curves}) + "\n")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the points of both curves. Their common point is measured once."""
    groups_axis = QUICK_GROUPS if options.quick else GROUPS
    base_groups = QUICK_GROUPS[0] if options.quick else BASE_GROUPS
    shared = [
        point(folder, vocab_size=BASE_VOCABULARY, num_groups=number, base_groups=base_groups, options=options)
        for number in groups_axis
    ]
    others = [
        point(folder, vocab_size=size, num_groups=base_groups, base_groups=base_groups, options=options)
        for size in (QUICK_VOCABULARIES if options.quick else VOCABULARIES)
        if size != BASE_VOCABULARY
    ]
    return {"tokens": shared, "vocabulary": [shared[groups_axis.index(base_groups)], *others]}


def point(
    folder: Path, *, vocab_size: int, num_groups: int, base_groups: int, options: argparse.Namespace
) -> dict[str, float]:
    """Measure one size of step in a separate process."""
    home = folder / f"{vocab_size}-{num_groups}"
    home.mkdir()
    model = folder / f"model-{vocab_size}"
    if not model.exists():
        save_random_model(SHAPE, model, vocab_size=vocab_size)
        (folder / f"batch-{vocab_size}").write_bytes(write_groups(base(str(model), vocab_size, base_groups)))
    groups = repeated(folder / f"batch-{vocab_size}", num_groups)
    (home / "batch").write_bytes(write_groups(groups))
    job = partial(Job, model=str(model), batch=str(home / "batch"), threads=options.threads)
    side = ("ours", job(folder=str(home / "ours"), micro_batch=options.micro_batch_tokens))
    figures = take_turns({"ours": side}, steps=options.steps, together=True)["ours"]
    tokens = count(groups).completion_tokens
    sys.stderr.write(f"{tokens} tokens, vocabulary {vocab_size}: {figures['step_s']:.2f} s a step\n")
    return {
        "tokens": tokens,
        "vocabulary": vocab_size,
        "step_s": round(figures["step_s"], 3),
        "peak_gb": round(figures["peak_bytes"] / 1e9, 3),
    }


def base(model: str, vocab_size: int, num_groups: int) -> tuple[TrainGroup, ...]:
    lengths = spread(GROUP_TOKENS, GROUP_SIZE)
    groups = even_groups(
        num_groups=num_groups, completion_tokens=lengths, prompt_tokens=PROMPT_TOKENS, vocab_size=vocab_size
    )
    return with_logprobs(groups, model)


def repeated(batch: Path, num_groups: int) -> tuple[TrainGroup, ...]:
    """Return the groups of `batch` repeated, each time as new groups."""
    kinds = read_groups(batch.read_bytes())
    return tuple(
        msgspec.structs.replace(kinds[number % len(kinds)], group_id=str(number), advantage_key=str(number))
        for number in range(num_groups)
    )


def fit(sizes: list[float], values: list[float]) -> dict[str, float]:
    """Return the least-squares line through a curve, and figures of its fit."""
    slope, intercept = np.polyfit(sizes, values, 1)
    residuals = np.asarray(values) - (slope * np.asarray(sizes) + intercept)
    spread_of_values = float(((np.asarray(values) - np.mean(values)) ** 2).sum())
    return {
        "slope": float(f"{slope:.4g}"),
        "intercept": float(f"{intercept:.4g}"),
        "r2": round(1 - float((residuals**2).sum()) / spread_of_values, 5) if spread_of_values else 1.0,
        "largest_deviation": round(float(np.max(np.abs(residuals) / np.asarray(values))), 4),
    }


def draw(curves: dict[str, list[dict[str, float]]], fits: dict[str, Any], path: Path) -> None:
    """Plot a panel with its line for each curve and value."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for row, (value, value_label) in zip(axes, VALUES.items(), strict=True):
        for panel, (curve, curve_label) in zip(row, CURVES.items(), strict=True):
            sizes = np.asarray([each[curve] for each in curves[curve]])
            line = fits[f"{value}_by_{curve}"]
            heights = [each[value] for each in curves[curve]]
            panel.plot(sizes, heights, "o", label="measured")
            panel.plot(sizes, line["slope"] * sizes + line["intercept"], label=f"line, R² {line['r2']:.4f}")
            panel.set(xlabel=curve_label, ylabel=value_label, ylim=(0, 1.15 * max(heights)))
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
