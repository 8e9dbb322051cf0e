"""Choices that the learner's first start measured: its kernels, and the layout of its sequences.

The home keeps them, so that later starts do not measure again. A choice belongs to a case: a text that names all that
it depends on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftis_node.errors import FileError
from ftis_node.files import read_object, replace_file
from ftis_node.learner.messages import LearnerBoot

log = logging.getLogger(__name__)

CHOICES_FILE = "learner-choices.json"


def choices_path(boot: LearnerBoot) -> Path:
    return Path(boot.checkpoints_dir).parent / CHOICES_FILE


def kept_choice(boot: LearnerBoot, case: str) -> Any:
    """Return the choice that an earlier start kept for this case, None if none did."""
    return _read(choices_path(boot)).get(case)


def keep_choice(boot: LearnerBoot, case: str, chosen: str) -> None:
    """Keep a choice. A home that cannot be written gives a warning, and the next start measures again."""
    path = choices_path(boot)
    try:
        replace_file(path, json.dumps({**_read(path), case: chosen}, indent=1).encode(), mode=0o600)
    except OSError as error:
        log.warning("what the learner measured is not kept: %s", error)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_object(path)
    except (OSError, FileError):  # missing, or damaged: it is measured again
        return {}
