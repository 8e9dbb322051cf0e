"""Each reader of bytes from peers returns a value or rejects the bytes with a known reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.records import rollout_pb2 as pb
from ftis_node.validation import Accepted
from tests.fuzz import cases, targets

CORPUS = Path(__file__).parent / "corpus"
SEEDS = targets.seed_cases()
BODY_SEEDS = targets.seeds()["signed_body_of_this_run"]

uint32 = st.one_of(st.sampled_from([0, 1, 2, 3, 5, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))
uint64 = st.one_of(st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
any_bytes = st.binary(max_size=64)
any_text = st.text(max_size=200)
any_float = st.floats(width=32)
few = {"max_size": 6}
ANY_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "schema": uint32,
        "codec": st.integers(0, 5),
        "run": any_bytes,
        "number": uint64,
        "created_ms": uint64,
        "task": any_text,
        "prompt_index": uint64,
        "problem_hash": any_bytes,
        "prompt_hash": any_bytes,
        "end_ids": st.lists(uint32, **few),
        "opening": any_text,
        "model": any_text,
        "tokenizer": any_bytes,
        "policy_version": uint64,
        "policy_version_span": uint32,
        "lengths": st.lists(uint32, **few),
        "finishes": st.lists(st.integers(-(2**31), 2**31 - 1), **few),
        "rewards": st.lists(any_float, **few),
        "token_ids": any_bytes,
        "logprobs": any_bytes,
        "texts": st.lists(any_text, **few),
        "mean_logprobs": st.lists(any_float, **few),
        "retells": any_bytes,
        "version_offsets": st.lists(uint32, **few),
        "version_spans": st.lists(uint32, **few),
        "id_planes": st.lists(any_bytes, **few),
        "logprob_planes": st.lists(any_bytes, **few),
    },
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600))
def test_random_bytes_are_read_or_rejected(case: bytes) -> None:
    targets.run_case(case)


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """Draw a valid case with a few bytes changed, removed, repeated or inserted."""
    case = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(1, max(1, len(case) - 1)))
        how = draw(st.sampled_from(("change", "remove", "repeat", "insert")))
        length = draw(st.integers(1, 16))
        if how == "change":
            case[place : place + 1] = bytes([draw(st.integers(0, 255))])
        elif how == "remove":
            del case[place : place + length]
        elif how == "repeat":
            case[place:place] = case[place : place + length]
        else:
            case[place:place] = draw(st.binary(min_size=1, max_size=16))
    return bytes(case)


@settings(max_examples=600, deadline=None)
@given(_mutated())
def test_damaged_messages_are_read_or_rejected(case: bytes) -> None:
    targets.run_case(case)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(BODY_SEEDS), ANY_FIELDS)
def test_signed_bodies_with_any_fields_are_validated_or_rejected(seed: bytes, fields: dict[str, object]) -> None:
    body = pb.Body.FromString(seed)
    for name in fields:
        body.ClearField(name)
    data = body.SerializeToString() + pb.Body(**fields).SerializeToString()
    targets.signed_validation(data)
    targets.signed_body_of_this_run(data)


def test_the_seeds_pass_all_rules() -> None:
    """Otherwise the fuzzers would reach only the first rule."""
    for seed in BODY_SEEDS[:3]:
        assert isinstance(targets._validated(targets._signed(pb.Body.FromString(seed))), Accepted)


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_each_case_of_the_corpus_passes(path: Path) -> None:
    assert path.name.startswith(f"{cases.name_of(path.read_bytes())}-")
    cases.run_case(path.read_bytes())


def test_the_corpus_is_small() -> None:
    files = list(CORPUS.iterdir())
    assert 12 <= len(files) <= 150
    assert sum(path.stat().st_size for path in files) < 100_000
