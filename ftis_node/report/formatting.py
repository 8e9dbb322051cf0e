"""Untrusted text on the page: bounded, without control characters and paths. The template engine escapes markup."""

from __future__ import annotations

import re

from ftis_node.telemetry.terminal_text import ELLIPSIS, printable

PATH = re.compile(r"(?<![\w:/])/(?:[^\s/'\")]+/)+")


def clean(text: object, *, limit: int = 120) -> str:
    """Return untrusted text in at most `limit` characters, with control and direction characters escaped."""
    shown = printable(str(text)[: limit + 1], keep_newlines=True)
    return shown if len(shown) <= limit else shown[: limit - 1] + ELLIPSIS


def without_paths(text: object) -> str:
    """Shorten absolute paths and addresses (`/ip4/...`) to their last part, because users share reports."""
    return PATH.sub("…/", str(text))
