"""Settings of one node: what may differ from peer to peer.

The order of precedence is flags, `FTIS_*` environment variables, `node.toml` in the home, and the defaults here. An
unknown key is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from ftis_node.config.limits import (
    AccessSection,
    BudgetSection,
    BufferSection,
    LimitsSection,
    ValidationSection,
)
from ftis_node.config.observe import ObserveSection, TrackingSection
from ftis_node.config.roles import ROLES, RolesSection
from ftis_node.config.schedule import ScheduleSection
from ftis_node.config.section import Section, first_problem
from ftis_node.config.workers import (
    MAX_SERVED_RANK,
    PARALLEL_SIZES,
    GenerationSection,
    LearnerSection,
    LoraSection,
    MemorySection,
    PromptsSection,
    Quantize,
)
from ftis_node.errors import ConfigError, FileError
from ftis_node.files import read_text, read_toml
from ftis_node.records.names import Codec, Role

PullRule = Literal["auto", "all", "needed"]
MAX_FILE_BYTES = 1 << 16


def read_peers(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the multiaddrs in order, each once. Raises ValueError for a file that cannot be used."""
    parts = given.split(",") if isinstance(given, str) else given
    named = [address for part in parts if part.strip() for address in _named_by(part.strip())]
    return tuple(dict.fromkeys(named))


def _named_by(part: str) -> list[str]:
    """Return the address, or those of the file behind `@`; `#` begins a comment in the file."""
    if not part.startswith("@"):
        return [part]
    path = Path(part[1:])
    try:
        text = read_text(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"the file of peers {path} cannot be read ({error.strerror})") from None
    except FileError as error:
        raise ValueError(f"the file of peers cannot be read: {error}") from None
    if "\x00" in text:
        raise ValueError(f"the file of peers {path} is not a text file of at most {MAX_FILE_BYTES >> 10} KiB")
    lines = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    if not any(lines):
        raise ValueError(f"the file of peers {path} is empty: write one multiaddr on each line")
    return [line for line in lines if line]


class SwarmSection(Section):
    """Traffic with peers."""

    max_upload_bytes_per_s: int = Field(default=64 << 20, ge=1 << 16, le=1 << 36)
    """Bytes of groups served per second to all peers together. Above it requests wait briefly or get the answer BUSY,
    first those of peers that received more than their share."""
    secret_file: str = Field(default="", max_length=4096)
    """File of 32 bytes or more that all members share (`openssl rand -hex 32`, mode 0600). Only its holders can read
    and send messages of this run. Empty: anyone may join."""
    pull_policy: PullRule = "auto"
    """`all`: every announced group. `needed`: what the learner will use, and the groups that this node is assigned to
    fetch for others. `auto`: all while there are at most 16 other members."""
    max_download_bytes_per_s: int = Field(default=0, ge=0, le=1 << 40)
    """Bytes of groups pulled per second; 0: no limit."""
    shutdown_serve_s: float = Field(default=15.0, ge=0, le=600)
    """How long the node serves its announced groups after the last step."""
    codec: Codec = "exact"
    """Codec of this node's groups, one of the run's `wire.codecs`: `exact`, `lossless` or `lossy`."""
    publish_stats: bool = True
    """Put measurements into the node's directory record: step, groups a minute, refusals, pass@1, senders of trained
    groups, refused senders."""


