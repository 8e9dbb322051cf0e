"""The model card of an exported model: a README.md as the Hugging Face hub shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node import __version__
from ftis_node.telemetry.terminal_text import printable

if TYPE_CHECKING:
    from ftis_node.config.manifest import RunManifest
    from ftis_node.telemetry.status import Status

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
