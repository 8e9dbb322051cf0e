"""Is a published file whole, and is it this model's? Told from its header, before any weight is touched.

An engine copies tensors one by one into what it serves and cannot go back; so a file that is cut short, of another
shape or without some tensor is refused before the first one is read. A tied output head is the embedding itself: a file
may name it once more or leave it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ftis_node.errors import ModelError
from ftis_node.ipc.durable import is_complete
from ftis_node.models import read_header, read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ftis_node.models import ModelSource

Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"

HEAD = "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3")  # safetensors' names


def shapes_in(source: ModelSource) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """What a model's own files hold, by name, and the names that may be left out."""
    shapes = {
        name: tuple(entry["shape"])
        for path in source.weights_files
        for name, entry in read_header(path).tensors.items()
    }
    if not read_json(source.folder / "config.json").get("tie_word_embeddings", False):
        return shapes, set()
    shapes.pop(HEAD, None)
    return shapes, {HEAD}


def check_published(path: Path, own: Shapes, *, optional: Iterable[str]) -> None:
    """Raises ModelError where the file at `path` is not complete or does not hold exactly the tensors of `own`."""
    if not is_complete(path.parent):
        raise ModelError(f"weights in {path.parent} are not completely written")
    entries = read_header(path).tensors
    found = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    problems = (
        ("lacks", sorted(own.keys() - found.keys())),
        ("names unknown", sorted(found.keys() - own.keys() - set(optional))),
        ("has another shape of", sorted(name for name in own.keys() & found.keys() if own[name] != found[name])),
        ("has integers in", sorted(name for name, entry in entries.items() if entry["dtype"] not in FLOATS)),
    )
    for problem, names in problems:
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"weights in {path} do not fit the model: the file {problem} {names[0]}{others}")
