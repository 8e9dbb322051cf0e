"""Export of a home's newest checkpoint as a model in the format of the Hugging Face hub, with a model card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node import __version__
from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError
from ftis_node.files import read_object
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import resolve_model
from ftis_node.node.startup.factories import learner_boot
from ftis_node.node.startup.last_status import read_last_status
from ftis_node.node.startup.migrations import bring_up_to_date
from ftis_node.telemetry.progress import unwatched
from ftis_node.telemetry.terminal_text import printable

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.telemetry.progress import OnProgress
    from ftis_node.telemetry.status import Status

ADAPTER_FILE = "adapter_config.json"
CARD = """---
base_model: {base}
library_name: {library}
tags:
- ftis-node
- grpo
---

# {base}, {step} steps of {task}

Trained with ftis-node {version}.

| | |
|---|---|
| base model | {base} |
| run | {run} ({run_id}) |
| method | {method} |
| task | {task} |
| steps | {step} |
| pass@1 | {accuracy} |
| groups trained on | {groups} |
"""


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


def model_card(manifest: RunManifest, status: Status, *, base: str, step: int, is_adapter: bool) -> str:
    """Return the card's text. `status` is the node's last status. Omit evaluations after `step`."""
    learner = status.learner
    total = learner.own_groups + learner.foreign_groups
    share = f", {learner.foreign_groups / total:.0%} from peers" if total else ""
    return CARD.format(
        base=printable(base),
        library="peft" if is_adapter else "transformers",
        step=step,
        task=manifest.task,
        version=__version__,
        run=printable(manifest.name),
        run_id=manifest.run_id,
        method=manifest.method.name,
        accuracy=_accuracy(status, step),
        groups=f"{total}{share}",
    )


def _accuracy(status: Status, step: int) -> str:
    known = [entry for entry in status.eval if entry.step <= step]
    if not known:
        return "not evaluated"
    same = [entry for entry in known if entry.task == known[-1].task]
    first, last = same[0], same[-1]
    before = f"{first.pass_at_1:.3f} at step {first.step}, " if first is not last else ""
    return f"{before}{last.pass_at_1:.3f} at step {last.step} ({last.n} problems of {last.task})"
