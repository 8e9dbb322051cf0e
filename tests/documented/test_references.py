"""The reference pages that are generated from the code, or list its parts, are up to date."""

import re
from collections.abc import Iterator
from pathlib import Path

from ftis_node.algorithms.methods import METHODS
from tests.documented import cli_reference, events
from tests.documented.families import PAGE, PRESET, families_table
from tests.documented.methods import methods_table, parameters_table
from tests.documented.metrics import metrics_table
from tests.documented.pages import ROOT

DOCS: Path = ROOT / "docs"


def test_the_page_of_commands_equals_the_generated_one():
    assert (DOCS / "reference/cli.md").read_text() == cli_reference.render(), "run `make docs`"


def test_the_page_of_events_has_every_event_and_its_fields():
    page = (DOCS / "reference/events.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .+ \| (.*) \|$", page, flags=re.MULTILINE))
    written = events.written()
    assert len(written) > 40
    assert {name: rows.get(name) for name in written} == {name: events.fields_of(name) for name in written}
    sources = "\n".join(path.read_text() for path in (ROOT / "ftis_node").rglob("*.py"))
    assert not [name for name in set(rows) - set(written) if f'"{name}"' not in sources]
    assert "TO WRITE" not in page


def test_the_page_of_methods_has_the_tables_of_the_code():
    page = (DOCS / "train/methods.md").read_text()
    assert methods_table() in page and parameters_table() in page, "python -m tests.documented.methods"
    formulas = page[page.index("## Formulas") : page.index('"Mean over"')]
    assert {name for name in METHODS if f"`{name}`" not in formulas} == set()


def test_the_page_of_metrics_has_the_table_of_the_code():
    assert metrics_table() in (DOCS / "reference/metrics.md").read_text(), "run `make docs`"


def test_the_page_of_models_has_the_table_of_the_tested_families():
    page = PAGE.read_text()
    assert families_table() in page, "run `make docs`"
    assert f"`{PRESET}`" in page


def test_the_architecture_page_names_every_package():
    page = (DOCS / "develop/architecture.md").read_text()
    packages = {path.name for path in (ROOT / "ftis_node").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == set(re.findall(r"^  (\w+)/  ", page, flags=re.MULTILINE))
    layers = page[page.index("## Layers") : page.index("## To change X")]
    assert packages == {name for name in re.findall(r"`(\w+)`", layers) if name != "status"}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_threat_model_names_tests_that_exist():
    """A cell is `FILE: TEST; FILE: TEST`; a file without a folder is in tests/attacks, TEST is a part of its name."""
    cells = list(_cells_of_tests((DOCS / "develop/threat-model.md").read_text()))
    assert len(cells) > 60
    missing = []
    for cell in cells:
        source = ""
        for name in re.split(r"[,;:] ", cell):
            files = (ROOT / "tests" / f"{name}.py", ROOT / "tests/attacks" / f"test_{name}.py")
            if found := [file for file in files if file.exists()]:
                source = found[0].read_text()
            elif not re.search(rf"def \w*{re.escape(name)}", source) and not (ROOT / "tests" / name).is_dir():
                missing.append(f"{name} in {cell!r}")
    assert not missing


def _cells_of_tests(page: str) -> Iterator[str]:
    """Yield the last cell of each row of the tables whose last column is "test"."""
    is_wanted = False
    for line in page.splitlines():
        cell = line.removesuffix("|").rpartition("|")[2].strip()
        if not line.startswith("|"):
            is_wanted = False
        elif cell == "test":
            is_wanted = True
        elif is_wanted and cell.strip("-"):
            yield cell
