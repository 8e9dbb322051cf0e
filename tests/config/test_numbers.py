"""Every numeric setting of the run configuration and of node.toml refuses infinity, NaN and absurd numbers."""

import math
import types
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import ValidationError

from ftis_node.config.manifest import RunManifest, parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.section import Section
from ftis_node.errors import ConfigError

ABSURD = 1e300


def sections(kind: type[Section]) -> set[type[Section]]:
    """Return a section and all sections in it."""
    found = {kind}
    for field in kind.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Section):
                found |= sections(part)
    return found


def holds(annotation: Any, kind: type) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return any(holds(part, kind) for part in get_args(annotation))
    inner = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    return inner is kind


FIELDS = [
    (section, name, kind)
    for root in (RunManifest, NodeSettings)
    for section in sorted(sections(root), key=lambda each: each.__name__)
    for name, field in section.model_fields.items()
    for kind in (float, int)
    if holds(field.annotation, kind)
]


def refuses(section: type[Section], name: str, value: Any) -> bool:
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return any(finding["loc"][:1] == (name,) for finding in error.errors())
    return False


def test_every_number_has_bounds():
    wrong = {float: [math.inf, -math.inf, math.nan, ABSURD, -ABSURD], int: [10**30, -(10**30)]}
    accepted = [
        f"{section.__name__}.{name} accepts {value}"
        for section, name, kind in FIELDS
        for value in wrong[kind]
        if not refuses(section, name, value)
    ]
    assert not accepted, "\n".join(accepted)


def test_the_search_finds_the_fields():
    names = {f"{section.__name__}.{name}" for section, name, _ in FIELDS}
    assert {"OptimizerSection.learning_rate", "MethodSection.cap", "StepSection.own_groups"} <= names
    assert len(FIELDS) > 40


@pytest.mark.parametrize("value", ["nan", "2.0"])
def test_an_invalid_learning_rate_is_refused(value):
    text = f'name = "x"\ntask = "arithmetic"\n[optimizer]\nlearning_rate = {value}\n'
    with pytest.raises(ConfigError, match=r"^run.toml: optimizer.learning_rate: "):
        parse_manifest(text, source="run.toml")
