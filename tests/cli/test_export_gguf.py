"""`export --gguf` writes a file that transformers reads back as the same model, and a Modelfile with its prompts."""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftis_node.cli.app import run
from ftis_node.models import PromptSettings, PromptTokenizer
from ftis_node.models.gguf_export import modelfile
from ftis_node.tasks import load_task
from ftis_node.workers.weight_store import probe_logprobs
from tests.cli.test_export import RUN, trained_home
from tests.models.tiny_models import make_tokenizer

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
    assert ids == expected
    assert run(command) == 2
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
