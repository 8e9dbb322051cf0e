"""The LoRA adapter of a transformers model in service: peft adds it once, and later versions replace its values.

The base is never written to. So if its file has the compute dtype, its tensors stay views of the mapped file. A
learner of the same adapter on the same host maps the same pages, and the base is in memory once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ftis_node.generation.engines.published import Shapes, check_adapter
from ftis_node.models.adapter_folder import ADAPTER_FILE, AdapterSettings, read_adapter
from ftis_node.models.library_logging import quiet_library_logging
from ftis_node.workers.tensor_file import checksums_of, read_tensors


class ServedAdapter:
    """The adapter of one model, up to `max_rank` (None: none is served); without one the model is its base."""

    def __init__(self, model: Any, shapes: Shapes, *, max_rank: int | None) -> None:
        """`shapes` are those of the base's tensors by name."""
        self._model = model
        self._shapes = shapes
        self._max_rank = max_rank
        self._adapted: Any = None
        self._settings: AdapterSettings | None = None

    def load(self, folder: Path) -> dict[str, int]:
        """Serve the adapter in `folder`. Returns the checksums of its tensors in the model.

        Raises ModelError, with the model unchanged, for one that is incomplete, damaged or of another base.
        """
        check_adapter(folder, self._shapes, max_rank=self._max_rank)
        settings, tensors = read_adapter(folder), read_tensors(folder / ADAPTER_FILE)
        with quiet_library_logging():
            from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

            if settings != self._settings:
                self.remove()
                config = LoraConfig(
                    r=settings.rank,
                    lora_alpha=settings.alpha,
                    target_modules=list(settings.targets),
                    task_type="CAUSAL_LM",
                    inference_mode=True,
                )
                self._adapted = get_peft_model(self._model, config, autocast_adapter_dtype=False).eval()
                self._settings = settings
            with torch.no_grad():
                set_peft_model_state_dict(self._adapted, tensors)
            held = get_peft_model_state_dict(self._adapted, save_embedding_layers=False)
        return checksums_of({name: held[name] for name, value in tensors.items() if held[name].dtype == value.dtype})

    def remove(self) -> None:
        """Take the adapter away, so that the model is its base again."""
        if self._adapted is not None:
            self._adapted.unload()
        self._adapted = self._settings = None
