"""Envelopes -> validation -> buffer -> a step's groups -> batch and loss of the learner; also served to peers."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import torch

from ftis_node.algorithms.methods import METHODS, method_parameters
from ftis_node.cli.commands.replay import WIDTH, _table, group_document
from ftis_node.learner.batch import make_batch, make_micro_batches, make_packed_micro_batches
from ftis_node.learner.messages import TrainGroup
from ftis_node.learner.step.objective import Objective
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import CODECS, pack_group, pack_text_group
from ftis_node.records.envelope import open_announcement
from ftis_node.records.peer_messages import BackfillRequest
from ftis_node.replay.group_choice import choose_sapo
from ftis_node.replay.group_history import read_group_history
from ftis_node.validation import ValidationResult
from ftis_node.view.groups import group_lines, group_row
from ftis_node.view.spans import text_lines, text_of
from tests.conftest import make_group, make_text_group, problem_hash
from tests.fuzz.fuzzed_node import HOSTILE, MADE_AT, OWN, RUN, FuzzedNode, fuzzed_node, running, sign_body
from tests.fuzz.mutator import Item, join, parsed

MEMBER_BITS = 0x03
AS_IS = 0x80  # raw bytes instead of a body to sign
INVALID_FIELDS = 0x40  # a signed body without the fields that the cheap rules require
SAPO = 0x20  # the step chooses groups by SAPO
METHOD_NAMES = sorted(METHODS)


def kinds(tag: int) -> type | None:
    return pb.Envelope if tag & AS_IS else pb.Body


async def chain(items: Sequence[Item]) -> None:
    """Submit each envelope, train a step on the accepted groups, and serve them."""
    async with fuzzed_node() as fuzzed:
        fuzzed.renders_all_views = False
        async with running(fuzzed.intake.run()):
            for number, item in enumerate(items, start=1):
                await _submit(fuzzed, item, number)
        rule: Any = {"rule": lambda *some: choose_sapo(*some, seed=1)} if items and items[0].tag & SAPO else {}
        _render(fuzzed)
        await _serve(fuzzed)
        groups = fuzzed.parts.store.buffer.take(1, own=0, foreign=len(items), **rule)[0]
        loop = fuzzed.wiring.train_loop(fuzzed.wiring.step_gate(), last_step=None)
        batch = loop.step_peers.batch(groups)
        assert len(batch) == len(groups)
        assert not any(group.own for group in batch), "a group of a peer is marked as own"
        if batch:
            _learn(batch, method=METHOD_NAMES[(items[0].tag >> 2 & 7) % len(METHOD_NAMES)])


async def _submit(fuzzed: FuzzedNode, item: Item, number: int) -> None:
    identity = HOSTILE[(item.tag & MEMBER_BITS) % len(HOSTILE)]
    data = item.data
    if not item.tag & AS_IS:
        message = parsed(pb.Body, item.data)
        message.sender = identity.peer
        if not item.tag & INVALID_FIELDS:
            _set_required_fields(message, number)
        data = sign_body(message.SerializeToString(), identity)
    verdict: ValidationResult = await fuzzed.intake.submit(data, origin=identity.peer_id)
    fuzzed.wiring.announcements.refuse([getattr(verdict, "group_id", None)])


def _set_required_fields(message: Any, number: int) -> None:
    """Set the fields that the cheap rules require, so that the other fields are tested."""
    message.schema, message.run, message.task = 1, bytes.fromhex(RUN.run_id), "arithmetic"
    message.number = message.number or number
    message.prompt_index %= 1000
    message.sampling.CopyFrom(pb.Sampling(temperature=1.0, top_p=1.0))
    own = make_group(HOSTILE[0])
    is_text = message.codec == pb.CODEC_TEXT
    message.tokenizer = bytes(16) if is_text else bytes.fromhex(own.tokenizer)
    message.problem_hash, message.prompt_hash = problem_hash(message.prompt_index), own.prompt_hash


def _render(fuzzed: FuzzedNode) -> None:
    for group in fuzzed.parts.store.reader.list_groups(limit=50):
        history = read_group_history(fuzzed.home, group.id)
        assert history is not None
        lines = [*map(text_of, group_lines(history, with_tokens=True)), *text_lines(group_lines(history), WIDTH)]
        assert all(text.isprintable() for text in lines), lines
        json.dumps(group_document(history), allow_nan=False)
        assert all(span.text.isprintable() for span in group_row(group, {}))
        assert all(line.isprintable() for line in _table([group], now=0.0))
        json.dumps(asdict(group), allow_nan=False, default=bytes.hex)
    for one in HOSTILE:
        fuzzed.parts.store.reader.groups_of(one.peer_id, limit=5)
    fuzzed.parts.peers.share_cap()


async def _serve(fuzzed: FuzzedNode) -> None:
    """Serve the accepted groups; their announcements must be valid for honest members."""
    served = fuzzed.wiring.served
    answers = await served.answer(HOSTILE[0].peer_id, BackfillRequest().to_bytes())
    ids = [open_announcement(answer).id for answer in answers]
    bodies = await served.lookup(ids)
    assert len(bodies) == len(ids)


def _learn(groups: list[TrainGroup], *, method: str) -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(groups), type=list[TrainGroup])
    batch = make_batch(sent)
    for num_tokens in (8, 4096):
        make_micro_batches(batch, max_tokens=num_tokens)
        make_packed_micro_batches(batch, max_tokens=num_tokens)
    torch.manual_seed(0)
    logprobs = (-torch.rand(batch.mask.shape)).requires_grad_()
    parameters = {name: 6 for name in ("max_completion_length",) if name in method_parameters(method)}
    objective = Objective(method, parameters, max_logprob_gap_nats=8.0)
    loss, _ = objective.loss(logprobs, batch, objective.advantages(batch), first_pass=None)
    loss.backward()
    assert bool(torch.isfinite(loss)), (method, loss)
    assert logprobs.grad is None or bool(torch.isfinite(logprobs.grad).all()), method
    batch.sampled_by(3)


def seeds() -> list[bytes]:
    group = make_group(HOSTILE[0], run_id=RUN.run_id, created_at=MADE_AT)
    text_group = make_text_group(HOSTILE[0], run_id=RUN.run_id, created_at=MADE_AT)
    parsable = replace(
        text_group, completions=tuple(replace(completion, text="10") for completion in text_group.completions)
    )
    bodies = [pack_group(group, codec=codec) for codec in CODECS]
    texts = [pack_text_group(text_group), pack_text_group(parsable)]
    claims = pack_group(replace(group, weights_of=OWN.peer_id))
    return [
        *(join([Item(number % 3, body)]) for number, body in enumerate([*bodies, *texts])),
        join([Item(0, bodies[0]), Item(1, bodies[1]), Item(SAPO | 2, bodies[2])]),
        join([Item(0, claims), Item(1, bodies[1])]),
        join([Item(0, bodies[0]), Item(0, bodies[0]), Item(1, texts[1])]),
    ]
