"""Whatever a peer sends, what reads it ends in a value or in a refusal with a name, and never in anything else."""

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
wild_bytes = st.binary(max_size=64)
wild_text = st.text(max_size=200)
wild_float = st.floats(width=32)
few = {"max_size": 6}
WILD_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "schema": uint32,
        "codec": st.integers(0, 5),
        "run": wild_bytes,
        "number": uint64,
        "created_ms": uint64,
        "task": wild_text,
        "prompt_index": uint64,
        "prompt_hash": wild_bytes,
        "model": wild_text,
        "tokenizer": wild_bytes,
        "policy_version": uint64,
        "policy_version_span": uint32,
        "lengths": st.lists(uint32, **few),
        "finishes": st.lists(st.integers(-(2**31), 2**31 - 1), **few),
        "rewards": st.lists(wild_float, **few),
        "token_ids": wild_bytes,
        "logprobs": wild_bytes,
        "texts": st.lists(wild_text, **few),
        "mean_logprobs": st.lists(wild_float, **few),
        "retells": wild_bytes,
        "version_offsets": st.lists(uint32, **few),
        "version_spans": st.lists(uint32, **few),
        "id_planes": st.lists(wild_bytes, **few),
        "logprob_planes": st.lists(wild_bytes, **few),
    },
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600))
def test_random_bytes(case: bytes) -> None:
    targets.run_case(case)


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """A valid case with a few bytes changed, cut out or doubled."""
    case = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(1, max(1, len(case) - 1)))
        how = draw(st.sampled_from(("change", "cut", "double", "insert")))
        length = draw(st.integers(1, 16))
        if how == "change":
            case[place : place + 1] = bytes([draw(st.integers(0, 255))])
        elif how == "cut":
            del case[place : place + length]
        elif how == "double":
            case[place:place] = case[place : place + length]
        else:
            case[place:place] = draw(st.binary(min_size=1, max_size=16))
    return bytes(case)


@settings(max_examples=600, deadline=None)
@given(_mutated())
def test_valid_messages_that_were_damaged(case: bytes) -> None:
    targets.run_case(case)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(BODY_SEEDS), WILD_FIELDS)
def test_signed_bodies_with_wild_fields(seed: bytes, fields: dict[str, object]) -> None:
    body = pb.Body.FromString(seed)
    for name in fields:
        body.ClearField(name)
    data = body.SerializeToString() + pb.Body(**fields).SerializeToString()
    targets.signed_door(data)
    targets.signed_body_of_this_run(data)


def test_the_seeds_reach_behind_the_last_rule() -> None:
    """Else the fuzzers would only ever see the first one."""
    message = pb.Body.FromString(BODY_SEEDS[0])
    message.sender = targets.SENDER.peer
    assert isinstance(targets._judged(targets._signed(message)), Accepted)
    for seed in BODY_SEEDS[:3]:
        assert isinstance(targets._judged(targets._signed(pb.Body.FromString(seed))), Accepted)


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_the_kept_corpus(path: Path) -> None:
    assert path.name.startswith(f"{cases.name_of(path.read_bytes())}-")
    cases.run_case(path.read_bytes())


def test_the_corpus_is_small() -> None:
    files = list(CORPUS.iterdir())
    assert 12 <= len(files) <= 150
    assert sum(path.stat().st_size for path in files) < 100_000
