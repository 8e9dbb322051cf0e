"""The run manifest: the settings on which all nodes of one swarm agree.

It is one TOML file. The SHA-256 of its canonical JSON is the run id. The run id names the gossip topic and is part of
every envelope, so nodes of different manifests never mix. What may differ from node to node is in `node.py`, not here:
model, LoRA, hardware, paths of data files. An unknown key is an error, and so is a contradiction.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, get_args

import tomli_w
from pydantic import (
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ftis_node.config.section import Section, first_problem, is_unknown_name
from ftis_node.config.step import MethodSection, OptimizerSection, StepSection
from ftis_node.errors import ConfigError
from ftis_node.files import parse_toml, read_text
from ftis_node.records.names import Codec

PRESETS = (
    "arithmetic-ftis",
    "arithmetic-compare",
    "arithmetic-hdee",
    "sums-ftis",
    "words-ftis",
    "guess-ftis",
    "calculator-ftis",
    "gsm8k-ftis",
    "open-swarm",
    "rg-swarm",
)
RUN_ID_HEX = 32
MAX_TASK_CHARS = 512
MAX_LOGPROB_GAP_NATS = 16.0  # honest log-probs exceed t nats with probability e^-t at most


class SamplingSection(Section):
    """How completions are sampled."""

    group_size: int = Field(default=12, ge=2, le=256)
    """Completions for one prompt by one node (G)."""
    temperature: float = Field(default=1.0, ge=0.01, le=5)  # vLLM samples at no lower one
    """Softmax temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1 is off. Below 1 sampling never draws the tokens that were cut, which is a bias. The log-probs are
    those of the full softmax, so equal weights have a ratio of 1."""
    top_k: int = Field(default=0, ge=0, le=1 << 24)
    """Tokens kept before sampling; 0 is off. See `sampling.top_p`."""
    max_prompt_tokens: int = Field(default=512, ge=1, le=131072)
    """Longer prompts are skipped (event `prompt_skipped`)."""
    max_completion_tokens: int = Field(default=760, ge=1, le=131072)
    """Longest completion."""
    max_total_tokens: int = Field(default=760, ge=2, le=262144)
    """Longest prompt and completion together; it may shorten the completion."""
    mask_truncated: bool = False
    """Whether completions without an end, mostly cut at the token limit, get no gradient, own and foreign ones alike
    (TRL's `mask_truncated_completions`). Their rewards still count in the mean of the group."""

    @model_validator(mode="after")
    def _settings_agree(self) -> SamplingSection:
        if self.max_total_tokens <= self.max_prompt_tokens:
            raise ValueError("max_total_tokens must be above max_prompt_tokens, or no completion fits")
        if self.is_truncated_sampling and self.temperature != 1:
            raise ValueError(
                "top_p below 1 or top_k above 0 needs temperature = 1: engines report the full softmax only there, "
                "and a truncated one biases every importance ratio"
            )
        return self

    @property
    def is_truncated_sampling(self) -> bool:
        """Whether tokens are drawn from a truncated distribution. The log-probs must then be those of the full one."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def max_logprob_gap_nats(self) -> float:
        """Return the nats by which honest log-probs may be below a learner's (`algorithms/diagnostics.py`).

        A truncated distribution has no such bound: infinity.
        """
        return math.inf if self.is_truncated_sampling else MAX_LOGPROB_GAP_NATS

    def completion_limit(self, num_prompt_tokens: int) -> int:
        """Return the longest completion of such a prompt: min(max_completion_tokens, max_total_tokens - prompt)."""
        return min(self.max_completion_tokens, self.max_total_tokens - num_prompt_tokens)

    def space_after(self, num_prompt_tokens: int) -> int:
        """Return `completion_limit`, or 0 for a prompt above `max_prompt_tokens`."""
        return self.completion_limit(num_prompt_tokens) if num_prompt_tokens <= self.max_prompt_tokens else 0


class EpisodeSection(Section):
    """Limits of an episode.

    `sampling.max_completion_tokens` bounds each turn, and `max_total_tokens` the prompt, all turns and observations.
    """

    max_turns: int = Field(default=8, ge=1, le=256)
    """Turns that a model takes at most in one episode."""
    max_observation_tokens: int = Field(default=256, ge=1, le=65536)
    """Tokens of an observation that models read; the rest is left out."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(default=(), max_length=8)
    """Texts that end a turn, such as `</tool>`; they stay part of it."""


class EvalSection(Section):
    """Greedy pass@1 on held-out problems while training."""

    every_steps: int = Field(default=5, ge=0, le=100000)
    """Steps between evaluations; 0: never."""
    limit: int = Field(default=512, ge=1, le=100000)
    """Test problems of one evaluation."""


class WireSection(Section):
    """Bounds on messages between nodes."""

    max_envelope_bytes: int = Field(default=1 << 20, ge=4096, le=4 << 20)
    """Largest envelope that a node sends or accepts."""
    codecs: tuple[Codec, ...] = Field(default=("exact", "lossless"), min_length=1, max_length=len(get_args(Codec)))
    """Allowed codecs of groups: `exact` (8 bytes a token), `lossless` (about 5.7, the same values), `lossy` (about 3.5,
    log-probs off by up to 1/512 nat). Nodes refuse a group in another codec."""
    announcement_shards: Literal[1, 2, 4, 8, 16, 32, 64] = 8
    """Topics over which announcements are spread, by sender. A node reads about 50 announcements a second, so large
    swarms need more."""

    @field_validator("codecs")
    @classmethod
    def _in_one_order(cls, value: tuple[Codec, ...]) -> tuple[Codec, ...]:
        """Sort the codecs, so that the run id does not depend on the order in a file."""
        return tuple(codec for codec in get_args(Codec) if codec in value)


class RunManifest(Section):
    """Settings on which all nodes of one swarm agree."""

    schema_version: Literal[1] = 1
    """Schema version of the manifest."""
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    """Name of the run, for people."""
    task: str = Field(min_length=1, max_length=MAX_TASK_CHARS)
    """Task SPEC without paths, such as `gsm8k` or `rg:chain_sum`."""
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    episode: EpisodeSection | None = None
    """Limits of a task with several turns. Only a run of such a task has this table."""
    method: MethodSection = Field(default_factory=MethodSection)
    step: StepSection = Field(default_factory=StepSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    wire: WireSection = Field(default_factory=WireSection)

    @model_validator(mode="after")
    def _settings_agree(self) -> RunManifest:
        sampling = self.sampling
        longest = sampling.completion_limit(1) if self.episode is None else sampling.max_total_tokens
        worst = sampling.group_size * longest * 8
        if worst > self.wire.max_envelope_bytes:
            raise ValueError(
                f"a group may take {worst} bytes (group_size x tokens x 8), more than wire.max_envelope_bytes"
            )
        if self.episode is not None and self.step.other_tokenizers == "text":
            raise ValueError('a run with [episode] needs step.other_tokenizers = "ignore": turns do not travel as text')
        return self

    @property
    def run_id(self) -> str:
        """Hex of the first 16 bytes of SHA-256 over the canonical JSON."""
        return _run_id(self)

    def canonical(self) -> bytes:
        """Return the JSON that is hashed and published: keys sorted, no spaces, every default but None written."""
        document = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    def to_toml(self) -> str:
        """Return the manifest as TOML, with every value that is not None."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


@lru_cache(maxsize=8)
def _run_id(manifest: RunManifest) -> str:
    """Return the run id from a cache: validation needs it for every group.

    A cache in the manifest itself would be inherited by changed copies.
    """
    return hashlib.sha256(manifest.canonical()).hexdigest()[:RUN_ID_HEX]


def parse_manifest(text: str, *, source: str, task: str | None = None) -> RunManifest:
    """Return the manifest in TOML text; `source` names it in errors. `task` is the SPEC of a text that has none.

    Raises ConfigError in one line.
    """
    tables = parse_toml(text, source=source)
    if task is not None:
        tables.setdefault("task", task)
    if "task" not in tables:
        raise ConfigError(f'{source} names no task: write task = "SPEC" into it, or give --task SPEC')
    try:
        return RunManifest.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_problem(error, schema=RunManifest)}") from None


def parse_canonical(canonical: bytes, *, source: str) -> RunManifest:
    """Return the manifest in its canonical JSON. Raises ConfigError for one of another version of ftis-node."""
    try:
        return RunManifest.model_validate_json(canonical)
    except ValidationError as error:
        cause = "needs a package" if is_unknown_name(error) else "was made by another version of ftis-node"
        raise ConfigError(f"{source} {cause} ({first_problem(error)})") from None


def load_manifest(name_or_path: str, *, task: str | None = None) -> RunManifest:
    """Return the preset of that name, or the manifest in that file. `task` is for a file that has none.

    Raises ConfigError.
    """
    if name_or_path in PRESETS:
        text = resources.files("ftis_node.config").joinpath("presets", f"{name_or_path}.toml").read_text()
        return parse_manifest(text, source=f"preset {name_or_path}")
    path = Path(name_or_path).expanduser()
    if not path.exists():
        close = difflib.get_close_matches(name_or_path, PRESETS, n=1)
        hint = f"; did you mean {close[0]} ?" if close else ""
        raise ConfigError(f"no run {name_or_path!r}: give one of {', '.join(PRESETS)} or a TOML file{hint}")
    return parse_manifest(read_text(path), source=str(path), task=task)


def preset_for_task(task: str) -> str:
    """Return the preset for a task SPEC if the user names no run: that of its first part, for one of this package."""
    family = re.split(r"[^a-z0-9]", task, maxsplit=1)[0]
    if family != "gsm8k" and f"{family}-ftis" in PRESETS:
        return f"{family}-ftis"
    return "rg-swarm" if "rg:" in task else "gsm8k-ftis"
