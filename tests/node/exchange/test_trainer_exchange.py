"""The exchange of a node with a trainer on real components: the groups that the trainer publishes and takes."""

import inspect
import re
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from ftis_node.node.exchange.trainer_exchange import PASSING, TrainerExchange
from ftis_node.node.exchange.trainer_messages import PublishedGroup
from ftis_node.node.http_api import exchange_api
from ftis_node.node.http_api.exchange_api import BODY_S, MAX_PENDING
from ftis_node.node.startup.home_opening import replace_files
from ftis_node.node.storage.disk_space import DiskSpace
from ftis_node.node.storage.node_store import DiskThread
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.wiring import NodeComponents
from ftis_node.records.codec import hash_messages, hash_prompt, unpack_group
from ftis_node.records.envelope import open_envelope
from ftis_node.records.group import CompletionStatus, FinishReason, Group
from ftis_node.records.identity import Identity
from ftis_node.swarm.reputation import Behaviour
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.registry import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation import Refusal
from tests.conftest import with_sections
from tests.node.exchange.parts import MANIFEST, PROBLEM, exchanging, own_group
from tests.node.nodes import ME, components, events_of, notes_of
from tests.replay.test_buffer import accepted

ANSWER = load_task("arithmetic")[PROBLEM].answer
ANN = Identity.from_seed(bytes([2]) * 32)
BOB = Identity.from_seed(bytes([3]) * 32)


def first_published(node: NodeComponents) -> Group:
    [envelope] = node.store.reader.envelopes(node.store.reader.own_ready()[:1])
    return unpack_group(open_envelope(envelope).body)


async def test_a_trainers_group_is_scored_signed_and_stored_for_peers(tmp_path):
    async with exchanging(tmp_path) as (node, exchange):
        offered = own_group(node.tokenizer, [ANSWER, "no"], created_at=time.time() - 20)
        assert await exchange.publish(offered) == PublishedGroup(1, [1.0, 0.0])
        assert await exchange.publish(own_group(node.tokenizer, [ANSWER, "1"], problem=PROBLEM)) == PublishedGroup(
            2, [1.0, 0.0]
        )
        group = first_published(node)
        assert (group.sender, group.number, group.rewards) == (ME.peer_id, 1, (1.0, 0.0))
        assert group.model == f"trainer of {node.context.about.model}", "peers would audit it as that model"
        assert group.tokens.token_ids.tobytes() == offered.token_ids
        assert group.tokens.logprobs.tobytes() == offered.logprobs
        assert group.prompt_ref.index == PROBLEM
        assert group.created_at == pytest.approx(offered.created_at, abs=1e-3), "not the time of sampling"
        assert group.finish_reasons == (FinishReason.STOP, FinishReason.STOP)
        assert node.context.state.policy_version == group.policy_version == 3
        assert node.slots.in_generation == 0


async def test_a_group_that_peers_would_refuse_is_not_published(tmp_path):
    async with exchanging(tmp_path) as (node, exchange):
        offered = own_group(node.tokenizer, [ANSWER, "no"])
        num_tokens = sum(offered.lengths)
        fields = {name: getattr(offered, name) for name in offered.__struct_fields__}
        refusals: list[tuple[dict[str, Any], str]] = [
            ({"problem": PROBLEM + 1}, "prompt_mismatch"), ({"problem_hash": b"\0" * 16}, "prompt_mismatch"),
            ({"prompt_ids": b"\0" * 7}, "prompt_mismatch"), ({"prompt_ids": b"\xff" * 8}, "token_out_of_range"),
            ({"prompt_ids": b"\0\0\0\0" * 5000}, "length"), ({"end_ids": [2**31 - 1]}, "token_out_of_range"),
            ({"tokenizer": "00" * 16}, "tokenizer"), ({"temperature": 0.7}, "sampling"),
            ({"temperature": float("nan")}, "sampling"), ({"top_k": 20}, "sampling"),
            ({"created_at": time.time() - MANIFEST.step.max_age_s - 60}, "stale"),
            ({"created_at": float("inf")}, "clock_skew"), ({"created_at": float("nan")}, "clock_skew"),
            ({"logprobs": b""}, "logprobs"), ({"logprobs": b"\0" * 4}, "malformed"),
            ({"token_ids": b"\0" * 7}, "malformed"), ({"lengths": [2**31 - 1] * 9}, "malformed"),
            ({"token_ids": np.full(num_tokens, -1, "<i4").tobytes()}, "token_out_of_range"),
            ({"logprobs": np.full(num_tokens, np.nan, "<f4").tobytes()}, "logprobs"),
            ({"logprobs": np.full(num_tokens, 1.0, "<f4").tobytes()}, "logprobs"),
            ({"lengths": [num_tokens]}, "group_size"),
        ]  # fmt: skip
        for changes, reason in refusals:
            refused = await exchange.publish(type(offered)(**(fields | changes)))
            assert isinstance(refused, Refusal)
            assert refused.reason == reason, changes
            assert node.store.reader.own_ready() == []
            assert node.slots.in_generation == 0, "the slot is still in use"
        assert await exchange.publish(offered) == PublishedGroup(1, [1.0, 0.0]), "a number is used up"


