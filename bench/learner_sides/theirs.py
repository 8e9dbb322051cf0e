"""TRL's side: its `GRPOTrainer` in its own training loop, which gets prepared completions instead of generating.

Only `_generate_and_score_completions` is replaced. Its result is what TRL would return for the same completions. It has
prompts padded on the left, completions on the right, masks, advantages and the number of completion tokens. The
rest is TRL's: shuffling, cutting into micro-batches, autocast, loss, metrics, backward, clip, fused AdamW.

The settings are its fastest ones here. There is no gradient checkpointing unless requested, no reference model and no
old log-probs (one update a batch), and torch computes attention. A step is timed from its begin callback to its end
callback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ftis_node.learner.groups import unpack_train_group
from ftis_node.learner.messages import TrainGroup
from ftis_node.learner.model.lora import ADAPTED_LAYERS
from learner_sides.batch import COMPLETION_TOKENS
from learner_sides.job import LEARNING_RATE, LORA, MAX_GRAD_NORM, Job, read_groups
from learner_sides.serving import Serving


def main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    groups = read_groups(Path(job.batch).read_bytes())
    serving = Serving(job)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    trainer = PreparedTrainer(
        model=job.model,
        reward_funcs=no_reward,
        args=settings(job, groups),
        train_dataset=Dataset.from_dict({"prompt": ["?"] * 10_000}),
        processing_class=tokenizer,
        peft_config=adapter() if job.lora else None,
        callbacks=[StepByStep(serving)],
    )
    trainer.prepared = prepare(groups, padding_id=trainer._tokenizer.pad_token_id)
    serving.ready()
    trainer.train()


class PreparedTrainer(GRPOTrainer):
    """A trainer with prepared completions."""

    prepared: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return {name: value.to(self.accelerator.device) for name, value in self.prepared.items()}


class StepByStep(TrainerCallback):
    """A callback that waits for a request before each step and reports the step's time."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._serving.wait_for_step():
            raise SystemExit
        self._serving.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._serving.end()


def settings(job: Job, groups: Sequence[TrainGroup]) -> GRPOConfig:
    """Return the settings of one optimizer step on the whole batch, with micro-batches of `job.micro_batch`."""
    num_completions = sum(len(group.rewards) for group in groups)
    assert num_completions % job.micro_batch == 0, "TRL takes micro-batches that divide the batch"
    return GRPOConfig(
        output_dir=f"{job.folder}/trl",
        use_cpu=job.device == "cpu",
        bf16=job.precision == "bfloat16",
        gradient_checkpointing=job.recompute,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=num_completions // job.micro_batch,
        num_generations=len(groups[0].rewards),
        max_completion_length=COMPLETION_TOKENS[1],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        beta=0.0,
        use_vllm=False,
        max_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def adapter() -> LoraConfig:
    """Return the adapter that the other side trains."""
    return LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        lora_dropout=0.0,
        target_modules=ADAPTED_LAYERS,
        task_type="CAUSAL_LM",
    )


def prepare(groups: Sequence[TrainGroup], *, padding_id: int) -> dict[str, torch.Tensor]:
    """Return the result of `_generate_and_score_completions` for these groups."""
    unpacked = [unpack_train_group(group) for group in groups]
    rows = [(group.prompt_ids, ids) for group in unpacked for ids in group.tokens.ids_of_each()]
    prompt_ids, prompt_mask = padded([prompt for prompt, _ in rows], padding_id, left=True)
    completion_ids, completion_mask = padded([ids for _, ids in rows], padding_id, left=False)
    rewards = torch.tensor([group.rewards for group in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages.flatten(),
        "num_items_in_batch": completion_mask.sum(),
    }


def padded(arrays: Sequence[NDArray[np.int32]], padding_id: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, `[N, longest]` int64."""
    width = max(map(len, arrays))
    ids = np.full((len(arrays), width), padding_id, dtype=np.int64)
    mask = np.zeros_like(ids)
    for line, array in enumerate(arrays):
        columns = slice(width - len(array), width) if left else slice(0, len(array))
        ids[line, columns], mask[line, columns] = array, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    """Return zeros. TRL does not call it, because rewards are prepared with the completions."""
    return [0.0] * len(completions)


if __name__ == "__main__":
    main()
