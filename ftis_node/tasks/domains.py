"""Domain of a node: the parts of the run's mixture for which it generates.

A domain is a SPEC with parts of the run's mixture in other proportions. A prompt reference names its part, so nodes of
any domain can reproduce and score the prompts of all peers.
"""

from __future__ import annotations

from functools import lru_cache

from ftis_node.errors import TaskError
from ftis_node.tasks.spec import TaskSpec, parse_spec


def is_domain(spec: TaskSpec, run: TaskSpec) -> bool:
    """Return whether `spec` has only parts of `run` and is not the whole run. The run must be a mixture."""
    return _names(spec) <= _names(run) and spec.canonical != run.canonical


@lru_cache(maxsize=4096)
def validated_domain(text: str, run: str) -> str:
    """Return the domain that a peer announces; "" unless it is a canonical SPEC of parts of the run's task."""
    try:
        spec = parse_spec(text)
    except TaskError:
        return ""
    return text if spec.canonical == text and is_domain(spec, parse_spec(run)) else ""


@lru_cache(maxsize=4096)
def part_names(domain: str) -> frozenset[str]:
    """Return the parts of a canonical domain; none for ""."""
    return _names(parse_spec(domain)) if domain else frozenset()


def proportions(mixture: str) -> dict[str, float]:
    """Return each part's fraction of the turns in a canonical SPEC, by its name; they sum to 1."""
    parts = parse_spec(mixture).parts
    total = sum(part.weight for part in parts)
    return {part.name: part.weight / total for part in parts}


def _names(spec: TaskSpec) -> frozenset[str]:
    return frozenset(part.name for part in spec.parts)
