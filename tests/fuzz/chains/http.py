"""Requests to the HTTP ports -> peer table, status, metrics."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.files import parse_json
from ftis_node.node.http_api.access import host_name, is_same_secret
from ftis_node.node.http_api.routes import ACTIONS, change_peer
from ftis_node.telemetry.metrics import render_metrics
from ftis_node.telemetry.terminal_text import one_line
from tests.fuzz.fuzzed_node import HOSTILE, OWN, fuzzed_node, render_views
from tests.fuzz.mutator import Item, join

HOST, TOKEN = 3, 4  # tags; the others are indices of an action whose body is the item


def kinds(tag: int) -> None:
    """No item is a protobuf message."""


async def chain(items: Sequence[Item]) -> None:
    """Handle each request, then render the views of the node."""
    async with fuzzed_node() as fuzzed:
        status = fuzzed.wiring.status_loop()
        change = partial(change_peer, fuzzed.parts.peers, fuzzed.wiring.swarm.rows)
        for one in HOSTILE:
            fuzzed.parts.peers.registry.seen(one.peer_id)
        for item in items:
            text = item.data.decode("utf-8", "surrogateescape")  # as aiohttp decodes headers
            if item.tag & 7 == HOST:
                host_name(text)
            elif item.tag & 7 == TOKEN:
                assert not is_same_secret(text, "an unknown secret")
            else:
                _change(change, ACTIONS[(item.tag & 7) % len(ACTIONS)], item.data)
        fuzzed.parts.peers.save()
        await render_views(fuzzed.parts)
        await status.refresh()
        render_metrics(status.latest)
        status.save()


def _change(change: Callable[..., dict[str, Any]], action: str, body: bytes) -> None:
    try:
        arguments = parse_json(body, source="the request")
        if isinstance(arguments, dict):
            json.dumps(change(action, arguments), allow_nan=False)
    except (UsageError, ValueError) as error:  # the node answers these with 400
        if isinstance(error, json.JSONDecodeError | UsageError | UnicodeDecodeError):
            one_line(str(error)).encode()
            return
        if "JSON compliant" in str(error):
            raise AssertionError("a row of the peer table is not valid JSON") from error


def seeds() -> list[bytes]:
    peer = HOSTILE[0].peer_id
    bodies = [{"peer": peer, "for_s": 7200}, {"peer": peer}, {"peer": peer[-8:], "trusted": False}]
    changes = [Item(tag, json.dumps(body).encode()) for tag, body in enumerate(bodies)]
    extreme = json.dumps({"peer": OWN.peer_id, "for_s": 1e308}).encode()
    return [
        join(changes),
        join([Item(0, extreme), Item(0, b'{"for_s": 1e999}')]),
        join([Item(HOST, b"127.0.0.1:80"), Item(HOST, b"[::1]:9"), Item(TOKEN, b"Bearer x"), Item(0, b"[" * 300)]),
    ]
