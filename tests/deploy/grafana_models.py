"""Grafana's published models of a dashboard: what of a JSON document they do not know or would not accept.

`from_json` of the models takes any value and drops unknown keys. So the document is compared with what the models write
again, and each value with its declared type.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from typing import Any

NUMBERS = (int, float)


def problems(document: dict[str, Any]) -> list[str]:
    """Return the path of each unknown key, and of each value that has another type than declared."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board = Dashboard.from_json(document)
    written = json.loads(json.dumps(board, cls=JSONEncoder))
    return [*lost(document, written), *misfits(board, Dashboard, "")]


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the paths of what the second document lacks or has otherwise. Defaults that it adds are no difference."""
    if isinstance(before, dict) and isinstance(after, dict):
        absent = object()
        pairs = ((f"{path}.{key}", one, after.get(key, absent)) for key, one in before.items())
        return [each for place, one, other in pairs for each in lost(one, other, place)]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [each for number, pair in pairs for each in lost(*pair, f"{path}[{number}]")]
    return [] if before == after else [path]


def misfits(value: Any, hint: Any, path: str) -> list[str]:
    """Return the paths of the values that do not have the type of `hint`."""
    if hasattr(value, "to_json"):  # the type of a panel's options is known by the panel's type only
        hints = typing.get_type_hints(type(value))
        return [each for key, kind in hints.items() for each in misfits(getattr(value, key), kind, f"{path}.{key}")]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        found = [misfits(value, part, path) for part in parts]
        return [] if [] in found else max(found, key=len)  # the type that explains most
    if origin is list and isinstance(value, list):
        return [each for number, one in enumerate(value) for each in misfits(one, parts[0], f"{path}[{number}]")]
    if origin is dict and isinstance(value, dict):
        return [each for key, one in value.items() for each in misfits(one, parts[1], f"{path}.{key}")]
    return [] if _fits(value, hint, parts) else [path]


def _fits(value: Any, hint: Any, parts: tuple[Any, ...]) -> bool:
    if hint in (Any, object):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return value in parts
    if typing.get_origin(hint) is not None:  # a list or a dict, which the value is not
        return False
    if issubclass(hint, enum.Enum):
        return value in [one.value for one in hint]
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, NUMBERS if hint is float else hint)
