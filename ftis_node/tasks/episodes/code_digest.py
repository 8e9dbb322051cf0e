"""A digest of the code that decides observations, by which peers see whether theirs may differ without fault.

Of a built-in episode it covers all modules of this folder, and those that read a text. Of a plug-in it covers the
modules that its package installs. An installation that links to a folder names none, so the folder of the episode's
own module counts, too.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

from ftis_node.records import think_block
from ftis_node.tasks import words

DIGEST_HEX: Final = 12
MAX_FILES: Final = 2000
MAX_BYTES: Final = 32 << 20  # of all files; what follows them is not read
LINK_PREFIX: Final = "__editable__"  # modules that pip writes for a link to a folder; they hold paths of this machine


def built_in_code() -> dict[str, Path]:
    """Return the modules that play the built-in episodes, by name."""
    files = [*Path(__file__).parent.glob("*.py"), Path(str(words.__file__)), Path(str(think_block.__file__))]
    return {path.name: path for path in files}


def plugin_code(entry: EntryPoint) -> dict[str, Path]:
    """Return the modules of an imported plug-in by their name in the package. It is empty for a module without a file.

    Files outside the package's own folder of modules are left out.
    """
    listed = (entry.dist.files if entry.dist else None) or ()
    names = (one for one in listed if one.suffix == ".py" and not one.parts[0].startswith(("..", LINK_PREFIX)))
    found = {str(name): Path(str(name.locate())) for name in names}
    root = sys.modules.get(entry.module.partition(".")[0])
    if root is not None and root.__file__:
        own = Path(root.__file__)
        inside = own.parent.rglob("*.py") if hasattr(root, "__path__") else [own]
        above = own.parent.parent if hasattr(root, "__path__") else own.parent
        found |= {path.relative_to(above).as_posix(): path for path in inside}
    return {name: path for name, path in found.items() if path.is_file()}


def code_digest(files: Mapping[str, Path]) -> str:
    """Return the first digits of the SHA-256 of these files with their names. Line ends count as equal.

    Raises OSError if there are none, or if one cannot be read.
    """
    if not files:
        raise OSError("the episode has no source")
    digest, left = hashlib.sha256(), MAX_BYTES
    for name, path in sorted(files.items())[:MAX_FILES]:
        with path.open("rb") as file:
            code = file.read(left)
        left -= len(code)
        code = code.replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(code)}\0".encode() + code)
    return digest.hexdigest()[:DIGEST_HEX]
