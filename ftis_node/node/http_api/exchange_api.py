"""Routes of an exchange node for the trainer on its machine, on the local port. Bodies are MessagePack.

    POST /exchange/publish   OwnGroup     ->  200 PublishedGroup | 422 refused for good | 503 refused for now
    POST /exchange/take      TakeRequest  ->  200 TakeAnswer

A refusal is JSON, {"error": "one line", "reason": "word"}. Both routes need the token of the home (`access.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from ftis_node.node.exchange.trainer_exchange import PASSING, TrainerExchange
from ftis_node.node.exchange.trainer_messages import OwnGroup, PublishedGroup, TakeAnswer, TakenGroup, TakeRequest
from ftis_node.telemetry.terminal_text import one_line
from ftis_node.validation import Refusal

CONTENT_TYPE = "application/msgpack"
PROMPT_BYTES = 4 << 20  # of a prompt and all small fields
MAX_TAKE_BYTES = 256
MAX_PENDING = 16  # groups of the trainer that wait to be scored
BODY_S = 10.0

Message = TypeVar("Message", OwnGroup, TakeRequest)


class _Refused(Exception):
    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(refusal.detail)
        self.status = status
        self.reason = refusal.reason


@dataclass(eq=False, repr=False)
class ExchangeApi:
    """Handlers of the two routes. `max_group_bytes` bounds a group's tokens, as it bounds the envelope of the run."""

    exchange: TrainerExchange
    max_group_bytes: int
    _num_pending: int = field(default=0, init=False)

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/exchange/publish", partial(_answered, self._publish))
        app.router.add_post("/exchange/take", partial(_answered, self._take))

    async def _publish(self, request: web.Request) -> PublishedGroup:
        if self._num_pending >= MAX_PENDING:
            raise _Refused(503, Refusal("busy", f"{MAX_PENDING} groups wait to be scored"))
        self._num_pending += 1
        try:
            offered = await _read(request, OwnGroup, max_bytes=self.max_group_bytes + PROMPT_BYTES)
            answer = await self.exchange.publish(offered)
        finally:
            self._num_pending -= 1
        if isinstance(answer, Refusal):
            raise _Refused(503 if answer.reason in PASSING else 422, answer)
        return answer

    async def _take(self, request: web.Request) -> TakeAnswer:
        requested = await _read(request, TakeRequest, max_bytes=MAX_TAKE_BYTES)
        groups = await self.exchange.take(requested.count)
        taken = [
            TakenGroup(one.id, one.prompt_ids, one.body, list(one.rewards), list(map(list, one.observation_ids)))
            for one in groups
        ]
        return TakeAnswer(taken)


async def _read(request: web.Request, kind: type[Message], *, max_bytes: int) -> Message:
    """Return the message in the body. Reads at most `max_bytes`, for at most `BODY_S` seconds."""
    try:
        async with asyncio.timeout(BODY_S):
            data = await request.clone(client_max_size=max_bytes).read()
        return msgspec.msgpack.decode(data, type=kind)
    except web.HTTPRequestEntityTooLarge:
        raise _Refused(413, Refusal("size", f"this request has at most {max_bytes} bytes")) from None
    except TimeoutError:
        raise _Refused(408, Refusal("slow", f"a request is complete within {BODY_S:.0f} s")) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _Refused(400, Refusal("malformed", f"no {kind.__name__}: {one_line(str(error))}")) from None


async def _answered(answer: Callable[[web.Request], Awaitable[object]], request: web.Request) -> web.Response:
    try:
        return web.Response(body=msgspec.msgpack.encode(await answer(request)), content_type=CONTENT_TYPE)
    except _Refused as refused:
        return web.json_response({"error": one_line(str(refused)), "reason": refused.reason}, status=refused.status)
