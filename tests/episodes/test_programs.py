"""The episode `programs` and its language: exact, a part of Python, and bounded whatever a peer writes."""

import io
import pickle
import re
import time
from contextlib import redirect_stdout
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.tasks import load_task
from ftis_node.tasks.episodes.program import output_of
from ftis_node.tasks.episodes.program_values import FUNCTIONS, MAX_OUTPUT

AS_IN_PYTHON = (
    "total = 0\nfor n in range(500):\n    if n % 7 == 0:\n        total += n * n\nprint(total)",
    "print([n for n in range(2, 60) if all(n % d for d in range(2, n))])",
    "a, b = 1, 1\nfor _ in range(30):\n    a, b = b, a + b\nprint(a)",
    "print(sum(int(d) for d in str(2**100)))",
    "sieve = [True] * 50\nfor n in range(2, 50):\n\tfor m in range(2 * n, 50, n):\n\t\tsieve[m] = False\nprint(sieve)",
    "x = 5\ny = [x for x in range(3)]  # the name x is that of the list inside\nprint(x, y)",
    "n = 27\nsteps = 0\nwhile n > 1:\n  n = n // 2 if n % 2 == 0 else 3 * n + 1\n  steps += 1\nprint(steps)",
    "for i, c in enumerate('abc'):\n  if c == 'b': continue\n  print(i, c, 'a' < c <= 'c', c in 'cd', c not in ['a'])",
    "print(list(zip([1, 2], 'ab')), (1,), -7 // 2, -7 % 3, 2 ** 0, not 0, 0 or 'x', 1 and 2)",
    "print('12321'[::-1] == '12321', [1, 2, 3][1:], 'abc'[-1], range(10)[2], len(range(0, 9, 2)))",
    "print(sorted([3, 1, 2]), max(1, 2), min([4, 3]), round(5), abs(-3), any([0]), [1] + [2] * 2)",
    "print(list(range(5, 0, -2)), int(' -12 '), True + True, 1 == True, [(1, 'a')] < [(1, 'b')], 'a' * 3)",
    "x = [1, 2]\nx[-1] += 5\nprint(x, 3 in range(4), 0 in range(1, 4), [])",
)


@pytest.mark.parametrize("program", AS_IN_PYTHON)
def test_a_program_prints_what_python_prints(program: str) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(program, {})
    assert output_of(program) == printed.getvalue().rstrip("\n")


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("1/3 + 0.5", "5/6"),
        ("0.1 + 0.2 == 0.3", "True"),
        ("6 / 2", "3"),
        ("round(2.675, 2)", "67/25"),
        ("print('so far')\n1 / 0", "so far\nerror: division by zero"),
        ("0 ** -1", "error: division by zero"),
        ("", "no output"),
        ("x = 1", "no output"),
        ("# a comment \ud800 \0 ö", "no output"),
        ("x", "error: 'x' has no value"),
        ("print(1", "error: no valid program"),
        ("(x := 1)", "error: no valid program"),
        ("f'{x}'", "error: unexpected \"'{x}'\""),
        ("x.append(1)", "error: unexpected '.'"),
        ("import os", "error: 'import' is not available"),
        ("type X = int", "error: 'type' is not available"),
        ("__debug__ = 1", "error: '__debug__' is not available"),
        ("breakpoint()", f"error: no function 'breakpoint'; there are {', '.join(FUNCTIONS)}"),
        ("1(2)", "error: no valid program"),
        ("0777", "error: no valid program"),
        ("1if 1 else 2", "error: unexpected 'if'"),
        ("print('' * 10**30)\n[] * 10**30", "\n[]"),
        ("x = 'a' * -10**30\n[x, [1] * -10**30 == []]", "['', True]"),
        ("break", "error: 'break' or 'continue' outside a loop"),
        ("x = [[1]]", "error: a list holds numbers, texts and tuples"),
        ("x = [1]\nx[0] = x", "error: a list holds numbers, texts and tuples"),
        ("'%d' % 3", "error: a sign between the wrong kinds of values"),
        ("sorted([3, 'a'])", "error: these values have no order"),
        ("[1, 2][2]", "error: an index is out of range"),
        ("a, b = 1, 2, 3", "error: 3 values for 2 names"),
        ("max([])", "error: an empty list has no least and no largest value"),
        ("sum(1, 2)", "error: sum does not take 2 values"),
    ],
)
def test_what_is_not_as_in_python(program: str, output: str) -> None:
    assert output_of(program) == output


