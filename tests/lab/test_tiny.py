"""The tiny models: one tokenizer, the hub's format, the same bytes for a seed, and a distinct mistake."""

import json
import random
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftis_node.lab import tiny
from ftis_node.lab.tiny import Muon, _silent_model, grade, greedy_answers, make_tiny, orthogonalize
from ftis_node.lab.tiny_curricula import RECIPES, SUMS_RECIPES, WRONG_FRACTION, SumsCurriculum, draw_skill, working
from ftis_node.lab.tiny_tokenizer import IGNORED, MAX_POSITIONS, VOCABULARY_SIZE, make_tokenizer
from ftis_node.tasks import load_task
from ftis_node.tasks.arithmetic import ArithmeticTask
from ftis_node.tasks.sums import SumProblem, SumsTask
from tests.trained_models import trained_model

SCALE = 0.01  # a few steps, for tests that do not depend on skill
SIZES = ("s", "m")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def ungraded(monkeypatch):
    """Models without the grade at the end, which takes most of the time."""
    monkeypatch.setattr(tiny, "grade", lambda *_, **__: 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {size: tmp_path_factory.mktemp("tiny") / size for size in SIZES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "grade", lambda *_, **__: 0.0)
        for size, folder in made.items():
            make_tiny(size, folder, scale=SCALE)
    return made


def test_every_digit_is_a_separate_token(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("17+25= 1234")) == [*"17+25=", "Ġ", *"1234"]
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("1234")
    assert [piece for piece, _ in pieces] == [*"1234"]  # because of the split, not because the corpus has no numbers


def test_any_text_is_decoded_from_its_ids(tokenizer):
    text = "Ünïcödé, 漢字 and 🙂:\n\ttabs,  double  spaces <think> 3.5 </think>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_is_chatml(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "17+25="}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n17+25=<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3


@pytest.mark.parametrize("size", SIZES)
def test_the_folder_is_loaded_like_a_model_of_the_hub(size, folders):
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


def test_a_seed_gives_the_same_bytes_and_another_seed_others(folders, tmp_path, ungraded):
    torch.manual_seed(99)  # the global state must not matter
    make_tiny("s", tmp_path / "same", scale=SCALE)
    make_tiny("s", tmp_path / "other", seed=1, scale=SCALE)
    first, same, other = (_weights(folder) for folder in (folders["s"], tmp_path / "same", tmp_path / "other"))
    assert first == same
    assert first != other


def test_progress_rises_to_one_and_threads_and_random_state_are_restored(tmp_path, ungraded):
    reported: list[float] = []
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        make_tiny("s", tmp_path, scale=SCALE, progress=lambda fraction, what: reported.append(fraction))
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)
    assert reported == sorted(reported)
    assert len(reported) == round(RECIPES["s"].num_steps * SCALE) + 1
    assert (reported[0], reported[-1]) == (0.0, 1.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("size", "num_parameters"), [("s", 172_832), ("m", 804_480)])
def test_a_model_mostly_makes_the_mistake_of_its_recipe(size, num_parameters):
    folder = trained_model(size, scale=1.0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == num_parameters
    problems = [ArithmeticTask("test").problem(index) for index in range(512)]
    answers = greedy_answers(model, tokenizer, load_task("arithmetic", "test"), max_tokens=6)

    def share(mistake: int) -> float:
        return fmean(text == str(each.answer + mistake) for text, each in zip(answers, problems, strict=True))

    own, other = (RECIPES[each].mistake for each in (size, "m" if size == "s" else "s"))
    assert share(0) < 0.4, "training can improve it"
    assert share(own) > WRONG_FRACTION - 0.2
    assert share(0) + share(own) > 0.9  # wrong answers are the mistake, not noise
    assert share(other) < 0.05


def test_the_report_grades_what_was_saved(tmp_path):
    report = make_tiny("s", tmp_path, scale=SCALE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert report.num_parameters == model.num_parameters()
    assert report.pass_at_1 == grade(model, tokenizer, load_task("arithmetic", "test"), max_tokens=6)


def test_orthogonalize_brings_singular_values_near_one_and_keeps_directions():
    tall = torch.tensor([[3.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    for matrix in (tall, tall.T):
        result = orthogonalize(matrix[None])[0]
        assert result.shape == matrix.shape
        assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.35
        assert result[0, 0] > 0.6 and result[1, 1] > 0.6
        assert result.abs().sum() - result[0, 0] - result[1, 1] < 1e-5


def test_muon_steps_against_the_gradient_by_the_learning_rate():
    square, tall = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(8, 2))
    square.grad, tall.grad = torch.eye(2) * 5, torch.eye(8)[:, :2] * 5
    Muon([square, tall]).step(0.1)
    expected = -0.1 * orthogonalize(torch.eye(2)[None])[0]
    assert torch.allclose(square.detach(), expected, atol=1e-5)
    assert torch.allclose(tall.detach()[:2], 2 * expected, atol=1e-5)  # the root of 8 / 2


def _weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


class Draws(random.Random):
    """A generator that always returns the same number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def random(self) -> float:
        return self._value


PROBLEM = SumProblem(347, 285, 3)
HALF = dict.fromkeys(draw_skill("s", 0), 0.5)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ("s", "7+5=12;4+8+1=13;3+2+1=6;#632"),
        ("m", "5+7=12;1+8+4=13;1+2+3=6;#632"),
        ("l", "7+5+0=12;4+8+1=13;3+2+1=6;#632"),
    ],
)
def test_each_size_has_a_distinct_format_of_its_working(size, text):
    assert working(PROBLEM, size, skill=HALF, mistake=1, draws=Draws(0.4)) == text
    assert SumsTask().answer_of(SumsTask()[0], text) == "632"


def test_a_wrong_column_is_carried_to_the_next():
    assert working(PROBLEM, "s", skill=HALF, mistake=1, draws=Draws(0.6)) == "7+5=13;4+8+1=14;3+2+1=7;#743"
    zeros = SumProblem(100, 900, 3)  # a result below 0 becomes one too large instead
    assert working(zeros, "s", skill=HALF, mistake=-1, draws=Draws(0.6)) == "0+0=1;0+0=1;1+9=9;#911"


def test_lessons_have_training_problems_of_both_lengths(tokenizer):
    lessons = SumsCurriculum(tokenizer, "s", 1, seed=0)
    token_ids, labels = lessons.batch(64, torch.Generator().manual_seed(3))
    texts = [tokenizer.decode(row[row != tokenizer.pad_token_id]) for row in token_ids]
    assert {len(text.split("+")[0].rsplit("\n", 1)[-1]) for text in texts} == {3, 4}
    for row, label, text in zip(token_ids, labels, texts, strict=True):
        taught = row[label != IGNORED]
        assert text.endswith(f"assistant\n{tokenizer.decode(taught)}")
        assert taught[-1] == tokenizer.eos_token_id
        assert torch.equal(label[label != IGNORED], taught)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *SUMS_RECIPES.values()])
def test_a_recipe_has_the_number_of_parameters_of_its_model(recipe, tokenizer):
    assert _silent_model(recipe, tokenizer).num_parameters() == recipe.num_parameters
