"""The class that is chosen without torch is the one that AutoTokenizer chooses, and it encodes equally."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tokenizer
from transformers import AutoTokenizer

from ftis_node.models.fingerprint import tokenizer_fingerprint
from ftis_node.models.tokenizer import CLASSES, tokenizer_class

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 12 + 30?"}]
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
        ("gpt_neox", "GPTNeoXTokenizerFast", {}),
        ("mistral", "LlamaTokenizerFast", {}),
        ("qwen2", "Qwen2Tokenizer", {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}),
    ],
)
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
