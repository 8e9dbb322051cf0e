"""The learner against TRL's GRPOTrainer: whole optimizer steps on the same completions; speed, memory, fraction of
peak.

    python bench/learner.py [--case 32768-lora-bfloat16 ... | all] [--full] [--threads 2]
    python bench/learner.py --device cuda --shape 0.5b [3b] [--peak-tflops 989]

The model is a Qwen2 shape of 12M parameters. With `--full` the batch has 96 ragged completions in 8 groups of 12 (see
learner_sides/batch.py). By default it is a quarter of that on a CPU, and one step counts. Every side is a separate
process with the environment that a node gives its learner. Sides alternate step by step, in alternating order, and the
median step counts. TRL runs at micro-batches of 8 and of 2. On a CPU it runs once more with glibc's default settings.
Speed is compared with the fastest of all, memory with the smaller of both environments.

A step is log-probs, loss, backward, clip and AdamW. The learner also publishes the weights for a generator: `call_s`
includes that, `step_s` does not. They are written to a file, although a node on a GPU shares memory. `cpu_s` is the
processor time of a call. Fractions of the peak are the floating-point operations of the tokens over time, relative to
the fastest matrix product in the same process. `share_of_peak` counts completion tokens only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from learner_sides.batch import GROUP_SIZE, Counts, count, ragged_groups, with_logprobs
from learner_sides.job import LORA, Job, write_groups
from learner_sides.process import take_turns
from stubs.random_models import SHAPES, save_random_model

CPU_SHAPE = "12m-wide"
VOCABULARIES = (8192, 32768)
MAIN_CASE = "8192-full-float32"
NUM_GROUPS, STEPS = 8, 3
QUICK_GROUPS, QUICK_STEPS = 2, 1
TRL_MICRO_BATCHES = (8, 2)  # completions; memory is compared with both, speed with the faster
PLAIN = "_plain"  # TRL again with glibc's default settings: often slower, with less memory


@dataclass(frozen=True, slots=True)
class Case:
    """A model with a form of training."""

    shape: str
    vocab_size: int
    lora: bool
    precision: str
    device: str

    @property
    def name(self) -> str:
        size = self.vocab_size if self.device == "cpu" else self.shape
        return f"{size}-{'lora' if self.lora else 'full'}-{self.precision}"


def main() -> None:
    """Run the cases and print the result."""
    options = arguments()
    logging.disable_progress_bar()
    cases = {case.name: case for case in all_cases(options)}
    chosen = set(options.case or ([MAIN_CASE] if options.device == "cpu" else ["all"]))
    if unknown := chosen - {*cases, "all"}:
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}, and all")
    with tempfile.TemporaryDirectory() as folder:
        measured = {
            name: measure(case, Path(folder) / name, options) for name, case in cases.items() if chosen & {name, "all"}
        }
    sys.stderr.write(table(measured))
    sys.stdout.write(json.dumps(result(measured, options)) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case", nargs="+", help=f"such as 32768-lora-bfloat16, or all; {MAIN_CASE} unless given, with cuda all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the batch, one step; without cuda the default"
    )
    parser.add_argument("--full", action="store_true", help="the whole batch, three steps; with cuda the default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["0.5b"], help="with cuda")
    parser.add_argument(
        "--groups", type=int, help=f"of {GROUP_SIZE} completions; {NUM_GROUPS} if full, else {QUICK_GROUPS}"
    )
    parser.add_argument("--steps", type=int, help=f"that count; {STEPS} if full, else {QUICK_STEPS}")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="of this project; default: the learner's")
    parser.add_argument("--trl-micro-batches", type=int, nargs="+", default=list(TRL_MICRO_BATCHES), metavar="N")
    parser.add_argument("--ours-only", action="store_true", help="without TRL, which is not needed then")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--kernels", choices=["auto", "plain", "compile"], default="auto", help="ours")
    parser.add_argument("--peak-tflops", type=float, help="the chip's own figure, instead of the measured product")
    options = parser.parse_args()
    if options.ours_only:
        options.trl_micro_batches = []
    is_full = options.full or (options.device == "cuda" and not options.quick)
    options.groups = options.groups or (NUM_GROUPS if is_full else QUICK_GROUPS)
    options.steps = options.steps or (STEPS if is_full else QUICK_STEPS)
    return options


def all_cases(options: argparse.Namespace) -> list[Case]:
    if options.device == "cuda":
        sizes = [(shape, SHAPES[shape]["vocab_size"]) for shape in options.shape]
        precisions = ["bfloat16"]
    else:
        sizes, precisions = [(CPU_SHAPE, size) for size in VOCABULARIES], ["float32", "bfloat16"]
    return [
        Case(shape, vocab_size, lora, precision, options.device)
        for shape, vocab_size in sizes
        for lora in (False, True)
        for precision in precisions
    ]


def measure(case: Case, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one case."""
    model = folder / "model"
    stored = torch.float32 if case.device == "cpu" else torch.bfloat16  # each side converts it when it loads it
    num_parameters = save_random_model(case.shape, model, dtype=stored, vocab_size=case.vocab_size, device=case.device)
    groups = with_logprobs(ragged_groups(num_groups=options.groups, vocab_size=case.vocab_size), str(model))
    batch = folder / "batch"
    batch.write_bytes(write_groups(groups))
    tokens = count(groups)
    sys.stderr.write(f"{case.name}: {num_parameters / 1e6:.1f} M parameters, {asdict(tokens)}\n")
    job = partial(
        Job,
        model=str(model),
        batch=str(batch),
        lora=case.lora,
        precision=case.precision,
        device=case.device,
        threads=options.threads,
        recompute=options.recompute,
        kernels=options.kernels,
    )
    sides = {"ours": ("ours", job(folder=str(folder / "ours"), micro_batch=options.micro_batch_tokens))}
    plain = {}
    for number in options.trl_micro_batches:
        name = f"trl_{number}"
        sides[name] = ("theirs", job(folder=str(folder / name), micro_batch=number))
        its = job(folder=str(folder / (name + PLAIN)), micro_batch=number, keeps_freed_blocks=False)
        plain[name + PLAIN] = ("theirs", its)
    sides_figures = take_turns(sides, steps=options.steps, together=case.device == "cpu")
    if plain and case.device == "cpu":
        sides_figures |= take_turns(plain, steps=1, together=False)
    work = flops_a_token(model, lora=case.lora)
    known_peak = options.peak_tflops * 1e12 if options.peak_tflops else None
    figures = {
        name: side_figures(raw, tokens, flops_a_token=work, peak_flops=known_peak or raw["peak_flops"])
        for name, raw in sides_figures.items()
    }
    compared = ratios(figures)
    return {"parameters": num_parameters, **asdict(tokens), **figures, **compared}


