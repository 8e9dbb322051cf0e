"""The trained model in the hub's format: by the learner at work, or out of its home while it works or rests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.errors import ConfigError
from ftis_node.learner.checkpoint import newest_usable, owner_of, restore_weights
from ftis_node.learner.policy import ADAPTER, load_policy, merged_weights
from ftis_node.learner.shards import whole
from ftis_node.models import export_adapter, export_model
from ftis_node.telemetry.work import unwatched

if TYPE_CHECKING:
    from torch import Tensor

    from ftis_node.learner.messages import LearnerBoot
    from ftis_node.learner.policy import Policy
    from ftis_node.telemetry.work import OnProgress


def export_policy(policy: Policy, out: Path, *, merge: bool) -> None:
    """Write `policy` to the folder `out`; `merge` False: the LoRA adapter alone, where there is one.

    Raises ConfigError where `out` exists and is not an empty folder.
    """
    if merge or policy.adapted is None:
        weights = merged_weights(policy, policy.compute_dtype)
        export_model(policy.causal_lm, policy.tokenizer, out, state_dict=weights)
    else:
        # What others can find the model by: its id on the hub, or else the folder here.
        is_on_hub = "/" in policy.source.name
        base = policy.source.name if is_on_hub else str(policy.source.folder)
        policy.adapted.peft_config[ADAPTER].base_model_name_or_path = base
        export_adapter(policy.adapted, policy.tokenizer, out, state_dict=adapter_state(policy))


def adapter_state(policy: Policy) -> dict[str, Tensor]:
    """The adapter's weights, whole, under the names of the adapted model. All ranks call it, and each gets them."""
    assert policy.adapted is not None
    return {name: whole(value).cpu() for name, value in policy.adapted.state_dict().items() if ".lora_" in name}


def export_newest(boot: LearnerBoot, out: Path, *, merge: bool, on_progress: OnProgress = unwatched) -> int:
    """Export from the newest checkpoint that can be read; returns the step it is of. Only reads the learner's home.

    Raises ConfigError where nothing was trained there yet, and as `export_policy` and `newest_usable` do.
    """
    on_progress(None, f"loading {Path(boot.model).name}")
    policy = load_policy(boot)
    trainable = policy.trainable()
    shapes = {name: value.shape for name, value in trainable.items()}
    on_progress(None, "reading the newest checkpoint")
    found, _ = newest_usable(Path(boot.checkpoints_dir), owner=owner_of(policy, boot), shapes=shapes)
    if found is None:
        raise ConfigError(f"nothing to export yet: there is no checkpoint in {boot.checkpoints_dir}")
    restore_weights(found, trainable)
    on_progress(None, f"writing the model after step {found.state.step}")
    export_policy(policy, out, merge=merge)
    return found.state.step
