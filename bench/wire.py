"""Measurements of the wire form: bytes per token, packing against a plain copy, groups per second from bytes to disk.

Groups have 12 completions of 300 tokens with Qwen-like ids. The worst case has ids uniform over the vocabulary
(`*_bytes_per_token`). The other has ids by Zipf's law with log-probs mostly near 0, as in text
(`*_bytes_per_token_of_text`). Bytes are all that a group needs: body, signature, announcement.

`pack_ratio_to_copy`: a plain copy, over packing and unpacking in the exact form. The copy is the least that packing
must do: numpy copies the group's 24 arrays into one buffer, and back into 24 arrays. `pack_ratio_to_memcpy`: the same
against one memcpy of all bytes each way.

`door_groups_per_s`: validation and storage on one core, without the scoring of mathematics. That is size, parsing,
rules, signature, rendering the prompt again, and SQLite with full synchronization. As in the intake loop under load, a
commit has many groups. `door_groups_per_s_one_a_commit`: a commit for each group, as under a light load.

`episode_*`: the same group as an episode of 5 turns of 60 sampled tokens. Observations do not travel.
`episode_flat_bytes_per_token` is the form of trainers that carry them: msgpack with ids, a mask and log-probs of all
tokens. It has 90 observed tokens between two turns. All bytes are per *sampled* token. `episode_flat_pack_us` times
msgpack alone, from lists of numbers to bytes. `episode_replay_us`: a receiver decodes 60 turns, lets an environment
answer them, renders its answers and compares their hash, with the tokenizer of the tiny models.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from ftis_node.config.manifest import RunManifest
from ftis_node.records.codec import CODECS, hash_messages, hash_prompt, pack_group, unpack_group
from ftis_node.records.envelope import Accepted, announce_group, seal_group
from ftis_node.records.group import Group, PromptRef
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.validation import ValidationContext, validate
from stubs.stub_node import StubScorer, StubTokenizer, stub_prompt
from stubs.wire_episodes import as_episode, flat_rows, replay_seconds
from stubs.wire_groups import RUN_ID, VOCABULARY, random_group

NUM_GROUPS = 300
REPEATS, LOOPS = 100, 20  # many short runs: on a shared machine some of them are undisturbed


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs, because other programs share the machine."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def make_groups(identity: Identity) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = []
    for number in range(1, NUM_GROUPS + 1):
        group = random_group(identity, number, rng)
        ref = PromptRef("gsm8k", "train", number)
        hashes = {"problem_hash": hash_messages(stub_prompt(ref)), "prompt_hash": hash_prompt([0])}
        groups.append(replace(group, rewards=(0.0,) * len(group.rewards), prompt_ref=ref, **hashes))
    return groups


def like_text(group: Group) -> Group:
    """Return the group with ids by Zipf's law, and three of five log-probs within 0.01 of 0."""
    rng = np.random.default_rng(1)
    completions = []
    for completion in group.completions:
        num_tokens = len(completion.token_ids)
        ids = np.minimum(rng.zipf(1.2, num_tokens), VOCABULARY - 1).astype(np.int32)
        scale = np.where(rng.random(num_tokens) < 0.6, 0.01, 1.0)
        logprobs = (-rng.exponential(1.0, num_tokens) * scale).astype(np.float32)
        completions.append(replace(completion, token_ids=ids, logprobs=logprobs))
    return group.with_completions(completions)


def bytes_per_token(group: Group, identity: Identity, codec: str) -> float:
    """Return the bytes of envelope and announcement per token."""
    envelope = seal_group(group, identity, codec=codec)
    data = envelope.to_bytes()
    announcement = announce_group(envelope, group, envelope_bytes=len(data)).to_bytes()
    return round((len(data) + len(announcement)) / group.num_tokens, 3)


def copy_seconds(group: Group) -> float:
    """Return the seconds to copy the group's arrays into one buffer and back."""
    completions = group.completions
    length = len(completions[0].token_ids)
    buffer = np.empty((2, group.num_tokens), dtype="<i4")
    ids, logprobs = buffer[0], buffer[1].view("<f4")
    begins = range(0, group.num_tokens, length)

    def copy() -> object:
        np.concatenate([completion.token_ids for completion in completions], out=ids)
        np.concatenate([completion.logprobs for completion in completions], out=logprobs)
        return [(ids[at : at + length].copy(), logprobs[at : at + length].copy()) for at in begins]

    return seconds(lambda: [copy() for _ in range(LOOPS)]) / LOOPS


