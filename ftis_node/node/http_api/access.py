"""Access to a node's HTTP ports, by the host name that a request uses and by a token.

    port on this machine only  any request whose `Host` names this machine (127.0.0.1, localhost, ::1). A web page whose
                               name resolves to 127.0.0.1 sends that name as `Host`, and is refused
    port for other machines    `Authorization: Bearer TOKEN`; probes need none

The bearer token is from `observe.token_file`, or from a file in the home (0600), which is created once. It survives
restarts, so that a scraper can keep it. The local port has a separate token, which each POST request must carry.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ftis_node.config.home import TOKEN_HEADER, Home
from ftis_node.config.observe import ObserveSection, is_loopback
from ftis_node.errors import ConfigError
from ftis_node.files import replace_file
from ftis_node.telemetry.secrets import keep_secret, read_private
from ftis_node.telemetry.terminal_text import one_line

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # a service manager probes these and has no token
BEARER = "Bearer "
TOKEN_BYTES = 32
MIN_TOKEN_CHARACTERS = 32


@web.middleware
async def own_names_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a request whose `Host` does not name this machine, and one that another site's page makes."""
    if not is_loopback(host_name(request.host)):
        return web.Response(
            status=403, text=f"this port is for this machine alone: call it 127.0.0.1, not {one_line(request.host)}\n"
        )
    if _is_of_another_site(request):
        return web.Response(status=403, text="pages of other sites may not use this port\n")
    return await handler(request)


def _is_of_another_site(request: web.Request) -> bool:
    """Return whether a browser says so, of anything but a link that its user follows."""
    page, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
    if page is not None and not is_loopback(host_name(page.partition("//")[2])):
        return True
    return site == "cross-site" and request.headers.get("Sec-Fetch-Dest") != "document"


def host_name(host: str) -> str:
    """Return the name in a `Host` header without its port; "" for a malformed header."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_same_secret(shown: str, secret: str) -> bool:
    """Return whether a header's token is `secret`, in constant time. The header may contain invalid text."""
    try:
        return hmac.compare_digest(shown.encode(errors="surrogateescape"), secret.encode())
    except UnicodeEncodeError:
        return False


def bearers_only(token: str) -> Middleware:
    """Return a middleware that refuses requests without the token, except for probes."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        if request.path in OPEN_PATHS or is_same_secret(shown, f"{BEARER}{token}"):
            return await handler(request)
        return web.Response(
            status=401,
            headers={"WWW-Authenticate": "Bearer"},
            text="this needs the header `Authorization: Bearer TOKEN` with the token of observe.token_file, "
            "or of observe.token in the node's home\n",
        )

    return checked


def token_for_changes(token: str) -> Middleware:
    """Return a middleware that refuses all but GET and HEAD requests without the token of the home."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in ("GET", "HEAD") or is_same_secret(request.headers.get(TOKEN_HEADER, ""), token):
            return await handler(request)
        line = f"this request needs the header {TOKEN_HEADER} with the token in the node's home"
        return web.json_response({"error": line, "reason": "token"}, status=403)

    return checked


def write_token(path: Path) -> str:
    """Return a new token, written to a file that its owner alone may read."""
    token = secrets.token_hex(TOKEN_BYTES)
    keep_secret(token)
    replace_file(path, token.encode(), mode=0o600)
    return token


def observe_token(settings: ObserveSection, home: Home) -> str | None:
    """Return the token of the port `observe.listen`; None if it needs none. Raise ConfigError for an invalid file.

    Without `observe.token_file`, the token is in the home and is created at first use.
    """
    if not settings.needs_token:
        return None
    if settings.token_file:
        return read_token(Path(settings.token_file).expanduser())
    if not home.observe_token.exists():
        write_token(home.observe_token)
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
