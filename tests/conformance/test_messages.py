"""The verdicts in `messages.json` are those of this reader; the bytes of the directory are those of hivemind."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ftis_node.config.manifest import parse_canonical
from ftis_node.errors import RecordError
from ftis_node.gossip import GossipLimits
from ftis_node.gossip.frames import unpack_ids
from ftis_node.gossip.names import manifest_key
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, DictionaryDHTValue, MSGPackSerializer, dht_pb2
from ftis_node.records.envelope import open_announcement
from ftis_node.records.group import FinishReason
from ftis_node.records.identity import peer_id_text
from ftis_node.records.peer_messages import open_backfill_request
from ftis_node.records.token_batch import TokenBatch
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.validation import Refused, ValidationContext, validate
from tests.records import wire_example as example

from .make_messages import ACCEPTED, MESSAGES, document

STORED: dict[str, Any] = json.loads(MESSAGES.read_text())
NODE = STORED["node"]


class _AsciiTokenizer:
    """The tokenizer of the file: an id is an ASCII character, and a prompt is its message without a template."""

    fingerprint = NODE["tokenizer"]
    num_ids = vocab_size = NODE["vocabulary"]
    end_ids, observation_form = (NODE["end"],), ()

    def encode_prompt(self, messages: Sequence[Mapping[str, str]], *, opening: str) -> list[int]:
        (message,) = messages
        return list((message["content"] + opening).encode("ascii"))

    def answer_texts(self, tokens: TokenBatch, finish_reasons: Sequence[FinishReason], *, opening: str) -> list[str]:
        return [
            self.answer_text(ids.tolist(), has_end=reason is FinishReason.STOP, opening=opening)
            for ids, reason in zip(tokens.ids_of_each(), finish_reasons, strict=True)
        ]

    def answer_text(self, ids: Sequence[int], *, has_end: bool, opening: str) -> str:
        return opening + bytes(ids[:-1] if has_end else ids).decode("ascii")

    def encode_observation(self, text: str, *, opening: str, max_tokens: int, has_end: bool) -> list[int]:
        return list((text[:max_tokens] + opening).encode("ascii"))


def _context(manifest: str = NODE["manifest"]) -> ValidationContext:
    """Return the state of the node in the file, in its run or another one."""
    run = parse_canonical(manifest.encode(), source="messages.json")
    scorer = IsolatedScorer(load_task(run.task))
    used = {
        (peer_id_text(bytes.fromhex(sender)), number)
        for sender, numbers in NODE["used_numbers"].items()
        for number in numbers
    }
    banned = {peer_id_text(bytes.fromhex(sender)) for sender in NODE["banned"]}
    return ValidationContext(
        manifest=run,
        tokenizer=_AsciiTokenizer(),  # type: ignore[arg-type]
        resolve=lambda ref, cost: scorer.resolve(ref, cost=cost),
        scorer=scorer,
        is_known=lambda group_id: False,
        has_number=lambda sender, number: (sender, number) in used,
        is_banned=banned.__contains__,
        now=lambda: NODE["now_ms"] / 1000,
    )


def _verdict(read: Callable[[bytes], object], data: str, *, prefix: str = "") -> str:
    """Return the reason of a reader's refusal with the prefix of its counter, or `accepted`."""
    try:
        read(bytes.fromhex(data))
    except RecordError as error:
        return f"{prefix}{error.reason}"
    return ACCEPTED


def _cases(part: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("message", STORED[part], ids=lambda message: message["case"])


def test_the_file_is_current():
    assert json.loads(json.dumps(document())) == STORED


@_cases("groups")
async def test_a_group_has_its_verdict(message):
    verdict = await validate(bytes.fromhex(message["data"]), _context())
    assert (verdict.refusal.reason if isinstance(verdict, Refused) else ACCEPTED) == message["verdict"]


@_cases("episodes")
async def test_an_episode_has_its_verdict(message):
    verdict = await validate(bytes.fromhex(message["data"]), _context(NODE["episodes"]["manifest"]))
    assert (verdict.refusal.reason if isinstance(verdict, Refused) else ACCEPTED) == message["verdict"]


@_cases("announcements")
def test_an_announcement_has_its_verdict(message):
    assert _verdict(open_announcement, message["data"], prefix="announcement_") == message["verdict"]


@_cases("questions")
def test_a_question_has_its_verdict(message):
    assert _verdict(open_backfill_request, message["data"], prefix="question_") == message["verdict"]


@_cases("id_lists")
def test_a_list_of_ids_has_its_verdict(message):
    verdict = _verdict(lambda data: unpack_ids(data, limits=GossipLimits()), message["data"])
    assert ("cut" if verdict == "ids" else verdict) == message["verdict"]


PAGE = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text()
DICTIONARY = 0x50


def test_the_page_has_the_request_for_a_manifest():
    key = DHTID.generate(manifest_key(example.RUN_ID)).to_bytes()
    request = dht_pb2.FindRequest(keys=[key]).SerializeToString()
    assert f"<!-- bytes: find -->\n    {request.hex()}\n" in PAGE


def test_a_dictionary_is_readable_without_hivemind():
    expiry = time.time() + 60
    stored = DictionaryDHTValue()
    stored.store(example.IDENTITY.peer_id, MSGPackSerializer.dumps(example.member()), expiry)
    read = msgpack.unpackb(MSGPackSerializer.dumps(stored))
    assert isinstance(read, msgpack.ExtType) and read.code == DICTIONARY
    _, latest, ((subkey, value, value_expiry),) = msgpack.unpackb(read.data)
    assert (latest, subkey, value_expiry) == (expiry, example.IDENTITY.peer_id, expiry)
    assert msgpack.unpackb(value) == example.member()
