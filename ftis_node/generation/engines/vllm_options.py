"""The adapter from this package's settings to vLLM's environment, `EngineArgs` and `SamplingParams`. Imports no vLLM.

Options that affect the correctness of log-probs, weights and memory are set here and cannot be overridden. All other
arguments of `EngineArgs` can be set by name, and override the defaults here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftis_node.config.no_network_env import NO_TELEMETRY
from ftis_node.errors import ConfigError
from ftis_node.generation.engines.base import EngineSettings, GenerateRequest
from ftis_node.models import ModelSource
from ftis_node.models.model_files import read_header

WORKER_EXTENSION = "ftis_node.generation.engines.vllm_worker.WorkerExtension"
CPU_BLOCK_TOKENS = 32  # the smallest block of vLLM's CPU attention; prompts are shared by whole blocks only
DEFAULT_MAX_BATCH = 256
MAX_LORAS = 3  # the newest adapter, and the two before it for completions in flight
MAX_LORAS_ASLEEP = 2  # if the engine sleeps during the learner's step: then nothing is in flight between two adapters
BLACKWELL = 10  # major compute capability of B200, B300
# Batch sizes with CUDA graphs. vLLM's own 51 take twice as long to capture; a batch is padded to the next size.
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
GRAPH_OPTIONS = frozenset({"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"})
KERNEL_OPTIONS = frozenset({"kernel_config", "enable_flashinfer_autotune"})
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has; an adapter of a lower rank fits, too

ENVIRONMENT = {
    **NO_TELEMETRY,
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process with threads may hang; see also `worker.py`
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for the command's output
    "TQDM_DISABLE": "1",  # its progress bars fill the log
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at the start, by a CUDA toolkit that few machines have
}
# On a CPU without graphs only one small sampler function is compiled. This costs half a minute at the
# first request and, at run time, more than it saves. Threads are not pinned: other workers share the cores.
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

RESERVED = {  # EngineArgs field -> the setting to use instead; empty: it is fixed here
    **dict.fromkeys(("model", "tokenizer", "skip_tokenizer_init", "seed", "logprobs_mode", "worker_extension_cls"), ""),
    **dict.fromkeys(("max_loras", "max_cpu_loras", "lora_target_modules", "enable_sleep_mode"), ""),
    # A model is data: code in its folder never runs. Only safetensors: other formats are unpickled or downloaded.
    **dict.fromkeys(("trust_remote_code", "code_revision", "load_format", "hf_config_path", "download_dir"), ""),
    "hf_token": "",  # would be written to settings.json: use the variable HF_TOKEN
    # An engine is on one host: it reads new weights from a file or the memory of this host.
    **dict.fromkeys(("nnodes", "node_rank", "data_parallel_size", "data_parallel_backend", "worker_cls"), ""),
    "enable_lora": "generation.adapters",
    "max_lora_rank": "lora_adapter.rank",
    "dtype": "dtype",
    "max_num_seqs": "generation.max_batch",
    "gpu_memory_utilization": "memory.limit_gib",
}


def environment(settings: EngineSettings, *, device: str, has_log: bool = True) -> dict[str, str]:
    """Return the environment variables that must be set before vLLM is imported.

    With `has_log`, stderr is a log file: it gets the phases of a start, and shows where an engine hangs.
    """
    logging_level = {"VLLM_LOGGING_LEVEL": "INFO" if has_log else "ERROR"}
    is_eager = settings.options.get("enforce_eager", device == "cpu")
    # On a CPU vLLM moves its worker into a third process if this is 1, whatever the other options are.
    multiprocessing = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_separate_core(settings, device=device)))}
    return ENVIRONMENT | logging_level | multiprocessing | (CPU_ENVIRONMENT if device == "cpu" and is_eager else {})


def num_loras(*, can_sleep: bool) -> int:
    """Return the number of adapters for which vLLM reserves memory at its start."""
    return MAX_LORAS_ASLEEP if can_sleep else MAX_LORAS


def served_rank(rank: int) -> int:
    """Return the rank for which vLLM reserves memory, to serve adapters of `rank`, at most the last of `LORA_RANKS`."""
    return next(served for served in LORA_RANKS if served >= rank)


def has_separate_core(settings: EngineSettings, *, device: str) -> bool:
    return settings.engine_core == "separate" or (settings.engine_core == "auto" and device != "cpu")


def check_options(options: Iterable[str], *, known: Iterable[str] | None = None) -> None:
    """Raise ConfigError for an option that is set here, or that is not in `known`, the names of `EngineArgs`."""
    for name in options:
        if name in RESERVED:
            instead = f": set {RESERVED[name]}" if RESERVED[name] else ", which ftis-node sets itself"
            raise ConfigError(f"generation.engine_options must not have {name!r}{instead}")
        if known is not None and name not in known:
            raise ConfigError(f"generation.engine_options has {name!r}, which is not an argument of vLLM's engine")


def engine_arguments(
    source: ModelSource,
    settings: EngineSettings,
    *,
    device: str,
    seed: int,
    capability: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return keyword arguments for `EngineArgs`. Raises ConfigError for options that are set here.

    `capability` is the GPU's compute capability, major and minor; None: unknown.
    """
    check_options(settings.options)
    arguments: dict[str, Any] = {
        "model": str(source.folder),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype_on(device),
        "seed": seed,
        "max_num_seqs": settings.max_batch or DEFAULT_MAX_BATCH,
        "max_model_len": settings.max_model_len,
        # The full softmax at the sampling temperature. If top_p or top_k truncate it, that of temperature 1 before the
        # truncation: this is why a run that truncates has temperature 1.
        "logprobs_mode": "raw_logprobs" if settings.is_truncated_sampling else "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "enforce_eager": device == "cpu",
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "enable_sleep_mode": settings.can_sleep and device != "cpu",
    }
    if device == "cpu":
        arguments["block_size"] = CPU_BLOCK_TOKENS
    else:
        # The core's default is 2048, that of vLLM's `LLM` 8192; the memory plan reserves memory for this number.
        arguments["max_num_batched_tokens"] = max(settings.max_prefill_tokens, arguments["max_num_seqs"])
        if capability is not None and capability[0] == BLACKWELL and "attention_config" not in settings.options:
            arguments["attention_backend"] = "FLASH_ATTN"  # vLLM would use FlashInfer there, which needs compilation
    if settings.memory_share is not None:
        arguments["gpu_memory_utilization"] = settings.memory_share
    if settings.cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.cache_bytes
    if settings.lora_rank is not None:
        places = num_loras(can_sleep=settings.can_sleep)
        arguments |= {"enable_lora": True, "max_lora_rank": served_rank(settings.lora_rank), "max_loras": places}
        arguments["lora_target_modules"] = layer_names(source) or None
    return arguments | settings.options


