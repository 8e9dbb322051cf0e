"""The checks of a home's model and of the last steps on disk; a start during a pause plans for the time after it."""

import json
import shutil
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest, parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.memory.choice import TrainingChoice
from ftis_node.models import PromptTokenizer, model_fingerprint, resolve_model
from ftis_node.node.startup import prepare
from ftis_node.node.startup.run_plan import RunPlan
from ftis_node.tasks import load_task
from tests.models.tiny_models import make_tokenizer, save_tiny
from tests.node.support import manifest_text

UNUSED: Any = None


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Make a home with a checkpoint of step 7, on a disk with 99 free bytes; a checkpoint needs 100."""
    checkpoint = tmp_path / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    monkeypatch.setattr(prepare, "free_bytes", lambda path: 99)
    monkeypatch.setattr(prepare, "checkpoint_bytes", lambda source, settings: 100)
    return Home(tmp_path)


def test_steps_that_were_not_saved_for_lack_of_space_are_an_error_at_the_end(home, monkeypatch):
    with pytest.raises(MachineError, match="no checkpoint after step 7 of 9; free disk space and start again"):
        prepare.check_saved(home, UNUSED, UNUSED, step=9)
    prepare.check_saved(home, UNUSED, UNUSED, step=7)
    monkeypatch.setattr(prepare, "free_bytes", lambda path: 100)
    prepare.check_saved(home, UNUSED, UNUSED, step=9)  # a full disk is not the cause


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
