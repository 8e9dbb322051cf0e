"""Trained tiny models for the tests, made once per checkout and kept in `.cache/`.

The folder's name is a hash of all that determines the weights, so a changed recipe makes new ones.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "models"
TINY_SCALE = 0.4  # of the usual training: right often enough for a signal
RECIPE_FILES = (
    *("lab/tiny.py", "lab/tiny_sums.py", "lab/tiny_tokenizer.py", "lab/tiny_corpus.txt"),
    *("tasks/arithmetic.py", "tasks/problems.py"),
)
RECIPE_PACKAGES = ("torch", "transformers", "tokenizers")


def trained_model(size: str, *, scale: float = TINY_SCALE) -> Path:
    """The folder of a tiny model of that size, in the hub's format. Copy it before you change a file in it."""
    folder = CACHE / f"{size}-{_recipe_hash(scale)}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            _make(size, folder, scale=scale)
    return folder


def copy_trained_models(target: Path) -> dict[str, Path]:
    """Copies of the models s and m in the folder `target`, by size."""
    return {size: Path(shutil.copytree(trained_model(size), target / size)) for size in ("s", "m")}


def _make(size: str, folder: Path, *, scale: float) -> None:
    from ftis_node.lab.tiny import make_tiny  # torch, which a checkout with a full cache need not load

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
