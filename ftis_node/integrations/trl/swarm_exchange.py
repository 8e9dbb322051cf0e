"""SwarmExchange: a trainer's link to the swarm, through the exchange node beside it.

A thread publishes the own groups, so the trainer does not wait for their scores. If the link fails, training continues
alone, and the link is tried again after growing pauses. Bodies of HTTP are MessagePack
(`node/exchange/trainer_messages.py`).
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from transformers import TrainerCallback

from ftis_node.backoff import ExponentialBackoff
from ftis_node.config.home import TOKEN_HEADER, Home
from ftis_node.config.manifest import RunManifest, SamplingSection, load_manifest
from ftis_node.errors import ConfigError, FileError, FtisError
from ftis_node.files import parse_json, read_text
from ftis_node.integrations.trl.foreign_groups import Fit, ForeignGroup, read_foreign
from ftis_node.node.exchange.trainer_messages import (
    MAX_TAKEN,
    OwnGroup,
    PublishedGroup,
    TakeAnswer,
    TakenGroup,
    TakeRequest,
)
from ftis_node.node.http_api.node_client import read_status

if TYPE_CHECKING:
    from trl import GRPOTrainer

logger = logging.getLogger(__name__)
MAX_QUEUED: Final = 64  # own groups; the oldest is dropped
MAX_TAKES: Final = 4  # requests for one batch: a taken group can be of no use
TAKE_TIMEOUT_S: Final = 30.0  # the trainer waits, but groups of a take that it gives up count as trained
PUBLISH_TIMEOUT_S: Final = 120.0  # the node scores the completions first
FLUSH_S: Final = 30.0
BACKOFF: Final = ExponentialBackoff(first_s=1.0, ceiling_s=60.0)
OK: Final = 200
MAX_ANSWER_BYTES: Final = 128 << 20
ROLE: Final = "exchange"
Answer = TypeVar("Answer", PublishedGroup, TakeAnswer)
LENGTH: Final = "max_completion_length"  # a trainer may take less than the run allows
PLAIN_SETTINGS = {
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "mask_truncated_completions": False,
}
"""Settings of GRPOConfig that change the distribution or hide tokens, by the value that does neither."""


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


def sampling_options(run: SamplingSection) -> dict[str, Any]:
    """Return the arguments of GRPOConfig with which a trainer samples as the run says."""
    return {
        "num_generations": run.group_size,
        "temperature": run.temperature,
        "top_p": run.top_p,
        "top_k": run.top_k,
        LENGTH: run.max_completion_tokens,
    }


def require_agreement(trainer: GRPOTrainer, node: ExchangeNode, *, tokenizer: str) -> None:
    """Raise ConfigError if the trainer samples otherwise than the run, or has another tokenizer than the node.

    `tokenizer` is the fingerprint of the trainer's.
    """
    args, run, name_of_run = trainer.args, node.manifest.sampling, node.manifest.name
    is_episode = node.manifest.episode is not None
    if tokenizer != node.tokenizer:
        raise ConfigError("the exchange node has another tokenizer: start it with --model and the trainer's model")
    for name, agreed in sampling_options(run).items():
        given = getattr(args, name)
        if given != agreed and (name != LENGTH or is_episode):  # peers refuse a turn that was cut before its limit
            raise ConfigError(f"{name} is {given}, and the run {name_of_run} has {agreed}: set it to {agreed}")
    if args.max_completion_length > run.max_completion_tokens:
        raise ConfigError(
            f"max_completion_length is {args.max_completion_length}, and the run {name_of_run} takes "
            f"{run.max_completion_tokens} tokens: set it to {run.max_completion_tokens} or less"
        )
    if run.mask_truncated:
        raise ConfigError(f"the run {name_of_run} sets sampling.mask_truncated, which only ftis-node's learner has")
    for name, plain in PLAIN_SETTINGS.items():
        if getattr(args, name, plain) not in (plain, {}):
            raise ConfigError(f"peers cannot train on what {name} makes: set it to {plain}")
    if trainer.tools:
        raise ConfigError("peers cannot play what tools answer: omit the tools, or exchange")
    if is_episode and trainer.rollout_func is None:
        raise ConfigError(f"the run {name_of_run} has episodes: give rollout_func=swarm_rollout(RUN)")
    if trainer.rollout_func is not None and not is_episode:
        raise ConfigError(f"the run {name_of_run} has no episodes: omit rollout_func, or exchange")
    if "prompt_index" not in (getattr(trainer.train_dataset, "column_names", None) or ()):
        raise ConfigError("train_dataset needs the column prompt_index: make it with swarm_dataset(RUN)")


class SwarmExchange:
    """Source of foreign groups and sink of own ones, for one trainer."""

    def __init__(self, home: str | Path, *, per_batch: int = 1, max_prompt_length: int = 2048) -> None:
        """Take at most `per_batch` foreign groups for a batch, from the exchange node on `home`; 0: share only.

        `max_prompt_length` is in tokens. Raises ConfigError if no exchange node answers, or for another `per_batch`.
        """
        if not 0 <= per_batch <= MAX_TAKEN:
            raise ConfigError(f"per_batch must be 0 to {MAX_TAKEN}, not {per_batch}")
        self.per_batch = per_batch
        self._max_prompt_length = max_prompt_length
        self._taking = ExchangeClient(home, timeout_s=TAKE_TIMEOUT_S)
        self.node = self._taking.connect()
        self._publishing = ExchangeClient(home, timeout_s=PUBLISH_TIMEOUT_S)
        self._changed = threading.Condition()
        self._num_failures = 0  # of the link, since it last worked
        self._closed_until = 0.0
        self._queue: deque[OwnGroup] = deque(maxlen=MAX_QUEUED)
        self._is_busy = self._is_closed = False
        self._num_shared = 0
        self._reported: set[str] = set()
        threading.Thread(target=self._publish_all, name="exchange-publish", daemon=True).start()

    def grpo_options(self) -> dict[str, Any]:
        return sampling_options(self.node.manifest.sampling)

    def draw(self, fit: Fit) -> list[ForeignGroup]:
        """Return new groups of peers that `fit` accepts, at most `per_batch`; none while the link is down."""
        chosen: list[ForeignGroup] = []
        if not self.per_batch or self._wait_s:
            return chosen
        try:
            for _ in range(MAX_TAKES):
                taken = self._taking.take(self.per_batch - len(chosen))
                read = (read_foreign(one, fit, max_prompt_length=self._max_prompt_length) for one in taken)
                chosen.extend(group for group in read if group is not None)
                if not taken or len(chosen) == self.per_batch:
                    break
        except (LinkError, RefusedGroupError, ValueError) as error:
            self._link_failed(error)
        else:
            self._link_worked()
        return chosen

    def share(self, group: OwnGroup) -> None:
        """Queue an own group for the node. Above `MAX_QUEUED` the oldest is dropped."""
        with self._changed:
            self._queue.append(group)
            self._changed.notify_all()

    def take_num_shared(self) -> int:
        """Return the number of groups that the node has published since the last call."""
        with self._changed:
            number, self._num_shared = self._num_shared, 0
        return number

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued groups are sent, and return whether they are. Do not wait while the link is down."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle or self._wait_s, timeout_s)
            return self._is_idle

    @property
    def _wait_s(self) -> float:
        """Return the seconds until the next try of the link, 0 if it may be used."""
        return max(0.0, self._closed_until - time.monotonic())

    def _link_failed(self, error: Exception) -> None:
        with self._changed:
            self._num_failures += 1
            self._closed_until = time.monotonic() + BACKOFF.delay_s(self._num_failures)
            if self._num_failures == 1:
                logger.warning("exchange node unreachable: %s; training continues without the swarm", error)

    def _link_worked(self) -> None:
        with self._changed:
            if self._num_failures:
                logger.warning("exchange node reachable again, after %d failures", self._num_failures)
            self._num_failures, self._closed_until = 0, 0.0

    @property
    def _is_idle(self) -> bool:
        return not self._queue and not self._is_busy

    def close(self) -> None:
        """End the thread. Queued groups are dropped: call `flush` first to wait for them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _publish_all(self) -> None:
        while (group := self._next()) is not None:
            self._publish(group)

    def _next(self) -> OwnGroup | None:
        """Wait for the next group and for the link; return None after `close`."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._queue) or self._is_closed)
            while not self._is_closed and (wait_s := self._wait_s):
                self._changed.notify_all()  # `flush` does not wait for the next try
                self._changed.wait(wait_s)
            if self._is_closed:
                return None
            self._is_busy = True
            return self._queue.popleft()

    def _publish(self, group: OwnGroup) -> None:
        try:
            self._publishing.publish(group)
        except RefusedGroupError as error:
            if error.reason not in self._reported:
                self._reported.add(error.reason)
                logger.warning(
                    "own group not shared (%s): %s; later ones of this reason are not logged", error.reason, error
                )
        except LinkError as error:
            self._link_failed(error)
            return
        else:
            with self._changed:
                self._num_shared += 1
        self._link_worked()


class FlushCallback(TrainerCallback):  # type: ignore[misc]  # transformers gives its callbacks no types
    """Callback that waits at the end of the training until the last own groups are shared."""

    def __init__(self, exchange: SwarmExchange) -> None:
        self._exchange = exchange

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if not self._exchange.flush(FLUSH_S):
            logger.warning(
                "last own groups not shared: the exchange node is unreachable, or takes over %.0f s", FLUSH_S
            )
