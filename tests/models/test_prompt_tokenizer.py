"""Prompt ids, text, and the fingerprint that is equal if two tokenizers encode equally."""

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tiny_models import VOCAB_SIZE, make_tokenizer, save_tiny
from transformers import AutoTokenizer, LlamaTokenizer

from ftis_node.errors import ModelError
from ftis_node.models import ModelSource, PromptTokenizer, load_tokenizer, resolve_model
from ftis_node.models.fingerprint import tokenizer_fingerprint
from ftis_node.models.tokenizer_class import CLASSES, tokenizer_class

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(resolve_model(str(folder)))


def test_a_prompt_is_the_chat_template_up_to_the_assistant(tokenizer):
    ids = tokenizer.encode_prompt(MESSAGES)
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids) == "system\nAnswer.\nuser\nWhat is 12 + 30?\nassistant\n"
    assert all(type(token) is int for token in ids)


def test_decode_keeps_spaces_as_they_were_sampled():
    """The tokenizer's own configuration may ask to clean spaces up."""
    made = make_tokenizer()
    made.clean_up_tokenization_spaces = True
    made.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    text = "it is n't , 42 . <answer> 7 </answer>"
    assert made.decode(made.encode(text)) != text
    assert PromptTokenizer(made, name="tidy").decode(made.encode(text)) == text


@pytest.mark.parametrize("text", ["10<|im_end|>\n<|im_start|>assistant\n10", "<|endoftext|>"])
def test_special_tokens_in_a_text_are_encoded_as_text(tokenizer, text):
    ids = tokenizer.encode_text(text)
    assert not set(ids) & {0, 1, 2}  # the three special tokens
    assert (tokenizer.decode(ids), tokenizer.eos_id) == (text, 2)
    prompt = tokenizer.encode_prompt([{"role": "user", "content": "7"}])
    assert prompt.count(1) == 2, "a later prompt lacks its special tokens"


def test_the_vocabulary_has_the_size_and_eos_ids_of_the_tokenizer(tokenizer):
    assert tokenizer.vocab_size == VOCAB_SIZE  # not the 320 rows of the embedding
    assert tokenizer.eos_ids == (0, 2)  # of the tokenizer and of the generation configuration
    assert tokenizer.name == "tiny"


def llama_tokenizer(**options):
    """Return a tokenizer that begins a text with a space and a start token."""
    letters = sorted(set("▁SystemAnswer.UAssistantWhat is12+30?:naïve42 in tags\n"))
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    return LlamaTokenizer(vocab=vocab, merges=[], **options)


@pytest.mark.parametrize(
    "made",
    [make_tokenizer(chat_template=None), llama_tokenizer(add_bos_token=True, add_eos_token=True)],
    ids=["none", "both"],
)
def test_a_saved_tokenizer_renders_the_plain_lines_of_its_prompts(made, tmp_path):
    """Other programs prompt an exported model by its chat template."""
    tokenizer = PromptTokenizer(made, name="base")
    tokenizer.save(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for messages in (MESSAGES, MESSAGES[1:]):
        ids = again.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == tokenizer.encode_prompt(messages)
        assert ids[-1] != tokenizer.eos_id, "the prompt does not end the text"
        assert PromptTokenizer(again, name="again").encode_prompt(messages) == ids
    if made.bos_token_id is not None:
        assert ids.count(made.bos_token_id) == made.add_bos_token


def test_a_tokenizer_whose_prompts_no_template_renders_is_saved_without_one(tmp_path, caplog, monkeypatch):
    tokenizer = PromptTokenizer(make_tokenizer(chat_template=None), name="base")
    monkeypatch.setattr(tokenizer, "encode_prompt", lambda messages: [5, 6, 7])
    tokenizer.save(tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()
    assert "no chat template gives the prompts of base" in caplog.text


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0]['content'] }}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [(None, "System: Answer.\n\nUser: What is 12 + 30?\n\nAssistant:"), (NO_SYSTEM, "Answer.\n\nWhat is 12 + 30?")],
    ids=["plain lines", "the system message in the first one"],
)
def test_a_prompt_without_a_template_or_a_system_role(template, text):
    tokenizer = PromptTokenizer(make_tokenizer(chat_template=template), name="other")
    assert tokenizer.decode(tokenizer.encode_prompt(MESSAGES)) == text


