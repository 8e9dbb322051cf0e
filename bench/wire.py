"""The wire form in figures: bytes a token, packing against a plain copy, groups a second through the door and to disk.

Groups of 12 completions of 300 tokens with Qwen-like ids. The door is everything but the scoring of mathematics: size,
parse, rules, signature, prompt made again, SQLite with its synchronisation.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ftis_node.config.manifest import RunManifest
from ftis_node.lab.wire_probe import RUN_ID, VOCABULARY, random_group
from ftis_node.records.codec import hash_prompt, pack_group, unpack_group
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.group import CompletionStatus, PromptRef
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.tasks.base import TaskItem
from ftis_node.validation import DoorContext, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_GROUPS = 300
REPEATS = 5


class FreeScorer:
    """Everything is worth what random_group claims least: the rules' cost is measured, not the scorer's."""

    async def score(self, item: TaskItem, texts: Sequence[str]) -> list[tuple[float, CompletionStatus]]:
        return [(0.0, CompletionStatus.SCORED) for _ in texts]


class FreeTokenizer:
    """A tokenizer without text."""

    fingerprint = "0" * 32
    vocab_size = VOCABULARY
    eos_ids = (VOCABULARY,)

    def encode_prompt(self, messages: Sequence[object]) -> list[int]:
        return [0]

    def decode(self, ids: Sequence[int]) -> str:
        return ""


def seconds(function: Callable[[], object]) -> float:
    """The best of a few runs: the machine is shared."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def make_groups(identity: Identity) -> list:
    from dataclasses import replace

    rng = np.random.default_rng(0)
    groups = []
    for number in range(1, NUM_GROUPS + 1):
        group = random_group(identity, number, rng)
        completions = tuple(replace(completion, reward=0.0) for completion in group.completions)
        ref = PromptRef("gsm8k", "train", number)
        groups.append(replace(group, completions=completions, prompt_hash=hash_prompt([0]), prompt_ref=ref))
    return groups


def door_rate(groups: list, identity: Identity) -> float:
    """Groups a second from signed bytes to an acknowledged row, one after the other."""
    manifest = RunManifest(name="bench", task="gsm8k")
    from dataclasses import replace

    sealed = [seal_group(replace(group, run_id=manifest.run_id), identity).to_bytes() for group in groups]

    async def run(folder: Path) -> float:
        buffer = ReplayBuffer(folder / "replay.sqlite")
        reader = ReplayReader(folder / "replay.sqlite")
        context = DoorContext(
            manifest=manifest,
            tokenizer=FreeTokenizer(),
            resolve=lambda ref: TaskItem(ref, ({"role": "user", "content": ""},), ""),
            scorer=FreeScorer(),
            is_known=reader.is_known,
            has_number=reader.has_number,
        )
        started = time.perf_counter()
        for data in sealed:
            verdict = await judge(data, context)
            assert isinstance(verdict, Accepted), verdict
            assert buffer.admit(verdict, own=False)
        took = time.perf_counter() - started
        reader.close()
        buffer.close()
        return len(sealed) / took

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


def main() -> None:
    identity = Identity.generate()
    groups = make_groups(identity)
    group = groups[0]
    body = pack_group(group)
    payload = bytes(8 * group.num_tokens)
    copy_s = seconds(lambda: [bytearray(payload) for _ in range(1000)]) / 1000
    pack_s = seconds(lambda: [pack_group(group) for _ in range(200)]) / 200
    unpack_s = seconds(lambda: [unpack_group(body) for _ in range(200)]) / 200
    result = {
        "bench": "wire",
        "exact_bytes_per_token": round(len(seal_group(group, identity).to_bytes()) / group.num_tokens, 3),
        "pack_us": round(pack_s * 1e6, 1),
        "unpack_us": round(unpack_s * 1e6, 1),
        "pack_ratio_to_copy": round(2 * copy_s / (pack_s + unpack_s), 3),
        "door_groups_per_s": round(door_rate(groups, identity)),
        "run_id": RUN_ID,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
