"""Ensembles in files: `ensemble --save` writes one, and `chat`, `try` and `eval` answer with it.

An ensemble is its mode and its models: no mode has parameters that are trained. An example:

    {"schema": 1, "mode": "mean", "models": [
      {"name": "s", "model": "./models/s", "weight": 2.0, "domain": "arithmetic:add"},
      {"name": "m", "model": "org/m"}]}

A `model` is a folder, the home of a node, or what `--model` takes besides. A relative folder is relative to the file.
A `weight` is the model's prior in a mixture; the default is 1. The file may come from somebody else, so its size, its
number of models and each value are bounded. It can make this machine load and download models, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from ftis_node.errors import ConfigError
from ftis_node.evaluation.members import Member, as_members, folder_members
from ftis_node.files import check_no_folder, read_file, replace_file
from ftis_node.telemetry.log import OnProgress, unwatched

if TYPE_CHECKING:
    from ftis_node.generation.engines.mixture_engine import MixtureWeights

MIXTURES: Final = ("posterior", "mean", "answer")
MODES: Final = (*MIXTURES, "vote", "confidence")
SCHEMA: Final = 1
MAX_BYTES: Final = 64 << 10
MAX_MODELS: Final = 32
HERE: Final = "./"  # begins a folder that is relative to the file, and never an id of the hub

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class SavedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model of the file."""

    name: Text
    model: Text
    weight: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] = 1.0
    domain: Annotated[str, msgspec.Meta(max_length=4096)] | None = None


class SavedEnsemble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    schema: int
    mode: Text
    models: Annotated[list[SavedModel], msgspec.Meta(min_length=1, max_length=MAX_MODELS)]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Members with different names, how they answer together, and the weight of each."""

    mode: str
    members: tuple[Member, ...]
    weights: tuple[float, ...]

    @property
    def is_mixture(self) -> bool:
        return self.mode in MIXTURES


def mixture_weights(mode: str, weights: Sequence[float]) -> MixtureWeights:
    """Return the weights of a mixture whose prior is in proportion to `weights`."""
    from ftis_node.generation.engines.mixture_engine import MixtureWeights

    log_prior = tuple(math.log(weight / sum(weights)) for weight in weights)
    return MixtureWeights(log_prior, learns=mode != "mean", reads_prompt=mode != "answer")


def check_modes(modes: Sequence[str]) -> None:
    """Raise ConfigError for an unknown mode, and if there is none."""
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError(f"no mode {unknown[0] if unknown else ''!r}: use all, or some of {', '.join(MODES)}")


def check_writable(path: Path) -> None:
    """Raise ConfigError if the file cannot be written, before an evaluation of hours."""
    check_no_folder(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder: create it, or save the ensemble elsewhere")


def save_ensemble(path: Path, mode: str, members: Sequence[Member]) -> None:
    """Write the ensemble of these members. Folders beside or below the file are relative to it. Raises ConfigError."""
    models = [SavedModel(member.name, _reference(member, path), domain=member.domain) for member in members]
    encoded = msgspec.json.encode(SavedEnsemble(SCHEMA, mode, models))
    try:
        replace_file(path, msgspec.json.format(encoded, indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): save the ensemble elsewhere") from None


def _reference(member: Member, path: Path) -> str:
    folder = member.home or Path(member.model).expanduser()
    if not folder.exists():
        return member.model  # an id of the hub
    folder, beside = folder.resolve(), path.resolve().parent
    return f"{HERE}{folder.relative_to(beside)}" if folder.is_relative_to(beside) else str(folder)


def read_ensemble(path: Path) -> SavedEnsemble:
    """Return the content of the file. Raises ConfigError if it is missing, too large or invalid."""
    try:
        saved = msgspec.json.decode(read_file(path, max_bytes=MAX_BYTES), type=SavedEnsemble)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no such file: {path}; make one with ftis-node ensemble --save {path}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no saved ensemble: {error}") from None
    if saved.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {saved.schema}, this version reads {SCHEMA}: save the ensemble again")
    if saved.mode not in MODES:
        raise ConfigError(f"{path}: no mode {saved.mode!r}: use one of {', '.join(MODES)}")
    if saved.mode not in MIXTURES and len({model.weight for model in saved.models}) > 1:
        raise ConfigError(f"{path}: {saved.mode} has no weights: remove them, or use one of {', '.join(MIXTURES)}")
    return saved


@contextmanager
def open_ensemble(path: Path, *, on_progress: OnProgress = unwatched) -> Iterator[Ensemble]:
    """Yield the ensemble of a file. The models of nodes' homes are exported, and removed at the end.

    Raises the exceptions of `read_ensemble` and of an export.
    """
    path = path.expanduser()
    saved = read_ensemble(path)
    with TemporaryDirectory(prefix="ftis-ensemble-") as scratch:
        members = [_member(each, path, Path(scratch), on_progress) for each in saved.models]
        yield Ensemble(saved.mode, tuple(as_members(members)), tuple(model.weight for model in saved.models))


def _member(saved: SavedModel, path: Path, scratch: Path, on_progress: OnProgress) -> Member:
    where = str(path.parent / saved.model) if saved.model.startswith(HERE) else saved.model
    if not Path(where).expanduser().is_dir():
        return Member(saved.name, where, saved.domain)
    found = folder_members(Path(where).expanduser(), scratch, on_progress=on_progress)
    if len(found) > 1:
        raise ConfigError(f"{path}: {saved.model} holds {len(found)} models: name the folder of one")
    return Member(saved.name, found[0].model, saved.domain, found[0].prompts)
