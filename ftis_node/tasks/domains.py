"""The domain of a node: what it generates for of a run that mixes several tasks.

A domain is a SPEC of parts of the run's mixture, in proportions of its own. The run stays what it is: prompts are
named by their part, so a node of any domain makes and scores everybody's prompts again.
"""

from __future__ import annotations

from functools import lru_cache

from ftis_node.errors import TaskError
from ftis_node.tasks.spec import TaskSpec, parse_spec


def is_domain(spec: TaskSpec, run: TaskSpec) -> bool:
    """Whether `spec` names parts of `run`, and nothing else, and is not the whole of it: then the run is a mixture."""
    return _names(spec) <= _names(run) and spec.canonical != run.canonical


@lru_cache(maxsize=4096)
def validated_domain(text: str, run: str) -> str:
    """What a peer says that its domain is; "" where that is no canonical SPEC of parts of the run's task."""
    try:
        spec = parse_spec(text)
    except TaskError:
        return ""
    return text if spec.canonical == text and is_domain(spec, parse_spec(run)) else ""


@lru_cache(maxsize=4096)
def part_names(domain: str) -> frozenset[str]:
    """The parts of a canonical domain; none of ""."""
    return _names(parse_spec(domain)) if domain else frozenset()


def proportions(mixture: str) -> dict[str, float]:
    """The share of each part's turns in a canonical SPEC, by its name; they add up to 1."""
    parts = parse_spec(mixture).parts
    total = sum(part.weight for part in parts)
    return {part.name: part.weight / total for part in parts}


def _names(spec: TaskSpec) -> frozenset[str]:
    return frozenset(part.name for part in spec.parts)
