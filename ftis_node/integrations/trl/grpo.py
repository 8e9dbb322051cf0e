"""TRL's `GRPOTrainer` with a loss of `ftis_node.algorithms`.

TRL samples, scores, makes advantages and micro-batches, and steps. Some of its methods are replaced: one adds each
row's group to the batch and exchanges groups with peers, one computes the loss. Two give the reward functions the
column `scored_text`, the texts that a node scores: with the think block that the prompt opened. Episodes come from a
rollout function (`run_task.py`). TRL marks their sampled tokens by 1 in `tool_mask`, and observed ones by 0.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from ftis_node.algorithms.loss import policy_loss, require_parameters
from ftis_node.algorithms.methods import find_method, is_separable, method_parameters
from ftis_node.errors import ConfigError
from ftis_node.integrations.trl.foreign_groups import Fit, ForeignGroup, exclude_understated, foreign_rows, join_batches
from ftis_node.integrations.trl.swarm_exchange import FlushCallback, SwarmExchange, require_agreement
from ftis_node.models.chat_template import PromptSettings
from ftis_node.models.tokenizer import PromptTokenizer
from ftis_node.node.exchange.trainer_messages import OwnGroup
from ftis_node.records.codec import hash_messages

UNUSED_TERMS = {
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}
"""Settings of GRPOConfig that add terms to TRL's own loss, by the value that adds none."""
OF_WHOLE_GROUPS = {"gepo"}  # reads the behaviour log-probs of the whole group, and a micro-batch has a part of it


def own_groups(
    batch: Mapping[str, Any], logprobs: Tensor, inputs: Sequence[Mapping[str, Any]], fit: Fit, *, policy_version: int
) -> Iterator[OwnGroup]:
    """Yield the groups of TRL's batch, `group_size` rows each.

    `logprobs` `[N, T]` are those of the sampling policy. `inputs` are the rows of the data set, with the problem's
    messages and its number. A group with an empty completion, or with a log-prob that is not finite, is omitted. Of an
    episode only the sampled tokens are sent: those that `tool_mask` marks. Each run of them is a turn.
    """
    ids, mask = batch["completion_ids"].cpu(), _loss_mask(batch).cpu()
    prompts, prompt_mask = batch["prompt_ids"].cpu(), batch["prompt_mask"].bool().cpu()
    logprobs, now = logprobs.float().cpu(), time.time()
    for first in range(0, len(ids), fit.group_size):
        rows = range(first, first + fit.group_size)
        lengths = mask[first : rows.stop].sum(dim=1).tolist()
        of_group = torch.cat([logprobs[row][mask[row]] for row in rows])
        if min(lengths) < 1 or not bool(of_group.isfinite().all()):
            continue
        yield OwnGroup(
            problem=int(inputs[first]["prompt_index"]),
            problem_hash=_problem_hash(inputs[first]["prompt"]),
            prompt_ids=_int32(prompts[first][prompt_mask[first]]),
            token_ids=_int32(torch.cat([ids[row][mask[row]] for row in rows])),
            logprobs=of_group.numpy().astype("<f4").tobytes(),
            lengths=lengths,
            policy_version=policy_version,
            tokenizer=fit.tokenizer,
            temperature=fit.temperature,
            top_p=fit.top_p,
            top_k=fit.top_k,
            created_at=now,
            end_ids=list(fit.end_ids),
            turn_lengths=[_turns(mask[row]) for row in rows] if "tool_mask" in batch else [],
            observation_form=list(fit.observation_form),
        )


def _turns(mask: Tensor) -> list[int]:
    """Return the lengths of the runs of True in `mask` `[T]`."""
    return [len(list(run)) for is_sampled, run in groupby(mask.tolist()) if is_sampled]


def _loss_mask(batch: Mapping[str, Any]) -> Tensor:
    """Return which tokens `[N, T]` the policy sampled: those of the completions without observations."""
    mask: Tensor = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def _problem_hash(prompt: Any) -> bytes:
    """Return the digest of chat messages; empty for a text, which is no problem of a run."""
    return hash_messages(prompt) if all(isinstance(message, dict) for message in prompt) else b""


def _int32(ids: Tensor) -> bytes:
    return np.asarray(ids.tolist(), dtype="<i4").tobytes()


class SwarmGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """A `GRPOTrainer` whose loss is `policy_loss` of a method.

    The behaviour log-probs are vLLM's. If transformers samples, or with `top_p` or `top_k`, they are the learner's own
    before the step.
    """

    def __init__(
        self,
        *args: Any,
        method: str = "ftis",
        method_params: Mapping[str, Any] | None = None,
        exchange: SwarmExchange | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the arguments of GRPOTrainer, the method's name, and the parameters that differ from its defaults.

        Groups of peers from `exchange` replace the last prompts of a batch, which TRL then does not sample. Peers get
        the own groups. With `exchange` the random numbers differ at each start, unless `full_determinism` is set.

        Raises ValueError for an unknown method, or for parameters that it refuses. Raises ConfigError for a GRPOConfig
        that the loss cannot follow.
        """
        self.method = method
        self.method_params = dict(method_params or {})
        self._rejection_key = secrets.randbits(62)  # a peer that knew it could choose which tokens `obrs` accepts
        require_parameters(method, self.method_params)
        super().__init__(*args, **kwargs)
        _require_usable(
            self.args,
            method,
            self.method_params,
            num_processes=self.accelerator.num_processes,
            has_router_loss=self.aux_loss_enabled,
        )
        self._exchange = exchange
        num_rows = self.model.get_input_embeddings().num_embeddings
        self.texts = PromptTokenizer(
            self._tokenizer,
            name="the trainer's model",
            extra_eos_ids=self.eos_token_ids,
            num_rows=num_rows,
            prompts=PromptSettings(arguments=self.chat_template_kwargs),
        )
        self.prompt_indices: Sequence[int | None] = ()  # of the rows that a rollout function plays
        self._prompt_ids: Sequence[Sequence[int]] = ()
        if exchange is not None:
            if not self.args.full_determinism:
                set_seed(secrets.randbits(32))  # else two trainers with TRL's seed could sample equal completions
            _require_place(self.args, exchange.per_batch, num_processes=self.accelerator.num_processes)
            manifest = exchange.node.manifest
            self._max_gap_nats = manifest.sampling.max_logprob_gap_nats
            self._fit = Fit(
                tokenizer=self.texts.fingerprint,
                vocab_size=num_rows,
                group_size=self.num_generations,
                temperature=self.temperature,
                max_completion_length=self.max_completion_length,
                top_p=self.top_p,
                top_k=self.top_k,
                end_ids=self.texts.end_ids,
                max_total_tokens=manifest.sampling.max_total_tokens if manifest.episode else None,
                observation_form=self.texts.observation_form if manifest.episode else (),
            )
            require_agreement(self, exchange.node, tokenizer=self.texts.fingerprint)
            self.add_callback(FlushCallback(exchange))

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's batch, with foreign groups, and `group_ids` and `sender_ids` `[N]`, 0 for own rows.

        TRL shuffles the rows before it makes micro-batches.
        """
        is_training = self.model.training
        exchange = self._exchange if is_training else None
        foreign = exchange.draw(self._fit) if exchange else []
        num_own = len(inputs) - len(foreign) * self.num_generations
        self.prompt_indices = [row.get("prompt_index") for row in inputs[:num_own]]
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs[:num_own])
        if self.top_p < 1 or self.top_k > 0:  # these are of the cut distribution, and a ratio needs the full one
            batch.pop("sampling_per_token_logps", None)
        rows = torch.arange(num_own, device=batch["advantages"].device)
        batch["group_ids"] = rows // (self.num_generations if is_training else self.num_generations_eval)
        batch["sender_ids"] = torch.zeros_like(rows)
        if exchange:
            self._metrics["train"]["foreign_groups"].append(len(foreign))
            self._share(exchange, batch, inputs[:num_own])
        if foreign:
            batch = self._with_foreign(batch, foreign)
        return batch

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Return what TRL sampled, and keep the ids of the prompts for the reward functions."""
        sampled: tuple[Any, ...] = super()._generate(prompts)
        self._prompt_ids = sampled[0]
        return sampled

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> Tensor:
        """Return TRL's rewards. The reward functions also get `scored_text`, unless others write tokens, too."""
        if not self.tools and self.rollout_func is None:
            rows = zip(inputs, self._prompt_ids, completion_ids_list, strict=True)
            inputs = [row | {"scored_text": self._scored_text(prompt, ids)} for row, prompt, ids in rows]
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return rewards

    def _scored_text(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str | None:
        has_end = len(ids) > 0 and int(ids[-1]) in self.texts.eos_ids
        return self.texts.answer_text(ids, has_end=has_end, opening=self.texts.opening_of(prompt_ids))

    def _share(self, exchange: SwarmExchange, batch: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> None:
        version = self.state.global_step
        for group in own_groups(batch, self._sampled_logprobs(batch), inputs, self._fit, policy_version=version):
            exchange.share(group)
        self._metrics["train"]["shared_groups"].append(exchange.take_num_shared())

    def _sampled_logprobs(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the log-probs `[N, T]` of the policy that sampled the batch: vLLM's, or the learner's own."""
        sampled: Tensor | None = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
        if sampled is not None:
            return sampled
        with torch.no_grad():
            return self._learner_logprobs(self.model, batch, batch_size=self.args.per_device_train_batch_size)[0]

    def _with_foreign(self, batch: dict[str, Any], foreign: list[ForeignGroup]) -> dict[str, Any]:
        scale = "mean" if _is_unscaled(self.args) else "std"
        rows = foreign_rows(foreign, first_group=int(batch["group_ids"].max()) + 1, scale=scale)
        rows = {name: value.to(batch["advantages"].device) for name, value in rows.items()}
        with torch.no_grad():
            first_pass, mask = self._learner_logprobs(
                self.model, rows, batch_size=self.args.per_device_train_batch_size
            )
        rows, num_excluded = exclude_understated(rows, first_pass, mask, max_gap_nats=self._max_gap_nats)
        self._metrics["train"]["understated_groups"].append(num_excluded)
        if "old_per_token_logps" in batch:
            rows["old_per_token_logps"] = first_pass
        return join_batches(batch, rows, padding_id=self._tokenizer.pad_token_id)

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the method's loss of one micro-batch, divided by the number of micro-batches of the step."""
        learner, mask = self._learner_logprobs(model, inputs)
        first_pass = inputs.get("old_per_token_logps")
        takes_senders = "sender_ids" in method_parameters(self.method)
        loss, figures = policy_loss(
            self.method,
            learner,
            _behaviour_logprobs(inputs, learner.detach() if first_pass is None else first_pass),
            mask,
            inputs["advantages"].to(learner.dtype),
            inputs["group_ids"] + self._rejection_key,
            first_pass_logprobs=None if first_pass is None else first_pass.float(),
            sender_ids=inputs["sender_ids"] if takes_senders else None,
            **self.method_params,
        )
        mode = "train" if self.model.training else "eval"
        for name, value in figures.items():
            self._metrics[mode][name].append(value)
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1)

    def _learner_logprobs(
        self, model: Any, inputs: Mapping[str, Any], *, batch_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the learner's log-probs of the completion tokens and their mask, both `[N, T]`.

        A forward pass has at most `batch_size` rows.
        """
        completion_mask = inputs["completion_mask"]
        logprobs, _, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            inputs["completion_ids"].shape[1],
            batch_size=batch_size,
        )
        return logprobs.float(), _loss_mask(inputs)


def _behaviour_logprobs(inputs: Mapping[str, Any], otherwise: Tensor) -> Tensor:
    """Return the log-probs under the sampling policy `[N, T]`; `otherwise` for tokens without one."""
    sampled = inputs.get("sampling_per_token_logps")
    if sampled is None:
        return otherwise.float()
    return torch.where(sampled.isnan(), otherwise, sampled).float()


def _require_usable(
    args: GRPOConfig, method: str, params: Mapping[str, Any], *, num_processes: int, has_router_loss: bool
) -> None:
    """Raise ConfigError for settings of TRL that the method's loss contradicts."""
    for name, unused in UNUSED_TERMS.items():
        if getattr(args, name, unused) != unused:
            raise ConfigError(f"{name} has no effect on the loss of {method}: set it to {unused}")
    if has_router_loss:
        raise ConfigError(f"the router loss of TRL is no part of the loss of {method}: set router_aux_loss_coef=0")
    scale = find_method(method).advantage_scale
    if scale not in ("std", "mean"):
        raise ConfigError(f"{method} needs advantages of the scale {scale}, which TRL does not compute")
    if scale == "mean" and not _is_unscaled(args):
        raise ConfigError(f"{method} expects advantages that are not divided by a deviation: set scale_rewards='none'")
    is_whole = method in OF_WHOLE_GROUPS or not is_separable(method, params)
    if is_whole and (args.steps_per_generation > 1 or num_processes > 1):
        raise ConfigError(
            f"{method} with these parameters compares all completions of a batch: use one process, and set"
            " steps_per_generation=1 and per_device_train_batch_size to the whole batch"
        )


def _is_unscaled(args: GRPOConfig) -> bool:
    return str(args.scale_rewards).lower() in ("none", "false")


def _require_place(args: GRPOConfig, per_batch: int, *, num_processes: int) -> None:
    """Raise ConfigError unless a batch has place for the foreign groups and one own group, all scaled alike."""
    if args.scale_rewards == "batch":
        raise ConfigError(
            "scale_rewards='batch' scales own groups otherwise than foreign ones: set it to 'group' or 'none'"
        )
    if num_processes > 1:
        raise ConfigError("foreign groups need one process: start the trainer without accelerate or torchrun")
    num_groups = args.generation_batch_size // args.num_generations
    if per_batch >= num_groups:
        raise ConfigError(f"per_batch of foreign groups must be below the {num_groups} groups of a batch")
