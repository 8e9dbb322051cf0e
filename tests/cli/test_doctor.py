"""`doctor --model` prints the memory plan as text and as JSON, and refuses contradicting options."""

import json
from pathlib import Path
from typing import Any

import pytest

from ftis_node.cli.app import run
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import LoraSection
from ftis_node.memory import choice as memory_choice
from tests.models.test_model_shape import QWEN_3B

GIB = 1 << 30


def doctor(capsys: pytest.CaptureFixture[str], home: Path, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["doctor", "--home", str(home), "--only", "model", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def plan_lines(output: str) -> list[dict[str, Any]]:
    return [finding for finding in json.loads(output) if finding["check"] == "memory"]


def test_a_plan_for_a_card_of_another_machine(capsys, tmp_path, model):
    code, output, _ = doctor(capsys, tmp_path, "--model", str(model), "--gpu-memory", "24", "--json")
    assert code == 0
    verdict, *rest = plan_lines(output)
    assert verdict["level"] == "ok"
    assert "gsm8k-ftis, all weights: both workers stay on one GPU" in verdict["finding"]
    assert f"of {0.95 * 24:.2f} GiB" in verdict["finding"]
    (cache,) = [finding["num_bytes"] for finding in rest if "key/value cache" in finding["finding"]]
    assert cache == 2 * 2 * 32 * 2 * 256 * 760  # 2 layers, 2 key/value heads of 16, bfloat16
    for text in ("share of its GPU", "activations are kept; the output head takes 2048 tokens at once"):
        assert any(text in finding["finding"] for finding in rest), text


def test_a_too_small_card_gives_exit_code_3_and_the_changes_that_would_fit(capsys, tmp_path, model):
    arguments = ("--model", str(model), "--gpu-memory", "1.5")
    code, output, error = doctor(capsys, tmp_path, *arguments, "--full", "--verbose")
    assert code == 3
    assert error.splitlines()[-1] == "ftis-node: not ready: memory.plan; see the advice above"
    assert "does not fit" in output and "use a smaller model or a larger device" in output
    assert "-> no Qwen2.5 model fits: take a larger card" in doctor(capsys, tmp_path, *arguments)[1]


def test_the_plan_uses_flags_and_run(capsys, tmp_path, model):
    (tmp_path / "node.toml").write_text("[generation]\nmax_batch = 4\n")
    arguments = ("--model", str(model), "--gpu-memory", "24", "--gpu-memory", "24", "--json")
    code, output, _ = doctor(capsys, tmp_path, *arguments, "--lora", "--run", "arithmetic-ftis")
    assert code == 0
    verdict, *rest = plan_lines(output)
    assert (
        "arithmetic-ftis, a LoRA adapter of rank 128: the generator on GPU 0, the learner on GPU 1"
        in verdict["finding"]
    )
    (cache,) = [finding["num_bytes"] for finding in rest if "key/value cache" in finding["finding"]]
    assert cache % (2 * 2 * 32 * 2 * 4) == 0 and cache < 2 * 2 * 32 * 2 * 5 * 760


def test_the_plan_uses_the_settings_of_the_homes_last_start(capsys, tmp_path, model):
    last = NodeSettings(model=str(model), lora=True, quantize="4bit", lora_adapter=LoraSection(rank=16, alpha=32))
    (tmp_path / "settings.json").write_text(last.model_dump_json())
    arguments = ("--model", str(model), "--gpu-memory", "24", "--json")
    _, output, _ = doctor(capsys, tmp_path, *arguments)
    assert "gsm8k-ftis, a LoRA adapter of rank 16 on a 4-bit base" in str(plan_lines(output))
    _, output, _ = doctor(capsys, tmp_path, *arguments, "--quantize", "none")
    assert "a LoRA adapter of rank 16: " in str(plan_lines(output))


def test_the_plan_names_the_gpus_of_each_worker(capsys, tmp_path, model):
    cards = [argument for _ in range(4) for argument in ("--gpu-memory", "24")]

    def verdict(*arguments):
        code, output, _ = doctor(capsys, tmp_path, "--model", str(model), *cards, *arguments, "--json")
        assert code == 0
        return str(plan_lines(output)[0]["finding"])

    assert "the generator on GPU 0, the learner on GPU 1; not used: 2, 3: " in verdict()
    spread = verdict("--gpus", "4", "--tensor-parallel", "2")
    assert "the generator on GPU 0 and 1, the learner on GPU 2 and 3, divided among them: " in spread
    assert "the generator on GPU 0, the learner on GPU 1 and 2, divided among them; not used: 3: " in verdict(
        "--gpus", "3"
    )
    assert "both workers stay on one GPU (GPU 0 of 4): " in verdict("--gpus", "1")
    code, output, _ = doctor(capsys, tmp_path, "--model", str(model), *cards, "--gpus", "5", "--json")
    assert code == 3 and "--gpus 5: this node sees 4 GPUs" in output


def save_qwen_3b(folder: Path) -> Path:
    """A model folder without weights: `doctor` reads only the headers of weight files."""
    folder.mkdir()
    for name, document in (("config.json", QWEN_3B), ("tokenizer_config.json", {})):
        (folder / name).write_text(json.dumps(document))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [3_085_938_688], "data_offsets": [0, 6_171_877_376]}})
    with (folder / "model.safetensors").open("wb") as weights:
        weights.write(len(header).to_bytes(8, "little") + header.encode())
        weights.truncate(weights.tell() + 6_171_877_376)  # a sparse file takes no space on the disk
    return folder


