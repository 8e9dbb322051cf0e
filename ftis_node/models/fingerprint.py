"""Fingerprints of models and tokenizers, by which nodes see whether theirs are the same.

Tokenizer: sha256 over the vocabulary with its ids, the merges, the special tokens, and the token ids of a few awkward
texts. The texts cover the normalizer and the splitting rules: releases of the libraries write those rules differently
but split alike. Two nodes with one fingerprint read each other's ids. It leaves out the chat template and the end
tokens. Related models with the same ids differ in them, such as a base model and its chat model.

Model: sha256 over the configuration, the tensors' names, types and shapes, and a sample of each weight file's bytes, an
adapter's included. It reads a few hundred kilobytes of a model of any size. It distinguishes models, but does not prove
that no bit changed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftis_node.models.adapter_folder import ADAPTER_FILE, read_adapter
from ftis_node.models.model_files import CONFIG_FILE, read_header, read_json
from ftis_node.models.source import ModelSource

FINGERPRINT_BYTES = 16
SAMPLE_BYTES = 65_536
SAMPLES_PER_FILE = 4

# Keys that the libraries write about themselves; they do not describe the model.
VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")

PROBE_TEXTS = (
    "The quick brown fox doesn't jump; it's 12345 + 67890 = 80235.",
    "  two spaces,\ttab\n\n\nlines \r\n end ",
    "naïve café cafe\u0301 Ünïcödé ﬁ ½ 東京 россия 🙂👩‍👩‍👧",
    "def f(x):\n    return {'a': x**2, \"b\": [1.5e-3]}  # <think> </answer>",
)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return 32 hexadecimal digits that identify how the transformers tokenizer `tokenizer` splits text."""
    added_tokens = sorted(tokenizer.added_tokens_decoder.items())
    return _digest(
        {
            "vocabulary": sorted(tokenizer.get_vocab().items()),
            "merges": _merges(tokenizer),
            "special": [[token, added.content] for token, added in added_tokens if added.special],
            "probes": [tokenizer.encode(text, add_special_tokens=False) for text in PROBE_TEXTS],
        }
    )


def model_fingerprint(source: ModelSource) -> str:
    """Return 32 hexadecimal digits that identify the model of `source`. Raises ModelError if its files are damaged."""
    config = read_json(source.folder / CONFIG_FILE)
    lasting = {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS}
    described: dict[str, Any] = {
        "config": lasting,
        "weights": [_weights_file(path) for path in source.weights_files],
    }
    if source.adapter is not None:
        described["adapter"] = [asdict(read_adapter(source.adapter)), _weights_file(source.adapter / ADAPTER_FILE)]
    return _digest(described)


def other_model(place: object, trained: object, given: object) -> str:
    """Return the error for a home that trains another model than the given one. Both are names for people."""
    named = f"another model of the name {given}" if trained == given else f"this {given}"
    return f"{place} trains {trained}, not {named}: give another --home, or the --model with which it began"


def _weights_file(path: Path) -> dict[str, Any]:
    header = read_header(path)
    span = max(header.num_bytes - header.data_start - SAMPLE_BYTES, 0)
    starts = [header.data_start + span * n // (SAMPLES_PER_FILE - 1) for n in range(SAMPLES_PER_FILE)]
    sample = hashlib.sha256()
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            sample.update(file.read(SAMPLE_BYTES))
    return {"tensors": header.tensors, "sample": sample.hexdigest()}


def _merges(tokenizer: Any) -> list[list[str]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    # Older files have "a b", newer ones ["a", "b"].
    return [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in merges]


def _digest(value: dict[str, Any]) -> str:
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[: 2 * FINGERPRINT_BYTES]
