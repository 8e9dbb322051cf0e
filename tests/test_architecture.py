"""The layers of the packages: each imports only lower layers, and the command line loads no heavy library.

`docs/develop/architecture.md` has the same layers. A package that is missing in the table fails a test.
"""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ftis_node"
BENCH = PACKAGE.parent / "bench"
LAYERS = {
    "errors": 0, "files": 0, "backoff": 0, "documentation": 0, "plugins": 0, "config": 1,
    "records": 0, "telemetry": 0, "algorithms": 2, "tasks": 2, "models": 2, "swarm": 2, "validation": 3, "replay": 3,
    "workers": 3, "generation": 4, "learner": 4, "gossip": 4, "memory": 5, "node": 6, "doctor": 7, "export": 7,
    "integrations": 7, "view": 7, "evaluation": 8, "report": 8, "dashboard": 8, "lab": 9, "bootstrap": 9, "cli": 10,
}  # fmt: skip
BASE = {"backoff", "documentation", "errors", "files", "plugins"}  # every package may import these
TOP_FILES = {"__init__", "__main__"}
IMPORTERS = {  # by heavy library: the packages that may import it
    "torch": {"algorithms", "models", "workers", "generation", "learner", "lab", "integrations"},
    "trl": {"integrations"},
    "hivemind": {"gossip"},
    "vllm": {"generation"},
    "peft": {"models", "learner", "generation"},
    "tensorboard": {"telemetry"},
    "wandb": {"telemetry"},
    "trackio": {"telemetry"},
    "textual": {"dashboard"},
    "textual_serve": {"dashboard"},
}


@cache
def _imports(path: Path) -> set[str]:
    """Return the dotted names of the modules that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            if node.module == "ftis_node":
                names.update(f"ftis_node.{alias.name}" for alias in node.names)
    return names


def _package(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if _package(path) not in TOP_FILES]


def test_every_package_has_a_layer():
    assert {_package(path) for path in FILES} == set(LAYERS)


def _forbidden_imports(is_wrong: Callable[[str, str], bool]) -> str:
    """Return one line for each import for which `is_wrong(package, name)` is true."""
    return "\n".join(
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in FILES
        for name in sorted(_imports(path))
        if is_wrong(_package(path), name)
    )


def _is_not_lower(package: str, name: str) -> bool:
    project, _, rest = name.partition(".")
    imported = rest.partition(".")[0]
    if project != "ftis_node" or imported in {"", package, "__version__", *BASE}:
        return False
    return LAYERS.get(imported, LAYERS[package]) >= LAYERS[package]


def _is_too_heavy(package: str, name: str) -> bool:
    library = name.partition(".")[0]
    return library in IMPORTERS and package not in IMPORTERS[library]


def test_packages_import_only_lower_layers():
    assert _forbidden_imports(_is_not_lower) == ""


def test_heavy_libraries_are_imported_only_in_their_packages():
    assert _forbidden_imports(_is_too_heavy) == ""


def _cycle_of(files: dict[str, Path]) -> list[str]:
    """Return one cycle of imports among files as module names, TYPE_CHECKING included; empty if there is none."""
    graph = {name: _modules_imported(path, files) - {name} for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _modules_imported(path: Path, files: dict[str, Path]) -> set[str]:
    """Return the names of `files` that a file imports; a package only for names that are not its modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= modules & files.keys()
            if not modules <= files.keys():
                names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & files.keys()


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def test_no_cycle_between_files_with_type_only_imports():
    names = {_module(path, PACKAGE.parent): path for path in FILES}
    by_package = {
        package: {name: path for name, path in names.items() if _package(path) == package} for package in LAYERS
    }
    assert not {package: cycle for package, files in by_package.items() if (cycle := _cycle_of(files))}


def test_no_cycle_between_files_of_the_benchmarks():
    assert not _cycle_of({_module(path, BENCH): path for path in sorted(BENCH.rglob("*.py"))})


def test_no_folder_has_more_than_20_files_and_no_file_more_than_350_lines():
    per_folder = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in FILES)
    del per_folder["cli/commands"]  # one command a file
    assert not {folder: number for folder, number in per_folder.items() if number > 20}
    others = Counter(path.parent for top in ("tests", "bench") for path in (PACKAGE.parent / top).rglob("*.py"))
    assert not {str(folder): number for folder, number in others.items() if number > 20}
    lengths = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in FILES}
    assert not {file: length for file, length in lengths.items() if length > 350}


