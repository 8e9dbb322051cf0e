"""The two routes for a trainer on the local port of an exchange node: access, and malformed or endless bodies."""

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession

from ftis_node.config.home import TOKEN_HEADER
from ftis_node.node.exchange.trainer_messages import PublishedGroup, TakeAnswer, TakeRequest
from ftis_node.node.http_api import exchange_api
from ftis_node.node.http_api.exchange_api import MAX_PENDING, MAX_TAKE_BYTES, PROMPT_BYTES, ExchangeApi
from ftis_node.node.wiring import NodeComponents
from ftis_node.records.identity import Identity
from tests.node.exchange.parts import MANIFEST, exchanging, own_group, serving
from tests.node.exchange.test_trainer_exchange import ANSWER
from tests.replay.test_buffer import accepted
from tests.waiting import eventually

ANN = Identity.from_seed(bytes([2]) * 32)
MAX_GROUP_BYTES = MANIFEST.wire.max_envelope_bytes


class Port:
    def __init__(self, url: str, api: ExchangeApi, node: NodeComponents, session: ClientSession) -> None:
        self.url, self.api, self.node, self._session = url, api, node, session
        self.token = node.home.control_token.read_text()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
        given = {TOKEN_HEADER: self.token} | headers
        async with self._session.post(self.url + path, data=body, headers=given) as response:
            return response.status, await response.read()


@pytest.fixture
async def port(tmp_path):
    async with (
        exchanging(tmp_path) as (node, exchange),
        serving(node, exchange) as (url, routes),
        ClientSession() as session,
    ):
        yield Port(url, routes, node, session)


def packed(node: NodeComponents) -> bytes:
    return msgspec.msgpack.encode(own_group(node.tokenizer, [ANSWER, "no"]))


async def test_a_group_is_published_and_a_peers_group_is_taken(port):
    status, body = await port.post("/exchange/publish", packed(port.node))
    assert (status, msgspec.msgpack.decode(body, type=PublishedGroup)) == (200, PublishedGroup(1, [1.0, 0.0]))
    foreign = accepted(ANN, 1)
    assert port.node.store.buffer.admit(foreign, own=False)
    status, body = await port.post("/exchange/take", msgspec.msgpack.encode(TakeRequest(2)))
    assert status == 200
    [group] = msgspec.msgpack.decode(body, type=TakeAnswer).groups
    assert (group.id, group.body) == (foreign.envelope.id, foreign.envelope.body)
    assert tuple(group.rewards) == foreign.group.rewards
    status, body = await port.post("/exchange/take", msgspec.msgpack.encode(TakeRequest(2)))
    assert (status, msgspec.msgpack.decode(body, type=TakeAnswer).groups) == (200, [])


async def test_only_a_client_with_the_token_exchanges_groups(port):
    for path, body in (("publish", packed(port.node)), ("take", msgspec.msgpack.encode(TakeRequest(1)))):
        for token in ("", "0" * 32, "\udcff"):
            status, response = await port.post(f"/exchange/{path}", body, **{TOKEN_HEADER: token})
            assert (status, msgspec.json.decode(response)["reason"]) == (403, "token")
        status, _ = await port.post(f"/exchange/{path}", body, Host="evil.example")
        assert status == 403, "a foreign host name was accepted with the token"
    assert port.node.store.reader.own_ready() == []


MALFORMED = (
    b"",
    b"\xc1",  # not MessagePack
    b"\x8a\xa7problem",  # cut
    b"\x91" * 5000,  # nested
    b"\xdf\x7f\xff\xff\xff",  # a map that claims two billion entries
    b"\xdb\xff\xff\xff\xff",  # a text that claims 4 GiB
    msgspec.msgpack.encode([1, 2]),
    msgspec.msgpack.encode({"count": 1, "problem": 1, "more": 2}),
    msgspec.msgpack.encode({"count": 1}) * 2,
)