class NodeSettings(BaseSettings):
    """Settings of one node."""

    model_config = SettingsConfigDict(env_prefix="FTIS_", env_nested_delimiter="__", extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    """Hub id, folder or GGUF file of the model this node trains."""
    name: str = Field(default="", max_length=64)
    """Name shown to people; empty: derived from the peer id."""
    role: Role = "full"
    """What the node does: generate, learn, both or neither (ftis-node docs train/roles)."""
    engine: Literal["auto", "vllm", "torch"] = "auto"
    """Generation engine."""
    task: str = Field(default="", max_length=4096)
    """As `--task`: a task SPEC with this node's paths. A SPEC of some parts of the run's mixture is the node's domain
    (ftis-node docs train/domains). Empty: the run's task, or the domain of the last start."""
    lora: bool | None = None
    """Train a LoRA adapter (true) or all weights (false) and nothing else. Unset: what the home began with, else the
    best choice that fits on the GPU (ftis-node docs operate/resources). Without a GPU: all weights."""
    quantize: Quantize = "none"
    """`4bit`: both workers hold the frozen base of a LoRA adapter in 4 bits (NF4), for a small card. Implies an
    adapter. Requires the extra `quantize`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models."""
    gpus: int = Field(default=0, ge=0, le=1024)
    """Number of GPUs that this node may use, the first ones that it sees. The generator gets `tensor_parallel_size` of
    them, the learner all others. 0: one each, or one for both, unless other settings require more."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights; auto: float32 on a CPU, bfloat16 on a GPU."""
    listen: tuple[str, ...] = Field(default=("/ip4/0.0.0.0/tcp/0",), min_length=1)
    """Multiaddrs to listen on; port 0: any free port."""
    announce: tuple[str, ...] = ()
    """Multiaddrs announced to peers instead of those found automatically, such as `/dns4/NAME/tcp/4001`: for a node
    behind a forwarded port."""
    peers: Annotated[tuple[str, ...], NoDecode] = ()
    """Multiaddrs of peers to dial first, each with /p2p/ID. `@FILE`: those in a file, one on each line. The environment
    variable separates them by commas."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of prompts, sampling and adapters."""
    data_paths: dict[str, str] = Field(default_factory=dict)
    """Local data file of a task, by task name, for parts of the run's task that `task` does not name."""
    prompts: PromptsSection = Field(default_factory=PromptsSection)
    generation: GenerationSection = Field(default_factory=GenerationSection)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    lora_adapter: LoraSection = Field(default_factory=LoraSection)
    buffer: BufferSection = Field(default_factory=BufferSection)
    swarm: SwarmSection = Field(default_factory=SwarmSection)
    access: AccessSection = Field(default_factory=AccessSection)
    validation: ValidationSection = Field(default_factory=ValidationSection)
    budget: BudgetSection = Field(default_factory=BudgetSection)
    limits: LimitsSection = Field(default_factory=LimitsSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    roles: RolesSection = Field(default_factory=RolesSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    observe: ObserveSection = Field(default_factory=ObserveSection)

    @field_validator("peers", mode="before")
    @classmethod
    def _read_peers(cls, value: Any) -> Any:
        is_text = isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(x, str) for x in value))
        return read_peers(value) if is_text else value

    @model_validator(mode="after")
    def _settings_fit_the_role(self) -> NodeSettings:
        if self.role == "generator" and not self.roles.follow:
            raise ValueError("role 'generator' takes its weights from a learner: name it, --follow PEER_ID")
        if self.role != "generator" and self.roles.follow:
            raise ValueError(f"role {self.role!r} follows no learner: remove roles.follow, or use --role generator")
        if self.role == "generator" and (self.budget.learn_steps, self.budget.learn_tokens) != (None, None):
            raise ValueError(
                "a generator takes no steps: remove --steps and --learn-tokens, and [budget] learn_steps and "
                "learn_tokens; use --generate-tokens"
            )
        if self.role == "exchange" and self.budget != BudgetSection():
            raise ValueError(
                "an exchange node neither generates nor trains: remove --steps, --generate-tokens, --learn-tokens and "
                "the section [budget]; limit the trainer instead"
            )
        if self.role == "exchange" and self.schedule != ScheduleSection():
            raise ValueError(
                "an exchange node has no workers to pause: remove the section [schedule]; pause the trainer instead"
            )
        if self.role == "learner" and self.budget.generate_tokens is not None:
            raise ValueError(
                "a learner does not generate: remove --generate-tokens and [budget] generate_tokens; use --steps "
                "or --learn-tokens"
            )
        return self

    @property
    def num_generator_gpus(self) -> int:
        """Number of GPUs of the engine, by `generation.engine_options`. Raises ConfigError if a size is not a positive
        integer.
        """
        if self.engine == "torch":
            return 1
        sizes = [self.generation.engine_options.get(name, 1) for name in PARALLEL_SIZES]
        for name, size in zip(PARALLEL_SIZES, sizes, strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"generation.engine_options.{name} is {size!r}: give a number of GPUs, 1 or more")
        return prod(sizes)

    @property
    def generates(self) -> bool:
        return ROLES[self.role].generates

    @property
    def learns(self) -> bool:
        return ROLES[self.role].learns

    @property
    def is_quantized(self) -> bool:
        """Return whether the base of the adapter has 4 bits."""
        return self.quantize != "none"

    @property
    def problem_with_quantize(self) -> str:
        """Return why `[generation]` excludes a base in 4 bits; "" if it does not."""
        if self.generation.adapters == "merge":
            return "no adapter is merged into 4-bit weights: remove generation.adapters = 'merge'"
        if "quantization" in self.generation.engine_options:
            return "--quantize and generation.engine_options.quantization exclude each other: remove one"
        return ""

    @model_validator(mode="after")
    def _adapters_can_be_served(self) -> NodeSettings:
        if self.is_quantized and self.lora is False:
            raise ValueError(
                "--quantize 4bit is for the base of an adapter: remove --full (lora = false), or give --quantize none"
            )
        if self.is_quantized and self.problem_with_quantize:
            raise ValueError(self.problem_with_quantize)
        if self.generation.adapters != "serve" and not self.is_quantized:
            return self
        if not self.lora and not self.is_quantized:
            raise ValueError("generation.adapters 'serve' needs an adapter: set lora = true (--lora), or use 'auto'")
        if self.lora_adapter.rank > MAX_SERVED_RANK:
            raise ValueError(
                f"an engine serves adapters with lora_adapter.rank up to {MAX_SERVED_RANK}: set a smaller rank"
            )
        return self


class _LastStart(InitSettingsSource):
    """The remembered settings. `roles` belong to the remembered role: another role of a stronger source drops them."""

    def __call__(self) -> dict[str, Any]:
        last = super().__call__()
        if self.current_state.get("role", last.get("role")) != last.get("role"):
            last.pop("roles", None)
        return last


def load_node_settings(
    node_toml: Path, *, remembered: Mapping[str, Any] = MappingProxyType({}), **flags: Any
) -> NodeSettings:
    """Return a node's settings from flags (None: not given), environment, `node_toml` if it exists, and defaults.

    `remembered` are those of the last start that come before the defaults.

    Raises ConfigError in one line that names the key.
    """
    tables = read_toml(node_toml) if os.path.lexists(node_toml) else {}

    class FromEverywhere(NodeSettings):
        """The settings with their sources in order of precedence."""

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            last = _LastStart(settings_cls, dict(remembered))
            return (init_settings, EnvSettingsSource(settings_cls), InitSettingsSource(settings_cls, tables), last)

    try:
        settings = FromEverywhere(**{key: value for key, value in flags.items() if value is not None})
    except ValidationError as error:
        if error.errors()[0]["loc"] == ("model",) and error.errors()[0]["type"] == "missing":
            raise ConfigError(f"no model: name it with --model ID_OR_DIR, or as `model` in {node_toml}") from None
        where = f"{node_toml}: " if tables else ""
        raise ConfigError(f"{where}{first_problem(error, schema=NodeSettings)}") from None
    except SettingsError as error:
        text = getattr(error.__cause__, "doc", None)  # of a JSONDecodeError
        name = next((name for name, value in os.environ.items() if name[:5].upper() == "FTIS_" and value == text), "")
        example = 'a list as ["A", "B"], a table as {"KEY": "VALUE"}'
        raise ConfigError(f"the environment variable {name or 'FTIS_*'} is not JSON: write {example}") from None
    return with_gpus_shared_out(NodeSettings.model_construct(**dict(settings)))


def with_gpus_shared_out(settings: NodeSettings) -> NodeSettings:
    """Return the settings with `gpus` divided: the learner gets all that the generator does not take.

    An explicit number in `[learner]` stays. Raises ConfigError if the numbers contradict each other.
    """
    number, learner = settings.gpus, settings.learner
    if not number:
        return settings
    if settings.device == "cpu":
        raise ConfigError(f'gpus = {number} (--gpus) and device = "cpu" contradict each other: remove one of them')
    taken = settings.num_generator_gpus if settings.generates else 0
    if taken > number:
        raise ConfigError(
            f"the generator needs {taken} GPUs (--tensor-parallel) and the node may use {number}: give --gpus "
            f"{taken + settings.learns} or more"
        )
    if not settings.learns or learner.gpus or learner.processes or number == 1:
        return settings
    if taken == number:
        raise ConfigError(
            f"the generator uses all {number} GPUs (--tensor-parallel), and the learner has none: give --gpus "
            f"{number + 1}, or --tensor-parallel {number - 1}"
        )
    return settings.model_copy(update={"learner": learner.model_copy(update={"processes": number - taken})})
