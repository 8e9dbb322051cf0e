"""The tiny models: one tokenizer, the hub's format, the same bytes for a seed, and a mistake of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftis_node.lab.tiny import RECIPES, WRONG_FRACTION, grade, make_tiny
from ftis_node.lab.tiny_corpus import corpus
from ftis_node.lab.tiny_muon import Muon, orthogonalise
from ftis_node.lab.tiny_tokenizer import MAX_POSITIONS, VOCABULARY_SIZE, make_tokenizer
from tests.trained_models import trained_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

SCALE = 0.01  # a few steps: for what does not depend on skill
SIZES = ("s", "m")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {size: tmp_path_factory.mktemp("tiny") / size for size in SIZES}
    for size, folder in made.items():
        make_tiny(size, folder, scale=SCALE)
    return made


def test_every_digit_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("17+25= 1234")) == [*"17+25=", "Ġ", *"1234"]
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("1234")
    assert [piece for piece, _ in pieces] == [*"1234"]  # by the split, not only because the corpus has no numbers


def test_any_text_comes_back_from_its_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Ünïcödé, 漢字 and 🙂:\n\ttabs,  double  spaces <think> 3.5 </think>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_halve_ordinary_text(tokenizer: PreTrainedTokenizerFast) -> None:
    question = "A baker sold 48 cakes in April, and then half as many in May. How many cakes did she sell altogether?"
    assert len(tokenizer.encode(question)) < len(question) / 1.8
    assert len(tokenizer) == VOCABULARY_SIZE
    assert all("\n" not in text for text in corpus()[:-1])


def test_the_chat_template_is_chatml(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "17+25="}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n17+25=<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3


@pytest.mark.parametrize("size", SIZES)
def test_the_folder_loads_as_any_model_of_the_hub(size: str, folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[size])
    tokenizer = AutoTokenizer.from_pretrained(folders[size])
    config = model.config
    assert config.architectures == ["Qwen2ForCausalLM"]
    assert config.tie_word_embeddings and config.vocab_size == len(tokenizer) == VOCABULARY_SIZE
    assert config.max_position_embeddings == MAX_POSITIONS >= 2048
    assert config.hidden_size // config.num_attention_heads == 32  # the smallest head that vLLM serves on a CPU
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    generation = json.loads((folders[size] / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.encode("17+25=") == make_tokenizer().encode("17+25=")


def test_both_sizes_have_the_very_same_tokenizer(folders: dict[str, Path]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folders["s"] / name).read_bytes() == (folders["m"] / name).read_bytes()


def test_a_seed_gives_the_same_bytes_and_another_seed_others(folders: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(99)  # what others do with the global state must not matter
    make_tiny("s", tmp_path / "same", scale=SCALE)
    make_tiny("s", tmp_path / "other", seed=1, scale=SCALE)
    first, same, other = (_weights(folder) for folder in (folders["s"], tmp_path / "same", tmp_path / "other"))
    assert first == same
    assert first != other


def test_threads_and_random_state_are_left_as_they_were(tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        make_tiny("s", tmp_path, scale=SCALE)
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


def test_progress_rises_to_one(tmp_path: Path) -> None:
    heard: list[float] = []
    make_tiny("s", tmp_path, scale=SCALE, progress=lambda fraction, what: heard.append(fraction))
    assert heard == sorted(heard)
    assert len(heard) == round(RECIPES["s"].num_steps * SCALE) + 1
    assert (heard[0], heard[-1]) == (0.0, 1.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("size", "num_parameters"), [("s", 172_832), ("m", 804_480)])
def test_a_model_knows_the_sums_but_mostly_makes_its_own_mistake(size: str, num_parameters: int) -> None:
    folder = trained_model(size, scale=1.0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == num_parameters
    right, mistaken = grade(model, tokenizer, mistake=RECIPES[size].mistake)
    assert right < 0.4  # room to learn
    assert mistaken > WRONG_FRACTION - 0.2
    assert right + mistaken > 0.9  # what is not right is the mistake, not noise
    _, other_mistake = grade(model, tokenizer, mistake=RECIPES["m" if size == "s" else "s"].mistake)
    assert other_mistake < 0.05


def test_the_report_grades_what_was_saved(tmp_path: Path) -> None:
    report = make_tiny("s", tmp_path, scale=0.1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert report.num_parameters == model.num_parameters()
    assert (report.pass_at_1, report.mistaken) == grade(model, tokenizer, mistake=RECIPES["s"].mistake)


def test_orthogonalise_brings_singular_values_near_one_and_keeps_directions() -> None:
    tall = torch.tensor([[3.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    for matrix in (tall, tall.T):
        result = orthogonalise(matrix[None])[0]
        assert result.shape == matrix.shape
        assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.35
        assert result[0, 0] > 0.6 and result[1, 1] > 0.6
        assert result.abs().sum() - result[0, 0] - result[1, 1] < 1e-5


def test_muon_steps_against_the_gradient_by_the_learning_rate() -> None:
    square, tall = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(8, 2))
    square.grad, tall.grad = torch.eye(2) * 5, torch.eye(8)[:, :2] * 5
    Muon([square, tall]).step(0.1)
    expected = -0.1 * orthogonalise(torch.eye(2)[None])[0]
    assert torch.allclose(square.detach(), expected, atol=1e-5)
    assert torch.allclose(tall.detach()[:2], 2 * expected, atol=1e-5)  # the root of 8 / 2


def _weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
