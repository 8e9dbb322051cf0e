"""Equal and unequal mathematical answers, the answer for which a completion votes, costly and malformed texts."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.tasks import load_task
from ftis_node.tasks.answers import answer_in, answers_agree, final_answer, plain_answer
from ftis_node.tasks.number_answers import cleaned, is_expression, number_in, plain_number, sides_of
from tests.tasks.completions import think_answer


@pytest.fixture
def gsm8k(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"question": "How many clips?", "answer": "48 + 24\n#### 72"}) + "\n")
    return load_task(f"gsm8k:{file}", split="test")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>48+24</think><answer>72</answer>", 1.0),
        ("<think>48+24</think>\n<answer>\\boxed{72}</answer>\n", 1.0), ("<think>72</think><answer>71</answer>", 0.0),
        ("<think>72</think><answer></answer>", 0.0), ("72", 0.0), ("<think>x</think>72", 0.0), ("\ud800 \x00", 0.0),
        ("<think>x</think><answer>\ud800 \x00</answer>", 0.0),
    ],
)  # fmt: skip
def test_the_reward_needs_format_and_answer(gsm8k, completion, reward):
    assert gsm8k.score(gsm8k[0], completion) == reward


def test_an_answer_on_which_the_parser_raises_is_wrong(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("math_verify.verify", fail)
    assert not answers_agree("\\frac{1}{2}", "0.5")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>x</think><answer>72</answer>", "72"), ("<think>\nx\n</think>\n<answer>\n72\n</answer>\n", "72"),
        ("  <think></think>\t<answer> a\nb </answer>", "a\nb"), ("<think>is a < b?</think><answer></answer>", ""),
    ],
)  # fmt: skip
def test_the_answer_of_a_text_in_the_format(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "", "72", "<answer>72</answer>", "<think>x</think><answer>72", "<think>x<answer>72</answer>",
        "<think>x<answer>72</answer></think>", "</think><think>x<answer>72</answer>",
        "Sure! <think>x</think><answer>72</answer>", "<think>x</think><answer>72</answer>.",
        "<think>x</think><think>y</think><answer>72</answer>",
        "<think>x</think><answer>71</answer><answer>72</answer>", "<Think>x</Think><Answer>72</Answer>",
    ],
)  # fmt: skip
def test_a_text_outside_the_format_has_no_answer(text):
    assert final_answer(text) is None


_PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "7", "x"])


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_an_answer_is_found_only_if_the_whole_text_can_be_parsed(text):
    answer = final_answer(text)
    if answer is not None:
        thought, _, rest = text.strip().removeprefix("<think>").partition("</think>")
        assert rest.lstrip().removeprefix("<answer>").removesuffix("</answer>").strip() == answer
        assert "<" not in thought + answer


HALF, HALF_PI = r"\frac{1}{2}", r"\frac{\pi}{2}"
RIGHT = {
    "1234": ("1,234", "$1,234.00", "1 234", "1\u00a0234", "1\u202f234", "1{,}234", r"1\,234", "1.234e3"),
    "20": ("€20", "20€", "20 dollars", "US$20", r"\$20", "$20$", "20kg", "20 m/s", "20 cm^2", "20 m²", "+20"),
    "18": ("18.", "**18**", "**18.**", "`18`", r"\boxed{18}", "$$\n18\n$$", r"\text{18 apples}", "18 eggs are left!"),
    "5": (
        "5 apples -- all red", "x = 5", "x=5", "f(2) = 5", "x_1 = 5", "Total: 5", "total cost = $5", "10/2",
        r"\frac{10}{2} = 5", "(5)",
    ),
    "-3": ("\u22123", "- 3", "(-3)", "$-3$", "-$3", "minus 3", "Negative 3 degrees"),
    "0.5": (".5", "0.50", "1/2", r"\frac12", r"\dfrac{1}{2}", "½", "5e-1"),
    "2.5": ("2.5 hours (150 minutes)", "2½", "2 1/2", r"2\frac{1}{2}", r"2\frac12", "5/2"),
    "1200": ("1.2e3", r"1.2 \times 10^3", "1,200"),
    "12": ("12 of the 15 apples", "12 out of 15"),
    "42": ("6*7 = 42", "6 × 7 = 42 apples", "x = 6*7 = 42", "40 + 2 =\n42", r"\sqrt{1764}", "84 ÷ 2 = 42", "2*21"),
    "50": ("50%", r"50\%", "50 percent"),
    r"90^\circ": ("90", "90°", r"90^{\circ}", r"\boxed{90^\circ}", "90 degrees"),
    r"15\mbox{ cm}^2": ("15", "15 square centimeters"),
    HALF: ("½", "0.5", r"\frac12", "x = 1/2", r"\frac{2}{4} = \frac{1}{2}", "1/2."),
    HALF_PI: (
        r"x = \frac{\pi}{2}", "\\[\n\\frac{\\pi}{2}\n\\]", r"\boxed{\frac{\pi}{2}}.", r"**\frac{\pi}{2}**",
        r"**$\frac{\pi}{2}$**.",
    ),
    "2,3": ("x = 2, x = 3", "x = 2 or x = 3", "3 and 2"),
    r"\left( 3, \frac{\pi}{2} \right)": (r"(3, \pi/2)",),
    r"\text{Evelyn}": ("Evelyn",),
    r"\text{June 20}": ("June 20", "june 20."),
    "12, 144": ("12, 144",),
    r"11\sqrt2": ("11*sqrt(2)",),
    "6 - 5i": ("-5i + 6",),
    "x^2 + 2x + 1": ("(x+1)^2",),
    r"\frac{1}{3}": ("0.333333",),
    "?!": ("?!",),  # a text that the library cannot parse equals itself
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": ("\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}",),
}  # fmt: skip
WRONG = {
    "42": (
        *("41=42", "42 = 41", "41 = x = 42", "x = 41, x = 42", r"\boxed{41, \boxed{42}}", r"\boxed{41} \boxed{42}"),
        *(r"41 \cup 42", "41\n42", "41, 42", "41; 42", "41 or 42", "41 42", "$41$ $42$", "[41,42]", r"\{42\}", "|42|"),
        *(r"42 \mod 100", r"4200\%", "42,000", "42 million", "42 and a half", "42x", r"42\pi", "42i", "x - 42"),
        *("x > 42", "≥ 42", "±42", "between 41 and 42", "41-42", "41/42", "A42", "1,42", "42_8", "forty-two"),
        *("42^1000", "42/0", ""),
    ),
    "0.5": ("50%", r"50\%", "5.0"),
    HALF: ("50%", "0.4 = 0.5", "1\n1/2"),
    "50": ("0.5", "5000%"),
    "10": ("20% of 50",),
    "150": ("2.5 hours (150 minutes)",),
    "15": ("12 of the 15 apples",),
    "2": (r"\left( 3, \frac{\pi}{2} \right)",),  # the last number alone is no answer
    r"\text{Evelyn}": ("Carla",),
    r"\text{June 20}": ("June 21", "May 20", "20"),
    "12, 144": ("12144", "12,144", "12"),
    "x^2 + 1": ("x^2 - 1", "**x^2 - 1**"),
    "3": ("negative 3", "minus 3", "the answer is minus 3", "negative -3"),
    "7": ("--7", "- -7", "the answer is --7", "−−7"),
    "-7": ("--7", "- -7", "the answer is --7", "−−7"),
    "[1,2]": ("(1,2)",),
    "72": ("71", "-72", "72000", "about a dozen", "{" * 100, "72" + " " * 500 + "."),
    HALF_PI: (r"41 = \frac{\pi}{2}", "\\pi\n\\frac{\\pi}{2}", r"\boxed{1, \boxed{\frac{\pi}{2}}}"),
}
REFERENCES = (
    *("18", "70000", "1,450", "-12", "9.5", "0", ".0000672", "0.15", "58,500", r"10,\!080", r"\$18.90", r"\$32,\!348"),
    *(r"11,\! 111,\! 111,\! 100", r"90^\circ", r"864 \mbox{ inches}^2", r"5.4 \text{ cents}", HALF, r"\frac43"),
    *(r"\left( 3, \frac{\pi}{2} \right)", "p - q", r"\text{Evelyn}", r"3\sqrt{13}", "6 - 5i", "3, 5, 7"),
    *(r"1 \pm \sqrt{19}", "5x - 7y + 11z + 4 = 0", r"(2,\infty)", r"\text{(C)}", r"1\frac{4}{5}", "2516_8", "x=5"),
)  # fmt: skip
PARTS = ("1", "12", *",. -()=", "**", r"\frac", "{", "}", "$", r"\boxed{", " of the 15", "½", "\n")


def spellings(reference: str) -> Iterator[str]:
    """Yield texts that give this answer."""
    yield from (reference, f"{reference}.", f"${reference}$", rf"\({reference}\)", rf"\boxed{{{reference}}}")
    yield from (f"The answer is ${reference}$.", rf"$\boxed{{{reference}}}$")
    if "=" not in reference and "," not in reference and not reference.startswith(r"\text"):
        yield f"x = {reference}"
    number = plain_number(reference)
    if number is None or not re.fullmatch(r"[-\d.,]+", reference):
        return
    yield from (f"**{reference}**", f"${reference}", f"{reference} apples", f"Answer: {reference} apples.")
    if number.denominator == 1:
        whole = int(number)
        yield from (f"{whole}.00", f"{whole:,}", f"{whole:,}".replace(",", "\u202f"), f"{whole - 1} + 1 = {whole}")


def disagreeing(reference: str) -> list[str]:
    return [text for text in spellings(reference) if not answers_agree(reference, text)]


def test_spellings_of_the_right_answer_agree():
    assert [(right, text) for right, texts in RIGHT.items() for text in texts if not answers_agree(right, text)] == []


def test_other_answers_and_several_answers_do_not_agree():
    assert [(right, text) for right, texts in WRONG.items() for text in texts if answers_agree(right, text)] == []


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_reference_agrees_with_itself(reference):
    assert disagreeing(reference) == []


@given(st.lists(st.sampled_from(PARTS), max_size=60).map("".join))
def test_no_text_raises_an_error(text):
    plain_number(text)
    number_in(cleaned(text))
    is_expression(sides_of(cleaned(text))[1])


def _check(files: list[str]) -> int:
    """Print each spelling of a reference that does not agree with it, and return their number."""
    num_texts, wrong = 0, []
    rows = [json.loads(line)["answer"] for file in files for line in Path(file).read_text().splitlines()]
    for reference in sorted({row.rpartition("####")[2].strip() for row in rows}):
        num_texts += sum(1 for _ in spellings(reference))
        wrong += [(reference, text) for text in disagreeing(reference)]
    for reference, text in wrong:
        sys.stdout.write(f"{reference!r} does not agree with {text!r}\n")
    sys.stdout.write(f"{len(rows)} references, {num_texts} spellings, {len(wrong)} disagree\n")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(_check(sys.argv[1:]) > 0)


MALFORMED = (
    *("", " ", "\x00", "\ud800", "<answer>", "</answer><answer>", "$", "\\boxed{", "9" * 100_000, "-" * 10_000),
    *(
        "<think></think><answer></answer>", "<think>" * 10_000, "0" * 5000 + "." + "0" * 5000, "1," * 20_000,
        "((" * 5000,
    ),
    "<think></think><answer>" + "0" * 400 + "." + "0" * 90 + "x</answer>",
    "<think></think><answer>9^{9^{9^9}}</answer>",
)  # fmt: skip


def test_arithmetic_votes_with_the_text_that_is_scored():
    task = load_task("arithmetic", split="test")
    assert answer_in(task, task[0], " 42\n") == "42"
    assert answer_in(task, task[0], " \n") is None
    assert answer_in(task, task[0], "042") == "042", "its reward differs from that of 42"


@pytest.mark.parametrize(
    "text", ["72", " 72 ", "$72$", "\\boxed{72}", "\\(72\\)", "+72", "72.", "72.00", "072", "$ 72 $"]
)
def test_forms_of_one_number_are_one_answer(gsm8k, text):
    assert answer_in(gsm8k, gsm8k[0], think_answer(text)) == "72"
    assert gsm8k.score(gsm8k[0], think_answer(text)) == 1.0, "the reward agrees"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("1,000", "1000"), ("1{,}000", "1000"), ("12,345,678.50", "12345678.5"), ("-0.0", "0"), ("-0.50", "-0.5"),
        ("000", "0"), ("1,2", "1,2"), ("72 clips", "72 clips"), ("x  +\n1", "x + 1"),
        ("\\frac{1}{2}", "\\frac{1}{2}"), ("$5$ or $6$", "$5$ or $6$"), ("1.2.3", "1.2.3"), ("1e5", "1e5"),
    ],
)  # fmt: skip
def test_plain_answer_simplifies_only_numbers(text, plain):
    assert plain_answer(text) == plain


def test_a_completion_without_the_format_has_no_answer(gsm8k):
    for text in ("72", "<answer>72</answer>", think_answer("72") + " indeed", think_answer("")):
        assert answer_in(gsm8k, gsm8k[0], text) is None


def test_a_mixture_reads_the_answer_by_the_problems_part(gsm8k, tmp_path):
    task = load_task(f"arithmetic+gsm8k:{tmp_path / 'test.jsonl'}", split="test")
    by_part = {task[index].ref.task: task[index] for index in range(2)}
    assert answer_in(task, by_part["arithmetic"], "072") == "072"
    assert answer_in(task, by_part["gsm8k"], think_answer("072")) == "72"


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_text_does_not_raise(gsm8k, text):
    for task in (gsm8k, load_task("arithmetic", split="test"), load_task("rg:leg_counting", split="test")):
        for each in (text, think_answer(text)):
            answer = answer_in(task, task[0], each)
            assert answer is None or answer
