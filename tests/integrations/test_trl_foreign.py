"""Foreign groups in TRL's batches: the choice from a buffer on disk, and the loss of a real step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftis_node.algorithms import policy_loss
from ftis_node.config.home import Home
from ftis_node.errors import ConfigError
from ftis_node.integrations.trl.foreign_groups import Fit, ForeignGroups, foreign_rows
from ftis_node.models.fingerprint import tokenizer_fingerprint
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.group import SamplingSettings
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.lifecycle import ReleaseReason
from tests.conftest import EOS, PROMPT_IDS, TOKENIZER, make_completion, make_group
from tests.integrations.test_trl import GROUP_SIZE, Recorded, logprobs_by_hand, make_trainer
from tests.trained_models import trained_model

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.records.identity import Identity

pytestmark = pytest.mark.filterwarnings("ignore")
FIT = Fit(tokenizer=TOKENIZER, vocab_size=32, group_size=2, temperature=1.0, max_completion_length=3)


def admit(home: Path, identity: Identity, *, own: bool = False, **changes: Any) -> bytes:
    """Store a group in the buffer of the home; return its id."""
    group = make_group(identity, **changes)
    envelope = seal_group(group, identity)
    buffer = ReplayBuffer(Home(home).replay)
    assert buffer.admit(Accepted(envelope, envelope.to_bytes(), group, tuple(PROMPT_IDS)), own=own)
    buffer.close()
    return envelope.id


def numbers(foreign: ForeignGroups, fit: Fit = FIT) -> list[int]:
    return [each.group.number for each in foreign.draw(fit)]


def test_the_newest_groups_are_drawn_once(tmp_path: Path, identity: Identity) -> None:
    with pytest.raises(ConfigError, match="no replay buffer"):
        ForeignGroups(tmp_path)
    for number in (1, 2, 3):
        admit(tmp_path, identity, number=number)
    foreign = ForeignGroups(tmp_path, per_batch=2)
    assert [numbers(foreign), numbers(foreign), numbers(foreign)] == [[3, 2], [1], []]
    admit(tmp_path, identity, number=4)
    assert numbers(foreign) == [4]


@pytest.mark.parametrize(
    "changes",
    [
        {"own": True},
        {"tokenizer": "12" * 16},
        {"created_at": time.time() - 7200},
        {"sampling": SamplingSettings(temperature=0.5)},
        {"completions": (make_completion(10, 11), make_completion(12, 13))},
        {"completions": (make_completion(10, reward=1.0), *[make_completion(12)] * 2)},
        {"completions": (make_completion(10, 11, 12, EOS, reward=1.0), make_completion(12))},
        {"completions": (make_completion(32, reward=1.0), make_completion(12))},
    ],
    ids=["own", "tokenizer", "age", "temperature", "equal rewards", "size", "length", "vocabulary"],
)
def test_a_group_that_does_not_fit_is_not_drawn(tmp_path: Path, identity: Identity, changes: dict[str, Any]) -> None:
    admit(tmp_path, identity, **changes)
    assert numbers(ForeignGroups(tmp_path)) == []
    admit(tmp_path, identity, number=2)
    assert numbers(ForeignGroups(tmp_path)) == [2]


def test_a_foreign_answer_ends_with_the_trainers_end_token(tmp_path: Path, identity: Identity) -> None:
    admit(tmp_path, identity, completions=(make_completion(10, 11, EOS, reward=1.0), make_completion(12)))
    for end_ids, last in (((5, 6), 5), ((5, EOS), EOS), ((), EOS)):
        [group] = ForeignGroups(tmp_path).draw(replace(FIT, end_ids=end_ids))
        rows = foreign_rows([group], first_group=0, scale="std")
        assert rows["completion_ids"].tolist() == [[10, 11, last], [12, 0, 0]]


@pytest.mark.parametrize(
    ("reason", "drawn"), [(ReleaseReason.TRAINED, [1]), (ReleaseReason.AUDIT, []), (ReleaseReason.REFUSED, [])]
)
def test_a_group_that_the_node_found_faulty_is_not_drawn(
    tmp_path: Path, identity: Identity, reason: ReleaseReason, drawn: list[int]
) -> None:
    admit(tmp_path, identity)
    buffer = ReplayBuffer(Home(tmp_path).replay)
    buffer.take(1, own=0, foreign=1)
    buffer.release_step(1, reason)
    buffer.close()
    assert numbers(ForeignGroups(tmp_path)) == drawn


def test_a_real_step_trains_on_a_foreign_group(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained_model("s")
    completions = [make_completion(19 + extra, 20, EOS, reward=extra / GROUP_SIZE) for extra in range(GROUP_SIZE)]
    tokenizer = tokenizer_fingerprint(AutoTokenizer.from_pretrained(model))
    admit(tmp_path, identity, tokenizer=tokenizer, completions=completions)
    monkeypatch.setattr("tests.integrations.test_trl.SwarmGRPOTrainer", Recorded)
    trainer = make_trainer(tmp_path / "trl", foreign=ForeignGroups(tmp_path), method_params={"cap": 1.5})
    trainer.train()
    assert isinstance(trainer, Recorded)
    [(inputs, loss)] = trainer.seen
    is_foreign = inputs["sender_ids"] == 1
    assert (len(is_foreign), int(is_foreign.sum())) == (2 * GROUP_SIZE, GROUP_SIZE)
    found = inputs["completion_ids"][is_foreign][:, :3].tolist()
    assert sorted(found) == [completion.token_ids.tolist() for completion in completions]

    before = AutoModelForCausalLM.from_pretrained(model)
    before.load_state_dict(trainer.before)
    learner = logprobs_by_hand(before, inputs)
    behaviour = learner.clone()
    behaviour[is_foreign, :3] = torch.from_numpy(completions[0].logprobs)
    mask = inputs["completion_mask"].bool()
    expected, figures = policy_loss(
        "ftis", learner, behaviour, mask, inputs["advantages"], inputs["group_ids"], cap=1.5
    )
    assert loss == pytest.approx(float(expected), abs=1e-5)
    on_policy, _ = policy_loss("ftis", learner, learner, mask, inputs["advantages"], inputs["group_ids"], cap=1.5)
    assert abs(loss - float(on_policy)) > 1e-4, "the peer's log-probs do not change the loss"
    [log] = [line for line in trainer.state.log_history if "foreign_groups" in line]
    assert log["foreign_groups"] == 1
    assert log["kept_fraction"] == pytest.approx(figures["kept_fraction"])


def test_with_several_updates_foreign_rows_have_the_first_logprobs_of_the_learner(
    tmp_path: Path, identity: Identity
) -> None:
    tokenizer = tokenizer_fingerprint(AutoTokenizer.from_pretrained(trained_model("s")))
    completions = [make_completion(19 + extra, 20, EOS, reward=extra / GROUP_SIZE) for extra in range(GROUP_SIZE)]
    admit(tmp_path, identity, tokenizer=tokenizer, completions=completions)
    trainer = make_trainer(tmp_path / "trl", foreign=ForeignGroups(tmp_path), grpo={"num_iterations": 2})
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": f"{1 + row // GROUP_SIZE}+4="} for row in range(8)])
    assert batch["sender_ids"].tolist() == [0] * GROUP_SIZE + [1] * GROUP_SIZE
    assert batch["group_ids"].tolist() == [0] * GROUP_SIZE + [1] * GROUP_SIZE
    mask = batch["completion_mask"].bool()
    expected = logprobs_by_hand(trainer.model, batch)
    torch.testing.assert_close(batch["old_per_token_logps"][mask], expected[mask], atol=1e-4, rtol=0)


def test_a_batch_has_at_least_one_own_group(tmp_path: Path, identity: Identity) -> None:
    admit(tmp_path, identity)
    with pytest.raises(ConfigError, match="below the 2 groups of a batch"):
        make_trainer(tmp_path / "trl", foreign=ForeignGroups(tmp_path, per_batch=2))
