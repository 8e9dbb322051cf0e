"""TRL's `GRPOTrainer` with a loss of `ftis_node.algorithms`.

TRL samples, scores, makes advantages and micro-batches, and steps. Two of its methods are replaced. One adds each row's
group to the batch, the other computes the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOTrainer

from ftis_node.algorithms import find_method, is_separable, policy_loss
from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from trl import GRPOConfig

UNUSED_TERMS = {
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}
"""Settings of GRPOConfig that add terms to TRL's own loss, by the value that adds none."""
OF_WHOLE_GROUPS = {"gepo"}  # reads the behaviour log-probs of the whole group, and a micro-batch has a part of it


class SwarmGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """A `GRPOTrainer` whose loss is `policy_loss` of a method.

    The behaviour log-probs are vLLM's. If transformers samples, they are the learner's own before the step.
    """

    def __init__(
        self, *args: Any, method: str = "ftis", method_params: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Take the arguments of GRPOTrainer, the method's name, and the parameters that differ from its defaults.

        Raises ValueError for an unknown method or parameter, ConfigError for a GRPOConfig that the loss cannot follow.
        """
        self.method = method
        self.method_params = dict(method_params or {})
        find_method(method)
        super().__init__(*args, **kwargs)
        _require_usable(self.args, method, self.method_params, num_processes=self.accelerator.num_processes)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's batch with `group_ids` `[N]`: TRL shuffles rows before it makes micro-batches."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        rows = torch.arange(len(batch["advantages"]), device=batch["advantages"].device)
        batch["group_ids"] = rows // num_generations
        return batch

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the method's loss of one micro-batch, divided by the number of micro-batches of the step."""
        learner, mask = self._learner_logprobs(model, inputs)
        anchor = inputs.get("old_per_token_logps")
        loss, figures = policy_loss(
            self.method,
            learner,
            _behaviour_logprobs(inputs, learner.detach() if anchor is None else anchor),
            mask,
            inputs["advantages"].to(learner.dtype),
            inputs["group_ids"],
            anchor_logprobs=anchor,
            **self.method_params,
        )
        mode = "train" if self.model.training else "eval"
        for name, value in figures.items():
            self._metrics[mode][name].append(value)
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1)

    def _learner_logprobs(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the learner's log-probs of the completion tokens and their mask, both `[N, T]`."""
        completion_mask = inputs["completion_mask"]
        logprobs, _, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            inputs["completion_ids"].shape[1],
        )
        mask = completion_mask if inputs.get("tool_mask") is None else completion_mask * inputs["tool_mask"]
        return logprobs.float(), mask.bool()


def _behaviour_logprobs(inputs: Mapping[str, Any], otherwise: Tensor) -> Tensor:
    """Return the log-probs under the sampling policy `[N, T]`; `otherwise` for tokens without one."""
    sampled = inputs.get("sampling_per_token_logps")
    if sampled is None:
        return otherwise.float()
    return torch.where(sampled.isnan(), otherwise, sampled).float()


def _require_usable(args: GRPOConfig, method: str, params: Mapping[str, Any], *, num_processes: int) -> None:
    """Raise ConfigError for settings of TRL that the method's loss contradicts."""
    for name, unused in UNUSED_TERMS.items():
        if getattr(args, name, unused) != unused:
            raise ConfigError(f"{name} has no effect on the loss of {method}: set it to {unused}")
    if find_method(method).advantage_scale == "mean" and str(args.scale_rewards).lower() not in ("none", "false"):
        raise ConfigError(f"{method} expects advantages that are not divided by a deviation: set scale_rewards='none'")
    is_whole = method in OF_WHOLE_GROUPS or not is_separable(method, params)
    if is_whole and (args.steps_per_generation > 1 or num_processes > 1):
        raise ConfigError(
            f"{method} with these parameters compares all completions of a batch: use one process, and set"
            " steps_per_generation=1 and per_device_train_batch_size to the whole batch"
        )
