"""Secret files, and redaction: the removal of secrets from all text that this process writes.

Code that reads a secret registers it with `keep_secret`. Log lines, tracebacks of the command line, events and statuses
pass through `redacted`. It removes each form of a secret, and user and password in a URL. It removes any
access token of the Hugging Face Hub and of an `Authorization` header.
"""

from __future__ import annotations

import base64
import os
import re
import stat
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from ftis_node.errors import ConfigError
from ftis_node.files import read_file

HIDDEN: Final = "<secret>"
MAX_SECRET_FILE_BYTES: Final = 4096
MIN_SECRET_BYTES: Final = 32
MIN_BYTES: Final = 8  # shorter values are not secrets, and would match ordinary text
VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "WANDB_API_KEY")
TOKENS: Final = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=Bearer )[\w.~+/-]{16,}=*|(?<=://)[^\s/@'\"]+:[^\s/@'\"]+(?=@)")

_forms: set[str] = set()


def keep_secret(secret: bytes | str) -> None:
    """Register a secret, so that `redacted` removes all its forms from now on."""
    if len(secret) >= MIN_BYTES:
        _forms.update(forms_of(secret.encode() if isinstance(secret, str) else secret))


def keep_variables_secret(environment: Mapping[str, str] = os.environ) -> None:
    """Register the access tokens in `VARIABLES` of the environment."""
    for name in VARIABLES:
        keep_secret(environment.get(name, ""))


def forms_of(secret: bytes) -> Iterator[str]:
    """Yield the forms of a secret in a text: the text, hex, Python's `repr`, base64 at each of three byte offsets."""
    yield secret.hex()
    yield secret.hex().upper()
    yield repr(secret)[2:-1]
    try:
        yield secret.decode("utf-8")
    except UnicodeDecodeError:
        yield secret.decode("latin-1")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):  # bytes before the secret; the characters that encode both are cut off
            text = encode(bytes(before) + secret).decode().rstrip("=")
            yield text[(before * 8 + 5) // 6 : (before + len(secret)) * 8 // 6]


def redacted(text: str) -> str:
    """Return the text with `HIDDEN` in place of each secret."""
    for form in _forms:
        if form in text:
            text = text.replace(form, HIDDEN)
    return TOKENS.sub(HIDDEN, text)


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without secrets. Replaces `sys.excepthook`."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))


def read_secret(path: Path, *, name: str) -> bytes:
    """Return the secret in the file of the setting `name`: raw bytes or hex digits.

    Raises ConfigError if the file is missing, short or not private.
    """
    content = read_private(path, name=name)
    secret = _unhexed(content)
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{name} {path} holds {len(secret)} bytes; {MIN_SECRET_BYTES} to {MAX_SECRET_FILE_BYTES} are needed:"
            " openssl rand -hex 32"
        )
    keep_secret(content.strip())
    keep_secret(secret)
    return secret


def read_private(path: Path, *, name: str, is_group_trusted: bool = False) -> bytes:
    """Return the bytes in the file of the setting `name`. Raises ConfigError if it is missing or not private."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        content = read_file(path, max_bytes=MAX_SECRET_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}; make one: openssl rand -hex 32") from None
    if mode & (stat.S_IRWXO if is_group_trusted else stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{name} {path} is open to other users (mode {mode:03o}): chmod 600 {path}")
    return content


def _unhexed(content: bytes) -> bytes:
    try:
        return bytes.fromhex(content.decode("ascii"))
    except ValueError:
        return content