def layer_names(source: ModelSource) -> list[str]:
    """Return the last names of all matrices in a model's layers: those that an adapter may change.

    Without them vLLM has places for the embedding and the output head of most models, too, each of vocabulary x rank.
    """
    tensors = (each for path in source.weights_files for each in read_header(path).tensors.items())
    names = (name for name, tensor in tensors if len(tensor["shape"]) == 2 and name.endswith(".weight"))
    return sorted({name.split(".")[-2] for name in names if ".layers." in name})


def capture_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes for which vLLM captures CUDA graphs."""
    return [*(size for size in CAPTURE_SIZES if size < max_batch), max_batch]


def quick_start(settings: EngineSettings, *, device: str) -> dict[str, Any]:
    """Return arguments that only shorten the start on a GPU: fewer CUDA graphs, no tuning of kernels that do not run.

    Related options of the user replace them.
    """
    if device == "cpu" or settings.options.get("enforce_eager"):
        return {}
    quick: dict[str, Any] = {}
    if not GRAPH_OPTIONS & settings.options.keys():
        quick["cudagraph_capture_sizes"] = capture_sizes(settings.max_batch or DEFAULT_MAX_BATCH)
    if not KERNEL_OPTIONS & settings.options.keys():
        quick["kernel_config"] = {"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False}
    return quick


def sampling_arguments(request: GenerateRequest, *, seed: int | None, num_sampled: int = 0) -> dict[str, Any]:
    """Return keyword arguments for `SamplingParams` of one completion, which has `num_sampled` tokens already.

    It ends at this model's ids and no others.
    """
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": request.max_tokens - num_sampled,
        "logprobs": 0,  # of the sampled token alone
        "seed": seed,
        "ignore_eos": True,
        "stop_token_ids": sorted(request.eos_ids),
        "detokenize": False,
    }
