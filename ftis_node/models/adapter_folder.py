"""LoRA adapters in peft's format: a folder with two small matrices for each adapted layer of a base model.

An adapter here is those matrices and nothing else. DoRA, biases, ranks that differ, new embeddings and other kinds of
peft are refused, because engines would serve another model than the learner trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ftis_node.config.node import NodeSettings
from ftis_node.errors import UntrainableModelError
from ftis_node.models.model_files import check_tensors, read_header, read_json

ADAPTER_CONFIG_FILE = "adapter_config.json"  # this and the next are peft's names
ADAPTER_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft wraps a model twice
HEAD = "lm_head"
# Settings of peft with which an adapter is more than two matrices a layer, or of other layers. All are off by default.
EXTRAS = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "lora_bias", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "target_parameters", "trainable_token_indices", "layers_to_transform"),
    *("exclude_modules", "layer_replication"),
)
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # values of `init_lora_weights`


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Rank and alpha of an adapter. `targets` are names of layers, or ends of names."""

    rank: int
    alpha: int
    targets: tuple[str, ...]

    def shapes(self, of_model: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the adapter's tensors by name, for a model whose tensors have these shapes."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in of_model.items():
            layer = name.removesuffix(".weight")
            is_target = any(f".{layer}".endswith(f".{target}") for target in self.targets)  # peft's rule
            if len(shape) == 2 and layer != name and is_target:
                found[f"{PREFIX}{layer}.lora_A.weight"] = (self.rank, shape[1])
                found[f"{PREFIX}{layer}.lora_B.weight"] = (shape[0], self.rank)
        return found


def read_adapter(folder: Path) -> AdapterSettings:
    """Return the settings of the adapter in `folder`, which a peer may have sent.

    Raises UntrainableModelError if it is no plain LoRA adapter, ModelError if its configuration is missing or damaged.
    """
    path = folder / ADAPTER_CONFIG_FILE
    config = read_json(path)
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    kinds = [f"peft_type {config.get('peft_type')!r:.40}"] if config.get("peft_type") != "LORA" else []
    kinds += [name for name in EXTRAS if config.get(name)]
    kinds += ["bias"] if config.get("bias", "none") != "none" else []
    kinds += ["init_lora_weights"] if str(config.get("init_lora_weights")).startswith(CHANGES_BASE) else []
    if kinds:
        raise UntrainableModelError(
            f"{path} describes no plain LoRA adapter ({', '.join(kinds)}): merge it into its base, and give that model"
        )
    if not isinstance(targets, list) or not targets or HEAD in targets or not all(isinstance(t, str) for t in targets):
        raise UntrainableModelError(f"{path}: target_modules is {targets!r:.60}, not a list of layers before {HEAD}")
    if not _is_count(rank) or not _is_count(alpha):
        raise UntrainableModelError(f"{path}: r and lora_alpha are {rank!r:.20} and {alpha!r:.20}, not whole numbers")
    return AdapterSettings(int(rank), int(alpha), tuple(sorted(targets)))


def check_fits(folder: Path, settings: AdapterSettings, of_model: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError if the adapter's file is damaged, or does not have two matrices for each of its layers."""
    path = folder / ADAPTER_FILE
    check_tensors(f"weights in {path}", read_header(path).tensors, settings.shapes(of_model), optional=())


def _is_count(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and float(value).is_integer()


def continued(settings: NodeSettings, adapter: Path | None) -> NodeSettings:
    """Return the settings of a node that trains on from the adapter in this folder, if there is one.

    It keeps its rank and alpha, unless `lora` is False: then it is merged and all weights are trained.
    """
    if adapter is None or settings.lora is False:
        return settings
    found = read_adapter(adapter)
    section = settings.lora_adapter.model_copy(update={"rank": found.rank, "alpha": found.alpha})
    return settings.model_copy(update={"lora": True, "lora_adapter": section})


def read_adapter_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of the adapter in an exported folder; None for a whole model."""
    path = folder / ADAPTER_CONFIG_FILE
    return read_json(path) if path.exists() else None
