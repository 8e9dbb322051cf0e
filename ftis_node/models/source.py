"""The source of a model: a folder on this machine, or an id on the hub.

`resolve_model` answers before anything heavy is loaded, so that a wrong `--model` gives one clear line within seconds.
Only safetensors are read, never a pickled checkpoint.
"""

from __future__ import annotations

import difflib
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.errors import FileError, ModelError
from ftis_node.files import check_regular, read_object
from ftis_node.models.hub import cached_snapshot, fetch_snapshot
from ftis_node.models.safetensors_file import read_header
from ftis_node.telemetry.log import unwatched

if TYPE_CHECKING:
    from ftis_node.telemetry.log import OnProgress

logger = logging.getLogger(__name__)

SMALL_FILES = frozenset({".json", ".txt", ".jinja", ".model"})  # vocabularies and settings
CONFIG_FILE = "config.json"
SINGLE_WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

# Any one of these sets of files is a tokenizer that transformers can read.
TOKENIZER_FILE_SETS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",), ("vocab.txt",))
TOKENIZER_HINT = "tokenizer.json, vocab.json with merges.txt, or tokenizer.model"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NEAR = 0.75  # similarity of 1 at most: above it one name may be a typo of the other


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is complete on this machine. Other nodes see `name`: the hub id, or the folder's own name."""

    name: str
    folder: Path

    @property
    def weights_files(self) -> tuple[Path, ...]:
        """The safetensors files in a fixed order. Raises ModelError if some are missing."""
        folder, index = self.folder, self.folder / WEIGHTS_INDEX_FILE
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(f"{index} names no weight files")
            shards = tuple(folder / name for name in sorted(set(weight_map.values())))
            if missing := [shard.name for shard in shards if not shard.is_file()]:
                raise ModelError(
                    f"folder {folder} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing)}"
                )
            return shards
        single = folder / SINGLE_WEIGHTS_FILE
        if not single.is_file():
            pickled = " (pickled weights are not read: convert them)" if any(folder.glob("*.bin")) else ""
            raise ModelError(f"folder {folder} has no weights: expected {SINGLE_WEIGHTS_FILE} or its index{pickled}")
        return (single,)


def resolve_model(model: str, *, on_progress: OnProgress = unwatched) -> ModelSource:
    """Find `model`, a folder or a hub id `org/name`, and check that it is complete.

    A hub id is looked up in the local cache first, then downloaded; only the download reports progress. Raises
    ModelError for a missing or incomplete folder, ModelFetchError if the hub does not serve the model.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        return _checked(ModelSource(name=folder.name, folder=folder))
    check_name(model)
    if (cached := cached_snapshot(model)) is not None:
        try:
            return _checked(ModelSource(name=model, folder=cached))
        except ModelError as error:
            logger.info("the cached copy of %s is incomplete, fetching the rest: %s", model, error)
    return _checked(ModelSource(name=model, folder=fetch_snapshot(model, on_progress=on_progress)))


def check_name(model: str) -> None:
    """Raise ModelError if `model` is neither a folder nor like an id on the hub, or if it is the typo of a folder."""
    path = Path(model).expanduser()
    if path.is_dir():
        return
    with suppress(OSError):
        beside = [folder.name for folder in path.parent.iterdir() if folder.is_dir()]
        if close := difflib.get_close_matches(path.name, beside, n=1, cutoff=NEAR):
            raise ModelError(f"no such folder: {model}; did you mean --model {path.parent / close[0]} ?")
    if not HUB_ID.fullmatch(model):
        raise ModelError(f"no such folder: {model} (an id on the hub looks like org/name)")


def check_hub_id(name: str) -> None:
    """Raise ModelError unless `name` looks like an id on the hub."""
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"{name!r} is not an id on the hub: write OWNER/NAME")


def _checked(source: ModelSource) -> ModelSource:
    try:
        for path in sorted(source.folder.iterdir()):
            if path.suffix in SMALL_FILES:
                check_regular(path)  # transformers reads it, and a pipe would block it for ever
    except (OSError, FileError) as error:
        raise ModelError(str(error)) from None
    config = read_json(source.folder / CONFIG_FILE)
    if "model_type" not in config:
        raise ModelError(f"{source.folder / CONFIG_FILE} names no model_type: it is not a transformers model")
    for path in source.weights_files:
        read_header(path)
    if not any(all((source.folder / name).is_file() for name in names) for names in TOKENIZER_FILE_SETS):
        raise ModelError(f"folder {source.folder} has no tokenizer: expected {TOKENIZER_HINT}")
    return source


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in `path`. Raises ModelError if it is missing or no object."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ModelError(f"folder {path.parent} has no {path.name}: it is not a transformers model") from None
    except (OSError, FileError) as error:
        raise ModelError(str(error)) from error