def test_the_options_of_training_are_one_short_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_choice, "find_spec", lambda name: None)
    monkeypatch.setattr("ftis_node.doctor.model.free_host_bytes", lambda: 64 * GIB)
    model = save_qwen_3b(tmp_path / "Qwen2.5-3B")
    arguments = ("--model", str(model), "--gpu-memory", "22")
    _, output, _ = doctor(capsys, tmp_path, *arguments)
    lines = output.splitlines()
    (verdict,) = [line for line in lines if "memory.plan" in line]
    assert verdict.startswith(
        "ok    memory.plan: gsm8k-ftis, a LoRA adapter of rank 128: one GPU: the generator sleeps"
    )
    (head,) = [number for number, line in enumerate(lines) if line.split() == ["needs", "fits", "plan"]]
    table = [line.removeprefix("ok    memory.option: ").split(maxsplit=3) for line in lines[head + 1 :]][:7]
    assert [row[2:] for row in table[:4]] == [
        ["no", "all weights"],
        ["no", "all weights, 8-bit optimizer states"],
        ["no", "all weights, optimizer states in host memory"],
        ["yes", "a LoRA adapter of rank 128 (join takes this)"],
    ]
    assert {row[2] for row in table[4:]} == {"yes"}
    assert not any("join takes" in row[3] for row in table[4:])
    assert len([line for line in lines if "memory." in line]) == 8, "parts and changes are details"
    _, output, _ = doctor(capsys, tmp_path, *arguments, "--verbose")
    assert "generator: places for adapters" in output
    code, output, _ = doctor(capsys, tmp_path, "--model", str(model), "--gpu-memory", "46", "--json")
    rows = [finding for finding in plan_lines(output) if finding["id"] == "memory.option"]
    assert (
        'yes   all weights, 8-bit optimizer states (first run `pip install -e ".[8bit]"` in the clone of ftis-node)'
        in rows[1]["finding"]
    )
    code, output, _ = doctor(capsys, tmp_path, *arguments, "--full")
    assert "-> --lora (rank 128) would suffice" in output and "memory.option" not in output


def test_a_missing_model_gives_exit_code_3(capsys, tmp_path):
    code, output, _ = doctor(capsys, tmp_path, "--model", str(tmp_path / "nowhere"))
    assert code == 3 and "nowhere" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora"], "--model"), (["--gpu-memory", "24"], "--model"), (["--gpus", "2"], "--model"),
        (["--model", "x", "--gpus", "2", "--tensor-parallel", "2"], "the learner has none"),
        (["--model", "x", "--gpu-memory", "0"], "--gpu-memory"),
        (["--model", "x", "--run", "no-such-run"], "no-such-run"),
    ],
)  # fmt: skip
def test_contradicting_options_are_a_one_line_error(capsys, tmp_path, arguments, message):
    code, output, error = doctor(capsys, tmp_path, *arguments)
    assert (code, output) == (2, "") and len(error.splitlines()) == 1
    assert message in error
