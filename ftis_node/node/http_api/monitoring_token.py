"""The token of the monitoring port `observe.listen`: from `observe.token_file`, or from a file in the home (0600).

The file in the home is created once. It survives restarts, so that a scraper can keep the token.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.config.observe import ObserveSection
from ftis_node.errors import ConfigError
from ftis_node.files import replace_file
from ftis_node.telemetry.secrets import keep_secret, read_private

TOKEN_BYTES = 32
MIN_TOKEN_CHARACTERS = 32


def observe_token(settings: ObserveSection, home: Home) -> str | None:
    """Return the token of the port `observe.listen`; None if it needs none. Raise ConfigError for an invalid file.

    Without `observe.token_file`, the token is in the home and is created at first use.
    """
    if not settings.needs_token:
        return None
    if settings.token_file:
        return read_token(Path(settings.token_file).expanduser())
    if not home.observe_token.exists():
        replace_file(home.observe_token, f"{secrets.token_hex(TOKEN_BYTES)}\n".encode(), mode=0o600)
    return read_token(home.observe_token)


def read_token(path: Path) -> str:
    """Return the token in a file. The file's group may read it, as for a mounted secret; other users may not."""
    content = read_private(path, name="observe.token_file", is_group_trusted=True)
    token = content.decode("ascii", errors="replace").strip()
    if not token.isascii() or len(token) < MIN_TOKEN_CHARACTERS or len(token.split()) != 1:
        raise ConfigError(
            f"observe.token_file {path} holds no token: one word of at least {MIN_TOKEN_CHARACTERS} characters is "
            "needed: openssl rand -hex 32"
        )
    keep_secret(token)
    return token
