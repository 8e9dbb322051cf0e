"""The built-in episodes, those of packages, and what a text of a peer can do to them."""

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ftis_node.config.manifest import EpisodeSection
from ftis_node.errors import TaskError
from ftis_node.generation.chat_model import chat_environments
from ftis_node.tasks import grader_releases, load_task
from ftis_node.tasks.episodes.calculator import ExpressionError, value_of
from ftis_node.tasks.episodes.episode import built_in_code, code_digest
from ftis_node.tasks.scorer import IsolatedScorer, ScoringLimits
from ftis_node.tasks.scoring_worker import ScoringCost
from tests.conftest import write_distribution

EXAMPLE = Path(__file__).parents[2] / "examples/ftis-node-episode-lock"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("47 * 83", "3901"), ("2*(3+4)/5", "2.8"), ("-2*-3", "6"), ("2--1", "3"), ("1/3", "0.333333"),
        ("-1/3", "-0.333333"), ("1/7*7", "1"), ("0.1+0.2", "0.3"), ("((1))", "1"), ("0 - 1/10000000", "0"),
    ],
)  # fmt: skip
def test_the_value_of_an_expression_is_exact(text: str, value: str) -> None:
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "incomplete"), ("2 +", "incomplete"), ("(2", "incomplete"), ("(2 3)", "not closed"),
        ("2 3", "unexpected '3'"), ("10**2", "unexpected '*'"), ("1e5", "unexpected 'e'"), ("٣+1", "unexpected"),
        ("1/(2-2)", "division by zero"), ("9" * 30 + "*" + "9" * 30, "too large"),
        ("1/7/" + "9" * 39 + "/9", "too large"), ("(" * 17 + "1" + ")" * 17, "too deep"),
        ("-" * 17 + "1", "too deep"), ("1+" * 100 + "1", "too long"),
    ],
)  # fmt: skip
def test_an_invalid_expression_has_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason.replace("*", r"\*")):
        value_of(text)


