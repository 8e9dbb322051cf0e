"""The libraries that grade: their releases by name, and a start that fails if they give wrong rewards."""

import json
from importlib.metadata import version

import pytest

from ftis_node.cli.app import run
from ftis_node.errors import MachineError
from ftis_node.tasks import grader_releases, load_task
from ftis_node.tasks.base import MAX_GRADER_BYTES, MixedTask
from ftis_node.tasks.scorer import IsolatedScorer, ScoringLimits
from tests.conftest import write_distribution
from tests.tasks.hostile_task import HostileTask
from tests.tasks.test_dataset_rewards import task_of

MATH = ", ".join(f"{package} {version(package)}" for package in ("latex2sympy2-extended", "math-verify", "sympy"))
GYM = f"reasoning-gym {version('reasoning-gym')}"
LIMITS = ScoringLimits(time_limit_s=0.5, wall_limit_s=3.0, memory_limit_bytes=1 << 30)
PLUGIN = """
from ftis_node.tasks.arithmetic import ArithmeticTask

class Checked(ArithmeticTask):
    grader = "library 7"

    def __init__(self, split):
        super().__init__(split)
        self.name = "checked"

    def check_grader(self):
        raise OSError("no library")

def half(item, text):
    return 0.5
"""


class FaultyGrader(HostileTask):
    """A task whose check meets a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def check_grader(self) -> None:
        if self._fault == "broken":
            raise MachineError("library 7 cannot grade here")
        self.score(self[0], self._fault)


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    (tmp_path / "graded_plugin.py").write_text(PLUGIN)
    points = "[ftis_node.tasks]\nchecked = graded_plugin:Checked\n[ftis_node.rewards]\nhalf = graded_plugin:half\n"
    write_distribution(tmp_path, "graded-plugin", points, version="2.0")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def broken_latex(tmp_path, monkeypatch):
    """A package that the scoring process, which is new, finds first."""
    (tmp_path / "latex2sympy2_extended").mkdir()
    broken = "raise ImportError('Unsupported ANTLR version 4.7.2')"
    (tmp_path / "latex2sympy2_extended" / "__init__.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plugins")
def test_a_task_names_the_releases_that_decide_its_rewards(tmp_path):
    by_hand = task_of(tmp_path, "&reward=exact,format")
    assert grader_releases(load_task("arithmetic")) == grader_releases(by_hand) == ""
    assert grader_releases(load_task("rg:chain_sum")) == GYM
    assert grader_releases(task_of(tmp_path)) == MATH
    assert grader_releases(task_of(tmp_path, "&reward=math,half")) == f"graded-plugin 2.0, {MATH}"
    assert grader_releases(load_task("checked")) == "graded-plugin 2.0, library 7"
    assert grader_releases(load_task("rg:chain_sum@half")) == f"graded-plugin 2.0, {GYM}"


def test_the_releases_of_a_mixture_are_bounded():
    long = HostileTask()
    long.grader = "é" * MAX_GRADER_BYTES  # type: ignore[attr-defined]
    assert grader_releases(MixedTask([long, HostileTask()], weights=[1, 1], name="two")) == "é" * 128


async def test_working_graders_pass_their_check(tmp_path):
    async with IsolatedScorer(load_task("arithmetic+rg:leg_counting"), task_of(tmp_path)) as scorer:
        await scorer.check()


@pytest.mark.usefixtures("broken_latex")
async def test_a_broken_grader_is_named_and_its_process_ends(tmp_path):
    """`math_verify.parse` hides such an error: without the check each answer in LaTeX would be wrong."""
    scorer = IsolatedScorer(task_of(tmp_path))
    with pytest.raises(MachineError) as error:
        await scorer.__aenter__()
    assert str(error.value) == (
        f"{MATH} cannot grade here (ImportError: Unsupported ANTLR version 4.7.2): "
        "pip install --force-reinstall math-verify"
    )
    assert scorer._pool is None


@pytest.mark.usefixtures("plugins")
async def test_a_plug_in_checks_its_own_library():
    with pytest.raises(MachineError, match=r"^the plug-in task 'checked' of graded-plugin 2.0 failed: OSError: no lib"):
        await IsolatedScorer(load_task("checked")).__aenter__()


@pytest.mark.parametrize(
    ("fault", "message"), [("broken", "library 7 cannot grade here"), ("segfault", "exit code -11")]
)
async def test_a_check_that_fails_or_dies_ends_the_start(fault, message):
    with pytest.raises(MachineError, match=message):
        await IsolatedScorer(FaultyGrader(fault), limits=LIMITS).__aenter__()


async def test_a_check_on_a_busy_machine_is_skipped(caplog):
    async with IsolatedScorer(FaultyGrader("sleep"), limits=LIMITS):
        assert "hostile: its grader was not checked: a text was not scored within 3 s" in caplog.text


@pytest.mark.usefixtures("broken_latex")
def test_doctor_names_a_broken_grader(tmp_path, capsys):
    assert run(["doctor", "--only", "grader", "--json", "--home", str(tmp_path / "home")]) == 3
    found = json.loads(capsys.readouterr().out)
    assert [(one["id"], one["level"]) for one in found] == [("grader.broken", "fail"), ("grader.works", "ok")]
    assert found[0]["finding"].startswith(f"{MATH} cannot grade here (ImportError: Unsupported ANTLR")
    assert found[1]["finding"] == f"{GYM}: known answers get the right rewards"
