"""`export` writes models that transformers and PEFT load with the log-probs of the learner, also as a GGUF file."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import LoraSection, Quantize
from ftis_node.learner.learner import Learner
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import PromptSettings, PromptTokenizer, resolve_model
from ftis_node.models.gguf_export import modelfile
from ftis_node.node.startup.worker_boots import learner_boot
from ftis_node.tasks import load_task
from ftis_node.telemetry.status import EvalStatus, LearnerStatus, Status
from ftis_node.workers.weight_store import WeightProof, probe_logprobs
from tests.deploy.files import check_command
from tests.learner.learner_rig import random_groups
from tests.models.tiny_models import make_tokenizer, save_tiny

RUN = 'name = "a"\ntask = "arithmetic"\n[optimizer]\nlearning_rate = 1e-2\nlora_learning_rate = 1e-2'


def trained_home(root: Path, *, lora: bool, run: str = RUN, quantize: Quantize = "none") -> WeightProof:
    """Create the home of a node that trained two steps; return the learner's log-probs of fixed tokens."""
    home = Home(root / "home")
    home.create()
    model = save_tiny(root / "tiny", seed=5)
    adapter = LoraSection(rank=4, alpha=8)
    settings = NodeSettings(model=str(model), lora=lora, lora_adapter=adapter, quantize=quantize, device="cpu")
    manifest = parse_manifest(run, source="run.toml")
    home.run_toml.write_text(manifest.to_toml())
    home.settings.write_text(settings.model_dump_json())
    source = resolve_model(settings.model)
    how = {"weights": home.weights, "adapters": quantize != "none"}
    learner = Learner(learner_boot(settings, manifest, source, home, WorkerPlacement(), **how))
    for step in (1, 2):
        learner.train(random_groups(seed=step), step=step)
    learner.checkpoints.save_if_behind()  # as at an orderly end
    evaluations = [EvalStatus(step, "arithmetic", accuracy, 8) for step, accuracy in ((0, 0.25), (2, 0.5), (4, 0.75))]
    home.status.write_bytes(Status(learner=LearnerStatus(own_groups=6, foreign_groups=2), eval=evaluations).to_json())
    return learner.state().proof


def test_the_adapter_of_a_4_bit_base_is_merged_into_the_whole_base(tmp_path):
    trained_home(tmp_path, lora=True, quantize="4bit")
    Home(tmp_path / "home").status.write_text('{"node": 5}')  # damaged: the card is without figures
    out = tmp_path / "out"
    assert run(["export", "--out", str(out), "--home", str(tmp_path / "home"), "--merge"]) == 0
    base, merged = (load_file(folder / "model.safetensors") for folder in (tmp_path / "tiny", out))
    added = [merged[name] - value for name, value in base.items() if name.endswith("_proj.weight")]
    assert all(0 < torch.linalg.matrix_rank(each, atol=1e-5) <= 4 for each in added), "the adapter, and no rounding"
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    card = (out / "README.md").read_text()
    assert "--lora --quantize 4bit --seed" in card and "| pass@1, greedy | not evaluated |" in card


@pytest.mark.parametrize(
    ("lora", "flags", "has_adapter"), [(False, [], False), (True, [], True), (True, ["--merge"], False)]
)
def test_the_exported_model_has_the_learners_logprobs_and_a_card(tmp_path, capsys, lora, flags, has_adapter):
    from huggingface_hub import ModelCard
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    proof = trained_home(tmp_path, lora=lora)
    out = tmp_path / "out"
    assert run(["export", "--out", str(out), "--home", str(tmp_path / "home"), *flags]) == 0
    shown = capsys.readouterr().out
    assert (
        "the model after step 2" in shown and f"  push   ftis-node export --home {tmp_path / 'home'} --push-to" in shown
    )
    commands = {line.split()[0]: shlex.split(line)[1:] for line in shown.splitlines() if line.startswith("  ")}
    assert commands["serve"][:2] == ["vllm", "serve"]
    assert commands["serve"][2:] == (
        [str(tmp_path / "tiny"), *"--enable-lora --max-lora-rank 8 --lora-modules".split(), f"trained={out}"]
        if has_adapter
        else [str(out)]
    )
    check_command(commands["ask"][1:])
    check_command(commands["push"][1:])
    assert commands["push"][:4] == ["ftis-node", "export", "--home", str(tmp_path / "home")]
    assert run([*commands["ask"][1:], "--max-tokens", "4"]) == 0
    assert len(capsys.readouterr().out) > 1
    assert (out / "adapter_config.json").exists() == has_adapter
    assert (out / "model.safetensors").exists() != has_adapter
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}, "other users can read it"
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == ("peft" if has_adapter else "transformers")
    assert card.data.base_model is None, "the hub has no model of that name"
    assert "| base model | tiny (a local folder) |" in card.text
    assert "# tiny, 2 steps of arithmetic" in card.text
    assert "| run | a (" in card.text and "), method ftis |" in card.text
    assert "| pass@1, greedy | 0.500 on arithmetic |" in card.text
    assert "| groups trained on | 6 own, 2 of peers |" in card.text
    assert parse_manifest((out / "run.toml").read_text(), source="run.toml") == parse_manifest(RUN, source="here")
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    exec(code.replace("OWNER/NAME", str(out)).replace("=256", "=4"), {})
    assert len(capsys.readouterr().out) > 1, "the code of the card prints an answer"
    loader: Any = AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM
    exported = loader.from_pretrained(out, dtype=torch.float32).eval()
    assert proof.rms_difference(probe_logprobs(exported, proof.probe_ids)) < 1e-5
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32).eval()
    assert proof.rms_difference(probe_logprobs(start, proof.probe_ids)) > 0.01, "it was trained"
    assert len(AutoTokenizer.from_pretrained(out)) > 0
    assert run(["export", "--out", str(out), "--home", str(tmp_path / "home")]) == 2, "the folder is in use"


