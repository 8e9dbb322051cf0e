"""Export of a policy or of the newest checkpoint, as a folder in the format of the Hugging Face hub."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Final

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from ftis_node.errors import ConfigError
from ftis_node.learner.checkpoint.checkpoint import newest_usable, owner_of
from ftis_node.learner.checkpoint.publication import gathering_of
from ftis_node.learner.distributed.ranks import ALONE
from ftis_node.learner.distributed.sharded_tensors import TensorGatherer, copy_from_rank_0
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model.lora import ADAPTER
from ftis_node.learner.model.policy import Policy, load_unchecked
from ftis_node.models import PromptTokenizer
from ftis_node.models.loading import check_export_folder, export_adapter, export_model
from ftis_node.telemetry.log import OnProgress, unwatched
from ftis_node.workers.tensor_file import write_tensors

MAX_FILE_BYTES: Final = 5 * 10**9


def export_policy(policy: Policy, out: Path, *, merge: bool, tokenizer: PromptTokenizer | None = None) -> None:
    """Write `policy` to the empty folder `out`; with `merge` False only the LoRA adapter. Raises ConfigError.

    `tokenizer` replaces the policy's own, which has no settings of prompts.
    """
    tokenizer = tokenizer or policy.tokenizer
    if merge or policy.adapted is None:
        with gathering_of(policy) as gathering:
            write = partial(write_weights, gathering, dtype=policy.compute_dtype)
            export_model(policy.causal_lm, tokenizer, out, dtype=policy.compute_dtype, write=write)
    else:
        base = policy.source.base
        is_on_hub = "/" in base.name
        policy.adapted.peft_config[ADAPTER].base_model_name_or_path = base.name if is_on_hub else str(base.folder)
        export_adapter(policy.adapted, tokenizer, out)


@torch.no_grad()
def write_weights(
    gathering: TensorGatherer, folder: Path, *, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a model's tensors into `folder`: one safetensors file, or shards with an index, named as on the hub.

    Each tensor is merged, converted and written before the next one. Raises OSError if the disk refuses.
    """
    outlines = {name: torch.empty(value.shape, dtype=dtype, device="meta") for name, value in gathering.tensors.items()}
    limit = max(max_file_bytes, *(outline.nbytes for outline in outlines.values()))  # a larger tensor changes the order
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(outlines, filename_pattern=pattern, max_shard_size=limit)
    for file_name, names in split.filename_to_tensors.items():
        tensors = {name: gathering.tensors[name] for name in names}
        write_tensors(folder / file_name, tensors, dtype=dtype, change=gathering.take)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def export_newest(
    boot: LearnerBoot,
    out: Path,
    *,
    merge: bool,
    tokenizer: PromptTokenizer | None = None,
    on_progress: OnProgress = unwatched,
) -> int:
    """Export from the newest readable checkpoint and return its step. Does not write to the learner's home.

    Raises ConfigError if nothing was trained there yet, and as `export_policy` and `newest_usable` do.
    """
    check_export_folder(out)  # before the model is loaded, which takes minutes if it is large
    on_progress(None, f"loading {Path(boot.model).name}")
    policy = load_unchecked(boot)
    on_progress(None, "reading the newest checkpoint")
    found, _ = newest_usable(Path(boot.checkpoints_dir), owner=owner_of(policy, boot))
    if found is None:
        raise ConfigError(f"nothing to export yet: there is no checkpoint in {boot.checkpoints_dir}")
    copy_from_rank_0(policy.trainable(), found.weights, ALONE)
    on_progress(None, f"writing the model after step {found.state.step}")
    export_policy(policy, out, merge=merge, tokenizer=tokenizer)
    return found.state.step
