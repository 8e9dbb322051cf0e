"""Loading a task by its spec: built-in names, plug-ins, unknown names, and no library for parsing."""

import subprocess
import sys

import pytest

from ftis_node.errors import TaskError
from ftis_node.tasks import Task, held_out_spec, load_task
from tests.conftest import write_distribution

PLUGIN = """
from ftis_node.records.group import PromptRef
from ftis_node.tasks import TaskItem

class Echo:
    isolate_scoring = False

    def __init__(self, split, name="echo"):
        self.split, self.name = split, name

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return TaskItem(PromptRef(self.name, self.split, index), ({"role": "user", "content": "say x"},), "x")

    def resolve(self, ref):
        return self[ref.index]

    def score(self, item, completion_text):
        return float(completion_text == "x")

def misnamed(split):
    return Echo(split, name="other")

def failing(split):
    raise OSError("no such\\tdisk")
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """An installed package with several tasks, of which only `echo` is valid."""
    (tmp_path / "echo_plugin.py").write_text(PLUGIN)
    write_distribution(
        tmp_path, "echo-plugin",
        "[ftis_node.tasks]\necho = echo_plugin:Echo\nmisnamed = echo_plugin:misnamed\nfailing = echo_plugin:failing\n"
        "absent = echo_plugin:absent\nno-task = builtins:str\ngsm8k = echo_plugin:Echo\n",
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "echo_plugin", raising=False)


@pytest.mark.parametrize("spec", ["arithmetic", "arithmetic:add", "arithmetic:sub", "rg:leg_counting"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_built_in_task_without_a_file_is_loaded(spec, split):
    task = load_task(spec, split=split)
    assert isinstance(task, Task)
    assert (task.name, task.split) == (spec, split)
    assert task.resolve(task[0].ref) == task[0]


@pytest.mark.usefixtures("plugins")
def test_a_plug_in_is_loaded_by_its_name():
    task = load_task("echo", split="test")
    assert task.split == "test"
    assert task.score(task[0], "x") == 1.0


@pytest.mark.usefixtures("plugins")
def test_a_plug_in_can_be_mixed():
    task = load_task("echo+arithmetic")
    assert [task[index].ref.task for index in range(2)] == ["arithmetic", "echo"]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misnamed", "has another name, 'other'"),
        ("failing", "the plug-in task 'failing' of echo-plugin 1.0 failed: OSError: no such disk"),
        ("absent", "failed: AttributeError"),
        ("no-task", "gave a str, which is not a Task"),
        ("no-such", "rg:NAME of reasoning-gym, absent, echo, failing"),
    ],
)
def test_a_faulty_plug_in_is_a_task_error(name, message):
    with pytest.raises(TaskError) as caught:
        load_task(name)
    assert message in str(caught.value)


@pytest.mark.usefixtures("plugins")
def test_a_plug_in_cannot_replace_a_built_in_task(tmp_path):
    with pytest.raises(TaskError, match="cannot be read"):
        load_task(f"gsm8k:{tmp_path}/absent.jsonl")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm9k", "unknown task 'gsm9k': known are arithmetic, "),
        ("gsm9k", "did you mean 'gsm8k'?"),
        ("arithmatic", "did you mean 'arithmetic'?"),
        ("arithmetic:mul", "arithmetic:mul"),
        ("rg", "unknown task 'rg'"),
        ("rg:chian_sum", "unknown task 'rg:chian_sum': reasoning-gym has rg:chain_sum"),
        ("rg:zzzzzzzz", "reasoning-gym has rg:ab, rg:acre, "),
        ("rg:codeio", "rg:codeio cannot be used: its problems differ from process to process"),
        ("arithmetic+rg:composite", "rg:composite cannot be used"),
        ("math500", "math500 is for evaluation, it has no split 'train'"),
    ],
)
def test_a_task_without_training_problems_is_a_one_line_error(spec, message):
    with pytest.raises(TaskError) as caught:
        load_task(spec, split="train")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_split_is_an_error():
    with pytest.raises(TaskError, match="unknown split 'validation'"):
        load_task("arithmetic", split="validation")


def test_importing_the_package_loads_no_library_of_a_task():
    code = (
        "import sys, ftis_node.tasks as tasks; tasks.parse_spec('gsm8k+rg:chain_sum'); tasks.load_task('arithmetic')\n"
        "loaded = {'torch', 'datasets', 'reasoning_gym', 'math_verify', 'sympy', 'pebble'} & set(sys.modules)\n"
        "sys.exit(' '.join(sorted(loaded)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_held_out_spec_has_the_parts_with_a_test_split(tmp_path):
    file = tmp_path / "train.jsonl"
    file.touch()
    assert str(held_out_spec("arithmetic:add")) == "arithmetic:add"
    assert str(held_out_spec("gsm8k=3+rg:chain_sum")) == "gsm8k=3+rg:chain_sum"
    assert held_out_spec(f"gsm8k:{file}") is None
    assert held_out_spec(f"gsm8k:{tmp_path}") is None
    assert str(held_out_spec(f"gsm8k:{tmp_path}+arithmetic=2")) == "arithmetic"
    (tmp_path / "test.jsonl").touch()
    assert str(held_out_spec(f"gsm8k:{tmp_path}")) == f"gsm8k:{tmp_path}"
    assert held_out_spec("some-plugin") is None
