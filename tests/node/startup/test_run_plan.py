"""What `--task` means: a run's task, or this node's domain of it, kept from start to start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.errors import ConfigError
from ftis_node.node.startup.run_plan import RunPlan, plan_run

if TYPE_CHECKING:
    from pathlib import Path

MIXED = "arithmetic:add+arithmetic:sub"


def write_run(path: Path, task: str, step: str = "") -> str:
    path.write_text(f'name = "mixed"\ntask = "{task}"\n[step]\nown_groups = 4\n{step}')
    return str(path)


def left_by(home: Home, plan: RunPlan) -> Home:
    """The home as a start by this plan leaves it."""
    home.root.mkdir(exist_ok=True)
    home.run_toml.write_text(plan.manifest.to_toml())
    home.settings.write_text(json.dumps({"model": "m", "task": plan.domain_spec or ""}))
    return home


def test_parts_of_a_named_runs_mixture_are_a_domain_and_the_run_stays(tmp_path: Path) -> None:
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    whole = plan_run(run, None, home=home)
    plan = plan_run(run, "arithmetic:sub", home=home)
    assert plan.domain_spec == "arithmetic:sub"
    assert plan.manifest == whole.manifest
    assert (plan.task_spec, plan.eval_specs) == (whole.task_spec, whole.eval_specs) == (MIXED, (MIXED,))
    assert (
        plan_run(run, "arithmetic:add=3+arithmetic:sub=1", home=home).domain_spec == "arithmetic:add=3+arithmetic:sub"
    )
    assert plan_run(run, "arithmetic:sub=2+arithmetic:add=2", home=home).domain_spec is None, "that is the whole"


def test_another_part_replaces_the_task_and_so_does_a_task_without_a_run(tmp_path: Path) -> None:
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    other = plan_run(run, "arithmetic:add+gsm8k", home=home)
    assert (other.manifest.task, other.domain_spec) == ("arithmetic:add+gsm8k", None)
    alone = plan_run(None, "rg:chain_sum", home=home)
    assert (alone.manifest.name, alone.manifest.task, alone.domain_spec) == ("rg-swarm", "rg:chain_sum", None)
    assert plan_run("rg-swarm", "rg:chain_sum", home=home).domain_spec == "rg:chain_sum"


def test_a_home_keeps_its_domain_and_may_change_or_end_it(tmp_path: Path) -> None:
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    first = plan_run(run, "arithmetic:sub", home=home)
    left_by(home, first)
    for named in (None, run, first.manifest.run_id):
        assert plan_run(named, None, home=home).domain_spec == "arithmetic:sub"
    assert plan_run(None, "arithmetic:add", home=home).domain_spec == "arithmetic:add"
    left_by(home, plan_run(None, MIXED, home=home))
    assert plan_run(None, None, home=home).domain_spec is None


@pytest.mark.parametrize("settings", ["{", "[]", '{"model": "m"}', '{"task": 3}', '{"task": "+"}', '{"task": "gsm8k"}'])
def test_settings_of_an_older_version_or_damaged_ones_keep_no_domain(tmp_path: Path, settings: str) -> None:
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    left_by(home, plan_run(run, None, home=home)).settings.write_text(settings)
    assert plan_run(None, None, home=home).domain_spec is None


def test_a_home_whose_run_an_older_version_made_of_a_part_keeps_it(tmp_path: Path) -> None:
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    part = parse_manifest((tmp_path / "run.toml").read_text(), source="run").model_copy(
        update={"task": "arithmetic:add"}
    )
    left_by(home, RunPlan(part, "arithmetic:add", ()))
    plan = plan_run(run, "arithmetic:add", home=home)
    assert (plan.manifest.run_id, plan.domain_spec) == (part.run_id, None)


def test_files_of_the_parts_come_from_the_spec_or_from_data_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, home = write_run(tmp_path / "run.toml", "gsm8k+math500+arithmetic"), Home(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    plan = plan_run(
        run,
        "gsm8k:g.jsonl=3+arithmetic",
        home=home,
        data_paths={"math500": "/data/m", "gsm8k": "/no", "arithmetic": "/x"},
    )
    assert plan.task_spec == "arithmetic+gsm8k:g.jsonl+math500:/data/m"
    assert plan.domain_spec == f"arithmetic+gsm8k:{tmp_path}/g.jsonl=3", "a later start may be from another folder"


def test_nodes_that_all_answer_the_same_prompts_have_no_domain(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.toml", MIXED, 'prompt_sharing = "horizontal"\n')
    with pytest.raises(ConfigError, match=r"omit --task arithmetic:add,") as caught:
        plan_run(run, "arithmetic:add", home=Home(tmp_path / "home"))
    assert "\n" not in str(caught.value)


def test_a_domain_is_no_longer_than_a_record_takes(tmp_path: Path) -> None:
    parts = [f"rg:{letter * 69}" for letter in "abcdefg"]
    run = write_run(tmp_path / "run.toml", "+".join(parts))
    weights = "+".join(f"{part}={101 + number}" for number, part in enumerate(parts))
    with pytest.raises(ConfigError, match="more than 512 bytes"):
        plan_run(run, weights, home=Home(tmp_path / "home"))
