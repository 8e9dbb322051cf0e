"""Digest of a run's data sets: the first node of a run writes it into the manifest, every other node compares it.

A member gives only its path (`dataset:/data/train.jsonl?name=gsm8k`); columns and rewards are those of the run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.tasks.dataset.row_problems import digest_of, load_problems
from ftis_node.tasks.dataset.task import check_digest
from ftis_node.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from ftis_node.tasks.spec import TaskPart


def pinned(spec: TaskSpec, run: TaskSpec | None = None) -> TaskSpec:
    """Return the spec with the digest of each data set. A data set of `run` without a query takes the query of `run`.

    Raises TaskError, also if a part has the columns and rewards of `run` but other problems. Raises NetworkError if the
    hub cannot be reached.
    """
    known = {part.name: part for part in run.parts} if run else {}
    return TaskSpec(tuple(_pinned(part, known.get(part.name)) if part.is_dataset else part for part in spec.parts))


def _pinned(part: TaskPart, known: TaskPart | None) -> TaskPart:
    if part.query is None and known is not None:
        part = replace(part, query=known.query)
    if part.query is None or part.query.sha256:
        return part
    problems = load_problems(part, "train")
    run_query = known.query if known else None
    if run_query is None or run_query.without_source() != part.query.without_source():
        return replace(part, query=replace(part.query, sha256=digest_of(problems)))
    part = replace(part, query=run_query)
    check_digest(part, problems, "train")
    return part
