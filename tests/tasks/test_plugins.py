"""Plug-ins: a real package that pip installed, and faulty ones whose errors name their package."""

import subprocess
import sys

import pytest

from ftis_node.cli.app import run
from ftis_node.errors import TaskError
from ftis_node.records.group import CompletionStatus, PromptRef
from ftis_node.tasks import held_out_spec, load_task
from ftis_node.tasks.answers import answer_in
from ftis_node.tasks.scorer import IsolatedScorer
from tests.conftest import raises_line, write_distribution

FAULTY = """
import sys
from ftis_node.records.group import PromptRef
from ftis_node.tasks import TaskItem

class Valid:
    isolate_scoring = False

    def __init__(self, split, name="valid"):
        self.split, self.name = split, name

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return TaskItem(PromptRef(self.name, self.split, index), ({"role": "user", "content": "say x"},), "x")

    def resolve(self, ref):
        return self[ref.index]

    def score(self, item, completion_text):
        return 1.0

class Unscored(Valid):
    def __init__(self, split):
        super().__init__(split, "unscored")

    def score(self, item, completion_text):
        raise RuntimeError("not scored")

    def answer_of(self, item, completion_text):
        return {"x": completion_text, "y": 7}[completion_text[0]]

class Unresolved(Valid):
    def __init__(self, split):
        super().__init__(split, "unresolved")

    def resolve(self, ref):
        if ref.index:
            raise ZeroDivisionError("division by zero")
        return self[0]

class Inconsistent(Valid):
    def __init__(self, split):
        super().__init__(split, "inconsistent")

    def resolve(self, ref):
        return self[1]

class Itemless(Valid):
    def __init__(self, split):
        super().__init__(split, "itemless")

    def __getitem__(self, index):
        return "x"

def leaving(split):
    sys.exit("bye")

def misnamed(split):
    return Valid(split, name="other")

def failing(split):
    raise OSError("no such\\tdisk")

text = "no function"
"""
CLASSES = ("Valid", "Unscored", "Unresolved", "Inconsistent", "Itemless")
TASKS = {name.lower(): f"faulty_plugin:{name}" for name in CLASSES}
TASKS |= {name: f"faulty_plugin:{name}" for name in ("leaving", "misnamed", "failing", "absent")}
TASKS |= {"no-task": "builtins:str", "gsm8k": "faulty_plugin:Valid", "twice": "faulty_plugin:Valid"}


@pytest.fixture
def faulty_plugins(tmp_path, monkeypatch):
    """A package in which every plug-in but `valid` breaks one rule; another package has the same `twice`."""
    (tmp_path / "faulty_plugin.py").write_text(FAULTY)
    tasks = "".join(f"{name} = {target}\n" for name, target in TASKS.items())
    points = f"[ftis_node.tasks]\n{tasks}[ftis_node.rewards]\ntext = faulty_plugin:text\n"
    write_distribution(tmp_path, "faulty-plugin", points, version="2.0")
    other = "[ftis_node.tasks]\ntwice = faulty_plugin:Valid\n"
    write_distribution(tmp_path, "other-plugin", other, version="2.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_plugin", raising=False)


async def test_the_example_package_has_a_task_and_a_reward(example_plugin, monkeypatch):
    monkeypatch.syspath_prepend(example_plugin)
    sorting, arithmetic = load_task("sorting", split="test"), load_task("arithmetic:add@brief")
    assert sorting.resolve(sorting[7].ref) == sorting[7] != sorting[8]
    assert sorting[0].answer == "".join(sorted(sorting[0].prompt[0]["content"].removeprefix("sort ")[:4]))
    assert arithmetic[3].ref == PromptRef("arithmetic:add@brief", "train", 3)
    assert arithmetic.resolve(arithmetic[3].ref) == arithmetic[3]
    assert sorting.isolate_scoring and arithmetic.isolate_scoring
    right, other = sorting[0].answer, arithmetic[0].answer
    async with IsolatedScorer(sorting, arithmetic) as scorer:
        scores = await scorer.score(sorting[0], [right, right[:3] + "x", right + "0"])
        assert [reward for reward, _ in scores] == [1.0, 0.75, 0.0]
        assert [reward for reward, _ in await scorer.score(arithmetic[0], [other, f"is {other}", "x"])] == [1, 0.5, 0]
    assert held_out_spec("arithmetic@brief+sorting") == held_out_spec("arithmetic@brief")
    assert answer_in(arithmetic, arithmetic[0], f" {other} ") == other, "the answer of the task"
    assert answer_in(sorting, sorting[0], " a  b ") == "a b", "the task has no answer_of"


