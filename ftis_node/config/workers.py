"""Settings of the two workers: five tables of `node.toml`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ftis_node.config.section import Section

GpuIndex = Annotated[int, Field(ge=0, le=1023)]

MAX_SERVED_RANK = 512  # vLLM's limit
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")  # of vLLM's EngineArgs: GPUs are their product


class LoraSection(Section):
    """The LoRA adapter, where one is trained. Defaults are the F-TIS paper's."""

    rank: int = Field(default=128, ge=1, le=4096, description="Rank r.")
    alpha: int = Field(
        default=256, ge=1, le=65536, description="Scale: the adapter's output is multiplied by alpha / r."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input while training.")


class GenerationSection(Section):
    """The generation worker."""

    max_batch: int = Field(
        default=0, ge=0, le=8192, description="Completions decoded side by side; 0: 256 by vllm, 128 by torch."
    )
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads of the worker; 0: half of the cores.")
    groups_in_flight: int = Field(
        default=0, ge=0, le=1024, description="Prompts given to the engine at once; 0: enough to fill its batch."
    )
    max_policy_versions_per_completion: int = Field(
        default=8, ge=0, le=100000,
        description="A completion that began more policy versions ago is cut at the next update (vllm engine).",
    )  # fmt: skip
    request_timeout_s: float = Field(
        default=600.0, gt=0, le=86400, description="A group that takes longer is given up."
    )
    startup_timeout_s: float = Field(
        default=1800.0, gt=0, le=86400, description="How long loading and the first compilation may take."
    )
    stall_timeout_s: float = Field(
        default=300.0, gt=0, le=86400,
        description="An engine with requests that makes no step for so long is hung: the worker restarts.",
    )  # fmt: skip
    gpus: tuple[GpuIndex, ...] = Field(
        default=(),
        max_length=64,
        description="Indices of the generator's GPUs, as many as `tensor_parallel_size` asks for; empty: as planned.",
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="Part of its GPU that vLLM may take; unset: as planned."
    )
    weight_check_tolerance_nats: float | None = Field(
        default=None, gt=0, le=100,
        description="By how much the log-probs that prove new weights may be off (root mean square, nats); unset: "
        "1e-4 in float32, 0.25 in bfloat16.",
    )  # fmt: skip
    engine_core: Literal["auto", "inside", "separate"] = Field(
        default="auto",
        description="Where vLLM's core runs: inside the worker's process (auto on a CPU) or in one of its own (GPU).",
    )
    adapters: Literal["auto", "merge", "serve"] = Field(
        default="auto",
        description="With `lora`, what the engine is handed: the model with the adapter merged into it, or the adapter "
        "alone (vllm engine); auto: the adapter by vllm on a GPU, up to rank 512.",
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's EngineArgs, such as `tensor_parallel_size` or `quantization`.",
    )


class LearnerSection(Section):
    """The learner worker."""

    micro_batch_tokens: int | None = Field(
        default=None, ge=16, le=1 << 24,
        description="Prompt and completion positions of one forward pass; unset: 2048 on a CPU, where more is no "
        "faster, 16384 on a GPU. After running out of memory the learner goes on with fewer.",
    )  # fmt: skip
    optimizer_states: Literal["float32", "8bit", "offload"] = Field(
        default="float32",
        description="Adam's moments: float32; 8 bits in blocks (bitsandbytes: a quarter of the memory); or, with "
        "masters and gradients, in host memory beside a GPU.",
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="CPU threads of each process; 0: half of the cores, divided."
    )
    keep_checkpoints: int = Field(default=2, ge=1, le=1000, description="Newest checkpoints kept.")
    checkpoint_every_steps: int | None = Field(
        default=None,
        ge=1,
        le=100000,
        description="Steps between checkpoints, each written before the next step; unset: in the background, as often "
        "as takes at most 5 % of the time, and every 100 steps at least. One is also written at a clean end.",
    )
    gpus: tuple[GpuIndex, ...] = Field(
        default=(),
        max_length=64,
        description="Indices of the learner's GPUs; several hold the model together; empty: as planned.",
    )
    processes: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Processes that hold the learner's model together, on a GPU or `threads` of the CPU's cores each; "
        "0: one for each of `gpus`, else one.",
    )
    recompute_activations: bool | None = Field(
        default=None,
        description="Gradient checkpointing: far less memory for about a third more time; unset: on a GPU, where the "
        "memory plan has no room to keep them, and after memory ran out.",
    )
    kernels: Literal["auto", "plain", "compile", "liger"] = Field(
        default="auto",
        description="What computes a layer's norms, rotary angles and activations: `plain` torch, `compile` "
        "(torch.compile, layer by layer), `liger` (the package liger-kernel); auto: the fastest on a GPU, measured at "
        "the start, plain on a CPU and for a learner of several processes.",
    )
    stall_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        le=86400,
        description="A step without any progress for so long is hung: the worker restarts.",
    )
    report_entropy: bool = Field(
        default=False, description="Report the policy's entropy with each step; costs one more pass over the logits."
    )

    @model_validator(mode="after")
    def _each_gpu_has_a_process(self) -> LearnerSection:
        if len(set(self.gpus)) != len(self.gpus):
            raise ValueError("learner.gpus names a GPU twice")
        if self.gpus and self.processes not in (0, len(self.gpus)):
            raise ValueError(
                f"learner.processes is {self.processes} and learner.gpus names {len(self.gpus)}: leave one of them out"
            )
        return self

    @property
    def num_processes(self) -> int:
        """How many are asked for."""
        return self.processes or len(self.gpus) or 1


class MemorySection(Section):
    """What is done with the memory plan (`docs/operate/resources.md`) before anything is loaded."""

    placement: Literal["auto", "shared", "time_shared"] = Field(
        default="auto",
        description="Both workers on one device. `shared`: a fixed part of the memory for each. `time_shared`: the "
        "generator sleeps while the learner steps. `auto`: as planned; on a CPU always `shared`.",
    )
    check: Literal["refuse", "warn"] = Field(
        default="refuse",
        description="What becomes of a model that does not fit on a GPU; on a CPU there is only ever a warning.",
    )
    weight_sync: Literal["auto", "pinned", "file"] = Field(
        default="auto",
        description="How new weights may cross from learner to engine beside a GPU: auto: the fastest that works, in "
        "the GPU's memory where both are on one; pinned: at most by a page-locked file; file: by a plain file.",
    )


class MismatchSection(Section):
    """When to warn that engine and learner compute unlike log-probs for the same tokens under the same weights."""

    max_kl: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Largest healthy KL(engine, learner) in nats a token; unset: 1e-4 in float32, 2e-3 in bfloat16.",
    )
    max_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Largest healthy share of tokens whose importance ratio is off by more than 1 %; unset: 0.01 in "
        "float32, 0.9 in bfloat16, where rounding alone is that large.",
    )
