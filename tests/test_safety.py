"""Forbidden code in the package: unpickling, running foreign code, starting a shell.

The first tests search the syntax trees for imports and calls by name. The others test plug-ins, options of vLLM and
telemetry switches. tests/models/test_model_loading.py tests models.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftis_node.config.no_network_env import NO_TELEMETRY
from ftis_node.errors import ConfigError, TaskError
from ftis_node.generation.engines.vllm_options import check_options
from ftis_node.tasks import load_task

PACKAGE = Path(__file__).parents[1] / "ftis_node"
FILES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "xml", "ftplib"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("torch.load", "torch.hub.load", "torch.jit.load", "joblib.load", "load_state_dict_from_url"),
    *("pandas.read_pickle", "run_path", "runpy.run_path"),
}
SUFFIXES = {".py", ".md", ".toml", ".proto", ".txt", ".yaml", ".yml"}
ALWAYS_FALSE = {"trust_remote_code", "allow_pickle", "shell"}  # keywords whose only allowed value is False


FROM_INDEX = re.compile(
    rb"\bftis[-_.]node\["
    rb"|(?:(?:pip3?|pipx|tool) install|uv add|uvx)(?: [^\s#`&;]+)*? [\"']?ftis[-_.]node\b(?![-_./])"
)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with its dotted name, such as `torch.load`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def faults(source: str) -> list[str]:
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Dict):
            keys = [
                (ast.unparse(key).strip("'\""), value) for key, value in zip(node.keys, node.values, strict=True) if key
            ]
            found += [f"{key} in a table" for key, value in keys if key == "trust_remote_code" and _may_be_true(value)]
    for name, call in calls(tree):
        if name in FORBIDDEN_CALLS:
            found.append(f"calls {name}")
        found += [
            f"{name}({keyword.arg}=...)"
            for keyword in call.keywords
            if keyword.arg in ALWAYS_FALSE and _may_be_true(keyword.value)
        ]
        if name.endswith(".from_pretrained") and name.startswith("Auto"):
            if not any(keyword.arg == "trust_remote_code" for keyword in call.keywords):
                found.append(f"{name} without trust_remote_code=False")
    return found


def _may_be_true(value: ast.expr) -> bool:
    """Return whether a value may be true: not the literal False, and no text that explains a reserved name."""
    return not (isinstance(value, ast.Constant) and (value.value is False or isinstance(value.value, str)))


def test_no_file_unpickles_or_runs_foreign_code():
    found = {str(path.relative_to(PACKAGE)): faults(path.read_text()) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


FORBIDDEN = (
    "import pickle", "from pickle import loads", "torch.load(path, weights_only=True)",
    "np.load(path, allow_pickle=wanted)", "eval(text)", "subprocess.run(line, shell=True)",
    "AutoModel.from_pretrained(folder, trust_remote_code=True)", "AutoModel.from_pretrained(folder)",
    "{'trust_remote_code': True}",
)  # fmt: skip


def test_the_search_finds_each_kind():
    for source in FORBIDDEN:
        assert len(faults(source)) == 1, source


def test_engine_options_cannot_make_vllm_run_or_unpickle_files_of_a_model():
    options = ("trust_remote_code", "load_format", "code_revision", "hf_config_path", "hf_token", "download_dir")
    for option in options:
        with pytest.raises(ConfigError, match=f"engine_options must not have '{option}'"):
            check_options([option])


@pytest.mark.parametrize(("spec", "kind"), [("wonders", "task"), ("arithmetic@judge", "reward")])
def test_an_unknown_plug_in_is_refused_without_a_process_or_a_connection(spec, kind, monkeypatch):
    def refuse(*arguments, **more):
        raise AssertionError(f"{arguments} {more}")

    for function in ("subprocess.Popen.__init__", "socket.socket.connect", "socket.getaddrinfo"):
        monkeypatch.setattr(function, refuse)
    with pytest.raises(TaskError, match=f"unknown {kind} '{spec.split('@')[-1]}': known are"):
        load_task(spec)


def test_telemetry_switches_override_the_environment_and_reach_child_processes():
    code = (
        "import sys; from ftis_node.cli import app; app.run = lambda arguments: 0\n"
        "try: app.main()\nexcept SystemExit: pass\n"
        "from huggingface_hub import constants; import subprocess\n"
        "assert constants.HF_HUB_DISABLE_TELEMETRY\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout)"
    )
    child = {name: value for name, value in os.environ.items() if name not in NO_TELEMETRY}
    child["HF_HUB_DISABLE_TELEMETRY"] = "0"
    done = subprocess.run([sys.executable, "-c", code], env=child, capture_output=True, text=True, check=True)
    assert {f"{name}={value}" for name, value in NO_TELEMETRY.items()} <= set(done.stdout.splitlines())


def test_no_message_or_page_recommends_a_package_of_an_index():
    """No index has ftis-node, so anyone can register the name; a self-reference of pyproject.toml is not looked up."""
    root = PACKAGE.parent
    files = [*FILES, *(root / "deploy").rglob("*"), *(root / "docs").rglob("*.md"), root / "README.md"]
    files += [root / "Dockerfile", root / "Makefile", *root.glob("*.md"), *(root / "bench").rglob("*.py")]
    files += [path for path in (root / "examples").rglob("*") if "node_modules" not in path.parts]
    assert [path for path in files if path.is_file() and FROM_INDEX.search(path.read_bytes())] == []


def test_a_recommendation_in_any_form_is_found():
    for text in (
        *("pip install ftis-node", 'pip3 install "ftis-node"', "pip install -U torch 'ftis-node'", "uvx ftis-node"),
        *("pip install --index-url X ftis.node", "uv add ftis_node", "pipx install ftis-node", 'x "ftis-node[vllm]"'),
    ):
        assert FROM_INDEX.search(text.encode()), text
    assert not FROM_INDEX.search(b"pip install -e ftis-node/\npip install ./ftis-node\npip install ftis-node-method-a")


def test_a_python_file_in_the_working_folder_does_not_run(tmp_path):
    """The folder may be a downloaded model's, and a child process reads the rows."""
    (tmp_path / "csv.py").write_text("open('mark', 'w')")
    (tmp_path / "rows.csv").write_text("question,answer\n1 + 1,2\n")
    command = [Path(sys.executable).with_name("ftis-node"), "tasks", "dataset:./rows.csv?prompt=question&answer=answer"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 + 1" in done.stdout, done.stderr
    assert not (tmp_path / "mark").exists()


def test_no_host_of_a_registry_is_named():
    root = PACKAGE.parent
    forbidden = re.compile(r"pypi\.org|files\.pythonhosted|registry\.npmjs|deb\.debian")
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        if not path.is_file() or parts[0] in {".git", "demo-out"} or "__pycache__" in parts:
            continue
        if (root / parts[0] / "pyvenv.cfg").exists():  # a virtual environment
            continue
        if path.suffix in SUFFIXES or path.name in {"Makefile", "run"}:
            assert path == Path(__file__) or not forbidden.search(path.read_text()), path