@pytest.mark.usefixtures("faulty_plugins")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("inconsistent", "the plug-in task 'inconsistent' of faulty-plugin 2.0 is not deterministic"),
        ("itemless", "the plug-in task 'itemless' of faulty-plugin 2.0 gave no valid TaskItem as problem 0"),
        (
            "leaving",
            "the plug-in task 'leaving' of faulty-plugin 2.0 failed: SystemExit: bye; report it to its authors",
        ),
        ("twice", "faulty-plugin and other-plugin both have a plug-in 'twice': uninstall one of them"),
        ("misnamed", "the plug-in task 'misnamed' of faulty-plugin 2.0 has another name, 'other'"),
        ("failing", "the plug-in task 'failing' of faulty-plugin 2.0 failed: OSError: no such disk"),
        ("absent", "the plug-in task 'absent' of faulty-plugin 2.0 failed: AttributeError"),
        ("no-task", "the plug-in task 'no-task' of faulty-plugin 2.0 gave a str, which is not a Task"),
        ("no-such", "rg:NAME of reasoning-gym, absent, failing"),
        ("gsm8k:/absent.jsonl", "cannot be read"),
        ("valid@text", "the plug-in reward 'text' of faulty-plugin 2.0 is a str, which cannot be called"),
        ("valid@brieff", "unknown reward 'brieff': known are "),
    ],
)
def test_the_error_of_a_faulty_plug_in_names_its_package(spec, message):
    with raises_line(TaskError, message):
        load_task(spec)


@pytest.mark.usefixtures("faulty_plugins")
async def test_later_errors_of_a_faulty_plug_in_are_contained():
    mixed = load_task("valid+arithmetic")
    assert [mixed[index].ref.task for index in range(2)] == ["arithmetic", "valid"]
    unscored, unresolved, valid = load_task("unscored"), load_task("unresolved"), load_task("valid")
    with pytest.raises(KeyError):  # validation refuses an unknown prompt by this error
        unresolved.resolve(PromptRef("unresolved", "train", 2))
    with pytest.raises(KeyError):
        valid.resolve(PromptRef("valid", "test", 0))
    async with IsolatedScorer(unscored, valid) as scorer:
        assert await scorer.score(unscored[0], ["x"]) == [(0.0, CompletionStatus.UNSCORED)]
        assert await scorer.score(valid[0], ["x"]) == [(1.0, CompletionStatus.SCORED)]


@pytest.mark.usefixtures("faulty_plugins")
def test_the_answers_of_a_plug_in():
    task = load_task("unscored")
    assert [answer_in(task, task[0], text) for text in ("x  1", "y", "", "z")] == ["x  1", None, None, None]


@pytest.mark.usefixtures("faulty_plugins")
def test_listing_plug_ins_imports_none(capsys):
    assert run(["tasks"]) == 0
    out = capsys.readouterr().out
    assert "plug-in   task leaving  (faulty-plugin 2.0, faulty_plugin:leaving)" in out
    assert "plug-in   reward text  (faulty-plugin 2.0, faulty_plugin:text)" in out
    assert "faulty_plugin" not in sys.modules


def test_listing_tasks_loads_no_library_of_a_task():
    code = (
        "import sys; from ftis_node.cli.app import run; from ftis_node.tasks import load_task\n"
        "run(['tasks']); load_task('arithmetic')\n"
        "loaded = {'torch', 'datasets', 'reasoning_gym', 'math_verify', 'sympy', 'pebble'} & set(sys.modules)\n"
        "sys.exit(' '.join(sorted(loaded)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_showing_a_task_scores_its_answer(capsys):
    assert run(["tasks", "arithmetic"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["answer: 10", "reward of the answer alone: 1.0"]
    assert run(["tasks", "gsm9k"]) == 2