def flops_a_token(model: Path, *, lora: bool) -> float:
    """Return the operations per token, forward and backward: 6 per trained parameter, 4 per frozen one."""
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        own = sum(value.numel() for value in causal_lm.parameters())
        if not lora:
            return 6.0 * own
        from peft import LoraConfig, get_peft_model

        from ftis_node.learner.model.lora import ADAPTED_LAYERS

        adapted = get_peft_model(causal_lm, LoraConfig(r=LORA.rank, target_modules=ADAPTED_LAYERS))
        return 4.0 * own + 6.0 * sum(value.numel() for value in adapted.parameters() if value.requires_grad)


def side_figures(raw: dict[str, float], tokens: Counts, *, flops_a_token: float, peak_flops: float) -> dict[str, float]:
    """Return the figures of one side, with units in the names."""
    share = flops_a_token / raw["step_s"] / peak_flops
    once = tokens.completion_tokens + tokens.prompt_tokens_once
    return {
        **{name: round(raw[name], 3) for name in ("step_s", "best_step_s", "call_s", "cpu_s")},
        "completion_tokens_per_s": round(tokens.completion_tokens / raw["step_s"], 1),
        "peak_gb": round(raw["peak_bytes"] / 1e9, 3),
        "share_of_peak": round(tokens.completion_tokens * share, 3),
        "share_of_peak_prompts_once": round(once * share, 3),
        "share_of_peak_real_tokens": round(tokens.real_tokens * share, 3),
        "matrix_peak_gflops": round(raw["peak_flops"] / 1e9, 1),
    }


def ratios(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the ratios to TRL. A speed above 1 is faster, a memory below 1 is smaller."""
    ours = figures["ours"]
    theirs = {name: side for name, side in figures.items() if name != "ours"}
    if not theirs:
        return {}
    fastest = min(side["step_s"] for side in theirs.values())
    smallest = {
        name: min(side["peak_gb"], theirs.get(name + PLAIN, side)["peak_gb"])
        for name, side in theirs.items()
        if not name.endswith(PLAIN)
    }
    memory = {f"memory_ratio_to_{name}": round(ours["peak_gb"] / peak_gb, 3) for name, peak_gb in smallest.items()}
    return {"speed_ratio_to_trl": round(fastest / ours["step_s"], 2), **memory}


def result(measured: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the printed object: the figures of the main case, or of the first that ran, and of every case."""
    from importlib.metadata import version

    main_case = MAIN_CASE if MAIN_CASE in measured else next(iter(measured))
    main = measured[main_case]
    return {
        "bench": "learner",
        "main_case": main_case,
        "share_of_peak": main["ours"]["share_of_peak"],
        **({} if options.ours_only else {**beside_trl(measured, main, options), "trl": version("trl")}),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "threads": options.threads,
        "steps": options.steps,
        "groups": options.groups,
        "torch": torch.__version__,
        "cases": measured,
    }


def beside_trl(
    measured: dict[str, dict[str, Any]], main: dict[str, Any], options: argparse.Namespace
) -> dict[str, float]:
    """Return the main case's ratios to TRL, and the worst of all cases."""
    largest = f"memory_ratio_to_trl_{max(options.trl_micro_batches)}"
    smallest = f"memory_ratio_to_trl_{min(options.trl_micro_batches)}"
    return {
        "speed_ratio_to_trl": main["speed_ratio_to_trl"],
        "memory_ratio_to_trl": main[largest],
        "memory_ratio_to_smallest_trl": main[smallest],
        "share_of_peak_trl": max(side["share_of_peak"] for name, side in main.items() if name.startswith("trl_")),
        "least_speed_ratio_to_trl": min(case["speed_ratio_to_trl"] for case in measured.values()),
        "most_memory_ratio_to_trl": max(case[largest] for case in measured.values()),
        "most_memory_ratio_to_smallest_trl": max(case[smallest] for case in measured.values()),
    }


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Return a readable table."""
    lines = [f"{'case':24} {'side':12} {'step s':>8} {'tokens/s':>9} {'peak GB':>8} {'share':>6} {'real':>6}"]
    for name, case in measured.items():
        for side, figures in case.items():
            if not isinstance(figures, dict):
                continue
            lines.append(
                f"{name:24} {side:12} {figures['step_s']:8.2f} {figures['completion_tokens_per_s']:9.0f} "
                f"{figures['peak_gb']:8.3f} {figures['share_of_peak']:6.3f} {figures['share_of_peak_real_tokens']:6.3f}"
            )
        memory = ", ".join(f"{key[7:]} {value}" for key, value in case.items() if key.startswith("memory_"))
        if "speed_ratio_to_trl" not in case:
            continue
        lines.append(f"{'':24} speed x {case['speed_ratio_to_trl']}; memory: {memory}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
