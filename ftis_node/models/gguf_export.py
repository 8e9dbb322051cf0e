"""A model folder as one GGUF file, for ollama, llama.cpp and LM Studio, by the `gguf` package's writer and name maps.

The format has its own names, and its own order of the rows of query and key projections of Llama models. The writer
gets one tensor at a time and keeps the data in a temporary file, so memory holds the largest tensor. Norms stay
float32, as in all files of llama.cpp. A tokenizer is written by the name of its pre-tokenizer, which llama.cpp
implements in code; one that it may not know is refused.

A Modelfile has the settings with which ollama imports the file, and prompts it as the node does. Its language for
templates is ollama's own. So its template is made of prompts that the model's tokenizer renders, with fields in place
of the texts. One filled template is one turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ftis_node.errors import ModelError
from ftis_node.models.model_files import CONFIG_FILE, read_json
from ftis_node.models.source import ModelSource
from ftis_node.models.tokenizer import PromptTokenizer

GgufKind = Literal["f16", "q8_0", "f32"]
FAMILIES: Final = ("llama", "qwen2", "qwen3")  # of transformers and of llama.cpp
FILE_TYPES: Final = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
BLOCK: Final = 32  # values of a row that share a scale in Q8_0
_LLAMA_3 = "\\p{N}{1,3}"
SYSTEM: Final = {"role": "system", "content": "{{ .System }}"}
PROMPT: Final = {"role": "user", "content": "{{ .Prompt }}"}
QUOTES: Final = '"""'


def architecture_of(source: ModelSource) -> str:
    """Return llama.cpp's name of a model's family. Raises ModelError for another family."""
    family = str(read_json(source.folder / CONFIG_FILE).get("model_type"))
    if family not in FAMILIES:
        raise ModelError(f"{source.name} is of the family {family!r}: GGUF is written for {', '.join(FAMILIES)}")
    return family


def write_gguf(source: ModelSource, path: Path, *, kind: GgufKind = "f16") -> None:
    """Write the model to `path`. An adapter must be merged before.

    Raises ModelError for another family, a scaled position encoding or a tokenizer that llama.cpp may not know, and
    OSError if the disk refuses. A file that exists is replaced.
    """
    import gguf

    config, architecture = read_json(source.folder / CONFIG_FILE), architecture_of(source)
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    _add_settings(writer, config, source.name, gguf.LlamaFileType[FILE_TYPES[kind]])
    _add_tokenizer(writer, source.tokenizer_folder, _integer(config, "vocab_size"))
    for name, data, form in _tensors(source, config, architecture, kind):
        writer.add_tensor(name, data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: Any, config: dict[str, Any], name: str, file_type: int) -> None:
    import gguf

    heads = _integer(config, "num_attention_heads")
    head_size = config.get("head_dim") or _integer(config, "hidden_size") // heads
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(_integer(config, "max_position_embeddings"))
    writer.add_embedding_length(_integer(config, "hidden_size"))
    writer.add_block_count(_integer(config, "num_hidden_layers"))
    writer.add_feed_forward_length(_integer(config, "intermediate_size"))
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(_integer(config, "vocab_size"))
    rope = _rope(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if factors := _rope_factors(rope, head_size):
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the position encoding; older configurations have them in two places."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ModelError(f"the position encoding {kind!r} is not written to GGUF")
    return {"rope_theta": config.get("rope_theta", 10_000.0), **scaling, "rope_type": kind}


def _rope_factors(rope: dict[str, Any], head_size: int) -> list[float]:
    """Return by how much each wavelength of Llama 3.1 is stretched; none without that scaling.

    As transformers' `_compute_llama3_parameters`: long wavelengths by `factor`, short ones not, those between smoothly.
    """
    if rope["rope_type"] == "default":
        return []
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    factors = []
    for place in range(0, head_size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (place / head_size)
        smooth = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _add_tokenizer(writer: Any, folder: Path, num_rows: int) -> None:
    """Add the tokens of a byte-level BPE tokenizer. The embedding may have more rows than there are tokens."""
    import gguf

    path = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = read_json(path) if path.is_file() else {}
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ModelError(f"the tokenizer in {folder} is no byte-level BPE: GGUF is written for those alone")
    largest = max([*model["vocab"].values(), *(added["id"] for added in tokenizer.get("added_tokens", ()))])
    if largest >= num_rows:
        raise ModelError(f"the tokenizer in {folder} has the token {largest}, but the model has {num_rows} embeddings")
    tokens = [f"[PAD{index}]" for index in range(num_rows)]
    types = [gguf.TokenType.UNUSED] * num_rows
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, gguf.TokenType.NORMAL
    for added in tokenizer.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(tokenizer, folder))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=num_rows).add_to_gguf(writer, quiet=True)


