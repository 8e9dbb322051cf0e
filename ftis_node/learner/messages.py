"""The messages between the daemon and the learner's worker.

The daemon starts a worker with `LearnerBoot`. Each request has one reply, after the step in progress. Events come
without a request: `CheckpointSkipped`, `CheckpointInProgress`, and in a step `PublishedWeights` and `WeightProof`.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from ftis_node.config.manifest import SamplingSection
from ftis_node.config.step import MethodSection, OptimizerSection
from ftis_node.config.workers import LearnerSection, LoraSection, Quantize
from ftis_node.learner.senders import SenderStats
from ftis_node.telemetry.status import StepFigures
from ftis_node.workers.weight_store import PublishedWeights, SharedWeights, Transfer, WeightProof
from ftis_node.workers.wire import Message

MAX_UNSAVED_STEPS = 100  # even if writes are slow: the buffer keeps the groups of unsaved steps
HEAD_CHUNK_TOKENS = 512  # 0.3 GB of float32 logits at a vocabulary of 150,000; on a GPU the memory plan sets it


class LearnerBoot(Message, frozen=True):
    """The configuration of a learner: sections of the manifest and of `node.toml`, and what the node derived.

    A field with the name of a setting replaces the setting. `model` is a folder or hub id, `model_name` its public
    name. Without `lora` all weights are trained. `max_logprob_gap_nats`: the summed log-probs of a peer's completion
    may be this far below the learner's. `micro_batch_tokens` bounds the padded tokens of a forward pass,
    `head_chunk_tokens` those of one pass through the output head. `publish_as`: the whole model, with an adapter
    merged, or the adapter alone. `quantize`: the form of an adapter's base (`models/quantized.py`). `base` are the
    handles of the engine's base; `base_refused` is the reason why it gave none. `copies_base`: load an own copy then.

    `takes_turns`: a generator on the same GPU sleeps during a step, and only then. So memory must be free again before
    the reply. `memory_share` is the learner's share of a GPU beside a generator. `recompute_activations` keeps only
    each layer's input, except in the last `layers_kept` layers; `may_recompute`: a lack of memory enables it in all. On
    a CPU each process has `num_threads`. `rejection_key` is secret: it decides which tokens the filter `obrs` rejects.
    """

    model: str
    model_name: str
    run_id: str
    checkpoints_dir: str
    weights_dir: str
    method: MethodSection = MethodSection()
    sampling: SamplingSection = SamplingSection()
    optimizer: OptimizerSection = OptimizerSection()
    settings: LearnerSection = LearnerSection()
    max_logprob_gap_nats: float = math.inf
    micro_batch_tokens: int = 2048
    recompute_activations: bool = False
    may_recompute: bool = False
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS
    layers_kept: int = 0
    takes_turns: bool = False
    transfer: Transfer = "file"
    memory_share: float | None = None
    lora: LoraSection | None = None
    publish_as: Literal["model", "adapter"] = "model"
    quantize: Quantize = "none"
    base: SharedWeights | None = None
    base_refused: str = ""
    copies_base: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    rejection_key: int = 0
    num_threads: int | None = None

    @property
    def measures_agreement(self) -> bool:
        """Return whether the learner compares the gradient of each peer's completions with that of own ones."""
        return self.method.peer_weights is not None

    @property
    def peak_learning_rate(self) -> float:
        """Return the peak rate of the trained tensors, an adapter's or the whole model's."""
        return self.optimizer.learning_rate if self.lora is None else self.optimizer.lora_learning_rate

    def learning_rate_at(self, step: int) -> float:
        return self.optimizer.learning_rate_at(step, peak=self.peak_learning_rate)


class TrainGroup(msgspec.Struct, frozen=True):
    """The completions of one prompt by one generator, with the prompt in this learner's own tokens.

    `body` is the signed body as stored. If it is in the text form, `text_token_ids` are the ids of its texts in this
    learner's tokens. `observation_ids` are those between the turns of an episode, completion by completion.
    `prompt_ids` are little-endian int32. `rewards` are this node's, one per completion.

    Groups with the same `advantage_key` share their mean and deviation: prompt and sender in the vertical mode, the
    prompt in the horizontal mode. `own`: this node signed the group. `of_own_weights`: a trusted node signed it and
    sampled with this node's weights: the mismatch is measured on it, and the loss treats it as own. `sender` is the
    signer's peer id; a group without one counts as a separate sender. Advantages are multiplied by `weight`. `end_ids`,
    of this learner's model, replace the sender's (`Group.tokens_ending_with`); none: the ids stay. `observation_form`
    are the ids that its chat template writes around an observation. `task` is the group's part of a mixture.
    """

    group_id: str
    advantage_key: str
    own: bool
    body: bytes
    prompt_ids: bytes
    rewards: tuple[float, ...]
    text_token_ids: tuple[tuple[int, ...], ...] = ()
    observation_ids: tuple[tuple[int, ...], ...] = ()
    of_own_weights: bool = False
    sender: str = ""
    weight: float = 1.0
    end_ids: tuple[int, ...] = ()
    observation_form: tuple[int, ...] = ()
    task: str = ""


