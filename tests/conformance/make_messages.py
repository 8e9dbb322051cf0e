"""Write `messages.json`: groups, announcements, questions and lists of ids, each with the verdict of a reader.

`proto/vectors.json` has the content of valid envelopes. This file adds the rules that need a run, a clock and the state
of a node. Run it again only after a change of the wire format or of a rule:

    python -m tests.conformance.make_messages
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ftis_node.config.manifest import EpisodeSection, RunManifest
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import hash_messages, hash_observations, hash_prompt
from ftis_node.records.identity import peer_id_bytes, peer_id_from_text
from ftis_node.tasks.arithmetic import ArithmeticTask
from ftis_node.tasks.episodes.guess import LARGER, SMALLER, GuessEpisode
from tests.records import wire_example as example
from tests.records.make_vectors import sign_body

MESSAGES = Path(__file__).with_name("messages.json")
MANIFEST = RunManifest(
    name="conformance",
    task="arithmetic",
    sampling={"group_size": 2, "max_prompt_tokens": 32, "max_completion_tokens": 4, "max_total_tokens": 36},
)
EPISODE_MANIFEST = MANIFEST.model_copy(update={"task": "guess", "episode": EpisodeSection(max_turns=2)})
NOW_MS = 1767225660000
VOCABULARY, END = 128, 2  # a token is a character of ASCII; 2 ends a completion
TOKENIZER = bytes.fromhex("cd" * 16)
USED_NUMBER = 7
BANNED, UNKNOWN = peer_id_bytes(b"\x11" * 32), peer_id_bytes(b"\x22" * 32)
ACCEPTED = "accepted"
TURNS: dict[str, Any] = {"turns": [2, 1], "turn_lengths": [1, 2, 2], "observation_hash": bytes(16)}

PROBLEM = ArithmeticTask()[5]
PROBLEM_HASH = hash_messages(PROBLEM.prompt)
PROMPT_HASH = hash_prompt(list(PROBLEM.prompt[0]["content"].encode()))  # the message alone, without a template


def body(**changes: Any) -> pb.Body:
    """Return a group of one right and one wrong completion, both ended, with these fields replaced."""
    ids = [*PROBLEM.answer.encode(), END, *b"0", END]
    fields: dict[str, Any] = {
        "schema": 1, "codec": pb.CODEC_EXACT, "run": bytes.fromhex(MANIFEST.run_id),
        "sender": peer_id_from_text(example.IDENTITY.peer_id), "number": 1, "created_ms": NOW_MS - 60_000,
        "task": "arithmetic", "prompt_index": PROBLEM.ref.index, "problem_hash": PROBLEM_HASH,
        "prompt_hash": PROMPT_HASH, "end_ids": [END], "model": "tiny-s", "tokenizer": TOKENIZER, "policy_version": 3,
        "sampling": pb.Sampling(temperature=1.0, top_p=1.0), "lengths": [3, 2],
        "finishes": [pb.FINISH_STOP, pb.FINISH_STOP], "rewards": [1.0, 0.0], "token_ids": int32s(ids),
        "logprobs": float32s([-0.5, -0.25, -0.125, -1.0, -2.0]),
    }  # fmt: skip
    return pb.Body(**fields | changes)


def int32s(values: list[int]) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def float32s(values: list[float]) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def groups() -> list[dict[str, str]]:
    """Return signed groups with their verdicts."""
    sampling = pb.Sampling(temperature=0.5, top_p=1.0)
    cases = {
        "valid": (ACCEPTED, body()),
        "59 s ahead": (ACCEPTED, body(created_ms=NOW_MS + 59_000)),
        "versions of each completion": (
            ACCEPTED,
            body(policy_version_span=2, version_offsets=[0, 1], version_spans=[1, 1]),
        ),
        "schema 2": ("version", body(schema=2)),
        "codec 9": ("codec", body(codec=9)),  # type: ignore[arg-type]
        "a codec that the run does not allow": ("codec", body(codec=pb.CODEC_LOSSY)),
        "a run of 15 bytes": ("malformed", body(run=bytes(15))),
        "a field of the text form": ("malformed", body(mean_logprobs=[-0.5, -0.5])),
        "planes in an exact body": ("malformed", body(id_planes=[b"\0"])),
        "one log-prob is missing": ("malformed", body(logprobs=float32s([-0.5] * 4))),
        "version offsets without 0": (
            "malformed",
            body(policy_version_span=2, version_offsets=[1, 1], version_spans=[1, 1]),
        ),
        "weights of 5 bytes": ("malformed", body(weights_of=bytes(5))),
        "number 2^63": ("malformed", body(number=2**63)),
        "another run": ("run", body(run=bytes(16))),
        "a banned sender": ("banned", body(sender=BANNED)),
        "signed by another sender": ("signature", body(sender=UNKNOWN)),
        "a number that the sender used before": ("sequence_reused", body(number=USED_NUMBER)),
        "61 s ahead": ("clock_skew", body(created_ms=NOW_MS + 61_000)),
        "older than the run allows": ("stale", body(created_ms=NOW_MS - int(MANIFEST.step.max_age_s * 1000) - 1000)),
        "another tokenizer": ("tokenizer", body(tokenizer=bytes(16))),
        "one completion": ("group_size", body(lengths=[5], finishes=[pb.FINISH_STOP], rewards=[1.0])),
        "another temperature": ("sampling", body(sampling=sampling)),
        "a completion of 5 tokens": (
            "length",
            body(lengths=[5, 2], token_ids=int32s([49] * 4 + [END, 48, END]), logprobs=float32s([-0.5] * 7)),
        ),
        "a reward of 1.5": ("reward_range", body(rewards=[1.5, 0.0])),
        "a reward that is not a number": ("reward_range", body(rewards=[math.nan, 0.0])),
        "id 128": ("token_out_of_range", body(token_ids=int32s([VOCABULARY, 49, END, 48, END]))),
        "a negative id": ("token_out_of_range", body(token_ids=int32s([-1, 49, END, 48, END]))),
        "a log-prob of 0.5": ("logprobs", body(logprobs=float32s([0.5, -0.25, -0.125, -1.0, -2.0]))),
        "a log-prob that is not a number": ("logprobs", body(logprobs=float32s([math.nan, -0.25, -0.125, -1.0, -2.0]))),
        "finish stop without the end token": ("finish_reason", body(token_ids=int32s([49, 49, 49, 48, END]))),
        "finish length at 2 tokens of 4": ("finish_reason", body(finishes=[pb.FINISH_STOP, pb.FINISH_LENGTH])),
        "a problem that does not exist": ("prompt_mismatch", body(prompt_index=2**31)),
        "another problem": ("prompt_mismatch", body(problem_hash=bytes(16))),
        "another rendering of the problem": (ACCEPTED, body(prompt_hash=bytes(4))),
        "a prompt hash of 16 bytes": ("malformed", body(prompt_hash=bytes(16))),
        "65 end ids": ("malformed", body(end_ids=range(65))),
        "end ids of another model": (ACCEPTED, body(end_ids=[END, 3])),
        "an end id inside a completion": ("finish_reason", body(end_ids=[END, int(PROBLEM.answer.encode()[0])])),
        "turns in a run without episodes": ("episode_mismatch", body(**TURNS)),
        "turns without a hash of observations": ("malformed", body(**TURNS | {"observation_hash": b""})),
        "turns of one completion of two": ("malformed", body(**TURNS | {"turns": [3], "turn_lengths": [1, 2, 2]})),
        "lengths of turns that sum to another": ("malformed", body(**TURNS | {"turn_lengths": [1, 1, 2]})),
        "a turn of 0 tokens": ("malformed", body(**TURNS | {"turn_lengths": [0, 3, 2]})),
        "an open think block in the prompt": (ACCEPTED, body(opening="<think>\n")),
        "an opening that is no think block": ("opening", body(opening="<answer>")),
        "another task": ("prompt_mismatch", body(task="gsm8k")),
        "exchanged rewards": ("reward_mismatch", body(rewards=[0.0, 1.0])),
    }
    made = [_case(case, verdict, sign_body(data)) for case, (verdict, data) in cases.items()]
    unknown = pb.Envelope.FromString(sign_body(body())).SerializeToString() + bytes.fromhex("98060a")
    return [
        *made,
        _case("an unknown field 99 in the envelope", ACCEPTED, unknown),
        _case("no message", "parse", b"\xff\xff"),
    ]


def episodes() -> list[dict[str, str]]:
    """Return signed groups of a run of the episode `guess` with their verdicts: two completions of two guesses each."""
    problem = GuessEpisode()[5]
    number = int(problem.answer)
    below, above = number - 1, number + 1

    def played(
        first: tuple[int, int], second: tuple[int, int], observations: list[list[str]], **changes: Any
    ) -> pb.Body:
        ids = [token for guess in (*first, *second) for token in (*str(guess).encode(), END)]
        turns = {
            "lengths": [6, 6],
            "turns": [2, 2],
            "turn_lengths": [3, 3, 3, 3],
            "observation_hash": hash_observations(observations),
            "rewards": [1.0, 0.5],  # found; two guesses that the answers allow
            "token_ids": int32s(ids),
            "logprobs": float32s([-0.5] * len(ids)),
        }
        about = {
            "run": bytes.fromhex(EPISODE_MANIFEST.run_id), "task": "guess", "prompt_index": problem.ref.index,
            "problem_hash": hash_messages(problem.prompt),
            "prompt_hash": hash_prompt(list(problem.prompt[0]["content"].encode())),
        }  # fmt: skip
        return body(**about | turns | changes)

    guesses, answers = ((below, number), (below, above)), [[LARGER], [LARGER]]
    one_turn = {"turns": [], "turn_lengths": [], "observation_hash": b""}
    cases = {
        "two turns": (ACCEPTED, played(*guesses, answers)),
        "another text of an observation": ("episode_mismatch", played(*guesses, [[LARGER], [SMALLER]])),
        "a turn after the end of its episode": ("episode_mismatch", played((number, number), guesses[1], answers)),
        "another reward": ("reward_mismatch", played(*guesses, answers, rewards=[1.0, 1.0])),
        "no turns in a run with episodes": ("episode_mismatch", played(*guesses, answers, **one_turn)),
    }
    return [_case(case, verdict, sign_body(data)) for case, (verdict, data) in cases.items()]


def announcements() -> list[dict[str, str]]:
    """Return announcements with their verdicts; a reader may still not follow an accepted one."""

    def announcement(**changes: Any) -> bytes:
        fields: dict[str, Any] = {
            "schema": 1, "id": bytes(range(32)), "number": 1, "envelope_bytes": 278, "num_tokens": 5,
            "tokenizer": TOKENIZER[:8], "policy_version": 3, "created_ms": NOW_MS,
        }  # fmt: skip
        return pb.Announcement(**fields | changes).SerializeToString()

    malformed: dict[str, dict[str, Any]] = {
        "an id of 31 bytes": {"id": bytes(31)}, "number 0": {"number": 0}, "number 2^63": {"number": 2**63},
        "no envelope": {"envelope_bytes": 0}, "an envelope above 4 MiB": {"envelope_bytes": (4 << 20) + 1},
        "no tokens": {"num_tokens": 0}, "524,289 tokens": {"num_tokens": 524_289},
        "a tokenizer of 16 bytes": {"tokenizer": TOKENIZER}, "policy version 2^63": {"policy_version": 2**63},
        "after the year 9999": {"created_ms": 253402300800000}, "attempt 256": {"attempt": 256},
        "a sender of 37 bytes": {"sender": bytes(37)},
    }  # fmt: skip
    return [
        _case("valid", ACCEPTED, announcement()),
        _case("of a group of another peer", ACCEPTED, announcement(sender=BANNED)),
        _case("attempt 255", ACCEPTED, announcement(attempt=255)),
        _case("an unknown field 99", ACCEPTED, announcement() + bytes.fromhex("98060a")),
        _case("schema 2", "announcement_version", announcement(schema=2)),
        _case("513 bytes", "announcement_size", announcement() + _padding(513 - len(announcement()))),
        _case("no message", "announcement_parse", b"\xff\xff"),
        *(_case(case, "announcement_malformed", announcement(**changes)) for case, changes in malformed.items()),
    ]


def questions() -> list[dict[str, str]]:
    """Return requests of the service `ask` with their verdicts."""
    numbers = pb.Question(schema=1, sender=BANNED, first_number=2, last_number=9)
    cases = {
        "everything": (ACCEPTED, pb.Question(schema=1)),
        "numbers of a sender": (ACCEPTED, numbers),
        "groups made after a time": (ACCEPTED, pb.Question(schema=1, since_ms=NOW_MS)),
        "schema 2": ("question_version", pb.Question(schema=2)),
        "numbers without a sender": ("question_malformed", pb.Question(schema=1, first_number=2)),
        "a sender of 37 bytes": ("question_malformed", pb.Question(schema=1, sender=bytes(37))),
    }
    return [
        *(_case(case, verdict, data.SerializeToString()) for case, (verdict, data) in cases.items()),
        _case("257 bytes", "question_size", numbers.SerializeToString() + _padding(257 - numbers.ByteSize())),
        _case("no message", "question_parse", b"\xff\xff"),
    ]


def id_lists() -> list[dict[str, str]]:
    """Return payloads of `fetch`, `fetch_text` and `confirm`: `accepted`, or `cut` if they end the stream."""
    sizes = {"one id": 32, "64 ids": 64 * 32, "no id": 0, "half an id": 16, "an id and a byte": 33, "65 ids": 65 * 32}
    return [
        _case(case, ACCEPTED if case in ("one id", "64 ids") else "cut", bytes(size)) for case, size in sizes.items()
    ]


def _padding(size: int) -> bytes:
    """Return an unknown field 15 that takes `size` bytes, its length as a varint of two bytes."""
    length = size - 3
    return bytes([0x7A, length & 127 | 128, length >> 7]) + bytes(length)


def _case(case: str, verdict: str, data: bytes) -> dict[str, str]:
    return {"case": case, "verdict": verdict, "data": data.hex()}


def document() -> dict[str, Any]:
    """Return the whole file."""
    node = {
        "manifest": MANIFEST.canonical().decode(), "run": MANIFEST.run_id, "now_ms": NOW_MS,
        "tokenizer": TOKENIZER.hex(), "vocabulary": VOCABULARY, "end": END, "banned": [BANNED.hex()],
        "used_numbers": {body().sender.hex(): [USED_NUMBER]},
    }  # fmt: skip
    node["episodes"] = {"manifest": EPISODE_MANIFEST.canonical().decode(), "run": EPISODE_MANIFEST.run_id}
    parts = {
        "groups": groups(), "episodes": episodes(), "announcements": announcements(), "questions": questions(),
        "id_lists": id_lists(),
    }  # fmt: skip
    return {"node": node, **parts}


if __name__ == "__main__":
    MESSAGES.write_text(json.dumps(document(), indent=1) + "\n")
