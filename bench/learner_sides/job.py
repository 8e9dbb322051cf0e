"""The job of one side, sent as JSON from the bench to the side's process."""

from __future__ import annotations

from typing import Literal

import msgspec

from ftis_node.config.step import OptimizerSection
from ftis_node.config.workers import LearnerSection, LoraSection
from ftis_node.learner.client import worker_environment
from ftis_node.learner.messages import LearnerBoot, TrainGroup
from ftis_node.workers.preload import KEEPS_FREED_BLOCKS

LEARNING_RATE = 1e-6  # so small that the behaviour log-probs remain nearly valid during a bench
MAX_GRAD_NORM = 1.0
LORA = LoraSection()  # that of the F-TIS paper, on both sides


class Job(msgspec.Struct, frozen=True):
    """Steps on one batch with one model.

    `batch` is a file of groups (see `write_groups`), `folder` that of the side. `micro_batch` is in completions for
    TRL, in tokens for the learner (0: its default). `recompute` is gradient checkpointing, `kernels` are the learner's.
    `keeps_freed_blocks`: glibc's settings are those of a node's learner on a CPU, else the defaults.
    """

    model: str
    batch: str
    folder: str
    lora: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 2
    micro_batch: int = 0
    recompute: bool = False
    kernels: str = "auto"
    keeps_freed_blocks: bool = True

    def boot(self, weights_dir: str) -> LearnerBoot:
        """Return the learner's boot. It writes no checkpoint during a bench."""
        boot = LearnerBoot(
            model=self.model,
            model_name="bench",
            run_id="bench",
            checkpoints_dir=f"{self.folder}/checkpoints",
            weights_dir=weights_dir,
            optimizer=OptimizerSection(
                learning_rate=LEARNING_RATE, lora_learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM
            ),
            lora=LORA if self.lora else None,
            dtype=self.precision,
            device=self.device,
            recompute_activations=self.recompute,
            head_chunk_tokens=512 if self.device == "cpu" else 2048,
            settings=LearnerSection(kernels=self.kernels, checkpoint_every_steps=100_000),
            num_threads=self.threads,
        )
        return msgspec.structs.replace(boot, micro_batch_tokens=self.micro_batch) if self.micro_batch else boot

    def environment(self) -> dict[str, str]:
        """Return the environment that a node gives its learner's process, for both sides."""
        given = worker_environment(self.boot(""))
        left_out = () if self.keeps_freed_blocks else KEEPS_FREED_BLOCKS
        return {name: value for name, value in given.items() if name not in left_out}


def write_groups(groups: tuple[TrainGroup, ...]) -> bytes:
    """Return the bytes of a batch file."""
    return msgspec.msgpack.encode(groups)


def read_groups(data: bytes) -> tuple[TrainGroup, ...]:
    """Return the groups of a batch file."""
    return msgspec.msgpack.decode(data, type=tuple[TrainGroup, ...])
