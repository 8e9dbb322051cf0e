"""An exported model as one GGUF file with a Modelfile for ollama beside it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ftis_node.config.disk_room import write_error
from ftis_node.config.home import Home
from ftis_node.config.home_files import last_settings
from ftis_node.errors import ConfigError
from ftis_node.models import PromptSettings, load_tokenizer, resolve_model
from ftis_node.models.gguf import SUFFIX
from ftis_node.models.gguf_export import GgufKind, architecture_of, modelfile, write_gguf

MODELFILE = "Modelfile"


def check_gguf_file(file: Path, home: Home) -> None:
    """Raise ConfigError unless `file` is a new GGUF file in a folder without a Modelfile.

    Raises ModelError if the model of the home is of a family that is not written.
    """
    if file.suffix != SUFFIX:
        raise ConfigError(f"--gguf {file}: give the name of a file that ends with {SUFFIX}")
    for path in (file, file.parent / MODELFILE):
        if path.exists():
            raise ConfigError(f"{path} exists: give a file in another folder with --gguf")
    if isinstance(model := last_settings(home).get("model"), str):
        architecture_of(resolve_model(model))


def export_gguf(folder: Path, file: Path, *, kind: GgufKind, system: str) -> None:
    """Write the model in `folder` to `file`, which has its name only when it is complete, and then the Modelfile.

    `system` is the usual system message. Raises ModelError as `write_gguf`, and MachineError if the disk refuses.
    """
    source = resolve_model(str(folder), trains=False)
    text = modelfile(file, load_tokenizer(source, prompts=PromptSettings()), system=system)
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(source, partial, kind=kind)
        partial.rename(file)
        (file.parent / MODELFILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(f"{file} cannot be written: {error}", error) from error
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
