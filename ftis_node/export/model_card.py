"""The card of an exported model, in the hub's form.

It has no name, key or address of a node, and no path of this machine. The author of a run chose its task, so a task
appears as code or without special characters. No link, image or tag of it may show up under the exporter's name.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ftis_node import __version__
from ftis_node.config.manifest import RunManifest
from ftis_node.models.hub import HUB_ID
from ftis_node.tasks.registry import hub_datasets, task_licenses
from ftis_node.telemetry.status import Status
from ftis_node.telemetry.terminal_text import printable

PLAIN = re.compile(r"(?!.*(?://|www\.))[\w .,:;=+/?-]*", re.ASCII)  # no Markdown, HTML or link
MARKUP = re.compile(r"[^\w .,:;=+?-]", re.ASCII)
CARD = """---
{metadata}
---

# {title}

| | |
|---|---|
{rows}
{about}
## Reproduce

`run.toml` is the manifest of the run. Save it, and run in a clone of ftis-node {version}:

```
{command}
```

Sampling and the groups of peers differ each time, so the result differs too.
"""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Facts about a run. `base` is the hub id of the node's model, or its folder's own name.

    `trains` are the options of `join` for what was trained.
    """

    manifest: RunManifest
    base: str
    trains: str
    seed: int
    status: Status

    @property
    def hub_base(self) -> str | None:
        return self.base if HUB_ID.fullmatch(self.base) else None


def write_model_card(
    folder: Path, record: RunRecord, *, step: int, is_adapter: bool, use: str, license: str | None
) -> None:
    """Write the card and the run's manifest into the folder of a model.

    `use` is the section with code that asks and serves the model, `license` the hub's id of a license.
    """
    from huggingface_hub import EvalResult, ModelCardData

    manifest = record.manifest
    tests = {one.task: one.pass_at_1 for one in record.status.eval if one.step <= step}
    names = {task: MARKUP.sub("_", task) for task in tests}
    results = [EvalResult("text-generation", name, name, "pass@1", tests[task]) for task, name in names.items()]
    metadata = ModelCardData(
        base_model=record.hub_base,
        datasets=hub_datasets(manifest.task) or None,
        eval_results=results or None,
        library_name="peft" if is_adapter else "transformers",
        license=license,
        model_name=MARKUP.sub("_", record.base) if results else None,
        pipeline_tag="text-generation",
        tags=["ftis-node", "grpo", "reinforcement-learning", manifest.method.name],
    )
    learner = record.status.learner
    rows = {
        "base model": _shown(record.base) + ("" if record.hub_base else " (a local folder)"),
        "license": license or "not given; that of the base model may apply",
        "run": f"{manifest.name} ({manifest.run_id}), method {manifest.method.name}",
        "task": _shown(manifest.task),
        "task data": "; ".join(task_licenses(manifest.task)),
        "pass@1, greedy": "; ".join(f"{value:.3f} on {_shown(task)}" for task, value in tests.items())
        or "not evaluated",
        "groups trained on": f"{learner.own_groups:,} own, {learner.foreign_groups:,} of peers",
    }
    options = f"{record.trains} --seed {record.seed} --steps {step}"
    text = CARD.format(
        metadata=metadata.to_yaml(),
        title=f"{_shown(record.base)}, {step} steps of {_shown(manifest.task)}",
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        about=use,
        version=__version__,
        command=f"ftis-node join --run run.toml --model {shlex.quote(printable(record.base))} {options}",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / "run.toml").write_text(manifest.to_toml(), encoding="utf-8")


def _shown(text: str) -> str:
    """Return text of others as Markdown: as it is if it has no special characters, else as code."""
    if PLAIN.fullmatch(text):
        return text
    return f"`{printable(text).replace('`', chr(39)).replace('|', '¦')}`"
