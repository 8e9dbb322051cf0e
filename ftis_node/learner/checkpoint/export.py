"""Export of the trained model in Hugging Face format, from the running learner or from its home."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from ftis_node.errors import ConfigError
from ftis_node.learner.checkpoint.checkpoint import newest_usable, owner_of, restore_weights
from ftis_node.learner.checkpoint.publish_weights import gathering_of
from ftis_node.learner.distributed.sharded_tensors import whole
from ftis_node.learner.model.policy import ADAPTER, load_unchecked
from ftis_node.models import export_adapter, export_model
from ftis_node.telemetry.log import unwatched
from ftis_node.workers.tensor_file import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from ftis_node.learner.distributed.sharded_tensors import TensorGatherer
    from ftis_node.learner.messages import LearnerBoot
    from ftis_node.learner.model.policy import Policy
    from ftis_node.telemetry.log import OnProgress

MAX_FILE_BYTES: Final = 5 * 10**9


def export_policy(policy: Policy, out: Path, *, merge: bool) -> None:
    """Write `policy` to the folder `out`; with `merge` False only the LoRA adapter, if there is one.

    Raises ConfigError if `out` exists and is not an empty folder.
    """
    if merge or policy.adapted is None:
        with gathering_of(policy) as gathering:
            write = partial(write_weights, gathering, dtype=policy.compute_dtype)
            export_model(policy.causal_lm, policy.tokenizer, out, dtype=policy.compute_dtype, write=write)
    else:
        # The model's public name: its id on the hub, else its local folder.
        is_on_hub = "/" in policy.source.name
        base = policy.source.name if is_on_hub else str(policy.source.folder)
        policy.adapted.peft_config[ADAPTER].base_model_name_or_path = base
        export_adapter(policy.adapted, policy.tokenizer, out, state_dict=adapter_state(policy))


@torch.no_grad()
def write_weights(
    gathering: TensorGatherer, folder: Path, *, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a model's tensors into `folder` under the names of its published files: one safetensors file, or shards
    with an index.

    Each tensor is merged, converted and written before the next one, so memory never holds a second model. Raises
    OSError if the disk refuses.
    """
    files: list[dict[str, Tensor]] = [{}]
    in_file = total_bytes = 0
    for name, tensor in gathering.tensors.items():
        num_bytes = tensor.numel() * dtype.itemsize
        if files[-1] and in_file + num_bytes > max_file_bytes:
            files.append({})
            in_file = 0
        files[-1][name] = tensor
        in_file += num_bytes
        total_bytes += num_bytes
    if len(files) == 1:
        write_tensors(folder / "model.safetensors", files[0], dtype=dtype, change=gathering.take)
        return
    places: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(folder / file_name, tensors, dtype=dtype, change=gathering.take)
        places |= dict.fromkeys(tensors, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def adapter_state(policy: Policy) -> dict[str, Tensor]:
    """Return the adapter's full weights, under the names of the adapted model, on every rank. All ranks call it."""
    assert policy.adapted is not None
    return {name: whole(value).cpu() for name, value in policy.adapted.state_dict().items() if ".lora_" in name}


def export_newest(boot: LearnerBoot, out: Path, *, merge: bool, on_progress: OnProgress = unwatched) -> int:
    """Export from the newest readable checkpoint and return its step. Does not write to the learner's home.

    Raises ConfigError if nothing was trained there yet, and as `export_policy` and `newest_usable` do.
    """
    on_progress(None, f"loading {Path(boot.model).name}")
    policy = load_unchecked(boot)
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
