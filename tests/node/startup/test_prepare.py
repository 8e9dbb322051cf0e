"""A node's start: the checks of its home, the plan during a pause, the progress line, an unfinished checkpoint."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest, parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.memory.choice import TrainingChoice
from ftis_node.models import PromptTokenizer, model_fingerprint, resolve_model
from ftis_node.node.context import NodeState
from ftis_node.node.startup import prepare, run, running_components
from ftis_node.node.startup.run_plan import RunPlan
from ftis_node.node.startup.running_components import StartProgress
from ftis_node.node.worker_interfaces import NullLearner
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.events import EventLog
from tests.conftest import with_sections
from tests.models.tiny_models import make_tokenizer, save_tiny
from tests.node.nodes import components, events_of
from tests.node.support import manifest_text

UNUSED: Any = None


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Make a home with a checkpoint of step 7, on a disk with 99 free bytes; a checkpoint needs 100."""
    checkpoint = tmp_path / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    for module in (prepare, run):
        monkeypatch.setattr(module, "free_bytes", lambda path: 99)
        monkeypatch.setattr(module, "checkpoint_bytes", lambda source, settings: 100)
    return Home(tmp_path)


def test_steps_that_were_not_saved_for_lack_of_space_are_an_error_at_the_end(home, monkeypatch):
    with pytest.raises(MachineError, match="no checkpoint after step 7 of 9; free disk space and start again"):
        run.check_saved(home, UNUSED, UNUSED, step=9)
    run.check_saved(home, UNUSED, UNUSED, step=7)
    monkeypatch.setattr(run, "free_bytes", lambda path: 100)
    run.check_saved(home, UNUSED, UNUSED, step=9)  # a full disk is not the cause


def test_a_home_belongs_to_a_model_by_its_fingerprint(tmp_path):
    model = save_tiny(tmp_path / "models" / "first")
    home = Home(tmp_path / "home")
    checkpoint = home.checkpoints / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    fingerprint = model_fingerprint(resolve_model(str(model)))
    owner = {"run_id": "0", "model": "first", "model_fingerprint": fingerprint, "trains": "full"}
    (checkpoint / "state.json").write_text(json.dumps({"owner": owner}))
    renamed = shutil.copytree(model, tmp_path / "second")
    prepare.check_owner(home, resolve_model(str(renamed)), lora=False)
    other = save_tiny(tmp_path / "first", seed=77)
    with pytest.raises(ConfigError, match="home trains first, not another model of the name first"):
        prepare.check_owner(home, resolve_model(str(other)), lora=False)


REFUSING = "{% if messages[1:] %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (REFUSING, "refuses the prompt: one message"),
        ("{{ messages[0].content }}", "leaves out a user's second message"),
    ],
)
def test_a_model_that_reads_one_turn_cannot_start_a_run_of_episodes(template, reason):
    made = make_tokenizer()
    made.chat_template = template
    tokenizer = PromptTokenizer(made, name="short")
    with pytest.raises(ModelError, match=reason) as caught:
        prepare.check_texts(tokenizer, load_task("guess")[0], load_manifest("guess-ftis"))
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("run guess-ftis has several turns, and this model reads one: ")
    assert "\n" not in str(caught.value)
    prepare.check_texts(tokenizer, load_task("arithmetic")[0], load_manifest("arithmetic-ftis"))


def test_a_stop_string_is_no_special_token():
    tokenizer, item = PromptTokenizer(make_tokenizer(), name="short"), load_task("guess")[0]
    end = tokenizer.decode(tokenizer.end_ids[:1], skip_special=False)
    run = load_manifest("guess-ftis")
    prepare.check_texts(tokenizer, item, with_sections(run, episode={"stop": ("7",)}))
    with pytest.raises(ModelError, match="is a special token here"):
        prepare.check_texts(tokenizer, item, with_sections(run, episode={"stop": ("7", end)}))


class Planned(Exception):
    """The end of a start, with what its plan counts."""


class Factory:
    async def arrange(self, *of: Any, others_count: bool = True) -> Any:
        raise Planned(others_count)


@pytest.mark.parametrize("is_paused", [True, False])
async def test_a_start_during_a_pause_plans_without_the_programs_that_run_now(
    tmp_path, tiny_models, monkeypatch, is_paused
):
    chosen: list[bool] = []

    def choose(settings: NodeSettings, *of: Any, others_count: bool) -> TrainingChoice:
        chosen.append(others_count)
        return TrainingChoice(settings, "")

    monkeypatch.setattr(prepare, "choose_training", choose)
    home = Home(tmp_path)
    home.create()
    if is_paused:
        home.pause.write_text('{"action": "pause"}')
    settings = NodeSettings(model=str(tiny_models["s"]), device="cpu", lora=False)
    plan = RunPlan(parse_manifest(manifest_text(foreign_wait_s=1), source="test"), "arithmetic", ())
    with pytest.raises(Planned) as planned:
        await prepare.prepare(settings, plan, home, Factory(), lambda fraction, what: None)
    assert chosen == list(planned.value.args) == [not is_paused]


class KilledLearner(NullLearner):
    """A learner that begins a checkpoint when it is stopped, and is killed."""

    def __init__(self, unfinished: Path) -> None:
        super().__init__(parameters=1)
        self._unfinished = unfinished

    async def stop(self) -> None:
        self._unfinished.mkdir()
        (self._unfinished / "weights.safetensors").touch()


async def test_an_unfinished_checkpoint_is_removed_at_the_end(tmp_path):
    """The learner has about five seconds to end. On a busy machine it is killed during a checkpoint."""
    unfinished = tmp_path / "checkpoints" / ".step-00000007.incomplete-0a1b2c3d"
    scorer = IsolatedScorer(load_task("arithmetic"))
    with components(
        tmp_path, learner=KilledLearner(unfinished), state=NodeState(step=6), scorer=scorer, new_peers_scorer=scorer
    ) as node:
        await running_components._stop(node)
        assert not unfinished.exists()
        assert [event["step"] for event in events_of(node, "stop")] == [6]


def test_the_line_names_the_phase_of_the_engine_and_each_phase_gives_an_event(tmp_path):
    lines: list[str] = []
    with closing(EventLog(tmp_path / "events.jsonl", max_bytes=1 << 20, kept_files=1)) as events:
        progress = StartProgress(
            ["generator", "learner", "network"], "m (3 MB)", events, lambda fraction, what: lines.append(what)
        )
        progress.begin_phase("compiling (first start only)")
        progress.end("network")
        progress.end("learner")
        progress.begin_phase("")
        progress.end("generator")
        progress.begin_phase("loading weights")  # a restart during the run shows no line
        progress.begin_phase("")
    assert lines == [
        "loading m (3 MB) into generator and learner; connecting",
        "generator: compiling (first start only); loading m (3 MB) into learner; connecting",
        "generator: compiling (first start only); loading m (3 MB) into learner",
        "generator: compiling (first start only)",
        "loading m (3 MB) into generator",
        "",
    ]
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["phase"]) for event in written] == [
        ("engine_start", "compiling (first start only)"),
        ("engine_start", "loading weights"),
    ]
    assert all(0 <= event["duration_s"] < 10 for event in written)
