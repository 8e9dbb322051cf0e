"""Methods and filters of other packages: a valid package, installed by pip, and faulty ones."""

import csv
import os
import subprocess
import sys

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.scored_batch import ScoredBatch, load_advantage
from ftis_node.cli.app import run
from ftis_node.config.manifest import RunManifest, load_manifest, parse_canonical, parse_manifest
from ftis_node.errors import ConfigError
from ftis_node.replay.group_choice import Candidate, load_choice
from tests.conftest import write_distribution

pytestmark = pytest.mark.usefixtures("fresh_plugins")

PLUGIN_RUN = """
name = "a"
task = "arithmetic"
[method]
package = "ftis-node-methods"
name = "balance"
"""
FAULTY = """
import torch
from ftis_node.algorithms.methods import Method

def fails(batch, settings):
    raise RuntimeError("no\\nidea")

def flat(batch, settings):
    return batch.advantages

def without_rewards(batch):
    return batch.rewards.log()

def twice(candidates, own, foreign, step):
    return [*candidates[:1], *candidates[:1]]

def unknown(candidates, own, foreign, step):
    return ["a group"]

failing = Method(objective=fails, source="x")
broadcast = Method(objective=flat, source="x")
greedy = Method(objective=flat, source="x", takes=("secret",))
number = 7
far = flat
"""


@pytest.fixture
def faulty_package(tmp_path, monkeypatch):
    (tmp_path / "faulty_methods.py").write_text(FAULTY)
    monkeypatch.delitem(sys.modules, "faulty_methods", raising=False)
    for package in ("faulty", "other"):
        own = "".join(f"{name} = faulty_methods:{name}\n" for name in ("failing", "broadcast", "greedy", "number"))
        others = "[ftis_node.filters]\nfar = faulty_methods:far\n"
        others += "[ftis_node.advantages]\nlog = faulty_methods:without_rewards\n"
        others += "[ftis_node.choices]\ntwice = faulty_methods:twice\nunknown = faulty_methods:unknown\n"
        more = own + others if package == "faulty" else ""
        points = f"[ftis_node.methods]\ntwice = faulty_methods:failing\n{more}"
        write_distribution(tmp_path, package, points, version="2.0")
    monkeypatch.syspath_prepend(tmp_path)


def _loss(method: str, **params: object) -> None:
    one = torch.ones(4, 2, dtype=torch.float64)
    policy_loss(method, -one, -one, one.bool(), one[:, 0], torch.tensor([0, 0, 1, 1]), **params)


@pytest.mark.usefixtures("methods_package")
def test_installed_plugins_are_listed(capsys):
    assert run(["tasks"]) == 0
    out = capsys.readouterr().out
    for line in ("method balance", "filter window", "advantage learner", "choice need"):
        assert f"plug-in   {line}  (ftis-node-methods 0.1.0, ftis_node_methods." in out


@pytest.mark.usefixtures("methods_package")
def test_a_manifest_names_the_method_and_its_package():
    manifest = parse_manifest(PLUGIN_RUN, source="run.toml")
    assert (manifest.method.name, manifest.method.package) == ("balance", "ftis-node-methods")
    assert parse_canonical(manifest.canonical(), source="a peer") == manifest
    assert parse_manifest(manifest.to_toml(), source="run.toml") == manifest
    assert manifest.method.given() == {}, "the package is not a parameter of the loss"
    with pytest.raises(ConfigError, match="wants the Python package another-package"):
        parse_manifest(PLUGIN_RUN.replace("ftis-node-methods", "another-package"), source="run.toml")
    method, step = {"filter": "window", "advantage_scale": "learner"}, {"group_selection": "need"}
    run = RunManifest(name="a", task="arithmetic", method=method, step=step)
    assert parse_canonical(run.canonical(), source="a peer") == run
    text = run.to_toml().replace("[method]", "[method]\nadvantage_shift = 0.1")
    with pytest.raises(ConfigError, match="advantage_shift has no effect with the plug-in"):
        parse_manifest(text, source="run.toml")


