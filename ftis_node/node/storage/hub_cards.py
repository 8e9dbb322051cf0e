"""Cards of an exported model and of exported rollouts, in the hub's form: how they came about, and under which license.

A card has no name, key or address of a node, and no path of this machine. The author of a run chose its task, so a task
appears as code or without special characters. No link, image or tag of it may show up under the exporter's name.
"""

from __future__ import annotations

import re
import shlex
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ftis_node import __version__
from ftis_node.config.manifest import read_own_manifest
from ftis_node.errors import ConfigError, FileError, ModelError
from ftis_node.files import read_object
from ftis_node.models.source import HUB_ID
from ftis_node.replay.reader import ReplayReader
from ftis_node.replay.rollout_rows import rows_schema
from ftis_node.tasks.registry import hub_datasets, task_licenses
from ftis_node.telemetry.health_summary import plural
from ftis_node.telemetry.status import Status
from ftis_node.telemetry.terminal_text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.models import PromptTokenizer
    from ftis_node.replay.rollout_rows import RowTotals
    from ftis_node.telemetry.status import EvalStatus

PLAIN: Final = re.compile(r"(?!.*(?://|www\.))[\w .,:;=+/?-]*", re.ASCII)  # no Markdown, HTML or link
TAGS: Final = ("ftis-node", "grpo", "reinforcement-learning")
CARD_FILE: Final = "README.md"
MANIFEST_FILE: Final = "run.toml"
REPRODUCE: Final = """## Reproduce

`{manifest}` is the manifest of the run. Save it, and run in a clone of ftis-node {version}:

```
ftis-node join --run {manifest} --model {base}{weights} --seed {seed} --steps {step}"""
MODEL_CARD: Final = """---
{metadata}
---

# {title}, {step} steps of {task}

Trained with [GRPO](https://arxiv.org/abs/2402.03300) by ftis-node {version}, by the method `{method}`.

{table}

## Prompt

{prompt}

{reproduce}
```

The groups of peers differ each time, so the weights differ too.
"""
PROMPT: Final = """The tokenizer's chat template renders a question as:

{fence}text
{text}
{fence}"""
QUESTION: Final = ({"role": "user", "content": "What is 12 + 30?"},)
DATA_CARD: Final = """---
{metadata}
---

# Rollouts of {task}

Completions that language models sampled in a run of ftis-node {version}, with token ids, log-probs and rewards.

{table}

A row is {row}. Log-probs are those of the full softmax at sampling time, in nats. Rewards are in [0, 1].
{senders}

The completions are the text of language models and are not checked by people.

{reproduce}
ftis-node replay export --format {format} --out rows{options}
```

Sampling and the groups of peers differ each time, so the rows differ too.
"""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Facts about a run. `base` is the hub id of the node's model, or its folder's own name.

    `lora` is None if the home does not say whether an adapter was trained. `num_peers` counts the peers that sent
    accepted groups. Token counts are those of the steps, None without a buffer.
    """

    manifest: RunManifest
    base: str
    step: int
    lora: bool | None
    seed: int
    own_groups: int = 0
    foreign_groups: int = 0
    num_peers: int = 0
    own_tokens: int | None = None
    foreign_tokens: int | None = None
    evaluations: tuple[EvalStatus, ...] = ()

    @property
    def hub_base(self) -> str | None:
        """The base model's id on the hub; None if the node was given a folder."""
        return self.base if HUB_ID.fullmatch(self.base) else None