class StepReport(StepFigures, frozen=True, kw_only=True):
    """The report of one step.

    `policy_version` is the newest step that changed the weights. `skipped` (no signal) and `refused` (a value was not
    finite) give the reason why this step did not. Then `num_updates` and `grad_norm` are 0. `unfinished` is the reason
    why the updates after the first `num_updates` were not done. The `mismatch_` fields (see `train_report.py`) cover
    own tokens that `mismatch_version` sampled, the version from which the step started.

    `understated` holds the ids of groups that `Objective.excluded` excludes, `unreadable` those of groups whose body
    could not be unpacked. `by_sender` includes this node. `agreement` by sender and `own_agreement` are cosines of
    gradients, or squared distances (`agreement.py`). `repeated`: the step was already done; this is its stored report.
    """

    step: int
    policy_version: int
    own_reward_mean: float | None = None
    foreign_reward_mean: float | None = None
    mismatch_tokens: int = 0
    num_updates: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0
    own_groups: int = 0
    foreign_groups: int = 0
    understated: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    by_sender: tuple[SenderStats, ...] = ()
    agreement: dict[str, float] = {}
    own_agreement: float | None = None
    skipped: str | None = None
    refused: str | None = None
    unfinished: str | None = None
    repeated: bool = False


class StateRequest(Message, frozen=True):
    """A request for the learner's state."""


class LearnerState(Message, frozen=True):
    """The learner's state after `step`, which used `last_groups`. `weights` is None for the starting model, version 0.

    `policy_version` is the last step that changed the weights. `layout` and `kernels` are as in `Policy`.
    """

    step: int
    policy_version: int
    parameters: int
    trainable_parameters: int
    proof: WeightProof
    weights: PublishedWeights | None = None
    last_report: StepReport | None = None
    last_groups: tuple[str, ...] | None = None
    layout: str | None = None
    kernels: str | None = None


class TrainRequest(Message, frozen=True):
    """Do step `step`, one more than the last one done; a repetition of the last one returns its report."""

    step: int
    groups: tuple[TrainGroup, ...]


class TrainReply(Message, frozen=True):
    """The result of a step. `weights` and `proof` are None if it left the weights unchanged.

    `saved_step` is the step of the newest checkpoint: after a crash the groups of all later steps are needed again.
    """

    report: StepReport
    weights: PublishedWeights | None = None
    proof: WeightProof | None = None
    saved_step: int | None = None


class CheckRequest(Message, frozen=True):
    """Measure the mismatch on this group for the next report, if the present weights sampled it; else drop it."""

    group: TrainGroup


class AuditRequest(Message, frozen=True):
    """Compare a peer's log-probs with those of the present weights, which the peer claims to have used."""

    group: TrainGroup


class AuditReply(Message, frozen=True):
    """KL(peer, learner) in nats a token over `num_tokens`; `kl` None: the weights have changed, or it is not finite."""

    kl: float | None = None
    num_tokens: int = 0


class GiveMemoryBack(Message, frozen=True):
    """A generator on the same device lacks memory: release cached blocks as soon as no step is in progress."""


class WriteWeights(Message, frozen=True):
    """Write the present weights to a file, because an engine cannot map them.

    `refused` is the reason why no engine here can: all later versions then go through files. Empty: only this version.
    """

    refused: str = ""


class WeightsWritten(Message, frozen=True):
    """The written weights; None while the policy is the starting model."""

    weights: PublishedWeights | None = None


class SaveRequest(Message, frozen=True):
    """Write a checkpoint of the newest step, unless there is one, and answer when it is on disk."""


class Saved(Message, frozen=True):
    """The newest checkpoint on disk is that of `step`."""

    step: int


class CheckpointSkipped(Message, frozen=True):
    """A checkpoint could not be read and was renamed; an older one is used."""

    name: str
    reason: str


class CheckpointInProgress(Message, frozen=True):
    """The learner waits until the checkpoint of `step` is on disk; every half second."""

    step: int


CheckpointEvent: TypeAlias = CheckpointSkipped | CheckpointInProgress