def test_a_run_whose_package_is_missing_is_refused_in_one_line():
    with pytest.raises(ConfigError) as caught:
        parse_manifest(
            PLUGIN_RUN.replace("ftis-node-methods", "ftis-node-absent").replace("balance", "absent"), source="run.toml"
        )
    line = str(caught.value)
    assert (
        "no method 'absent' is installed: the author of the manifest wants the Python package "
        "ftis-node-absent. Its code runs with all your rights. Check where it comes from"
    ) in line
    assert "install ftis-node-absent" not in line, "another person's wish is no instruction"
    assert "\n" not in line
    canonical = load_manifest("arithmetic-ftis").canonical().replace(b'"name":"ftis"', b'"name":"absent"')
    with pytest.raises(ConfigError, match=r"run x needs a package .*a package adds it by the entry point") as caught:
        parse_canonical(canonical, source="run x")
    assert "another version" not in str(caught.value)
    for kind, line in (
        ("filter", '[method]\nfilter = "absent"'),
        ("advantage", '[method]\nadvantage_scale = "absent"'),
        ("choice", '[step]\ngroup_selection = "absent"'),
    ):
        with pytest.raises(ConfigError, match=f"no {kind} 'absent' is installed"):
            parse_manifest(f'name = "a"\ntask = "x"\n{line}', source="run.toml")
    with pytest.raises(ConfigError, match="method 'ftis' is built in"):
        parse_manifest('name = "a"\ntask = "x"\n[method]\npackage = "p"', source="run.toml")


def test_an_unset_package_does_not_change_run_ids():
    assert b"package" not in RunManifest(name="a", task="gsm8k").canonical()


@pytest.mark.usefixtures("faulty_package")
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("failing", "the plug-in method 'failing' of faulty 2.0 failed: RuntimeError: no idea; report it"),
        ("broadcast", r"the plug-in method 'broadcast' of faulty 2.0 gave float64 \[4\] instead of float64 \[4, 2\]"),
        ("greedy", "the plug-in method 'greedy' of faulty 2.0 takes secret, which is not a parameter of policy_loss"),
        ("number", "the plug-in method 'number' of faulty 2.0 is a int, which is not a Method"),
        ("twice", "faulty and other both have a plug-in 'twice': uninstall one of them"),
    ],
)
def test_a_faulty_method_fails_with_one_line_that_names_its_package(method, message):
    with pytest.raises(ConfigError, match=message):
        _loss(method)


@pytest.mark.usefixtures("faulty_package")
def test_a_filter_of_the_wrong_type_is_refused():
    with pytest.raises(ConfigError, match=r"the plug-in filter 'far' of faulty 2.0 gave float64 \[4\] instead of bool"):
        _loss("ftis", filter="far")


@pytest.mark.usefixtures("faulty_package")
def test_advantages_that_are_not_finite_are_refused():
    scored = ScoredBatch(*torch.tensor([[1.0, 0.0], [0, 0], [0, 0], [0, 0], [1.0, 1.0]], dtype=torch.float64))
    with pytest.raises(ConfigError, match="the plug-in advantage 'log' of faulty 2.0 failed: .* holds a non-finite"):
        load_advantage("log")(scored)


@pytest.mark.usefixtures("faulty_package")
@pytest.mark.parametrize(
    ("name", "message"), [("twice", "gave 2 own and 0 foreign groups, 1 of them"), ("unknown", "not one of the ready")]
)
def test_a_choice_of_other_groups_is_refused(name, message):
    ready = Candidate(b"a", "me", own=True, arrival=0, created_at=0.0, policy_version=0, problem=b"p")
    with pytest.raises(ConfigError, match=f"the plug-in choice '{name}' of faulty 2.0 .*{message}"):
        load_choice(name)([ready], 4, 4, step=1)


def test_installed_plugins_are_compared_with_a_built_in_one(example_method, tiny_models, tmp_path):
    command = [sys.executable, "-m", "ftis_node", "compare", "--pair", f"{tiny_models['s']},{tiny_models['m']}"]
    options = ["--task", "arithmetic:add", "--prompts", "4", "--steps", "2", "--seeds", "1", "--out", str(tmp_path)]
    methods = ("ftis", "balance:advantage_scale=learner", "ftis:filter=window:peer_weights=shrinkage")
    path = os.pathsep.join([str(example_method), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *options, "--methods", ",".join(methods), "--share", "need:1"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert {(row["method"], row["model"]) for row in rows} == {
        (method, model) for method in methods for model in ("s", "m")
    }
