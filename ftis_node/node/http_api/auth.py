"""Access to a node's HTTP ports: by the host name that a request uses, and by a token.

    port on this machine only  any request whose `Host` names this machine (127.0.0.1, localhost, ::1). A web page whose
                               name resolves to 127.0.0.1 sends that name as `Host`, and is refused
    port for other machines    `Authorization: Bearer TOKEN`; probes need none

The bearer token is that of `monitoring_token.py`. The local port has a separate token, which requests for changes and
groups must carry. `local_api.py` and `exchange_api.py` check it.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ftis_node.config.observe import is_loopback
from ftis_node.telemetry.terminal_text import one_line

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # a service manager probes these and has no token
BEARER = "Bearer "


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