def test_no_public_class_name_twice():
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    repeated = {name: files for name, files in places.items() if len(files) > 1 and not _is_generated(files)}
    assert not repeated


def _is_generated(files: list[str]) -> bool:
    return any(file.endswith("_pb2.py") for file in files)


HEAVY = (
    *("torch", "vllm", "hivemind", "transformers", "datasets", "matplotlib", "tensorboard", "wandb", "trackio"),
    *("textual", "rich", "aiohttp", "numpy", "pyarrow", "cryptography", "zmq", "psutil", "prometheus_client"),
)
NOT_FOR_HELP = (*HEAVY, "pydantic", "msgspec", "http.client", "sqlite3")  # typer reads options with pydantic
LOADED = """
import sys
before = set(sys.modules)  # coverage.py loads some libraries itself
from ftis_node.cli.app import run
for arguments, libraries in {commands!r}:
    code = run(arguments)
    heavy = sorted((set(sys.modules) - before) & set(libraries))
    if code or heavy:
        sys.exit(f"{{arguments}}: exit code {{code}}, loaded {{heavy}}")
"""


def _run_in_one_process(commands: list[tuple[list[str], tuple[str, ...]]]) -> subprocess.CompletedProcess[str]:
    """Run commands in one process. It fails at the first command after which one of its libraries is loaded."""
    code = LOADED.format(commands=commands)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("statement", "library"),
    [
        ("from ftis_node import Manifest, ReplayBuffer, Task, decode_envelope", "pandas"),
        ("import ftis_node.gossip", "google"),
        ("import ftis_node.generation.client, ftis_node.generation.evaluate, ftis_node.generation.worker", "vllm"),
        ("import ftis_node.learner.client, ftis_node.models", "peft"),
    ],
)
def test_an_import_loads_neither_torch_nor_another_large_library(statement, library):
    large = {library, "torch", "transformers", "safetensors", "hivemind", "datasets"}
    code = f"import sys; {statement}; sys.exit(' '.join({large} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_loads_no_heavy_library():
    light = [([option], NOT_FOR_HELP) for option in ("--version", "--help")]
    done = _run_in_one_process([*light, *(([command, "--help"], HEAVY) for command in ("join", "replay", "compare"))])
    assert done.returncode == 0, done.stderr


def test_status_loads_no_heavy_library(tmp_path):
    from ftis_node.telemetry.status import Status

    (tmp_path / "status.json").write_bytes(Status().to_json())
    done = _run_in_one_process([(["status", "--json", "--home", str(tmp_path)], HEAVY)])
    assert done.returncode == 0, done.stderr
    assert '"schema": 1' in done.stdout


NODE_PARTS = (
    *("supervision", "worker_interfaces", "worker_settings", "pausing", "context", "storage"),
    *("peers", "training", "loops", "exchange", "http_api", "wiring", "daemon", "startup"),
)
"""Folders and files of the node, lowest first: each imports only those below it."""


def test_parts_of_the_node_import_only_lower_parts():
    files = [path for path in FILES if path.is_relative_to(PACKAGE / "node") and path.parent.name != "ftis_node"]
    parts = {path: path.relative_to(PACKAGE / "node").parts[0].removesuffix(".py") for path in files}
    assert set(parts.values()) == {*NODE_PARTS, "__init__"}
    upward = [
        (part, name)
        for path, part in parts.items()
        for name in _imports(path)
        if part != "__init__" and name.startswith("ftis_node.node.")
        if NODE_PARTS.index(name.split(".")[2]) > NODE_PARTS.index(part)
    ]
    assert not upward


def test_only_the_composition_root_has_all_components():
    """A loop or a component receives each part that it uses beside those of `NodePart` as a separate argument."""
    users = {path.relative_to(PACKAGE).as_posix() for path in FILES if "ftis_node.node.wiring" in _imports(path)}
    assert {user for user in users if not user.startswith(("node/startup/", "lab/"))} == {"node/daemon.py"}
