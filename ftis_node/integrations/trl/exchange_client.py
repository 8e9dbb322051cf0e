"""HTTP client of an exchange node on this machine. Bodies are MessagePack (`node/exchange/trainer_messages.py`)."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from ftis_node.config.home import TOKEN_HEADER, Home
from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.errors import ConfigError, FileError, FtisError
from ftis_node.files import parse_json, read_text
from ftis_node.node.exchange.trainer_messages import OwnGroup, PublishedGroup, TakeAnswer, TakenGroup, TakeRequest
from ftis_node.node.http_api.node_client import read_status

OK: Final = 200
MAX_ANSWER_BYTES: Final = 128 << 20
ROLE: Final = "exchange"

Answer = TypeVar("Answer", PublishedGroup, TakeAnswer)


class LinkError(FtisError):
    """Failure of the link: the node does not answer, or answers with something else."""


class RefusedGroupError(FtisError):
    """Refusal of a group by the node, with its reason in one word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ExchangeNode:
    """The run and the tokenizer fingerprint (hex) of a running exchange node."""

    manifest: RunManifest
    tokenizer: str


class ExchangeClient:
    """Client of the exchange node on one home. Each request reads address and token: a node may restart."""

    def __init__(self, home: str | Path, *, timeout_s: float) -> None:
        self._home = Home(Path(home).expanduser())
        self._timeout_s = timeout_s

    def connect(self) -> ExchangeNode:
        """Return what the node is. Raises ConfigError if no node of the role `exchange` answers."""
        advice = f"start it: ftis-node join --role exchange --home {self._home.root}"
        try:
            status = read_status(self._home) if self._home.running_url() else None
        except (OSError, FtisError) as error:
            raise ConfigError(f"no exchange node answers ({error}): {advice}") from None
        if status is None:
            raise ConfigError(f"no node runs on {self._home.root}: {advice}")
        if status.node.role != ROLE:
            raise ConfigError(f"the node in {self._home.root} has the role {status.node.role}: {advice}")
        return ExchangeNode(load_manifest(str(self._home.run_toml)), status.model.tokenizer_fingerprint)

    def publish(self, group: OwnGroup) -> PublishedGroup:
        """Publish a group. Raises LinkError, RefusedGroupError."""
        return self._post("/exchange/publish", group, PublishedGroup)

    def take(self, count: int) -> list[TakenGroup]:
        """Take up to `count` foreign groups. Raises LinkError."""
        return self._post("/exchange/take", TakeRequest(count), TakeAnswer).groups

    def _post(self, path: str, message: OwnGroup | TakeRequest, kind: type[Answer]) -> Answer:
        try:
            url, token = self._home.running_url(), read_text(self._home.control_token)
        except (OSError, FileError) as error:
            raise LinkError(f"the home {self._home.root} cannot be read: {error}") from None
        if url is None:
            raise LinkError(f"no node runs on {self._home.root}")
        address = urlsplit(url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=self._timeout_s)
        try:
            connection.request("POST", path, msgspec.msgpack.encode(message), {TOKEN_HEADER: token})
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LinkError(f"the node at {url} does not answer: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if len(answer) > MAX_ANSWER_BYTES:
            raise LinkError(f"the node's answer to {path} has more than {MAX_ANSWER_BYTES} bytes")
        if response.status != OK:
            raise _refusal(response.status, answer)
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise LinkError(f"the node's answer to {path} is unreadable: {error}") from None


def _refusal(status: int, body: bytes) -> FtisError:
    """Return the error that a refusal of the node is. A wrong token is a failure of the link: the node restarted."""
    try:
        document: Any = parse_json(body, source="the answer")
        reason, detail = str(document["reason"]), str(document["error"])
    except (FileError, KeyError, TypeError):
        return LinkError(f"the node answers with status {status}")
    if reason in ("token", "slow"):
        return LinkError(detail)
    return RefusedGroupError(reason, detail)