@pytest.mark.parametrize("opening", ["", "<think>\n"])
async def test_a_trainer_may_render_the_problem_in_its_own_way(tmp_path, opening):
    sampling = MANIFEST.sampling.model_copy(update={"max_completion_tokens": 32, "max_total_tokens": 512})
    async with exchanging(tmp_path, manifest=MANIFEST.model_copy(update={"sampling": sampling})) as (node, exchange):
        prompt_ids = node.tokenizer.encode_text(f"Today is 27 Nov 2026. {opening}")
        texts = [f"</think>{ANSWER}" if opening else ANSWER, "no"]
        offered = own_group(node.tokenizer, texts, prompt_ids=np.array(prompt_ids, "<i4").tobytes())
        assert await exchange.publish(offered) == PublishedGroup(1, [1.0, 0.0])
        group = first_published(node)
        item = node.task[PROBLEM]
        assert (group.problem_hash, group.opening) == (hash_messages(item.prompt), opening)
        assert group.prompt_hash == hash_prompt(prompt_ids), "peers would audit it as if sampled after their prompt"
        assert group.prompt_hash != hash_prompt(node.tokenizer.encode_prompt(item.prompt, opening=opening))


async def test_a_completion_ends_at_the_trainers_end_tokens(tmp_path):
    async with exchanging(tmp_path) as (node, exchange):
        end_id = next(token for token in range(node.tokenizer.vocab_size) if token not in node.tokenizer.eos_ids)
        ids = [*node.tokenizer.encode_text(ANSWER), end_id]
        assert ids.count(end_id) == 1
        flat, logprobs = np.array(ids * 2, "<i4"), np.linspace(-0.5, -0.1, 2 * len(ids), dtype="<f4")
        changes = {"token_ids": flat.tobytes(), "logprobs": logprobs.tobytes(), "lengths": [len(ids)] * 2}
        offered = own_group(node.tokenizer, ["", ""], **changes, end_ids=[end_id])
        assert await exchange.publish(offered) == PublishedGroup(1, [1.0, 1.0])
        group = first_published(node)
        assert group.end_ids == (end_id,)
        assert group.finish_reasons == (FinishReason.STOP, FinishReason.STOP)


class BusyScorer(IsolatedScorer):
    """A scorer that does not finish the first text, as on a busy machine."""

    async def score(
        self, item: TaskItem, texts: Sequence[str], *, cost: ScoringCost | None = None
    ) -> list[tuple[float, CompletionStatus]]:
        scores = await super().score(item, texts, cost=cost)
        assert cost is not None
        cost.num_lost += 1
        return [(0.0, CompletionStatus.UNSCORED), *scores[1:]]


async def test_a_group_that_was_not_scored_in_time_is_refused_for_now(tmp_path):
    scorer = BusyScorer(load_task("arithmetic"))
    async with exchanging(tmp_path, scorer=scorer) as (node, exchange):
        refused = await exchange.publish(own_group(node.tokenizer, [ANSWER, "no"]))
        assert isinstance(refused, Refusal)
        assert refused.reason == "scoring_timeout" and refused.reason in PASSING
        assert node.store.reader.own_ready() == [] and node.slots.in_generation == 0
    await scorer.close()


async def test_publishing_is_refused_while_no_peer_fetches_groups(tmp_path):
    async with exchanging(tmp_path, slots=SlotPool(1)) as (node, exchange):
        assert isinstance(await exchange.publish(own_group(node.tokenizer, [ANSWER, "no"])), PublishedGroup)
        busy = await exchange.publish(own_group(node.tokenizer, ["1", "no"], policy_version=9))
        assert isinstance(busy, Refusal)
        assert busy.reason == "busy"
        assert node.context.state.policy_version == 9, (
            "without the new version, old groups do not become stale and free their slots"
        )