def read_run_record(home: Home, *, base: str | None = None, step: int | None = None) -> RunRecord:
    """Return the facts from the home's files, without evaluations after `step` (None: the last step).

    `base` replaces the name of the node's model. Raises ConfigError if no node has run with the home.
    """
    if not home.run_toml.exists() or not home.settings.exists():
        raise ConfigError(f"no node has run with the home {home.root}: give the right one with --home")
    settings, (status, num_peers) = read_object(home.settings), _last_status(home)
    model = str(settings.get("model", ""))
    last = status.learner.step if step is None else step
    own_tokens, foreign_tokens = _trained_tokens(home)
    return RunRecord(
        manifest=read_own_manifest(home.run_toml),
        base=base or (model if HUB_ID.fullmatch(model) else Path(model).name),  # as `ModelSource.name`
        step=last,
        lora=None if settings.get("lora") is None else bool(settings["lora"]),
        seed=seed if isinstance(seed := settings.get("seed"), int) else 0,
        own_groups=status.learner.own_groups,
        foreign_groups=status.learner.foreign_groups,
        num_peers=num_peers,
        own_tokens=own_tokens,
        foreign_tokens=foreign_tokens,
        evaluations=tuple(entry for entry in status.eval if entry.step <= last),
    )


def _last_status(home: Home) -> tuple[Status, int]:
    """Return the last status, and the number of peers in it that sent accepted groups; empty if it is damaged."""
    try:
        document = read_object(home.status)
        status = msgspec.convert(document, Status)
    except (OSError, FileError, msgspec.ValidationError):
        return Status(), 0
    rows = document.get("peers")
    accepted = [row.get("groups_accepted") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return status, sum(isinstance(number, int) and number > 0 for number in accepted)


def _trained_tokens(home: Home) -> tuple[int, int] | tuple[None, None]:
    if not home.replay.exists():
        return None, None
    with closing(ReplayReader(home.replay)) as reader:
        return reader.trained_tokens_by_origin()


def write_model_card(
    folder: Path, record: RunRecord, *, is_adapter: bool, tokenizer: PromptTokenizer, license: str | None = None
) -> None:
    """Write the card and the run's manifest into the folder of a model. `license` is the hub's id of a license."""
    from huggingface_hub import EvalResult, ModelCardData

    manifest = record.manifest
    newest = {entry.task: entry for entry in record.evaluations}
    results = [
        EvalResult("text-generation", name, name, "pass@1", entry.pass_at_1, dataset_split="test")
        for name, entry in ((_plain(task), entry) for task, entry in newest.items())
    ]
    metadata = ModelCardData(
        base_model=record.hub_base,
        datasets=hub_datasets(manifest.task) or None,
        eval_results=results or None,
        library_name="peft" if is_adapter else "transformers",
        license=license,
        model_name=f"{_plain(record.base)} after {record.step} steps" if results else None,
        pipeline_tag="text-generation",
        tags=[*TAGS, manifest.method.name],
    )
    rows = [*_run_rows(record, license=license), ("pass@1", _accuracy(record))]
    prompt = _prompt_of(tokenizer)
    text = MODEL_CARD.format(metadata=metadata.to_yaml(), table=_table(rows), prompt=prompt, **_common(record))
    _write(folder, text, record)


def _prompt_of(tokenizer: PromptTokenizer) -> str:
    try:
        ids = tokenizer.encode_prompt(QUESTION)
    except ModelError as error:
        return f"The template refuses a question alone ({printable(str(error))})."
    text = tokenizer.decode(ids, skip_special=False)
    longest = max(map(len, re.findall("`+", text)), default=0)
    return PROMPT.format(text=text, fence="`" * max(4, longest + 1))


def write_data_card(
    folder: Path,
    record: RunRecord,
    totals: RowTotals,
    *,
    file: str,
    with_texts: bool,
    is_flat: bool,
    license: str | None = None,
) -> None:
    """Write the card of rollouts and the run's manifest into `folder`, whose rows are in `file`.

    The card has the columns' types, because those of JSON lines cannot be seen in the first rows.
    """
    import datasets
    from huggingface_hub import DatasetCardData

    metadata = DatasetCardData(
        license=license,
        source_datasets=hub_datasets(record.manifest.task) or None,
        tags=[*TAGS, record.manifest.method.name],
        task_categories=["text-generation"],
        configs=[{"config_name": "default", "data_files": file}],
    )
    schema = rows_schema(with_texts=with_texts, is_flat=is_flat)
    info = datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(schema))
    datasets.info.DatasetInfosDict({"default": info}).to_dataset_card_data(metadata)
    rows = [
        *_run_rows(record, license=license),
        ("groups", f"{totals.own_groups:,} own, {totals.foreign_groups:,} of {plural(totals.num_peers, 'peer')}"),
        ("tokens", f"{totals.own_tokens:,} own, {totals.foreign_tokens:,} of peers"),
    ]
    text = DATA_CARD.format(
        metadata=metadata.to_yaml(),
        table=_table(rows),
        row="a completion" if is_flat else "a group: the completions of one prompt by one node",
        senders="The column `sender` has the peer ids of the nodes."
        if totals.with_senders
        else "The column `sender` numbers the nodes; their ids and names were removed.",
        format=file.rpartition(".")[2],
        options=" --text" * with_texts + " --flat" * is_flat,
        **_common(record),
    )
    _write(folder, text, record)


