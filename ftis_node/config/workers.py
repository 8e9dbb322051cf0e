"""Settings of the prompts and the two workers: five tables of `node.toml`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from ftis_node.config.section import MOST, Section

GpuIndex = Annotated[int, Field(ge=0, le=1023)]
Quantize = Literal["none", "4bit"]

MAX_SERVED_RANK = 512  # vLLM's limit
EXECUTOR_BACKEND = "distributed_executor_backend"
EXECUTOR_BACKENDS = ("mp", "ray")  # vLLM has others, for launchers
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")  # of vLLM's EngineArgs; product: GPUs
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})
SAVE_LIMIT_S = 600.0  # most time for checkpoints after a stop; those in deploy/ are a minute longer


class LoraSection(Section):
    """The LoRA adapter, if the node trains one. The F-TIS paper's values are the defaults."""

    rank: int = Field(default=128, ge=1, le=4096)
    """Rank r."""
    alpha: int = Field(default=256, ge=1, le=65536)
    """Scale: the adapter's output is multiplied by alpha / r."""


class PromptsSection(Section):
    """How this node renders prompts for its own model."""

    template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking = false`."""

    @field_validator("template_arguments")
    @classmethod
    def _are_free_names(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(value.keys() & RESERVED_VARIABLES):
            raise ValueError(f"{taken[0]} is a variable that ftis-node sets itself: remove it")
        return value


class GenerationSection(Section):
    """The generation worker."""

    max_batch: int = Field(default=0, ge=0, le=8192)
    """Completions decoded in one batch; 0: 256 with vllm, 128 with torch."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the worker; 0: half of the cores."""
    gpus: tuple[GpuIndex, ...] = Field(default=(), max_length=64)
    """Indices of the generator's GPUs, as many as `tensor_parallel_size` requires; empty: the memory plan chooses."""
    adapters: Literal["auto", "merge", "serve"] = "auto"
    """What the engine loads with `lora`. `merge`: the model with the adapter merged into it. `serve`: the adapter
    alone. On a CPU with the torch engine the base is then in memory once, if the model's files have the node's dtype.
    `auto`: `serve` with vllm on a GPU up to rank 512, else `merge`."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, such as `tensor_parallel_size`, `pipeline_parallel_size`,
    `distributed_executor_backend` (`mp` or `ray`) or `quantization`."""

    @model_validator(mode="after")
    def _knows_the_executor(self) -> GenerationSection:
        backend = self.engine_options.get(EXECUTOR_BACKEND, "mp")
        if backend not in EXECUTOR_BACKENDS:
            raise ValueError(f'generation.engine_options.{EXECUTOR_BACKEND} is {backend!r}: give "mp" or "ray"')
        return self


class LearnerSection(Section):
    """The learner worker."""

    micro_batch_tokens: int | None = Field(default=None, ge=16, le=1 << 24)
    """Prompt and completion positions of one forward pass; unset: 2048 on a CPU (more is no faster), 16384 on a GPU.
    After running out of memory the learner continues with fewer."""
    optimizer_states: Literal["float32", "8bit", "offload"] = "float32"
    """Adam's moments. `float32`; `8bit`: quantized in blocks (bitsandbytes), a quarter of the memory; `offload`: in
    host memory, with the master weights and gradients."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of each process; 0: half of the cores, divided among them."""
    checkpoint_every_steps: int | None = Field(default=None, ge=1, le=100000)
    """Steps between checkpoints, each written before the next step. Unset: checkpoints are written in the background,
    at least every 100 steps and using at most 5 % of the time. A clean shutdown also writes one."""
    gpus: tuple[GpuIndex, ...] = Field(default=(), max_length=64)
    """Indices of the learner's GPUs. Several GPUs share one model. Empty: the memory plan chooses."""
    processes: int = Field(default=0, ge=0, le=64)
    """Processes that share the learner's model, each on one GPU or on `threads` CPU cores; 0: one for each of `gpus`,
    else one."""
    recompute_activations: bool | None = None
    """Gradient checkpointing: far less memory for about a third more time. Unset: used on a GPU in the layers for which
    the memory plan has no space. After a lack of memory it is used in all."""
    kernels: Literal["auto", "plain", "compile"] = "auto"
    """Implementation of a layer's norms, rotary embeddings and activations: `plain` torch, `compile` (torch.compile,
    layer by layer). `auto`: the faster of them on a GPU, measured at the first start; `plain` on a CPU and for a
    learner of several processes."""

    @model_validator(mode="after")
    def _settings_agree(self) -> LearnerSection:
        if len(set(self.gpus)) != len(self.gpus):
            raise ValueError("learner.gpus names a GPU twice")
        if self.gpus and self.processes not in (0, len(self.gpus)):
            raise ValueError(
                f"learner.processes is {self.processes} and learner.gpus names {len(self.gpus)}: remove one of them"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return self.processes or len(self.gpus) or 1


class MemorySection(Section):
    """How the node uses the memory plan that it makes before it loads anything (ftis-node docs operate/resources)."""

    placement: Literal["auto", "shared", "time_shared"] = "auto"
    """Both workers on one device. `shared`: each has a fixed part of the memory. `time_shared`: the generator sleeps
    while the learner steps. `auto`: the memory plan chooses; on a CPU always `shared`."""
    check: Literal["refuse", "warn"] = "refuse"
    """What the node does if a model does not fit on a GPU: refuse to start, or warn. On a CPU it only warns."""
    limit_gib: float | None = Field(default=None, gt=0, le=MOST)
    """The most memory of each GPU that this node plans with and its learner takes, in GiB. Unset: 95 % of the card, and
    at most what other programs leave free at the start less 0.3 GiB."""
