"""Token ids to text, by the tokenizer of the node's own model, where its file is on this machine.

`tokenizers` reads `tokenizer.json` alone: neither transformers nor torch is loaded for it. A model that has only other
files, or that is not here any more, leaves the ids as they are. Nothing is fetched.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.errors import FileError
from ftis_node.files import read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from ftis_node.config.home import Home

TOKENIZER_FILE = "tokenizer.json"


class Decoder:
    """Of one home. The file is read at the first use, which may take a second: not inside an event loop."""

    def __init__(self, home: Home) -> None:
        self._home = home

    @cached_property
    def _opened(self) -> tuple[Tokenizer | None, str]:
        return _open_tokenizer(self._home)

    @property
    def missing(self) -> str:
        """Why there is no tokenizer; empty where there is one."""
        return self._opened[1]

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str | None:
        """The text of these ids; None where there is no tokenizer, or an id is not one of its own."""
        tokenizer, _ = self._opened
        if tokenizer is None:
            return None
        try:
            ids = [int(token) for token in token_ids]
            return str(tokenizer.decode(ids, skip_special_tokens=not with_special_tokens))
        except OverflowError:  # a negative id
            return None


def _open_tokenizer(home: Home) -> tuple[Tokenizer | None, str]:
    try:
        model = str(read_object(home.settings)["model"])
    except (OSError, FileError, KeyError):
        return None, f"{home.settings} does not say which model: these are token ids"
    folder = _folder_of(model)
    if folder is None or not (folder / TOKENIZER_FILE).is_file():
        return None, f"the model's {TOKENIZER_FILE} is not at hand: these are token ids"
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / TOKENIZER_FILE)), ""
    except Exception as error:  # the library raises a bare Exception for a file that it cannot read
        return None, f"{folder / TOKENIZER_FILE} cannot be read ({error}): these are token ids"


def _folder_of(model: str) -> Path | None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub.errors import HFValidationError

    from ftis_node.models.hub import cached_snapshot

    try:
        return cached_snapshot(model)
    except HFValidationError:  # a folder that is gone
        return None