def _common(record: RunRecord) -> dict[str, object]:
    fields = {
        "title": _shown(record.base),
        "base": shlex.quote(printable(record.base)),
        "manifest": MANIFEST_FILE,
        "method": record.manifest.method.name,
        "seed": record.seed,
        "step": record.step,
        "task": _shown(record.manifest.task),
        "version": __version__,
        "weights": {None: "", True: " --lora", False: " --full"}[record.lora],
    }
    return fields | {"reproduce": REPRODUCE.format(**fields)}


def _run_rows(record: RunRecord, *, license: str | None) -> list[tuple[str, str]]:
    manifest = record.manifest
    own, foreign = record.own_tokens, record.foreign_tokens
    total = record.own_groups + record.foreign_groups
    share = f", {record.foreign_groups / total:.0%} from peers" if total else ""
    tokens = "unknown" if own is None or foreign is None else f"{own:,} own, {foreign:,} of peers"
    return [
        ("base model", f"{_shown(record.base)}{'' if record.hub_base else ' (a local folder)'}"),
        ("license", license or "not given; that of the base model may apply"),
        ("run", f"{manifest.name} ({manifest.run_id})"),
        ("method", manifest.method.name),
        ("task", _shown(manifest.task)),
        ("task data", "; ".join(task_licenses(manifest.task))),
        ("steps", f"{record.step:,}"),
        ("groups trained on", f"{total:,}{share}"),
        ("tokens trained on", tokens),
        ("peers that sent accepted groups", f"{record.num_peers:,}"),
        ("seed of the node", str(record.seed)),
        ("ftis-node", __version__),
    ]


def _accuracy(record: RunRecord) -> str:
    tasks = dict.fromkeys(entry.task for entry in record.evaluations)
    return "; ".join(_accuracy_of(record, task) for task in tasks) or "not evaluated"


def _accuracy_of(record: RunRecord, task: str) -> str:
    """Return the first and the last evaluation on `task`."""
    same = [entry for entry in record.evaluations if entry.task == task]
    first, last = same[0], same[-1]
    before = f"{first.pass_at_1:.3f} at step {first.step}, " if first is not last else ""
    return f"{before}{last.pass_at_1:.3f} at step {last.step} ({last.n} problems of {_shown(task)}, greedy)"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _shown(text: str) -> str:
    """Return text of others as Markdown: as it is if it has no special characters, else as code."""
    if PLAIN.fullmatch(text):
        return text
    code = printable(text).replace("`", "'").replace("|", "¦")
    return f"`{code}`"


def _plain(text: str) -> str:
    """Return text of others without special characters, for metadata that a hub may show as HTML."""
    return "".join(mark if PLAIN.fullmatch(mark) else "_" for mark in text).replace("//", "/_")


def _write(folder: Path, card: str, record: RunRecord) -> None:
    for name, text in ((CARD_FILE, card), (MANIFEST_FILE, record.manifest.to_toml())):
        (folder / name).write_text(text, encoding="utf-8")
