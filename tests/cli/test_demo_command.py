"""The reports of `demo --llm` have the answers before and after training."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.lab import demo
from ftis_node.lab.demo import DemoPlan, DemoResult, NodeResult
from tests.report.support import write_home


def test_each_report_has_the_answers_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [NodeResult(name, 1, 0.1, 0.9, 60, 1, 1, 1, 1, 8.1, min_final=0.5) for name in ("full", "lora")]
    for node in nodes:
        write_home(tmp_path / f"home-{node.name}")
    sample = {"problem": "2+2=", "right_answer": "four", "before": {"text": "five", "is_right": False}}
    sample |= {node.name: {"text": f"four, says {node.name}", "is_right": True} for node in nodes}
    monkeypatch.setattr(demo, "llm_plan", lambda **_: DemoPlan("words-ftis", (), "", steps=1))
    monkeypatch.setattr(demo, "run_demo", lambda *_, **__: DemoResult(nodes, 1.0, 1, [sample]))
    assert run(["demo", "--llm", "--out", str(tmp_path)]) == 0
    for name, other in (("full", "lora"), ("lora", "full")):
        page = (tmp_path / f"report-{name}.html").read_text(encoding="utf-8")
        assert "Accuracy 0 % before, 75 % after, on 64 problems of arithmetic." in page
        assert "<pre>five</pre>" in page and f"<pre>four, says {name}</pre>" in page and f"says {other}" not in page
        assert f"After: node {name}.</p>" in page
    assert "reports in" in capsys.readouterr().out
