"""Base class of the tables of both configuration files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST = 1e9  # bound of settings without a natural one: above any use, well within float32

UNKNOWN_NAME = "unknown_name"  # type of the error for a plug-in that is not installed

Positive = Annotated[float, Field(gt=0, le=MOST)]


class Section(BaseModel):
    """A table of the manifest or of `node.toml`: frozen, with no unknown keys and no infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _similar(word: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), [one for one in known if one != word], n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def _keys_beside(place: Sequence[int | str], schema: type[BaseModel] | None) -> Iterable[str]:
    for part in place[:-1]:
        field = schema.model_fields.get(str(part)) if schema is not None else None
        section = field.annotation if field is not None else None
        schema = section if isinstance(section, type) and issubclass(section, BaseModel) else None
    return schema.model_fields if schema is not None else ()


def is_unknown_name(error: ValidationError) -> bool:
    """Return whether the first error is the name of a plug-in that is not installed."""
    return error.errors()[0]["type"] == UNKNOWN_NAME


def first_problem(error: ValidationError, *, schema: type[BaseModel] | None = None) -> str:
    """Return the first error of a validation, as one line for a user. `schema` is the model that was validated."""
    finding: Any = error.errors()[0]
    where = ".".join(str(part) for part in finding["loc"])
    if finding["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_similar(finding['loc'][-1], _keys_beside(finding['loc'], schema))}"
    message = finding["msg"].removeprefix("Value error, ")
    if isinstance(finding["input"], dict):
        return f"{where}: {message}" if where else message
    words = re.findall("'([^']+)'", message) if finding["type"] in ("literal_error", UNKNOWN_NAME) else ()
    return f"{where}: {message} (got {finding['input']!r:.80}){_similar(finding['input'], words)}"
