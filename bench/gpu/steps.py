"""`memory`: the learner's steps against its plan, with the seconds of publication and proof; a checkpoint."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.step import OptimizerSection
from ftis_node.config.workers import LearnerSection, Quantize
from ftis_node.lab.card.device_speed import peak_flops, synchronize
from ftis_node.lab.card.usage import gib
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import LearnerBoot, TrainGroup
from ftis_node.memory.learner_memory import Workload, learner_memory
from ftis_node.models import read_shape, resolve_model
from ftis_node.workers.weight_store import PublishedWeights
from gpu.cases import Options
from gpu.device import model_folder, peak_bytes, reset_peak
from learner import flops_a_token
from learner_sides.batch import count, even_groups, memory_folder, with_flat_logprobs
from learner_sides.job import LORA

GROUPS, GROUP_SIZE = 2, 12
STEPS = 3  # the first is not counted
SAVED_TOKENS = 256  # of the step before the checkpoint
NEVER = 100_000


def memory(
    options: Options, *, shape: str, lora: bool, recompute: bool, tokens: int, quantize: Quantize = "none"
) -> dict[str, Any]:
    """Measure steps of one micro-batch of `tokens` positions. `mfu` counts each position of the packed row once."""
    folder = model_folder(shape, options.device)
    groups = filled(tokens, read_shape(resolve_model(str(folder))).vocab_size)
    with _homes() as (home, weights):
        boot = learner_boot(options, folder, home=home, weights=weights, lora=lora, recompute=recompute, tokens=tokens)
        if quantize != "none":  # into such a base no adapter is merged
            boot = msgspec.structs.replace(boot, quantize=quantize, publish_as="adapter")
        planned = planned_bytes(folder, boot)
        options.note(planned_gib=gib(planned), micro_batch_tokens=tokens)
        before = reset_peak(options.device)
        learner = Learner(boot)
        rounds = []
        for step in range(1, STEPS + 1):
            rounds.append(one_step(learner, groups, step))
            synchronize(options.device)
            allocated, reserved = peak_bytes(options.device, before)
            counted = rounds[1:] or rounds
            options.note(
                **{name: round(min(each[name] for each in counted), 4) for name in rounds[0]},
                allocated_gib=gib(allocated),
                reserved_gib=gib(reserved),
                allocated_to_plan=round(allocated / planned, 3),
                layout=learner.policy.layout,
            )
        learner.close()
    tokens_of = count(groups)
    positions = tokens_of.completion_tokens + tokens_of.prompt_tokens_once
    peak, step_s = peak_flops(options.device), min(each["step_s"] for each in rounds[1:])
    achieved = flops_a_token(folder, lora=lora) * positions / step_s / 1e12
    return {
        "positions_per_s": round(positions / step_s, 1),
        "tflops": round(achieved, 5),
        "mfu": round(achieved / peak["peak_tflops"], 4),
        **peak,
    }


def checkpoint(options: Options, *, shape: str) -> dict[str, Any]:
    """Measure a checkpoint of all weights: 37 GB at 3B."""
    folder = model_folder(shape, options.device)
    groups = filled(SAVED_TOKENS, read_shape(resolve_model(str(folder))).vocab_size)
    with _homes() as (home, weights):
        learner = Learner(
            learner_boot(options, folder, home=home, weights=weights, recompute=True, tokens=SAVED_TOKENS)
        )
        one_step(learner, groups, 1)
        began = time.monotonic()
        learner.checkpoints.save_if_behind()
        saved_s = round(time.monotonic() - began, 2)
        size = sum(path.stat().st_size for path in Path(home).rglob("*") if path.is_file())
        learner.close()
    return {"checkpoint_s": saved_s, "checkpoint_gib": gib(size)}


@contextmanager
def _homes() -> Iterator[tuple[str, str]]:
    """Yield a folder for checkpoints, and one in memory for weights."""
    with tempfile.TemporaryDirectory() as home, memory_folder() as weights:
        yield home, weights


def learner_boot(
    options: Options, folder: Path, *, home: str, weights: str, tokens: int, lora: bool = False, recompute: bool = False
) -> LearnerBoot:
    """Return the boot of a learner that writes no checkpoint, with the plain kernels of the memory plan."""
    return LearnerBoot(
        model=str(folder),
        model_name=folder.name,
        run_id="gpu-check",
        checkpoints_dir=f"{home}/checkpoints",
        weights_dir=weights,
        optimizer=OptimizerSection(learning_rate=1e-6, lora_learning_rate=1e-6),
        lora=LORA if lora else None,
        dtype="bfloat16" if options.device == "cuda" else "float32",  # which few CPUs compute
        device=options.device,
        micro_batch_tokens=tokens,
        recompute_activations=recompute,
        settings=LearnerSection(kernels="plain", checkpoint_every_steps=NEVER),
    )


def filled(tokens: int, vocab_size: int) -> tuple[TrainGroup, ...]:
    """Return groups that fill a packed micro-batch of `tokens`, with each prompt once."""
    prompt = min(128, tokens // 8)
    length = (tokens // GROUPS - prompt) // GROUP_SIZE
    made = even_groups(
        num_groups=GROUPS, completion_tokens=[length] * GROUP_SIZE, prompt_tokens=prompt, vocab_size=vocab_size
    )
    return with_flat_logprobs(made, vocab_size)


def one_step(learner: Learner, groups: Sequence[TrainGroup], step: int) -> dict[str, float]:
    """Return the seconds of the step, of publication and of the proof; `cpu_s` is the processor time of all three.

    A step whose `cpu_s` is near its time is bound by the host: the GPU waits for operations.
    """
    times: dict[str, float] = {}
    began_s = time.process_time()

    def note(news: object) -> None:
        now = time.monotonic()
        if isinstance(news, PublishedWeights):
            assert news.step_done_at_s is not None
            times["published"], times["publish_s"] = now, now - news.step_done_at_s
        else:
            times["prove_s"] = now - times.pop("published")

    report = learner.train(groups, step=step, on_published=note).report
    if report.num_updates != 1 or report.out_of_memory:
        raise RuntimeError(f"step {step} was not done as requested: {report}")
    return {"step_s": report.duration_s, **times, "cpu_s": time.process_time() - began_s}


def planned_bytes(folder: Path, boot: LearnerBoot) -> int:
    """Return the planned bytes of this learner's tensors, without its context and the transfer."""
    settings = NodeSettings(
        model=str(folder),
        lora=boot.lora is not None,
        quantize=boot.quantize,
        dtype=boot.dtype,
        learner={"micro_batch_tokens": boot.micro_batch_tokens, "recompute_activations": boot.recompute_activations},
    )
    shape = read_shape(resolve_model(str(folder)))
    workload = Workload.of(settings, load_manifest("gsm8k-ftis"), on_gpu=boot.device == "cuda")
    # The run's longest completion is longer than a small micro-batch here.
    found = learner_memory(
        shape, replace(workload, max_total_tokens=min(workload.max_total_tokens, boot.micro_batch_tokens))
    )
    return found.resident - found.context + found.gradients + found.activations + found.work
