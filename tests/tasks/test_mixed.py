"""Mixtures interleave the problems of their parts by weight, and references name the part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.records.group import PromptRef
from ftis_node.tasks import is_domain, load_task, parse_spec, validated_domain
from ftis_node.tasks.arithmetic import ArithmeticTask
from ftis_node.tasks.base import MixedTask, Task, TaskItem


class _Numbered:
    """`size` problems whose answer is their index."""

    split = "train"
    isolate_scoring = False

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> TaskItem:
        return TaskItem(PromptRef(self.name, self.split, index), ({"role": "user", "content": str(index)},), str(index))

    def resolve(self, ref: PromptRef) -> TaskItem:
        if ref.index >= self.size:
            raise KeyError(str(ref))
        return self[ref.index]

    def score(self, item: TaskItem, completion_text: str) -> float:
        return float(completion_text == f"{self.name} {item.answer}")


def _mixture(*parts: tuple[str, int, int]) -> MixedTask:
    """Return a mixture of parts of (name, size, weight)."""
    tasks: list[Task] = [_Numbered(name, size) for name, size, _ in parts]
    return MixedTask(tasks, weights=[weight for _, _, weight in parts], name="mixture")


def _order(task: Task) -> str:
    return " ".join(f"{task[index].ref.task}{task[index].ref.index}" for index in range(len(task)))


def test_parts_alternate_by_weight_and_the_shorter_one_repeats_until_the_longer_ends():
    assert _order(_mixture(("a", 6, 3), ("b", 2, 1))) == "a0 a1 b0 a2 a3 a4 b1 a5"
    assert _order(_mixture(("a", 5, 2), ("b", 1, 1))) == "a0 b0 a1 a2 b0 a3 a4 b0 a0"


def test_the_part_resolves_references_and_scores():
    mixture = _mixture(("a", 2, 1), ("b", 2, 1))
    item = mixture[1]
    assert (item.ref, mixture.resolve(item.ref)) == (PromptRef("b", "train", 0), item)
    assert (mixture.score(item, "b 0"), mixture.score(item, "a 0")) == (1.0, 0.0)


@pytest.mark.parametrize(
    "ref", [PromptRef("mixture", "train", 0), PromptRef("c", "train", 0), PromptRef("a", "train", 2)]
)
def test_unknown_references_raise_key_error(ref):
    with pytest.raises(KeyError):
        _mixture(("a", 2, 1), ("b", 2, 1)).resolve(ref)


def test_the_order_in_a_spec_does_not_matter():
    one, other = load_task("arithmetic:sub=2+arithmetic:add"), load_task("arithmetic:add=1+arithmetic:sub=2")
    assert isinstance(one, MixedTask)
    assert one.name == other.name == "arithmetic:add+arithmetic:sub=2"
    assert [one[i] for i in range(30)] == [other[i] for i in range(30)]
    assert [one[i].ref.task for i in range(3)] == ["arithmetic:sub", "arithmetic:add", "arithmetic:sub"]
    assert one[0] == ArithmeticTask("train", "sub")[0]


def test_a_mixture_is_isolated_if_any_part_is():
    class Isolated(_Numbered):
        isolate_scoring = True

    plain = _Numbered("a", 1)
    assert not MixedTask([plain], weights=[1], name="m").isolate_scoring
    assert MixedTask([plain, Isolated("b", 1)], weights=[1, 1], name="m").isolate_scoring


RUN = "arithmetic:add+arithmetic:sub=2+gsm8k"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("arithmetic:add", True), ("gsm8k:/data/g=3+arithmetic:add", True),
        ("arithmetic:add=2+arithmetic:sub+gsm8k", True), ("gsm8k+arithmetic:sub=2+arithmetic:add", False),
        ("gsm8k:/data/g=2+arithmetic:sub=4+arithmetic:add=2", False), ("arithmetic", False),
        ("arithmetic:add+math500", False), ("gsm8k@brief", False),
    ],
)  # fmt: skip
def test_a_domain_is_a_proper_part_of_the_mixture(spec, expected):
    assert is_domain(parse_spec(spec), parse_spec(RUN)) is expected


def test_a_run_of_one_task_has_no_domains():
    assert not is_domain(parse_spec("gsm8k:/data/g"), parse_spec("gsm8k"))


@pytest.mark.parametrize(
    "text", ["", "gsm8k=2", "gsm8k+arithmetic:add", "math500", "gsm8k:/etc/passwd", "\x1b[2J", RUN]
)
def test_a_text_that_is_no_canonical_domain_of_the_run_counts_as_none(text):
    assert validated_domain(text, RUN) == ""


def test_a_canonical_domain_is_accepted_unchanged():
    assert validated_domain("arithmetic:add+gsm8k=3", RUN) == "arithmetic:add+gsm8k=3"


@given(st.one_of(st.text(max_size=520), st.text(alphabet="gsm8k+=0123456789.@:", max_size=520)))
def test_any_text_of_a_peer_gives_a_domain_or_none(text):
    domain = validated_domain(text, RUN)
    assert domain in ("", text)
    assert not domain or is_domain(parse_spec(domain), parse_spec(RUN))