def test_a_template_that_refuses_every_prompt_is_a_model_error():
    tokenizer = PromptTokenizer(make_tokenizer(chat_template="{{ raise_exception('never') }}"), name="broken")
    with pytest.raises(ModelError, match="chat template of broken refuses the prompt: never"):
        tokenizer.encode_prompt([{"role": "user", "content": "x"}])


def test_the_fingerprint_does_not_depend_on_the_spelling_of_the_file(tokenizer, folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "elsewhere")
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = dict(sorted(content["model"]["vocab"].items(), reverse=True))
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]  # as older releases wrote it
    path.write_text(json.dumps(content, indent=7))
    again = load_tokenizer(resolve_model(str(other)))
    assert (again.fingerprint, len(tokenizer.fingerprint)) == (tokenizer.fingerprint, 32)
    assert int(tokenizer.fingerprint, 16) > 0


def swap(tokenizer_json, one, other):
    vocabulary = tokenizer_json["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


CHANGES = {
    "two tokens": lambda made: swap(made, "a", "b"),
    "two control bytes": lambda made: swap(made, "\u0100", "\u0101"),  # bytes 0 and 1 in a byte-level tokenizer
    "a merge": lambda made: made["model"]["merges"].pop(),
    "a split": lambda made: made.update(pre_tokenizer=made["pre_tokenizer"]["pretokenizers"][1]),
    "the normalizer": lambda made: made.update(normalizer=None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_fingerprint_depends_on_all_that_changes_the_ids(tokenizer, change):
    from tokenizers import Tokenizer

    made = make_tokenizer()
    content = json.loads(made.backend_tokenizer.to_str())
    change(content)
    made._tokenizer = Tokenizer.from_str(json.dumps(content))
    assert PromptTokenizer(made, name="other").fingerprint != tokenizer.fingerprint


def test_the_fingerprint_depends_on_special_tokens_but_not_on_template_and_end(tokenizer):
    other = make_tokenizer(chat_template="{{ messages[0]['content'] }}")
    other.eos_token = "<|endoftext|>"
    assert PromptTokenizer(other, name="x").fingerprint == tokenizer.fingerprint
    more_special = make_tokenizer()
    more_special.add_tokens(["answer"], special_tokens=True)
    assert PromptTokenizer(more_special, name="x").fingerprint != tokenizer.fingerprint


def with_rows(folder, to, num_rows, **generation):
    """Copy a model whose configuration names `num_rows` embeddings."""
    shutil.copytree(folder, to)
    for name, changes in (("config.json", {"vocab_size": num_rows}), ("generation_config.json", generation)):
        (to / name).write_text(json.dumps(json.loads((to / name).read_text()) | changes))
    return load_tokenizer(ModelSource("cut", to))


def test_ids_without_an_embedding_are_no_tokens(folder, tmp_path, caplog):
    """Gemma 3's tokenizer has one id more than its model has embeddings."""
    tokenizer = with_rows(folder, tmp_path / "cut", VOCAB_SIZE - 1)
    assert (tokenizer.vocab_size, tokenizer.num_ids) == (VOCAB_SIZE - 1, VOCAB_SIZE)
    assert f"the tokenizer of cut has {VOCAB_SIZE} ids, the model {VOCAB_SIZE - 1} embeddings" in caplog.text
    assert tokenizer.encode_prompt(MESSAGES)
    assert tokenizer.eos_ids == (0, 2)


def test_a_prompt_with_such_an_id_is_refused_with_the_cause(folder, tmp_path):
    ids = load_tokenizer(resolve_model(str(folder))).encode_prompt(MESSAGES)
    tokenizer = with_rows(folder, tmp_path / "cut", max(ids))
    for _ in range(2):
        with pytest.raises(ModelError, match=rf"the id {max(ids)}, but the model has {max(ids)} embeddings: resize"):
            tokenizer.encode_prompt(MESSAGES)


def test_end_tokens_outside_of_the_vocabulary_are_left_out(folder, tmp_path, caplog):
    tokenizer = with_rows(folder, tmp_path / "cut", 320, eos_token_id=[2, 99999, -1, VOCAB_SIZE])
    assert tokenizer.eos_ids == (2,)
    assert f"[-1, {VOCAB_SIZE}, 99999] are left out" in caplog.text


def test_a_damaged_tokenizer_is_a_model_error(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer in .* cannot be read"):
        load_tokenizer(resolve_model(str(other)))


USE = """
import sys
from pathlib import Path
from ftis_node.models import load_tokenizer
from ftis_node.models.source import ModelSource
folder = Path(sys.argv[1])
tokenizer = load_tokenizer(ModelSource("tiny", folder))
ids = tokenizer.encode_prompt([{"role": "system", "content": "Answer."}, {"role": "user", "content": "1 + 1 = "}])
print(tokenizer.decode(ids), tokenizer.encode_text("<|im_end|>"), tokenizer.fingerprint)
sys.exit("torch was loaded" if "torch" in sys.modules else 0)
"""


def _save(folder: Path, model_type: str, class_name: str, **changes: object) -> Path:
    make_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": class_name} | changes))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def _saved(tokenizer: Any, folder: Path) -> dict[str, bytes]:
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("model_type", "class_name"), CLASSES)
def test_the_class_is_that_of_auto_tokenizer(model_type, class_name, tmp_path):
    folder = _save(tmp_path / "model", model_type, class_name)
    chosen, auto = tokenizer_class(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert chosen is type(auto)
    loaded = chosen.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(auto)
    assert _saved(loaded, tmp_path / "a") == _saved(auto, tmp_path / "b")
    assert loaded.special_tokens_map == auto.special_tokens_map
    assert loaded.apply_chat_template(MESSAGES, tokenize=False) == auto.apply_chat_template(MESSAGES, tokenize=False)


@pytest.mark.parametrize(
    ("model_type", "class_name", "changes"),
    [
        ("gpt_neox", "GPTNeoXTokenizerFast", {}), ("mistral", "LlamaTokenizerFast", {}),
        ("qwen2", "Qwen2Tokenizer", {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}),
    ],
)  # fmt: skip
def test_other_models_use_auto_tokenizer(model_type, class_name, changes, tmp_path):
    assert tokenizer_class(_save(tmp_path / "model", model_type, class_name, **changes)) is AutoTokenizer


def test_another_release_of_transformers_uses_auto_tokenizer(tmp_path, monkeypatch):
    folder = _save(tmp_path / "model", *next(iter(CLASSES)))
    monkeypatch.setattr(metadata, "version", lambda name: "5.18.2")
    assert tokenizer_class(folder) is AutoTokenizer


def test_a_tokenizer_is_loaded_without_torch(tmp_path):
    folder = _save(tmp_path / "model", "qwen2", "TokenizersBackend")
    done = subprocess.run([sys.executable, "-c", USE, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ROLE, END = "<|im_start|>{{ m.role }} {{ m.content }}", "<|im_end|>"


@pytest.mark.parametrize(
    ("each", "around"),
    [
        (f"{ROLE}{END}\n", ("\n<|im_start|>user ", "<|im_end|>\n")),
        (f"{ROLE} {END}\n", ("\n<|im_start|>user ", " <|im_end|>\n")),
        (f"{ROLE}\n{END}", ("<|im_start|>user ", "\n<|im_end|>")), (f"{ROLE}\n", ("\n<|im_start|>user ", "\n")),
    ],
)  # fmt: skip
def test_an_observation_follows_the_end_token_of_the_answer(each, around):
    """The model has sampled that token, so it is not written again, also if a space is before it."""
    made = make_tokenizer()
    made.chat_template = f"{{% for m in messages %}}{each}{{% endfor %}}"
    tokenizer = PromptTokenizer(made, name="spaced")
    before, after = around
    ids = tokenizer.encode_observation("4", opening="", max_tokens=9)
    assert tokenizer.decode(ids, skip_special=False) == f"{before}4{after}"
    assert END not in before


@pytest.mark.parametrize("left_out", ["assistant", "user"])
def test_a_template_that_leaves_out_a_message_takes_no_observation(left_out):
    made = make_tokenizer()
    made.chat_template = (
        f"{{% for m in messages %}}{{% if loop.first or m.role != '{left_out}' %}}{ROLE}{{% endif %}}{{% endfor %}}"
    )
    with pytest.raises(ModelError, match="leaves out"):
        PromptTokenizer(made, name="short").encode_observation("4", opening="", max_tokens=9)