def packing_seconds(group: Group, codec: str) -> tuple[float, float]:
    """Return the seconds to pack and unpack a group."""
    body = pack_group(group, codec=codec)
    pack_s = seconds(lambda: [pack_group(group, codec=codec) for _ in range(LOOPS)]) / LOOPS
    return pack_s, seconds(lambda: [unpack_group(body) for _ in range(LOOPS)]) / LOOPS


def validation_rate(groups: list[Group], identity: Identity, *, codec: str = "exact", per_commit: int = 64) -> float:
    """Return the groups per second from signed bytes to a committed row."""
    manifest = RunManifest(name="bench", task="gsm8k", wire={"codecs": tuple(CODECS)})
    sealed = [seal_group(replace(group, run_id=manifest.run_id), identity, codec=codec).to_bytes() for group in groups]

    async def run(folder: Path) -> float:
        buffer = ReplayBuffer(folder / "replay.sqlite")
        reader = ReplayReader(folder / "replay.sqlite")
        context = ValidationContext(
            manifest=manifest,
            tokenizer=StubTokenizer(),
            resolve=lambda ref, cost: StubScorer().resolve(ref, cost=cost),
            scorer=StubScorer(),
            is_known=reader.is_known,
            has_number=reader.has_number,
        )
        started = time.perf_counter()
        for begin in range(0, len(sealed), per_commit):
            verdicts = [await validate(data, context) for data in sealed[begin : begin + per_commit]]
            assert all(isinstance(verdict, Accepted) for verdict in verdicts), verdicts
            assert all(buffer.admit_many([(verdict, False) for verdict in verdicts]))
        took = time.perf_counter() - started
        reader.close()
        buffer.close()
        return len(sealed) / took

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


def best_validation_rate(groups: list[Group], identity: Identity, **how: object) -> int:
    """Return the best rate of a few runs, each with a new buffer."""
    return round(max(validation_rate(groups, identity, **how) for _ in range(REPEATS)))


def main() -> None:
    identity = Identity.generate()
    groups = make_groups(identity)
    group = groups[0]
    result: dict[str, object] = {"bench": "wire", "run_id": RUN_ID}
    for codec in CODECS:
        pack_s, unpack_s = packing_seconds(group, codec)
        result |= {
            f"{codec}_bytes_per_token": bytes_per_token(group, identity, codec),
            f"{codec}_bytes_per_token_of_text": bytes_per_token(like_text(group), identity, codec),
            f"{codec}_pack_us": round(pack_s * 1e6, 1),
            f"{codec}_unpack_us": round(unpack_s * 1e6, 1),
        }
    episode = as_episode(group)
    pack_s, unpack_s = packing_seconds(episode, "exact")
    flat = flat_rows(group)
    flat_data = msgspec.msgpack.encode(flat)
    result |= {
        "episode_bytes_per_token": bytes_per_token(episode, identity, "exact"),
        "episode_ratio": round(
            bytes_per_token(episode, identity, "exact") / bytes_per_token(group, identity, "exact"), 4
        ),
        "episode_pack_us": round(pack_s * 1e6, 1),
        "episode_unpack_us": round(unpack_s * 1e6, 1),
        "episode_replay_us": round(replay_seconds(episode) * 1e6),
        "episode_flat_bytes_per_token": round(len(flat_data) / group.num_tokens, 3),
        "episode_flat_pack_us": round(seconds(lambda: msgspec.msgpack.encode(flat)) * 1e6, 1),
        "episode_flat_unpack_us": round(seconds(lambda: msgspec.msgpack.decode(flat_data)) * 1e6, 1),
    }
    payload = bytes(8 * group.num_tokens)
    memcpy_s = seconds(lambda: [bytearray(payload) for _ in range(LOOPS)]) / LOOPS
    copy_s, packing_s = copy_seconds(group), sum(packing_seconds(group, "exact"))
    result |= {
        "copy_us": round(copy_s * 1e6, 1),
        "pack_ratio_to_copy": round(copy_s / packing_s, 3),
        "pack_ratio_to_memcpy": round(2 * memcpy_s / packing_s, 3),
        "door_groups_per_s": best_validation_rate(groups, identity),
        "door_groups_per_s_lossless": best_validation_rate(groups, identity, codec="lossless"),
        "door_groups_per_s_one_a_commit": best_validation_rate(groups, identity, per_commit=1),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
