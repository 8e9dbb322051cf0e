"""Redaction: secrets that this process must never write down, and the one function that removes them.

Code that reads a secret registers it here (`keep_secret`). Log lines, tracebacks of the command line, events and
statuses pass `redacted`, so that a secret in an error's text is not written. It looks for the secret as text, in hex,
and in base64 at each of the three offsets of a triple of bytes. It also looks for the form in which Python shows bytes,
and for any access token of the hub or `Authorization` header.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import sys
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

HIDDEN: Final = "<secret>"
MIN_BYTES: Final = 8  # what is shorter is no secret, and its forms would be found in innocent text
VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "WANDB_API_KEY")
TOKENS: Final = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=Bearer )[\w.~+/-]{16,}=*")

_forms: set[str] = set()


def keep_secret(secret: bytes | str) -> None:
    """Register a secret: from now on `redacted` removes it, in each of its forms."""
    if len(secret) >= MIN_BYTES:
        _forms.update(forms_of(secret.encode() if isinstance(secret, str) else secret))


def keep_variables_secret(environment: Mapping[str, str] = os.environ) -> None:
    """Keep what the environment's variables for access tokens hold."""
    for name in VARIABLES:
        keep_secret(environment.get(name, ""))


def forms_of(secret: bytes) -> Iterator[str]:
    """Yield the forms that the bytes of a secret may have in a text."""
    yield secret.hex()
    yield secret.hex().upper()
    yield repr(secret)[2:-1]
    try:
        yield secret.decode("utf-8")
    except UnicodeDecodeError:
        yield secret.decode("latin-1")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):  # bytes in front of it, which share the first character or two with it
            text = encode(bytes(before) + secret).decode().rstrip("=")
            yield text[(before * 8 + 5) // 6 : (before + len(secret)) * 8 // 6]


def redacted(text: str) -> str:
    """Return the text, without secrets."""
    for form in _forms:
        if form in text:
            text = text.replace(form, HIDDEN)
    return TOKENS.sub(HIDDEN, text)


class SecretFreeFormatter(logging.Formatter):
    """Log lines, with their tracebacks, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return redacted(super().format(record))


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For `sys.excepthook`: the usual traceback, without secrets."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))