def test_settings_of_another_release_are_one_line(tmp_path, capsys):
    home = Home(tmp_path / "home")
    home.create()
    home.run_toml.write_text(RUN)
    home.settings.write_text('{"model": "m", "quux": 1}')
    assert run(["export", "--out", str(tmp_path / "out"), "--home", str(home.root)]) == 2
    message = f"{home.settings}: unknown key 'quux'; `ftis-node join --home {home.root}` writes it again"
    assert message in capsys.readouterr().err


QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
IDS = torch.arange(24)[None]
SYSTEM = {"role": "system", "content": "Answer in tags."}


def filled(text: str, *, prompt: str, system: str = "") -> str:
    """Return the prompt that ollama makes by a Modelfile: fields in place of texts, up to the response."""
    (template,) = re.findall(r'TEMPLATE """(.*?)"""', text, re.DOTALL)
    found = re.fullmatch(
        r"{{ if \.System }}(.*){{ else }}(.*){{ end }}{{ \.Response }}<\|im_end\|>", template, re.DOTALL
    )
    assert found is not None
    return found[1 if system else 2].replace("{{ .System }}", system).replace("{{ .Prompt }}", prompt)


@pytest.mark.parametrize(("lora", "kind", "tolerance"), [(True, "f16", 2e-3), (False, "q8_0", 0.04)])
def test_the_file_has_the_learners_logprobs(tmp_path, capsys, lora, kind, tolerance):
    proof = trained_home(tmp_path, lora=lora)
    file = tmp_path / "new" / "Tiny-1.gguf"
    command = ["export", "--home", str(tmp_path / "home"), "--gguf", str(file)]
    assert run([*command, "--gguf-type", kind]) == 0
    shown = capsys.readouterr().out
    assert f"{file}: the model after step 2" in shown
    assert f"ollama create tiny-1 -f {file.parent / 'Modelfile'}" in shown
    assert sorted(path.name for path in file.parent.iterdir()) == ["Modelfile", "Tiny-1.gguf"]
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    assert proof.rms_difference(probe_logprobs(model, proof.probe_ids)) < tolerance
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32).eval()
    assert proof.rms_difference(probe_logprobs(start, proof.probe_ids)) > 3 * tolerance, "it was trained"
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    expected = make_tokenizer().apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert (ids, run(command)) == (expected, 2)
    assert f"{file} exists: give a file in another folder" in capsys.readouterr().err


def test_folder_and_file_are_one_model(tmp_path, capsys):
    """Bit for bit; a file of 16 bits has matrices rounded. The Modelfile has the system message of the task."""
    trained_home(tmp_path, lora=False, run=RUN.replace('"arithmetic"', '"rg:chain_sum"'))
    out = tmp_path / "out"
    file = out / "tiny.gguf"
    command = ["export", "--home", str(tmp_path / "home"), "--gguf"]
    assert run([*command, str(file), "--gguf-type", "f32", "--out", str(out)]) == 0
    assert run([*command, str(tmp_path / "half" / file.name)]) == 0
    text = (out / "Modelfile").read_text()
    assert text.startswith("# ollama create NAME -f Modelfile\nFROM ./tiny.gguf\n")
    message = load_task("rg:chain_sum")[0].prompt[0]["content"]
    assert f'SYSTEM """{message}"""' in text and 'PARAMETER stop """<|im_end|>"""' in text
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for folder in (out, tmp_path / "half"):
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()
        with torch.no_grad():
            assert torch.equal(read(IDS).logits, exported(IDS).logits), folder
        for value in exported.parameters():
            value.data = value.data.half().float() if value.ndim > 1 else value.data
    capsys.readouterr()
    assert run(["try", "What is 12 + 30?", "--model", str(file), "--max-tokens", "4"]) == 0
    assert len(capsys.readouterr().out) > 1


@pytest.mark.parametrize("has_template", [True, False])
def test_ollama_prompts_as_the_node_does(has_template):
    made = make_tokenizer() if has_template else make_tokenizer(chat_template=None)
    tokenizer = PromptTokenizer(made, name="tiny", prompts=PromptSettings())
    text = modelfile(Path("tiny.gguf"), tokenizer)
    assert filled(text, prompt=QUESTION[0]["content"]) == tokenizer.render_prompt(QUESTION).text
    with_system = tokenizer.render_prompt([SYSTEM, *QUESTION]).text
    assert filled(text, prompt=QUESTION[0]["content"], system=SYSTEM["content"]) == with_system


def test_a_start_token_that_llama_cpp_adds_is_not_in_the_template():
    made = make_tokenizer(chat_template="<|endoftext|>{{ messages[-1]['content'] }}")
    start = ("<|endoftext|>", made.convert_tokens_to_ids("<|endoftext|>"))
    for adds, template in ((False, "<|endoftext|>What"), (True, "What")):
        if adds:
            made.backend_tokenizer.post_processor = TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[start]
            )
        tokenizer = PromptTokenizer(made, name="tiny", prompts=PromptSettings())
        assert filled(modelfile(Path("tiny.gguf"), tokenizer), prompt="What") == template


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to write: add --out FOLDER"),
        (["--gguf", "a.bin"], "give the name of a file that ends with .gguf"),
        (["--gguf", "a.gguf"], "is of the family 'mixtral': GGUF is written for llama, qwen2, qwen3"),
    ],
)
def test_wrong_use_is_one_line(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    trained_home(tmp_path, lora=False)
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mixtral"}))
    capsys.readouterr()
    assert run(["export", "--home", str(tmp_path / "home"), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not [*tmp_path.glob("*.gguf*")]