def test_halving_the_range_finds_every_number() -> None:
    task = load_task("guess", "test")
    for index in range(len(task)):
        item = task[index]
        low, high = map(int, item.prompt[0]["content"].removesuffix("?").split("-"))
        texts: list[str] = []
        while not texts or not task.play(item, texts).is_over:
            if texts:
                sign = task.play(item, texts).observations[-1]
                low, high = (int(texts[-1]) + 1, high) if sign == "+" else (low, int(texts[-1]) - 1)
            texts.append(str((low + high) // 2))
        assert task.play(item, texts).reward == 1.0


def test_a_game_ends_at_the_fourth_guess_and_ignores_what_follows() -> None:
    task = load_task("guess")
    item = task[0]
    wrong = str(int(item.answer) - 1)
    played = task.play(item, [wrong, "x", str(int(item.answer) + 1), wrong, item.answer])
    assert (played.observations, played.num_turns, played.is_over) == (("+", "?", "-"), 4, True)
    assert played.reward == 0.25, "two of four guesses were numbers of the range that was left"


@pytest.mark.parametrize(
    ("name", "first"), [("guess", ("46-60?", "56")), ("calculator", ("What is 26 times 51?", "1326"))]
)
def test_the_first_problem_is_fixed(name: str, first: tuple[str, str]) -> None:
    """Peers of other releases make the same one."""
    item = load_task(name)[0]
    assert (item.prompt[-1]["content"], item.answer) == first


def test_held_out_problems_are_never_trained_on() -> None:
    for name in ("guess", "calculator"):
        train, test = load_task(name), load_task(name, "test")
        held_out = {(test[index].prompt[-1]["content"], test[index].answer) for index in range(len(test))}
        assert len(held_out) == len(test)
        assert held_out.isdisjoint((train[index].prompt[-1]["content"], train[index].answer) for index in range(2000))


@pytest.mark.parametrize(
    ("texts", "observations", "reward"),
    [
        (["26 * 51", "26 times 51 is 1326."], ("1326",), 1.0), (["It is 26 * 51 = 1400.", "1,326"], ("1326",), 1.0),
        (["26 * 51"], ("1326",), 0.0), (["1326"], (), 1.0), (["1325"], (), 0.0),
        (["26 / (1 - 1)", "1326"], ("error: division by zero",), 1.0), (["<think>26 * 51</think>1326"], (), 1.0),
    ],
)  # fmt: skip
def test_the_calculator_answers_expressions_and_scores_the_last_text(texts, observations, reward) -> None:
    task = load_task("calculator")
    played = task.play(task[0], texts)
    assert (played.observations, played.reward) == (observations, reward)


@pytest.mark.parametrize("name", ["guess", "calculator"])
@pytest.mark.parametrize("part", ["", "\0", "9", "1 ", "(", "1+", "٣"])
def test_any_text_has_a_result_at_once(name: str, part: str) -> None:
    task, text = load_task(name), part * 5_000_000
    began = time.process_time()
    assert task.play(task[0], [text, text]).reward == 0.0
    assert time.process_time() - began < 2.0, "quadratic work takes minutes"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = "[ftis_node.episodes]\nlock = ftis_node_episode_lock:LockEpisode\nbomb = bomb:Bomb\n"
    write_distribution(tmp_path, "ftis-node-episode-lock", entry)
    (tmp_path / "bomb.py").write_text(BOMB)
    for folder in (tmp_path, EXAMPLE):
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in ("ftis_node_episode_lock", "bomb"):
        sys.modules.pop(name, None)


BOMB = """
import os
from ftis_node_episode_lock import LockEpisode

class Bomb(LockEpisode):
    name = "bomb"
    def step(self, state, text):
        if text == "loop":
            while True:
                pass
        if text == "grow":
            return "x" * 10_000_000, state
        if text == "pid":
            return str(os.getpid()), state
        if text == "raise":
            raise KeyError(text)
        return text, state
"""


async def test_an_episode_of_a_package_is_played_in_the_scoring_process(example: None) -> None:
    task = load_task("lock")
    item = task[7]
    async with IsolatedScorer(task) as scorer:
        assert scorer.is_episode(item)
        played = await scorer.play(item, ["000", item.answer], cost=ScoringCost())
    assert played is not None
    assert (played.num_turns, played.is_over, played.reward) == (2, True, 1.0)
    assert played.observations == (str(sum(map(str.__eq__, "000", item.answer))),)
    assert "ftis-node-episode-lock 1.0" in grader_releases(task)
    assert "code " in grader_releases(task)


async def test_a_bomb_ends_its_own_replay_alone(example: None) -> None:
    task = load_task("bomb")
    async with IsolatedScorer(task, limits=ScoringLimits(time_limit_s=0.5)) as scorer:
        for text in ("loop", "grow", "raise"):
            cost = ScoringCost()
            assert await scorer.play(task[0], [text], cost=cost) is None
            assert cost.num_stopped == (text == "loop")
        again = await scorer.play(task[0], ["echo"], cost=ScoringCost())
    assert again is not None and again.observations == ("echo",)


def test_a_conversation_plays_an_episode_of_a_package_in_the_scoring_process(example: None) -> None:
    limits, item = EpisodeSection(max_turns=3), load_task("bomb")[3]
    play = chat_environments("calculator+bomb", limits).begin(item.prompt[-1]["content"])
    assert play is not None and play.item == item
    pid = play.observation("pid")
    assert pid is not None and int(pid) != os.getpid()
    assert play.observation("raise") is None, "it failed"
    assert chat_environments("bomb", limits).begin("What is 26 * 51?") is None


def test_the_reward_of_an_episode_cannot_be_replaced(example: None, example_plugin: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(example_plugin))
    with pytest.raises(TaskError, match="has several turns"):
        load_task("guess@brief")


async def test_a_text_that_an_episode_cannot_read_counts_as_unfinished(example: None) -> None:
    """So its node does not share the group, which peers would refuse."""
    task = load_task("bomb")
    async with IsolatedScorer(task) as scorer:
        for text in ("raise", "\ud800"):
            cost = ScoringCost()
            assert await scorer.play(task[0], [text], cost=cost) is None
            assert cost.num_lost == 1


def test_votes_compare_the_last_turn() -> None:
    task = load_task("calculator")
    item = task[0]
    assert task.answer_of(item, "It is 1,326.") == task.answer_of(item, "1326") == "1326"
    assert load_task("guess").answer_of(item, " 42\n> 7\n") == "42\n> 7"


def test_the_code_of_a_built_in_episode_is_a_release(tmp_path: Path) -> None:
    """Two checkouts of one version may have other rewards without fault."""
    assert grader_releases(load_task("guess")) == f"guess code {code_digest(built_in_code())}"
    assert {"guess.py", "calculator.py", "words.py"} <= built_in_code().keys()
    digests = set()
    for code in (b"a = 1\n", b"a = 1\r\n", b"a = 2\n"):
        (tmp_path / "guess.py").write_bytes(code)
        digests.add(code_digest(built_in_code() | {"guess.py": tmp_path / "guess.py"}))
    assert len(digests) == 2, "line ends are no difference"


@pytest.mark.parametrize("is_linked", [False, True])
def test_all_modules_of_a_package_are_its_release(tmp_path: Path, monkeypatch, is_linked: bool) -> None:
    entry = "[ftis_node.episodes]\nlock = padlock.game:LockEpisode\n"
    write_distribution(tmp_path, "padlock", entry)
    package = tmp_path / "padlock"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "game.py").write_text((EXAMPLE / "ftis_node_episode_lock.py").read_text())
    listed = "__editable___padlock_finder.py,,\n" if is_linked else "padlock/game.py,,\npadlock/rules.py,,\nmore.py,,\n"
    (tmp_path / "padlock-1.0.dist-info/RECORD").write_text(listed)
    monkeypatch.syspath_prepend(str(tmp_path))
    releases = []
    for rules, finder, more in (("1", "/a", "1"), ("1", "/b", "1"), ("2", "/b", "1"), ("2", "/b", "2")):
        (package / "rules.py").write_text(rules)
        (tmp_path / "__editable___padlock_finder.py").write_text(finder)
        (tmp_path / "more.py").write_text(more)
        releases.append(grader_releases(load_task("lock")))
    for name in ("padlock", "padlock.game"):
        sys.modules.pop(name, None)
    assert "padlock 1.0" in releases[0]
    same_rules, other_rules, other_module = (one != other for one, other in pairwise(releases))
    assert (same_rules, other_rules, other_module) == (False, True, not is_linked)
