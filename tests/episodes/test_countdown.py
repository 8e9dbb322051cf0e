"""The episode `countdown`: its feedback, rewards and problems."""

import pytest

from ftis_node.tasks import load_task

TASK = load_task("countdown")
FIRST = TASK[0]  # 68, 19, 32, 13 and the target 94


def test_the_first_problems_are_fixed() -> None:
    """Peers of other releases make the same ones."""
    assert FIRST.prompt[1]["content"] == "Numbers: 68, 19, 32, 13. Target: 94."
    assert FIRST.answer == "((13 + 68) + 32) - 19"
    assert load_task("countdown:small")[0].prompt[1]["content"] == "Numbers: 11, 5, 7. Target: 13."
    assert "with + - * / and" in FIRST.prompt[0]["content"]
    assert "with + - * and" in load_task("countdown:small")[0].prompt[0]["content"]


@pytest.mark.parametrize("name", ["countdown", "countdown:small"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_problem_has_a_solution(name: str, split: str) -> None:
    task = load_task(name, split)
    for index in range(200):
        item = task[index]
        played = task.play(item, [item.answer, "1"])
        assert (played.is_over, played.num_turns, played.reward) == (True, 1, 1.0)


@pytest.mark.parametrize(
    ("text", "observation", "reward"),
    [
        ("68 + 32 - 19 + 13", None, 1.0),
        ("<think>68 + 1</think> So 68 + 32 = 100, and 13 + 68 + 32 - 19 = 94.", None, 1.0),
        ("68 + 32 + 13 + 19", "= 132, 38 too high", 0.1),
        ("68 / 32 + 13 - 19", "= -3.875, 97.875 too low", 0.1),
        ("68 + 32 - 19 + 14", "= 95, 1 too high; 14 is not given; 13 is used 0 times, not 1", 0.0),
        ("68 + 68 + 32 - 19 + 13 - 68", "= 94; 68 is used 3 times, not 1", 0.0),
        ("068 + 32 - 19 + 13", "= 94; 068 is not given; 68 is used 0 times, not 1", 0.0),
        ("68 / (19 - 19)", "error: division by zero", 0.0),
        ("94", "no expression", 0.0),
        ("", "no expression", 0.0),
    ],
)
def test_the_feedback_names_the_value_and_each_wrong_number(text: str, observation: str | None, reward: float) -> None:
    played = TASK.play(FIRST, [text])
    assert played.observations == (() if observation is None else (observation,))
    assert played.reward == reward


def test_the_last_text_counts() -> None:
    played = TASK.play(FIRST, ["68", "68 + 32 + 13 + 19", "68 + 32"])
    assert (played.num_turns, played.is_over, played.reward) == (3, False, 0.0)


def test_a_number_that_is_given_twice_is_used_twice() -> None:
    task = load_task("countdown:small")
    item = task[1]
    assert item.prompt[1]["content"] == "Numbers: 7, 7, 6. Target: 49."
    assert task.play(item, ["7 * 6 + 7"]).reward == 1.0
    assert task.play(item, ["7 * 6"]).observations == ("= 42, 7 too low; 7 is used 1 times, not 2",)


def test_votes_compare_expressions() -> None:
    assert TASK.answer_of(FIRST, "It is 68 + 32.") == "68+32"
    assert TASK.answer_of(FIRST, "none") is None
