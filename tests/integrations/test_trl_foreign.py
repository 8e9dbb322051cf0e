"""Foreign groups in TRL's batches: which ones fit, and the loss of a real step."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftis_node.algorithms import policy_loss
from ftis_node.config.manifest import load_manifest
from ftis_node.errors import ConfigError
from ftis_node.integrations.trl.foreign_groups import Fit, ForeignGroup, foreign_rows, read_foreign
from ftis_node.models.fingerprint import tokenizer_fingerprint
from ftis_node.node.exchange.trainer_messages import TakenGroup
from ftis_node.records.codec import pack_group
from ftis_node.records.group import Completion, SamplingSettings
from ftis_node.records.identity import Identity
from tests.conftest import EOS, PROMPT_IDS, TOKENIZER, make_completion, make_group, with_sections
from tests.integrations.test_trl import GROUP_SIZE, Recorded, logprobs_by_hand, make_trainer
from tests.trained_models import trained_model

pytestmark = pytest.mark.filterwarnings("ignore")
FIT = Fit(tokenizer=TOKENIZER, vocab_size=32, group_size=2, temperature=1.0, max_completion_length=3)


class Drawn:
    """An exchange that gives one group, once."""

    per_batch = 1
    node = SimpleNamespace(manifest=load_manifest("arithmetic-ftis"))

    def __init__(self, *groups: ForeignGroup) -> None:
        self._groups = list(groups)

    def draw(self, fit: Fit) -> list[ForeignGroup]:
        groups, self._groups = self._groups, []
        return groups

    def share(self, group: object) -> None:
        pass

    def take_num_shared(self) -> int:
        return 0

    def flush(self, timeout_s: float) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_node(monkeypatch):
    monkeypatch.setattr("ftis_node.integrations.trl.grpo.require_agreement", lambda *_, **__: None)
    monkeypatch.setattr("ftis_node.integrations.trl.grpo.own_groups", lambda *_, **__: ())


def read(
    identity: Identity, fit: Fit = FIT, *, observation_ids: Sequence[list[int]] = (), **changes: Any
) -> ForeignGroup | None:
    """Return a group of the node as the trainer gets it."""
    group = make_group(identity, **changes)
    prompt_ids = np.array(PROMPT_IDS, "<i4").tobytes()
    taken = TakenGroup(b"id", prompt_ids, pack_group(group), list(group.rewards), list(observation_ids))
    return read_foreign(taken, fit, max_prompt_length=2048)


def own_tokenizer_and_group(identity: Identity) -> tuple[list[Completion], ForeignGroup]:
    tokenizer = tokenizer_fingerprint(AutoTokenizer.from_pretrained(trained_model("s")))
    completions = [make_completion(19 + extra, 20, EOS, reward=extra / GROUP_SIZE) for extra in range(GROUP_SIZE)]
    fit = Fit(tokenizer, vocab_size=64, group_size=GROUP_SIZE, temperature=1.0, max_completion_length=3)
    group = read(identity, fit, tokenizer=tokenizer, completions=completions)
    assert group is not None
    return completions, group


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": "12" * 16},
        {"sampling": SamplingSettings(temperature=0.5)},
        {"completions": (make_completion(10, 11), make_completion(12, 13))},
        {"completions": (make_completion(10, reward=1.0), *[make_completion(12)] * 2)},
        {"completions": (make_completion(10, 11, 12, EOS, reward=1.0), make_completion(12))},
        {"completions": (make_completion(32, reward=1.0), make_completion(12))},
    ],
    ids=["tokenizer", "temperature", "equal rewards", "size", "length", "vocabulary"],
)
def test_a_group_that_does_not_fit_is_not_used(identity, changes):
    assert read(identity, **changes) is None
    assert read(identity) is not None


def test_a_foreign_answer_ends_with_the_trainers_end_token(identity):
    completions = (make_completion(10, 11, EOS, reward=1.0), make_completion(12))
    for end_ids, last in (((5, 6), 5), ((5, EOS), EOS), ((), EOS)):
        group = read(identity, replace(FIT, end_ids=end_ids), completions=completions)
        assert group is not None
        rows = foreign_rows([group], first_group=0, scale="std")
        assert rows["completion_ids"].tolist() == [[10, 11, last], [12, 0, 0]]


def test_a_real_step_trains_on_a_foreign_group(tmp_path, identity, monkeypatch):
    model = trained_model("s")
    completions, group = own_tokenizer_and_group(identity)
    monkeypatch.setattr("tests.integrations.test_trl.SwarmGRPOTrainer", Recorded)
    trainer = make_trainer(tmp_path / "trl", exchange=Drawn(group), method_params={"cap": 1.5})
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


def test_with_several_updates_foreign_rows_have_the_first_logprobs_of_the_learner(tmp_path, identity):
    _, group = own_tokenizer_and_group(identity)
    trainer = make_trainer(tmp_path / "trl", exchange=Drawn(group), grpo={"num_iterations": 2})
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": f"{1 + row // GROUP_SIZE}+4="} for row in range(8)])
    assert batch["sender_ids"].tolist() == [0] * GROUP_SIZE + [1] * GROUP_SIZE
    assert batch["group_ids"].tolist() == [0] * GROUP_SIZE + [1] * GROUP_SIZE
    mask = batch["completion_mask"].bool()
    expected = logprobs_by_hand(trainer.model, batch)
    torch.testing.assert_close(batch["old_per_token_logps"][mask], expected[mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("sampling", "is_excluded"), [({}, True), ({"top_p": 0.9}, False)])
def test_a_group_with_understated_logprobs_has_no_gradient(tmp_path, identity, sampling, is_excluded, monkeypatch):
    monkeypatch.setattr(Drawn, "node", SimpleNamespace(manifest=with_sections(Drawn.node.manifest, sampling=sampling)))
    _, group = own_tokenizer_and_group(identity)
    tokens = group.group.tokens
    logprobs = np.append([-0.1, -60.0], tokens.logprobs[2:]).astype(np.float32)  # of the worst answer
    group = replace(group, group=replace(group.group, tokens=replace(tokens, logprobs=logprobs)))
    trainer = make_trainer(tmp_path, exchange=Drawn(group), method="vis")
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "1+4="}] * 2 * GROUP_SIZE)
    trainer.model.eval()
    assert (abs(float(trainer._compute_loss(trainer.model, batch))) < 10) == is_excluded
    assert trainer._metrics["train"]["understated_groups"] == [int(is_excluded)]


@pytest.mark.parametrize("is_repeatable", [False, True])
def test_trainers_of_a_swarm_sample_with_other_random_numbers(tmp_path, is_repeatable, monkeypatch):
    monkeypatch.setattr("transformers.trainer.enable_full_determinism", lambda seed: None)
    grpo = {"full_determinism": is_repeatable}
    one, other = ((make_trainer(tmp_path, exchange=Drawn(), grpo=grpo), torch.rand(4).tolist())[1] for _ in range(2))
    assert (one == other) == is_repeatable


@pytest.mark.parametrize(("count", "scale", "error"), [(2, "group", "below the 2 groups"), (1, "batch", "or 'none'")])
def test_a_batch_has_an_own_group_scaled_as_foreign_ones(tmp_path, count, scale, error, monkeypatch):
    monkeypatch.setattr(Drawn, "per_batch", count)
    with pytest.raises(ConfigError, match=error):
        make_trainer(tmp_path / "trl", exchange=Drawn(), grpo={"scale_rewards": scale})