def _pre_tokenizer(tokenizer: dict[str, Any], folder: Path) -> str:
    """Return llama.cpp's name of the rule that splits text into words before BPE."""
    rule = tokenizer.get("pre_tokenizer") or {}
    steps = rule.get("pretokenizers", [rule])
    kinds = [step.get("type") for step in steps]
    patterns = [json.dumps(step.get("pattern", ""), ensure_ascii=False) for step in steps if step["type"] == "Split"]
    if kinds == ["Digits", "ByteLevel"]:
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"]:
        return "llama-bpe" if _LLAMA_3 in patterns[0].replace("\\\\", "\\") else "qwen2"
    raise ModelError(f"the tokenizer in {folder} splits text in a way that llama.cpp may not know: {kinds}")


def _tensors(
    source: ModelSource, config: dict[str, Any], architecture: str, kind: GgufKind
) -> Iterator[tuple[str, np.ndarray[Any, Any], Any]]:
    """Yield each tensor under its name in GGUF, with its form."""
    import gguf
    from safetensors import safe_open

    names = gguf.get_tensor_name_map(
        next(number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture),
        _integer(config, "num_hidden_layers"),
    )
    heads = _integer(config, "num_attention_heads")
    reordered = {"q_proj.": heads, "k_proj.": config.get("num_key_value_heads") or heads}
    for file in source.weights_files:
        with safe_open(file, framework="pt") as tensors:  # numpy has no bfloat16
            for name in tensors.keys():
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                target = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if target is None:
                    raise ModelError(f"{source.name} has the tensor {name}, which GGUF has no name for")
                data = tensors.get_tensor(name).float().numpy()
                for part, num_heads in reordered.items() if architecture == "llama" else ():
                    data = _in_pairs(data, num_heads) if part in name else data
                form = _form(data, kind)
                yield target, gguf.quantize(data, form), form


def _in_pairs(data: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Return the rows of a Llama projection as llama.cpp orders them: those of a rotation are neighbors."""
    halves = data.reshape(num_heads, 2, data.shape[0] // num_heads // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape)


def _form(data: np.ndarray[Any, Any], kind: GgufKind) -> Any:
    import gguf

    if data.ndim == 1 or kind == "f32":
        return gguf.GGMLQuantizationType.F32
    if kind == "q8_0" and data.shape[-1] % BLOCK == 0:
        return gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType.F16


def _integer(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ModelError(f"{CONFIG_FILE} lacks {key}")
    return value


def modelfile(file: Path, tokenizer: PromptTokenizer, *, system: str = "") -> str:
    """Return the Modelfile for a GGUF file beside it, with greedy answers. `system` is the usual system message.

    Raises ModelError for texts that a Modelfile cannot quote.
    """
    ends = [tokenizer.decode([token], skip_special=False) for token in tokenizer.end_ids]
    with_system, without = (_rendered(tokenizer, turns) for turns in ([SYSTEM, PROMPT], [PROMPT]))
    template = (
        f"{{{{ if .System }}}}{with_system}{{{{ else }}}}{without}{{{{ end }}}}{{{{ .Response }}}}{''.join(ends[:1])}"
    )
    lines = [
        "# ollama create NAME -f Modelfile",
        f"FROM ./{file.name}",
        f"TEMPLATE {_quoted(template)}",
        *([f"SYSTEM {_quoted(system)}"] if system else []),
        *(f"PARAMETER stop {_quoted(end)}" for end in ends),
        "PARAMETER temperature 0",
    ]
    return "\n".join(lines) + "\n"


def _rendered(tokenizer: PromptTokenizer, turns: list[dict[str, str]]) -> str:
    """Return a prompt up to the answer, without the start tokens that llama.cpp adds by itself."""
    prompt = tokenizer.render_prompt(turns)
    return prompt.text.removeprefix(tokenizer.start_text) + prompt.opening


def _quoted(text: str) -> str:
    if QUOTES in text:
        raise ModelError(f"a Modelfile cannot hold {QUOTES}, which the prompts of the model have")
    return f"{QUOTES}{text}{QUOTES}"
