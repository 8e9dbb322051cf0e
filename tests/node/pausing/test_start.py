"""A start during a pause plans for the time after it."""

from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.memory.choice import TrainingChoice
from ftis_node.node.startup import prepare
from ftis_node.node.startup.run_plan import RunPlan
from tests.node.support import manifest_text


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
