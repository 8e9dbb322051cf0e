"""Parts that run other benches: `learner`, `one_gpu`, and throughput and transfer of `generate`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import one_gpu as one_gpu_bench
from ftis_node.lab.card.device_speed import peak_flops
from gpu.cases import Options
from gpu.running import ask_program

BENCH = Path(__file__).parent.parent


def learner(options: Options, *, shape: str, lora: bool) -> dict[str, Any]:
    """Measure whole steps, also those of TRL if it is installed."""
    trained = "lora" if lora else "full"
    case = f"8192-{trained}-float32" if options.small else f"{shape}-{trained}-bfloat16"
    command = [str(BENCH / "learner.py"), "--device", options.device, "--case", case]
    if options.small:
        command += ["--quick", "--groups", "1"]
    else:
        steps = ["--steps", "3"] if shape == "0.5b" else ["--steps", "2", "--groups", "8"]
        command += ["--shape", shape, *steps, "--peak-tflops", str(peak_flops(options.device)["peak_tflops"])]
    if options.small or find_spec("trl") is None:
        command.append("--ours-only")
    (measured,) = ask_program(command)["cases"].values()
    ours = measured["ours"]
    return {
        "step_s": ours["step_s"],
        "publish_s": round(ours["call_s"] - ours["step_s"], 3),
        "mfu": ours["share_of_peak_prompts_once"],
        "positions_per_s": round((measured["completion_tokens"] + measured["prompt_tokens_once"]) / ours["step_s"], 1),
        "product_tflops": round(ours["matrix_peak_gflops"] / 1000, 2),
        "allocated_gib": round(ours["peak_gb"] * 1e9 / 2**30, 3),
        "beside": {name: value for name, value in measured.items() if name.startswith(("trl", "speed", "memory"))},
    }


def one_gpu(options: Options, *, shape: str, lora: bool) -> None:
    """Run both workers on the device, in turns or together as planned: two short rounds of a step each."""
    one_gpu_bench.measure(shape, lora=lora, device=options.device, small=options.small, note=options.note)


def throughput(options: Options, *, shape: str, max_batch: int) -> dict[str, Any]:
    """Return the tokens per second of the worker and of raw vLLM, with `max_batch` completions at a time."""
    found = _generation(options, shape, "throughput", ["--max-batch", str(max_batch)])
    return {"gen_tokens_per_s": found["tokens_per_s"], **found, "max_batch": max_batch}


def engine_transfer(options: Options, *, shape: str) -> dict[str, Any]:
    """Measure the time from a step's end to the first token of its version, with a learner worker."""
    found = _generation(options, shape, "transfer", [])
    return {"publish_s": found["publish_ms"] / 1000, "load_s": found["load_ms"] / 1000, **found}


def _generation(options: Options, shape: str, part: str, more: list[str]) -> dict[str, Any]:
    command = [str(BENCH / "generation.py"), "--shape", shape, "--device", options.device, "--part", part, *more]
    if options.small:
        command += ["--rounds", "1", "--groups", "2", "--completion-tokens", "8"]
    found = ask_program(command)
    return {name: value for name, value in found.items() if name not in ("bench", "shape")}
