"""The demo: two real nodes, their table, and answers before and after training."""

import asyncio
import json
import os
from dataclasses import replace

import pytest

from ftis_node.cli.app import run
from ftis_node.config.manifest import load_manifest
from ftis_node.evaluation.model_answers import answers_of
from ftis_node.lab import demo
from ftis_node.lab.demo import DemoNode, DemoPlan, DemoResult, NodeResult, run_demo
from ftis_node.tasks import load_task
from tests.conftest import with_sections
from tests.report.support import write_home

NODE = NodeResult("m", 800_000, 0.1, 0.9, 40, 640, 640, 1, 1, min_final=0.85)


@pytest.mark.timeout(300)
def test_two_nodes_train_and_answer_some_problems(tiny_models, tmp_path):
    settings = "[learner]\nmicro_batch_tokens = 512\n"
    nodes = tuple(DemoNode(size, str(tiny_models[size]), settings=settings) for size in ("s", "m"))
    preset = load_manifest("arithmetic-ftis")  # with a rate after which no answer is as before
    (tmp_path / "run.toml").write_text(with_sections(preset, optimizer={"learning_rate": 0.05}).to_toml())
    plan = DemoPlan(str(tmp_path / "run.toml"), nodes, "two models", steps=2, sample_task="arithmetic")
    result = run_demo(plan, tmp_path, steps=2, engine="torch", seed=0, on_progress=lambda fraction, what: None)
    assert [(node.name, node.steps) for node in result.nodes] == [("s", 2), ("m", 2)]
    assert all(node.own_groups and node.foreign_groups and not node.refused for node in result.nodes)
    problems = load_task("arithmetic", split="test")
    for index, sample in enumerate(result.samples):
        assert sample["problem"] == problems[index].prompt[0]["content"]
        assert sample["right_answer"] == problems[index].answer
        for name in ("before", "s", "m"):
            assert sample[name]["is_right"] == (sample[name]["text"] == problems[index].answer)
    assert len(json.loads((tmp_path / "results.json").read_bytes())["samples"]) == len(result.samples) == 5
    model_of = {"before": tiny_models["s"]} | {name: tmp_path / f"model-{name}" for name in ("s", "m")}
    found = asyncio.run(
        answers_of(
            [str(model) for model in model_of.values()], "arithmetic", limit=5, k=1,
            max_tokens=preset.sampling.max_total_tokens, engine="torch",
        )
    )  # fmt: skip
    for name, answers in zip(model_of, found, strict=True):
        assert [sample[name]["text"] for sample in result.samples] == [one.greedy.text for one in answers]
    assert (
        len({tuple(sample[name]["text"] for sample in result.samples) for name in model_of}) > 1
    )  # two may answer alike after so few steps
    assert (tmp_path / "model-s" / "model.safetensors").exists()


def test_the_commands_of_a_demo_have_no_settings_of_the_environment(tmp_path, monkeypatch):
    def note(*_, **how):
        given.update(how.get("env") or os.environ)
        raise OSError("enough")

    given = {}
    monkeypatch.setenv("FTIS_OBSERVE__LISTEN", "0.0.0.0:9464")
    monkeypatch.setattr("subprocess.Popen", note)
    with pytest.raises(OSError, match="enough"):
        run_demo(DemoPlan("", (), "", steps=1), tmp_path, steps=1, engine="torch", seed=0, on_progress=lambda *_: None)
    assert "PATH" in given and not [name for name in given if name.startswith("FTIS_")]


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, None),
        ({"pass_before": 0.7}, "m gained 0.200, less than 0.25"),
        ({"foreign_groups": 64}, "m used 9% foreign groups, less than 40 %"),
        ({"pass_after": 0.8}, "m ends at 0.800, below 0.85"),
        (
            {"refused": {"stale": 2, "wrong_reward": 1}},
            "m refused groups of the other node (stale 2, wrong_reward 1), all must be accepted",
        ),
    ],
)
def test_a_demo_that_missed_a_goal_says_which(changes, failure):
    result = DemoResult([replace(NODE, **changes)], 1.0, [])
    assert result.failures() == ([] if failure is None else [failure])


def test_each_report_has_the_answers_of_its_node(tmp_path, monkeypatch, capsys):
    nodes = [NodeResult(name, 1, 0.1, 0.9, 60, 1, 1, 1, 1, min_final=0.5) for name in ("full", "lora")]
    for node in nodes:
        write_home(tmp_path / f"home-{node.name}")
    sample = {"problem": "2+2=", "right_answer": "four", "before": {"text": "five", "is_right": False}}
    sample |= {node.name: {"text": f"four, says {node.name}", "is_right": True} for node in nodes}
    monkeypatch.setattr(demo, "llm_plan", lambda **_: DemoPlan("words-ftis", (), "", steps=1))
    monkeypatch.setattr(demo, "run_demo", lambda *_, **__: DemoResult(nodes, 1.0, [sample]))
    assert run(["demo", "--llm", "--out", str(tmp_path)]) == 0
    for name, other in (("full", "lora"), ("lora", "full")):
        page = (tmp_path / f"report-{name}.html").read_text(encoding="utf-8")
        assert "Accuracy 0 % before, 75 % after, on 64 problems of arithmetic." in page
        assert "<pre>five</pre>" in page and f"<pre>four, says {name}</pre>" in page and f"says {other}" not in page
        assert f"After: node {name}.</p>" in page
    assert "reports in" in capsys.readouterr().out
