"""Agreement of a trainer with its exchange node: checked at the start, because peers would refuse its groups later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from ftis_node.config.manifest import SamplingSection
    from ftis_node.integrations.trl.exchange_client import ExchangeNode

LENGTH: Final = "max_completion_length"  # a trainer may take less than the run allows
PLAIN_SETTINGS = {
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "mask_truncated_completions": False,
}
"""Settings of GRPOConfig that change the distribution or hide tokens, by the value that does neither."""


def sampling_options(run: SamplingSection) -> dict[str, Any]:
    """Return the arguments of GRPOConfig with which a trainer samples as the run says."""
    return {
        "num_generations": run.group_size,
        "temperature": run.temperature,
        "top_p": run.top_p,
        "top_k": run.top_k,
        LENGTH: run.max_completion_tokens,
    }


def require_agreement(trainer: GRPOTrainer, node: ExchangeNode, *, tokenizer: str) -> None:
    """Raise ConfigError if the trainer samples otherwise than the run, or has another tokenizer than the node.

    `tokenizer` is the fingerprint of the trainer's.
    """
    args, run = trainer.args, node.manifest.sampling
    if tokenizer != node.tokenizer:
        raise ConfigError("the exchange node has another tokenizer: start it with --model and the trainer's model")
    for name, agreed in sampling_options(run).items():
        given = getattr(args, name)
        if given != agreed and name != LENGTH:
            raise ConfigError(f"{name} is {given}, and the run {node.manifest.name} has {agreed}: set it to {agreed}")
    if args.max_completion_length > run.max_completion_tokens:
        raise ConfigError(
            f"max_completion_length is {args.max_completion_length}, and the run {node.manifest.name} takes "
            f"{run.max_completion_tokens} tokens: set it to {run.max_completion_tokens} or less"
        )
    for name, plain in PLAIN_SETTINGS.items():
        if getattr(args, name, plain) not in (plain, {}):
            raise ConfigError(f"peers cannot train on what {name} makes: set it to {plain}")
    if trainer.tools or trainer.rollout_func is not None:
        raise ConfigError("peers cannot train on the tokens of tools or of a rollout function: omit exchange")
    if "prompt_index" not in (getattr(trainer.train_dataset, "column_names", None) or ()):
        raise ConfigError("train_dataset needs the column prompt_index: make it with swarm_dataset(RUN)")
