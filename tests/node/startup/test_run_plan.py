"""The meaning of `--task`: a run's task, or this node's domain in it, which the home keeps.

`join --run RUN_ID` joins exactly the requested run or fails.
"""

import hashlib
import json
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError, TaskError
from ftis_node.gossip.directory.entries import RUN_ID_HEX, pack_manifest, unpack_manifest
from ftis_node.node.startup.run_plan import RunPlan, find_run, plan_run
from tests.conftest import raises_line

MIXED = "arithmetic:add+arithmetic:sub"


def write_run(path: Path, task: str, step: str = "") -> str:
    path.write_text(f'name = "mixed"\ntask = "{task}"\n[step]\nown_groups = 4\n{step}')
    return str(path)


def started_with(home: Home, plan: RunPlan) -> Home:
    """Write the home like a start with this plan."""
    home.root.mkdir(exist_ok=True)
    home.run_toml.write_text(plan.manifest.to_toml())
    home.settings.write_text(json.dumps({"model": "m", "task": plan.domain_spec or ""}))
    return home


def test_parts_of_a_runs_mixture_are_a_domain_of_the_same_run(tmp_path):
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    whole = plan_run(run, None, home=home)
    plan = plan_run(run, "arithmetic:sub", home=home)
    assert (plan.domain_spec, plan.manifest) == ("arithmetic:sub", whole.manifest)
    assert (plan.task_spec, plan.eval_specs) == (whole.task_spec, whole.eval_specs) == (MIXED, (MIXED,))
    assert (
        plan_run(run, "arithmetic:add=3+arithmetic:sub=1", home=home).domain_spec == "arithmetic:add=3+arithmetic:sub"
    )
    assert plan_run(run, "arithmetic:sub=2+arithmetic:add=2", home=home).domain_spec is None, "these are all parts"


def test_a_task_outside_the_run_or_without_a_run_replaces_the_task(tmp_path):
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    other = plan_run(run, "arithmetic:add+gsm8k", home=home)
    assert (other.manifest.task, other.domain_spec) == ("arithmetic:add+gsm8k", None)
    alone = plan_run(None, "rg:chain_sum", home=home)
    assert (alone.manifest.name, alone.manifest.task, alone.domain_spec) == ("rg-swarm", "rg:chain_sum", None)
    assert plan_run("rg-swarm", "rg:chain_sum", home=home).domain_spec == "rg:chain_sum"


def test_a_home_keeps_its_domain_until_another_task_is_given(tmp_path):
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    first = plan_run(run, "arithmetic:sub", home=home)
    started_with(home, first)
    for named in (None, run, first.manifest.run_id):
        assert plan_run(named, None, home=home).domain_spec == "arithmetic:sub"
    assert plan_run(None, "arithmetic:add", home=home).domain_spec == "arithmetic:add"
    started_with(home, plan_run(None, MIXED, home=home))
    assert plan_run(None, None, home=home).domain_spec is None


@pytest.mark.parametrize("settings", ["{", '{"model": "m"}', '{"task": 3}', '{"task": "+"}'])
def test_old_or_damaged_settings_keep_no_domain(tmp_path, settings):
    run, home = write_run(tmp_path / "run.toml", MIXED), Home(tmp_path / "home")
    started_with(home, plan_run(run, None, home=home)).settings.write_text(settings)
    assert plan_run(None, None, home=home).domain_spec is None


