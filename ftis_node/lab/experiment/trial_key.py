"""Keys of trials: the names of their results on disk.

A key is a digest of all that determines a result: the options, the device, and the content of models and data. Paths
and environment variables are not in it. Releases of the code, torch and Python are not in it either: each result
names its own (`made_by`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, Final

from ftis_node.lab.experiment.trial import Trial
from ftis_node.models import PromptSettings, load_tokenizer, model_fingerprint, pick_device, resolve_model
from ftis_node.models.adapter_folder import ADAPTER_FILE
from ftis_node.tasks import TaskSpec, grader_releases, load_task, parse_spec

NUM_HASHED: Final = 512  # problems of a split that code generates; of a data set all


def with_keys(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials with their keys. It reads each model and each data set once.

    Raises ModelError, TaskError, NetworkError, and MachineError for a missing GPU.
    """
    model, problems = cache(_model), cache(_problems)
    return [replace(trial, key=_key(trial, model, problems)) for trial in trials]


def options_of(trial: Trial) -> str:
    """Return all options that determine a result, as they are spelled. Of equal ones, one trial is enough."""
    return json.dumps(_description(trial, lambda model: model, lambda *spec: spec), sort_keys=True)


def _key(trial: Trial, model: Callable[[str], Any], problems: Callable[[str, str], Any]) -> str:
    described = _description(trial, model, problems) | {"device": pick_device(trial.device)}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    return f"{trial.members[0].name}-{trial.labels['method'].split(':')[0]}-{digest}"


def _description(trial: Trial, model: Callable[[str], Any], problems: Callable[[str, str], Any]) -> dict[str, Any]:
    """Describe a trial. `model` describes a model, `problems` the problems of a SPEC and a split."""
    final = trial.final_evaluation
    return {
        "manifest": trial.manifest.model_dump(mode="json"),
        "members": [
            asdict(member)
            | {"model": model(member.model), "domain": member.domain and problems(member.domain, "train")}
            for member in trial.members
        ],
        "train": problems(trial.task_spec, "train"),
        "test": [problems(spec, "test") for spec in trial.eval_specs],
        "delay": asdict(trial.delay),
        "seed": trial.seed,
        "first_place": trial.first_place,
        "steps": trial.steps,
        "adapter": trial.lora_adapter.model_dump(),
        "codec": trial.codec,
        "apart": trial.apart,
        "final_evaluation": final and asdict(final) | {"tasks": [problems(spec, "test") for spec in final.tasks]},
        **({"asynchronous": True} if trial.is_asynchronous else {}),
    }


def _model(name: str) -> list[Any]:
    """Describe a model by its configuration, the content of its weights, and its tokenizer."""
    source = resolve_model(name)
    tokenizer = load_tokenizer(source, prompts=PromptSettings())
    weights = []
    for path in (*source.weights_files, *([source.adapter / ADAPTER_FILE] if source.adapter else [])):
        with path.open("rb") as file:
            weights.append(hashlib.file_digest(file, "sha256").hexdigest())
    text = [tokenizer.fingerprint, tokenizer.template_digest, tokenizer.eos_ids]
    return [model_fingerprint(source), weights, *text]


def _problems(spec: str, split: str) -> list[Any]:
    """Describe the problems of a split by their content, and the packages that score them."""
    found = []
    for part in parse_spec(spec).parts:
        task = load_task(TaskSpec((part,)), split=split)
        digest = hashlib.sha256()
        for index in range(len(task) if part.takes_path else min(len(task), NUM_HASHED)):
            item = task[index]
            digest.update(json.dumps([item.prompt, item.answer]).encode() + b"\n")
        found.append([str(replace(part, path=None)), grader_releases(task), len(task), digest.hexdigest()])
    return found
