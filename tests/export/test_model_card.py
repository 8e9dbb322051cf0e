"""A card shows text of others without links, images or tags of it."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from ftis_node.config.manifest import RunManifest
from ftis_node.export.model_card import RunRecord, write_model_card
from ftis_node.export.model_export import QUESTION, _use_section
from ftis_node.telemetry.status import EvalStatus, Status

OF_MODEL: Any = {"is_adapter": True, "step": 2, "use": "", "license": None}
HOSTILE = [
    "pattern=<img/src=http://evil.example/x.png>&reward=regex",
    "answer=![x](http://evil.example/x.png)",
    "answer=a`b|c`<script>",
    "answer=www.evil.example",
    "answer=*bold*'\"\\: {x: 1} # y",
]


def record_of(task: str, base: str = "tiny") -> RunRecord:
    manifest = RunManifest(name="a", task=task)
    return RunRecord(manifest, base, "--lora", 0, Status(eval=(EvalStatus(2, task, 0.5, 8),)))


def rendered(folder: Path) -> tuple[str, str]:
    """Return the HTML of a card, as a hub makes it, and its metadata."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    assert isinstance(yaml.safe_load(metadata), dict)
    return MarkdownIt("gfm-like", {"html": True}).render(text), metadata


@pytest.mark.parametrize("query", HOSTILE)
def test_the_task_of_a_run_adds_no_link_image_or_tag_to_a_card(tmp_path, query):
    record = record_of(f"dataset:x?prompt=q&{query}", base="<b>[m](http://evil.example)|`")
    write_model_card(tmp_path, record, **OF_MODEL)
    assert_harmless(*rendered(tmp_path))


def assert_harmless(html: str, metadata: str) -> None:
    assert "<a " not in html
    for tag in ("<img", "<script", "<b>", "<em", "<strong"):
        assert tag not in html
    assert not set("<>[]()!|`") & set(metadata)
    assert html.count("<td") % 2 == 0, "no cell is split"


def test_a_plain_task_is_shown_as_it_is(tmp_path):
    write_model_card(tmp_path, record_of("arithmetic=3+rg:chain_sum", base="org/tiny-1.5B"), **OF_MODEL)
    text = (tmp_path / "README.md").read_text()
    assert "# org/tiny-1.5B, 2 steps of arithmetic=3+rg:chain_sum\n" in text
    assert "| task | arithmetic=3+rg:chain_sum |" in text
    assert "--model org/tiny-1.5B --lora" in text


def test_a_card_asks_with_the_system_message_of_the_task_and_serves_the_adapter(tmp_path):
    hostile = "Be short.\n```\n<img src=http://evil.example/x.png>"
    use = _use_section("org/mine", {"r": 12}, base="org/base", system=hostile)
    write_model_card(tmp_path, record_of("words"), **OF_MODEL | {"use": use})
    (line,) = (line for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("(answer,) = "))
    turns = line.removeprefix("(answer,) = ask(").partition(", max_new_tokens")[0]
    assert [turn["content"] for turn in ast.literal_eval(turns)] == [hostile, QUESTION]
    assert "vllm serve org/base --enable-lora --max-lora-rank 16 --lora-modules trained=org/mine" in use
    assert_harmless(*rendered(tmp_path))
