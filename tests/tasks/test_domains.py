"""The domain of a node: parts of the run's mixture, and what is believed of a peer's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.tasks import is_domain, parse_spec, part_names, proportions, validated_domain

RUN = "arithmetic:add+arithmetic:sub=2+gsm8k"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("arithmetic:add", True),
        ("gsm8k:/data/g=3+arithmetic:add", True),
        ("arithmetic:add=2+arithmetic:sub+gsm8k", True),
        ("gsm8k+arithmetic:sub=2+arithmetic:add", False),
        ("gsm8k:/data/g=2+arithmetic:sub=4+arithmetic:add=2", False),
        ("arithmetic", False),
        ("arithmetic:add+math500", False),
        ("gsm8k@brief", False),
    ],
)
def test_a_domain_names_parts_of_the_mixture_and_is_not_the_whole(spec: str, expected: bool) -> None:
    assert is_domain(parse_spec(spec), parse_spec(RUN)) is expected


def test_a_run_of_one_task_has_no_domains() -> None:
    assert not is_domain(parse_spec("gsm8k:/data/g"), parse_spec("gsm8k"))


@pytest.mark.parametrize(
    "told", ["", "gsm8k=2", "gsm8k+arithmetic:add", "math500", "gsm8k:/etc/passwd", "\x1b[2J", RUN]
)
def test_what_is_no_canonical_domain_of_the_run_counts_as_none(told: str) -> None:
    assert validated_domain(told, RUN) == ""


def test_a_canonical_domain_is_believed_as_it_was_told() -> None:
    assert validated_domain("arithmetic:add+gsm8k=3", RUN) == "arithmetic:add+gsm8k=3"
    assert part_names("arithmetic:add+gsm8k=3") == {"arithmetic:add", "gsm8k"}
    assert part_names("") == frozenset()


def test_proportions_are_by_weight() -> None:
    assert proportions(RUN) == {"arithmetic:add": 0.25, "arithmetic:sub": 0.5, "gsm8k": 0.25}
    assert proportions("gsm8k@brief") == {"gsm8k@brief": 1.0}


@given(st.one_of(st.text(max_size=520), st.text(alphabet="gsm8k+=0123456789.@:", max_size=520)))
def test_no_text_of_a_peer_is_more_than_a_domain(told: str) -> None:
    believed = validated_domain(told, RUN)
    assert believed in ("", told)
    assert part_names(believed) <= part_names(RUN)
