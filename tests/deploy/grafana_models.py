"""A check of a dashboard against Grafana's published models: unknown keys and values of a wrong type.

`from_json` of the models takes any value and drops unknown keys. So the document is compared with the output of the
models, and each value with its declared type.
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
    return [*differences(document, written), *type_errors(board, Dashboard, "")]


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the paths that the second document lacks or changes. Added defaults are no difference."""
    if isinstance(before, dict) and isinstance(after, dict):
        absent = object()
        pairs = ((f"{path}.{key}", one, after.get(key, absent)) for key, one in before.items())
        return [each for place, one, other in pairs for each in differences(one, other, place)]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [each for number, pair in pairs for each in differences(*pair, f"{path}[{number}]")]
    return [] if before == after else [path]


def type_errors(value: Any, hint: Any, path: str) -> list[str]:
    """Return the paths of the values that do not have the type of `hint`."""
    if hasattr(value, "to_json"):  # only the type of the panel defines the type of its options
        hints = typing.get_type_hints(type(value))
        return [each for key, kind in hints.items() for each in type_errors(getattr(value, key), kind, f"{path}.{key}")]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        found = [type_errors(value, part, path) for part in parts]
        return [] if [] in found else max(found, key=len)  # the type with the most detailed errors
    if origin is list and isinstance(value, list):
        return [each for number, one in enumerate(value) for each in type_errors(one, parts[0], f"{path}[{number}]")]
    if origin is dict and isinstance(value, dict):
        return [each for key, one in value.items() for each in type_errors(one, parts[1], f"{path}.{key}")]
    return [] if _fits(value, hint, parts) else [path]


def _fits(value: Any, hint: Any, parts: tuple[Any, ...]) -> bool:
    if hint in (Any, object):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return value in parts
    if typing.get_origin(hint) is not None:  # a list or a dict, but the value is neither
        return False
    if issubclass(hint, enum.Enum):
        return value in [one.value for one in hint]
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, NUMBERS if hint is float else hint)
