"""Trained tiny models for the tests, made once per checkout and kept in `.cache/`.

The folder's name has a hash of everything that determines the weights, so a changed recipe makes new models.
"""

import hashlib
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "models"
TINY_SCALE = 0.4  # of the usual training: enough correct answers for a signal
RECIPE_FILES = (
    *("lab/tiny.py", "lab/tiny_curricula.py", "lab/tiny_tokenizer.py", "lab/tiny_corpus.txt"),
    *("tasks/arithmetic.py", "tasks/problems.py"),
)
RECIPE_PACKAGES = ("torch", "transformers", "tokenizers")


def trained_model(size: str, *, scale: float = TINY_SCALE) -> Path:
    """Return the folder of a tiny model, in the hub's format; make it if it is missing. Change only files of a copy."""
    folder = CACHE / f"{size}-{_recipe_hash(scale)}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            _make(size, folder, scale=scale)
    return folder


def copy_trained_models(target: Path) -> dict[str, Path]:
    """Copy the models s and m into the folder `target` and return their folders by size."""
    return {size: Path(shutil.copytree(trained_model(size), target / size)) for size in ("s", "m")}


def _make(size: str, folder: Path, *, scale: float) -> None:
    from ftis_node.lab.tiny import make_tiny  # it loads torch, which a full cache makes unnecessary

    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    make_tiny(size, unfinished, scale=scale)  # type: ignore[arg-type]
    os.rename(unfinished, folder)


def _recipe_hash(scale: float) -> str:
    recipe = hashlib.sha256(f"{scale} {platform.python_version()} {platform.machine()}".encode())
    for name in RECIPE_PACKAGES:
        recipe.update(f"{name} {version(name)}".encode())
    for name in RECIPE_FILES:
        recipe.update((ROOT / "ftis_node" / name).read_bytes())
    return recipe.hexdigest()[:16]