async def test_a_take_by_sapo_leaves_the_own_groups_to_peers(tmp_path):
    async with exchanging(tmp_path, manifest=with_sections(MANIFEST, step={"group_selection": "sapo"})) as (
        node,
        exchange,
    ):
        assert node.store.buffer.admit(accepted(ME, 1), own=True)
        assert await exchange.take(3) == []
        assert node.store.reader.ready_counts() == (1, 0)


async def test_foreign_groups_are_taken_once_and_their_senders_gain_reputation(tmp_path):
    async with exchanging(tmp_path) as (node, exchange):
        for sender in (ANN, BOB):
            for number in (1, 2):
                assert node.store.buffer.admit(accepted(sender, number), own=False)
        assert node.store.buffer.admit(accepted(ME, 1), own=True)
        first, second, third = [await exchange.take(count) for count in (3, 3, 3)]
        assert [len(groups) for groups in (first, second, third)] == [3, 1, 0]
        taken = [*first, *second]
        assert {group.sender for group in first} == {ANN.peer_id, BOB.peer_id}
        assert len({group.id for group in taken}) == 4
        assert node.store.reader.ready_counts() == (1, 0), "the own group is not there for peers"
        assert node.store.reader.figures().released == {"trained": 4}
        assert [behaviour for _, behaviour, _ in notes_of(node)] == [Behaviour.CONTRIBUTED] * 4
        assert node.context.counters.groups_trained_foreign == 4
        assert [event["step"] for event in events_of(node, "taken")] == [1, 1, 1, 2]


async def test_a_failed_take_loses_no_groups(tmp_path):
    """The disk is full. The trainer did not get the groups, so the next take returns them again."""
    async with exchanging(tmp_path, disk=DiskThread(DiskSpace(root=tmp_path))) as (node, exchange):
        assert node.store.buffer.admit(accepted(ANN, 1), own=False)
        await _fail_to_take(node, exchange)
        assert [group.sender for group in await exchange.take(1)] == [ANN.peer_id]
        assert await exchange.take(1) == []
        assert node.context.counters.groups_trained_foreign == 1


async def test_a_failed_take_returns_no_groups_of_earlier_starts(tmp_path):
    async with exchanging(tmp_path) as (node, exchange):
        node.context.events.write("start", peer="")
        for number in (1, 2, 3):
            assert node.store.buffer.admit(accepted(ANN, number), own=False)
        assert len([await exchange.take(1) for _ in range(3)]) == 3
    async with exchanging(tmp_path) as (node, exchange):
        node.context.events.write("start", peer="")
        assert node.store.buffer.admit(accepted(BOB, 1), own=False)
        await _fail_to_take(node, exchange)
        await exchange.take(0)
        assert node.store.reader.ready_counts() == (0, 1)
    replace_files(node.home)
    async with exchanging(tmp_path) as (_, exchange):
        assert [group.sender for group in await exchange.take(9)] == [BOB.peer_id], "the start discards the buffer"


async def _fail_to_take(node: NodeComponents, exchange: TrainerExchange) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL  # type: ignore[misc]
    with patch.object(node.store.buffer, "release_step", side_effect=error), pytest.raises(sqlite3.OperationalError):
        await exchange.take(9)


async def test_a_take_that_a_crash_interrupted_counts_as_trained(tmp_path):
    with components(tmp_path) as node:
        assert node.store.buffer.admit(accepted(ANN, 1), own=False)
        assert len(node.store.buffer.take(5, own=0, foreign=1).groups) == 1
    async with exchanging(tmp_path) as (node, exchange):
        assert node.store.reader.figures().released == {"trained": 1}
        assert await exchange.take(1) == []


ROOT = Path(__file__).parents[3]


def test_the_page_has_each_reason_of_a_request():
    page = (ROOT / "docs/train/trl.md").read_text("utf-8")
    table = page[page.index("| reason | the request is refused") :].partition("\n\n")[0]
    reasons = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", table, flags=re.MULTILINE))
    code = inspect.getsource(exchange_api) + inspect.getsource(TrainerExchange.publish)
    assert set(reasons) == {"token", *re.findall(r'Refusal\("(\w+)"', code)}  # `access.py` checks the token
    assert f"{MAX_PENDING} groups" in reasons["busy"] and f"{BODY_S:.0f} s" in reasons["slow"]