PAIRS = "x = [(1/3, 1/3, 1/3, 1/3, 1/3, 1/3, 1/3, 1/3)] * 2000\ny = [x[0]] * 2000\n"
STEPS, LARGE, DEEP = "more than 50000 steps", "a number has more than 2000 bits", "the program is nested too deeply"


@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("10**10**10", LARGE), ("(1/3)**1300", LARGE), ("x = 2\nwhile True: x = x * x", LARGE),
        ("x = 1/3\nwhile True: x = x * x + 1/7", LARGE),
        ("r = range(10)\nk = 10**600\nfor i in range(2000):\n r = r[::k][::k][::k]\nprint(len(r))", LARGE),
        ("r = range(10)[::10**600]\nwhile True: y = r[::1]", STEPS),
        ("x = 1/(2**999 + 3)\nwhile True: y = (2**1000 + 1) * x", STEPS), ("while True: pass", STEPS),
        ("[0] * 10**9", STEPS), ("sum(n for n in range(10**9))", STEPS),
        ("[1 for a in range(99) for b in range(99) for c in range(99)]", STEPS),
        ("x = [1]\nwhile True: x += x", STEPS), ("sorted(range(10**9))", STEPS),
        ("x = [(1/n, 1/n) for n in range(1, 2000)]\nwhile True: y = x < x[::-1]", STEPS),
        *((f"{PAIRS}for n in range(3000): {use}", STEPS) for use in ("min(x, y)", "x == y", "x[1] in [x[0]] * 9")),
        ("x = 'a' * 999\ny = [x] * 30000\nprint(y)", STEPS),
        ("x = 'ab'\nwhile True: x += x", "a text has more than 1000 characters"),
        ("while True: print('x' * 99)", f"more than {MAX_OUTPUT} characters of output"),
        ("range(10**30)", "a range has bounds up to 1000000000, and a step other than 0"),
        ("9" * 41, "a number in the program has too many digits"),
        ("0." + "1" * 15, "a number in the program has too many digits"), ("(" * 17, DEEP), ("-" * 17 + "1", DEEP),
        ("1+" * 240 + "1", DEEP), ("2**" * 200 + "1", DEEP), ("1 if 1 else " * 100 + "1", DEEP),
        ("1 + " * 251, "the program has more than 500 words and signs"),
        ("\n" * 2001, "the program has more than 2000 characters"), ("x\0", "unexpected '\\x00'"),
        ("x\ud800", "unexpected '\\ud800'"), ("ö = 1", "unexpected '\\xf6'"), ("x\f", "unexpected '\\x0c'"),
    ],
)  # fmt: skip
def test_a_bomb_ends_in_an_observation_that_names_the_limit(program: str, limit: str) -> None:
    began = time.process_time()
    output_of.cache_clear()
    output = output_of(program)
    assert output.splitlines()[-1] == f"error: {limit}" and len(output) < MAX_OUTPUT + 100
    assert time.process_time() - began < 2.0, "it takes some hundredths of a second"


@pytest.mark.parametrize("error", [OverflowError, ValueError])
def test_a_limit_of_python_is_an_observation_too(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setitem(FUNCTIONS, "abs", (fail, range(1, 2)))
    output_of.cache_clear()
    assert output_of("print(1)\nabs(2)") == "1\nerror: a value is too large"
    output_of.cache_clear()


WORDS = (
    *(
        "for x in range(9):\n ", "while x:\n ", "if x:\n ", "else:\n ", "print(", "sum(", "str(", "[", "]", "(",
        ")", ",",
    ),
    *("x", "y", "=", "+=", "+", "-", "*", "**", "/", "//", "%", "<", "==", " in ", " not ", " or ", " if ", " else "),
    *("0", "3", "99", "0.5", "'a'", "True", ":", " for x in ", "\n", "break", "# ", "\0", ".", "ü", "f", "range(x)"),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=40).map("".join) | st.text(max_size=80))
