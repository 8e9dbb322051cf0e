"""Generator of docs/reference/configuration.md: one row per setting.

python -m tests.documented.configuration      print the page
"""

import ast
import sys
from collections.abc import Iterator
from inspect import cleandoc, getsource
from itertools import pairwise
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ftis_node.config.manifest import PRESETS, RunManifest, load_manifest
from ftis_node.config.node import NodeSettings
from tests.documented.pages import as_links

HEADER = """# Configuration

Two files configure a node. All nodes of a swarm share the **run manifest**. Its hash is the run id, so another value
makes another swarm. **node.toml** in the node's home may differ from node to node. Options override environment
variables (`FTIS_NAME`, `FTIS_LEARNER__THREADS`). These override `node.toml`, which overrides the defaults. A list or a
table in a variable is JSON: `FTIS_TRACKING__TO='["wandb"]'`. Unknown keys are an error.
"""
PRESET_FILES = "../../ftis_node/config/presets"


def render_reference() -> str:
    parts = [
        HEADER,
        "## Run manifest\n",
        *_tables(RunManifest),
        "## node.toml\n",
        *_tables(NodeSettings),
        "## Presets\n",
    ]
    parts.append("`--run NAME` takes a preset:\n\n| preset | task | run id |\n|---|---|---|")
    for preset in PRESETS:
        manifest = load_manifest(preset)
        parts.append(f"| [{preset}]({PRESET_FILES}/{preset}.toml) | `{manifest.task}` | `{manifest.run_id}` |")
    return as_links("\n".join(parts) + "\n")


def _tables(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    rows, sections, meanings = [], [], _meanings(settings)
    for name, field in settings.model_fields.items():
        nested = next((kind for kind in get_args(field.annotation) if kind is not NoneType), field.annotation)
        if isinstance(nested, type) and hasattr(nested, "model_fields"):
            sections.append((name, nested))
        else:
            rows.append(f"| `{prefix}{name}` | {_default(field)} | {_bounds(field)} | {meanings[name]} |")
    yield "\n".join(["| key | default | bounds | meaning |", "|---|---|---|---|", *rows, ""])
    for name, nested in sections:
        yield f"### `[{prefix}{name}]`\n\n{cleandoc(nested.__doc__ or '')}\n"
        yield from _tables(nested, f"{prefix}{name}.")


def _meanings(settings: type[BaseModel]) -> dict[str, str]:
    """Return the string below each field, on one line."""
    (table,) = ast.parse(getsource(settings)).body
    assert isinstance(table, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(table.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "unset" if value is None or value in ("", (), {}) else f"`{value}`"


def _bounds(field: FieldInfo) -> str:
    signs: dict[str, str] = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found: list[Any] = [
        f"{sign} {getattr(mark, name)}"
        for mark in field.metadata
        for name, sign in signs.items()
        if hasattr(mark, name)
    ]
    return ", ".join(found)


if __name__ == "__main__":
    sys.stdout.write(render_reference())
