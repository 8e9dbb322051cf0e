"""Methods and filters of other packages: a valid package, installed by pip, and faulty ones."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.methods import find_method, is_separable, load_method, method_parameters
from ftis_node.algorithms.settings import load_filter
from ftis_node.cli.app import run
from ftis_node.config.manifest import RunManifest, load_manifest, parse_canonical, parse_manifest
from ftis_node.errors import ConfigError
from tests.conftest import EXAMPLES, write_distribution

PLUGIN_RUN = """
name = "a"
task = "arithmetic"
[method]
package = "ftis-node-method-sqrt"
name = "sqrt_tis"
"""
FAULTY = """
import torch
from ftis_node.algorithms.methods import Method

def fails(batch, settings):
    raise RuntimeError("no\\nidea")

def flat(batch, settings):
    return batch.advantages

failing = Method(objective=fails, source="x")
broadcast = Method(objective=flat, source="x")
greedy = Method(objective=flat, source="x", takes=("secret",))
number = 7
far = flat
"""


@pytest.fixture(autouse=True)
def fresh_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the caches, so that each test loads the plug-ins on its path."""
    load_method.cache_clear()
    load_filter.cache_clear()
    yield
    load_method.cache_clear()
    load_filter.cache_clear()


@pytest.fixture
def sqrt_package(example_method: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(example_method)
    return example_method


@pytest.fixture
def faulty_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_methods.py").write_text(FAULTY)
    monkeypatch.delitem(sys.modules, "faulty_methods", raising=False)
    for package in ("faulty", "other"):
        own = "".join(f"{name} = faulty_methods:{name}\n" for name in ("failing", "broadcast", "greedy", "number"))
        more = f"{own}[ftis_node.filters]\nfar = faulty_methods:far\n" if package == "faulty" else ""
        points = f"[ftis_node.methods]\ntwice = faulty_methods:failing\n{more}"
        write_distribution(tmp_path, package, points, version="2.0")
    monkeypatch.syspath_prepend(tmp_path)


def _loss(method: str, **params: object) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """Return loss, metrics and gradient of four completions of two tokens. rho is 4 at two of them, 1/4 at two."""
    behaviour = torch.full((4, 2), -3.0, dtype=torch.float64)
    shift = torch.tensor([4.0, 4.0, 0.25, 0.25], dtype=torch.float64).log()
    learner = (behaviour + shift[:, None]).requires_grad_()
    mask, advantages = torch.ones(4, 2, dtype=torch.bool), torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    loss, metrics = policy_loss(method, learner, behaviour, mask, advantages, torch.tensor([0, 0, 1, 1]), **params)
    loss.backward()
    assert learner.grad is not None
    return loss, metrics, learner.grad


@pytest.mark.usefixtures("sqrt_package")
def test_installed_methods_and_filters_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tasks"]) == 0
    out = capsys.readouterr().out
    assert "plug-in   method sqrt_tis  (ftis-node-method-sqrt 0.1.0, ftis_node_method_sqrt:SQRT_TIS)" in out
    assert "plug-in   filter good  (ftis-node-method-sqrt 0.1.0, ftis_node_method_sqrt:good)" in out


@pytest.mark.usefixtures("sqrt_package")
def test_the_example_method_weights_by_the_square_root() -> None:
    loss, metrics, gradient = _loss("sqrt_tis")
    assert gradient[:, 0].tolist() == pytest.approx([-2 / 8, 2 / 8, -0.5 / 8, 0.5 / 8])
    assert _loss("sqrt_tis", cap=1.5)[2][0, 0].item() == pytest.approx(-1.5 / 8), "its weight is capped"
    assert loss.item() == pytest.approx(0.0)
    assert metrics["truncated_fraction"] == 0.5, "rho is 4 at half of the tokens, and its cap is 3"
    assert method_parameters("sqrt_tis")["cap"] == 3.0
    assert find_method("sqrt_tis").source == "this example"


@pytest.mark.usefixtures("sqrt_package")
def test_the_example_filter_drops_negatives() -> None:
    _, metrics, gradient = _loss("ftis", filter="good")
    assert metrics["kept_fraction"] == 0.5
    assert gradient[1].tolist() == gradient[3].tolist() == [0.0, 0.0]
    assert gradient[0, 0].item() < 0
    assert not is_separable("ftis", {"filter": "good"})


@pytest.fixture
def balance_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example package with its metadata, as pip would install it."""
    source = EXAMPLES / "ftis-node-method-balance"
    points = tomllib.loads((source / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
        for group, names in points.items()
    ]
    write_distribution(tmp_path, "ftis-node-method-balance", "".join(lines))
    monkeypatch.syspath_prepend(source)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("balance_package")
def test_the_balance_weight_is_the_ratio_to_the_mixture_of_both_generators() -> None:
    """rho is 4 and 1/4; half of the completions are own, so the weights are 4 / 2.5 and 1/4 / 0.625."""
    gradient = _loss("balance", sender_ids=torch.tensor([0, 0, 5, 5]))[2]
    assert gradient[:, 0].tolist() == pytest.approx([-1.6 / 8, 1.6 / 8, -0.4 / 8, 0.4 / 8])
    assert _loss("balance", cap=3.0)[2][:, 0].tolist() == pytest.approx([-3 / 8, 3 / 8, -0.25 / 8, 0.25 / 8])
    assert not is_separable("balance", {})


@pytest.mark.usefixtures("balance_package")
@pytest.mark.parametrize("estimator", ["author_k3", "k1_fwd"])
@pytest.mark.parametrize("seed", range(4))
def test_the_window_filter_equals_its_definition(seed: int, estimator: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    size, lengths = (6, 90), torch.tensor([90, 33, 32, 31, 3, 0])
    learner, behaviour = -3 * torch.rand(2, *size, generator=generator, dtype=torch.float64)
    mask = torch.arange(90) < lengths[:, None]
    mask[0] &= torch.arange(90) % 7 != 3
    expected = []
    for lp, lg, marks in zip(learner, behaviour, mask, strict=True):
        ratios = (lp - lg)[marks]
        values = torch.exp(-ratios) + ratios - 1 if estimator == "author_k3" else -ratios
        windows = values.unfold(0, min(32, len(values)), 1).mean(dim=1) if len(values) else torch.tensor([-math.inf])
        expected.append(windows.max().item())
    for threshold in sorted(expected)[1:]:
        _, metrics = policy_loss(
            "f-nois",
            learner,
            torch.where(mask, behaviour, math.nan),
            mask,
            torch.full((6,), -1.0, dtype=torch.float64),
            torch.zeros(6, dtype=torch.int64),
            filter="window",
            kl_estimator=estimator,
            kl_threshold=max(0.0, threshold - 1e-9),
        )
        kept = sum(value < max(0.0, threshold - 1e-9) for value in expected)
        assert metrics["kept_fraction"] == pytest.approx(kept / 6)


@pytest.mark.usefixtures("sqrt_package")
def test_a_manifest_names_the_method_and_its_package() -> None:
    manifest = parse_manifest(PLUGIN_RUN, source="run.toml")
    assert (manifest.method.name, manifest.method.package) == ("sqrt_tis", "ftis-node-method-sqrt")
    assert parse_canonical(manifest.canonical(), source="a peer") == manifest
    assert parse_manifest(manifest.to_toml(), source="run.toml") == manifest
    assert manifest.method.given() == {}, "the package is not a parameter of the loss"
    with pytest.raises(ConfigError, match="wants the Python package another-package"):
        parse_manifest(PLUGIN_RUN.replace("ftis-node-method-sqrt", "another-package"), source="run.toml")
    filtered = RunManifest(name="a", task="arithmetic", method={"filter": "good"})
    assert filtered.method.filter == "good"


def test_a_run_whose_package_is_missing_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(PLUGIN_RUN.replace("sqrt", "absent"), source="run.toml")
    line = str(caught.value)
    assert (
        "no method 'absent_tis' is installed: the author of the manifest wants the Python package "
        "ftis-node-method-absent. Its code runs with all your rights. Check where it comes from"
    ) in line
    assert "install ftis-node-method-absent" not in line, "another person's wish is no instruction"
    assert "\n" not in line
    canonical = load_manifest("arithmetic-ftis").canonical().replace(b'"name":"ftis"', b'"name":"absent_tis"')
    with pytest.raises(ConfigError, match=r"run x needs a package .*a package adds it by the entry point") as caught:
        parse_canonical(canonical, source="run x")
    assert "another version" not in str(caught.value)
    with pytest.raises(ConfigError, match="no filter 'absent' is installed"):
        parse_manifest('name = "a"\ntask = "x"\n[method]\nfilter = "absent"', source="run.toml")
    with pytest.raises(ConfigError, match="method 'ftis' is built in"):
        parse_manifest('name = "a"\ntask = "x"\n[method]\npackage = "p"', source="run.toml")


def test_an_unset_package_does_not_change_run_ids() -> None:
    assert b"package" not in RunManifest(name="a", task="gsm8k").canonical()
    assert RunManifest(name="a", task="gsm8k", method={"name": "gepo"}).run_id == "b90913b252bf983c56918670b60693a3"


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
def test_a_faulty_method_fails_with_one_line_that_names_its_package(method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _loss(method)


@pytest.mark.usefixtures("faulty_package")
def test_a_filter_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the plug-in filter 'far' of faulty 2.0 gave float64 \[4\] instead of bool"):
        _loss("ftis", filter="far")


def test_an_installed_method_is_compared_with_a_built_in_one(
    example_method: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "ftis_node", "compare", "--pair", f"{tiny_models['s']},{tiny_models['m']}"]
    options = ["--task", "arithmetic:add", "--prompts", "4", "--steps", "2", "--seeds", "1", "--out", str(tmp_path)]
    path = os.pathsep.join([str(example_method), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *options, "--methods", "sqrt_tis,ftis:filter=good"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert {(row["method"], row["model"]) for row in rows} == {
        (method, model) for method in ("sqrt_tis", "ftis:filter=good") for model in ("s", "m")
    }