def test_any_text_has_the_same_bounded_output_twice(program: str) -> None:
    output_of.cache_clear()
    output = output_of(program)
    output_of.cache_clear()
    assert output_of(program) == output and len(output) < MAX_OUTPUT + 200
    output.encode("ascii")


NUMBERS = st.integers(0, 99).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from("+ - * < == and or".split()), inner)
        | st.builds("(-{} if {} else {})".format, inner, inner, inner)
        | st.builds("sum([{}, {}])".format, inner, inner)
        | st.builds("max({}, abs({}) % 7)".format, inner, inner)
    ),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(EXPRESSIONS)
def test_expressions_have_the_value_of_python(expression: str) -> None:
    assert output_of(f"print({expression} + 0)") == str(eval(expression) + 0)


TASK = load_task("programs")
FIRST = TASK[0]  # the squares of all multiples of 18 below 452


def test_the_first_problem_is_fixed() -> None:
    """Peers of other releases make the same one."""
    assert FIRST.prompt[1]["content"] == "What is the sum of the squares of all multiples of 18 below 452?"
    assert FIRST.answer == "1790100"
    texts = [load_task("programs", split)[i].prompt[1]["content"] for split in ("train", "test") for i in range(64)]
    assert blake2b("\n".join(texts).encode(), digest_size=8).hexdigest() == "2e3e8ed3f2e0928d"


def test_programs_run_in_the_scoring_process() -> None:
    assert TASK.isolate_scoring
    assert pickle.loads(pickle.dumps(TASK))[0] == FIRST


@pytest.mark.parametrize(
    ("texts", "observations", "reward"),
    [
        (["```python\nprint(sum(n * n for n in range(0, 452, 18)))\n```", "It is 1,790,100."], ("1790100",), 1.0),
        (["So:\n```\n1 / 0\n", "1790100"], ("error: division by zero",), 1.0),
        (["```1 + 1``` and ```3```", "2"], ("2",), 0.0),
        (["```1790100```"], ("1790100",), 0.0),
        (["<think>```1```</think>1790100"], (), 1.0),
    ],
)
def test_a_block_is_a_call_and_other_text_the_answer(texts, observations, reward) -> None:
    played = TASK.play(FIRST, texts)
    assert (played.observations, played.reward) == (observations, reward)


PROGRAMS = {
    r"squares of all multiples of (\d+) below (\d+)": "sum(n * n for n in range(0, {1}, {0}))",
    r"from 1 to (\d+) .* divided by (\d+) but not by (\d+)": "sum(n % {1} == 0 < n % {2} for n in range({0} + 1))",
    r"below (\d+) whose digits have the sum (\d+)": "sum(n for n in range({0}) if sum(int(d) for d in str(n)) == {1})",
    r"of (\d+) to the power of (\d+), divided by (\d+)": "{0} ** {1} % {2}",
    r"plus (\d+) times .* number (\d+)": "a, b = 1, 1\nfor _ in range({1} - 1):\n    a, b = b, b + {0} * a\nprint(a)",
}


@pytest.mark.parametrize(("question", "program"), PROGRAMS.items())
def test_every_problem_is_solved_by_a_plain_program_within_the_limits(question: str, program: str) -> None:
    task = load_task("programs", "test")
    items = [task[index] for index in range(len(task))]
    found = [(re.search(question, item.prompt[1]["content"]), item.answer) for item in items]
    solved = [output_of(program.format(*match.groups())) == answer for match, answer in found if match]
    assert len(solved) > 10 and all(solved)