def test_files_of_the_parts_come_from_the_spec_or_from_data_paths(tmp_path, monkeypatch):
    run, home = write_run(tmp_path / "run.toml", "gsm8k+math500+arithmetic"), Home(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    plan = plan_run(
        run,
        "gsm8k:g.jsonl=3+arithmetic",
        home=home,
        data_paths={"math500": "/data/m", "gsm8k": "/no", "arithmetic": "/x"},
    )
    assert plan.task_spec == "arithmetic+gsm8k:g.jsonl+math500:/data/m"
    assert plan.domain_spec == f"arithmetic+gsm8k:{tmp_path}/g.jsonl=3", (
        "the path is relative, and a later start may be in another folder"
    )


def test_a_run_with_horizontal_prompts_has_no_domains(tmp_path):
    run = write_run(tmp_path / "run.toml", MIXED, 'prompt_sharing = "horizontal"\n')
    with raises_line(ConfigError, "omit --task arithmetic:add,"):
        plan_run(run, "arithmetic:add", home=Home(tmp_path / "home"))


QUERY = "prompt=q&answer=a&reward=exact&style=plain"


def write_problems(path: Path) -> Path:
    path.write_text("".join(json.dumps({"q": f"what is {n}?", "a": str(n)}) + "\n" for n in range(8)))
    return path


def test_the_data_file_that_a_run_file_names_is_read(tmp_path):
    problems = write_problems(tmp_path / "q.jsonl")
    run = write_run(tmp_path / "run.toml", f"dataset:./q.jsonl?{QUERY}")
    plan = plan_run(run, None, home=Home(tmp_path / "home"))
    assert str(problems) in plan.task_spec.replace("/./", "/")
    assert str(tmp_path) not in plan.manifest.task, "the manifest has no path"
    assert "sha256=" in plan.manifest.task


def test_a_manifest_of_the_swarm_reads_no_file_that_it_names(tmp_path):
    problems = write_problems(tmp_path / "q.jsonl")
    stranger = parse_manifest(f'name = "x"\ntask = "dataset:{problems}?{QUERY}"', source="peer")
    with pytest.raises(TaskError, match="needs the run's data file"):
        plan_run(stranger.run_id, None, home=Home(tmp_path / "home"), find=lambda run_id: stranger)


def test_a_run_file_without_a_task_takes_that_of_the_flag(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('name = "plain"\n[step]\nown_groups = 4\n')
    plan = plan_run(str(run), "arithmetic", home=Home(tmp_path / "home"))
    assert (plan.manifest.task, plan.manifest.step.own_groups, plan.domain_spec) == ("arithmetic", 4, None)
    with pytest.raises(ConfigError, match='names no task: write task = "SPEC" into it, or give --task SPEC'):
        plan_run(str(run), None, home=Home(tmp_path / "home"))


PEER = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
CANONICAL = RunManifest(name="wanted", task="arithmetic").canonical()


def find(text: bytes, monkeypatch: pytest.MonkeyPatch) -> RunManifest:
    """Return the run that a node reads from this text, which a peer serves under its hash."""
    run_id = hashlib.sha256(text).hexdigest()[:RUN_ID_HEX]

    async def served(settings: object, *, run_id: str, timeout_s: float) -> bytes:
        unpacked = unpack_manifest(pack_manifest(text), run_id=run_id)
        assert unpacked is not None, "the hash does not match"
        return unpacked

    monkeypatch.setattr("ftis_node.gossip.directory.lookup.find_manifest", served)
    return find_run(run_id, NodeSettings(model="m", peers=(PEER,)))


def test_a_canonical_text_is_the_requested_run(monkeypatch):
    manifest = find(CANONICAL, monkeypatch)
    assert (manifest.name, manifest.canonical()) == ("wanted", CANONICAL)


@pytest.mark.parametrize(
    "text",
    [
        CANONICAL.replace(b",", b", "),
        CANONICAL.replace(b'"name":"wanted"', b'"name":"other","name":"wanted"'),
        CANONICAL.replace(b"1e-06", b"0.000001"),
    ],
    ids=["spaces", "a repeated key", "another form of a number"],
)
def test_a_text_with_another_canonical_form_is_refused_in_one_line(text, monkeypatch):
    assert text != CANONICAL
    with pytest.raises(ConfigError, match="not in the canonical form") as caught:
        find(text, monkeypatch)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
