"""What one side is asked to do. It travels as JSON from the bench to the side's process."""

from __future__ import annotations

from typing import Literal

import msgspec

from ftis_node.config.step import OptimizerSection
from ftis_node.config.workers import LearnerSection, LoraSection
from ftis_node.learner.client import KEEPS_FREED_BLOCKS, worker_environment
from ftis_node.learner.messages import LearnerBoot, TrainGroup

LEARNING_RATE = 1e-6  # so small that the behaviour log-probs stay true for the steps of a bench
MAX_GRAD_NORM = 1.0
LORA = LoraSection()  # the F-TIS paper's, on both sides


class Job(msgspec.Struct, frozen=True):
    """Steps on one batch with one model.

    `batch` is a file of groups (see `write_groups`), `folder` the side's own. `micro_batch` is in completions for TRL,
    in tokens for us (0: the learner's default). `recompute` is gradient checkpointing, `kernels` are ours.
    `keeps_freed_blocks`: glibc as a
    node sets it for its learner on a CPU, else as it comes.
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
        """The learner for it. It writes no checkpoint within a bench."""
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
        """What the node gives its learner's process; both sides get it."""
        given = worker_environment(self.boot(""))
        left_out = () if self.keeps_freed_blocks else KEEPS_FREED_BLOCKS
        return {name: value for name, value in given.items() if name not in left_out}


def write_groups(groups: tuple[TrainGroup, ...]) -> bytes:
    """The bytes of a batch file."""
    return msgspec.msgpack.encode(groups)


def read_groups(data: bytes) -> tuple[TrainGroup, ...]:
    """What `write_groups` was given."""
    return msgspec.msgpack.decode(data, type=tuple[TrainGroup, ...])