async def test_a_malformed_body_is_refused_and_the_next_one_accepted(port):
    for body in MALFORMED:
        for path in ("publish", "take"):
            status, response = await port.post(f"/exchange/{path}", body)
            error = msgspec.json.decode(response)
            if path == "take" and len(body) > MAX_TAKE_BYTES:
                assert (status, error["reason"]) == (413, "size")
            else:
                assert (status, error["reason"]) == (400, "malformed"), body[:40]
            assert "\n" not in error["error"]
    assert (await port.post("/exchange/publish", packed(port.node)))[0] == 200


async def test_a_field_beyond_its_bounds_is_refused(port):
    fields = msgspec.to_builtins(own_group(port.node.tokenizer, [ANSWER, "no"]), builtin_types=(bytes,))
    invalid: tuple[dict[str, Any], ...] = (
        {"problem": -1}, {"problem": 2**31}, {"problem": 1.5},
        {"lengths": []}, {"lengths": [0, 3]}, {"lengths": [1] * 4097},
        {"policy_version": -1}, {"policy_version": 2**64 - 1}, {"tokenizer": "x" * 65}, {"temperature": "1"},
        {"top_k": -1}, {"prompt_ids": "text"},
    )  # fmt: skip
    for changes in invalid:
        status, response = await port.post("/exchange/publish", msgspec.msgpack.encode(fields | changes))
        assert (status, msgspec.json.decode(response)["reason"]) == (400, "malformed"), changes
    assert (await port.post("/exchange/publish", msgspec.msgpack.encode(fields)))[0] == 200
    for count, expected in ((0, 400), (17, 400), (2**63, 400), (16, 200)):
        assert (await port.post("/exchange/take", msgspec.msgpack.encode({"count": count})))[0] == expected


async def test_a_body_is_read_only_up_to_its_bound(port):
    async def endless():
        while True:
            sent.append(1 << 16)
            yield b"\0" * (1 << 16)

    for path, bound in (("publish", MAX_GROUP_BYTES + PROMPT_BYTES), ("take", MAX_TAKE_BYTES)):
        sent: list[int] = []
        with suppress(OSError):  # the node may close the connection before the client reads the response
            status, response = await port.post(f"/exchange/{path}", endless())
            assert (status, msgspec.json.decode(response)["reason"]) == (413, "size")
        assert sum(sent) < bound + (16 << 20), "more than the bound and the buffers of the connection"
    assert (await port.post("/exchange/publish", packed(port.node)))[0] == 200


async def test_a_body_that_never_ends_is_refused_in_time(port, monkeypatch):
    monkeypatch.setattr(exchange_api, "BODY_S", 0.2)
    is_over = asyncio.Event()

    async def stalled():
        yield b"\x81"
        await is_over.wait()

    try:
        status, response = await port.post("/exchange/take", stalled())
    finally:
        is_over.set()
    assert (status, msgspec.json.decode(response)["reason"]) == (408, "slow")


async def test_groups_that_wait_to_be_scored_are_bounded(port):
    is_over = asyncio.Event()

    async def late():
        yield b"\x81"
        await is_over.wait()

    waiting = [asyncio.create_task(port.post("/exchange/publish", late())) for _ in range(MAX_PENDING)]
    try:
        await eventually(lambda: port.api._num_pending == MAX_PENDING)
        status, response = await port.post("/exchange/publish", packed(port.node))
        assert (status, msgspec.json.decode(response)["reason"]) == (503, "busy")
    finally:
        is_over.set()
        await asyncio.gather(*waiting)
    assert [task.result()[0] for task in waiting] == [400] * MAX_PENDING
    assert port.api._num_pending == 0


async def test_a_refusal_names_its_reason(port):
    group = own_group(port.node.tokenizer, [ANSWER, "no"], temperature=0.5)
    status, response = await port.post("/exchange/publish", msgspec.msgpack.encode(group))
    assert (status, msgspec.json.decode(response)["reason"]) == (422, "sampling")
