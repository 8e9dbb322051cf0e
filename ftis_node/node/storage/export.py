"""Export of a home's newest checkpoint as a model in the format of the Hugging Face hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError
from ftis_node.files import read_object
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import resolve_model
from ftis_node.node.startup.factories import learner_boot
from ftis_node.node.startup.last_status import read_last_status
from ftis_node.node.startup.migrations import bring_up_to_date
from ftis_node.node.storage.model_card import model_card
from ftis_node.telemetry.progress import unwatched

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.config.home import Home
    from ftis_node.telemetry.progress import OnProgress

ADAPTER_FILE = "adapter_config.json"


def export_model_of(home: Home, out: Path, *, merge: bool, on_progress: OnProgress = unwatched) -> int:
    """Write the model and its card to `out` and return its training step. Upgrade a home of an older schema first.

    Raise ConfigError if no node has run with the home, or `out` is in use.
    """
    from ftis_node.learner.checkpoint.export import export_newest

    if not home.settings.exists() or not home.run_toml.exists():
        raise ConfigError(f"no node has run with the home {home.root}: give the right one with --home")
    bring_up_to_date(home)
    settings = NodeSettings.model_validate(read_object(home.settings))
    manifest = load_manifest(str(home.run_toml))
    source, nothing_planned = resolve_model(settings.model, on_progress=on_progress), WorkerPlacement()
    boot = learner_boot(settings, manifest, source, home, nothing_planned, weights=home.weights)
    step = export_newest(boot, out, merge=merge, on_progress=on_progress)
    is_adapter = (out.expanduser() / ADAPTER_FILE).exists()
    card = model_card(manifest, read_last_status(home), base=source.name, step=step, is_adapter=is_adapter)
    (out.expanduser() / "README.md").write_text(card, encoding="utf-8")
    return step
