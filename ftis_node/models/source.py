"""The source of a model: a folder on this machine, or an id on the hub.

`resolve_model` answers before anything heavy is loaded, so that a wrong `--model` gives one clear line within seconds.
Only safetensors are read, never a pickled checkpoint.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.errors import FileError, FtisError, ModelError, UntrainableModelError
from ftis_node.files import check_regular
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE, check_fits, read_adapter
from ftis_node.models.gguf import SUFFIX, gguf_folder, is_gguf
from ftis_node.models.hub import HUB_ID, cached_snapshot, fetch_snapshot
from ftis_node.models.model_files import CONFIG_FILE, read_header, read_json
from ftis_node.telemetry.log import OnProgress, unwatched

logger = logging.getLogger(__name__)

SMALL_FILES = frozenset({".json", ".txt", ".jinja", ".model"})  # vocabularies and settings
GENERATION_CONFIG_FILE = "generation_config.json"
SINGLE_WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

# Any one of these sets of files is a tokenizer that transformers can read.
TOKENIZER_FILE_SETS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",), ("vocab.txt",))
TOKENIZER_HINT = "tokenizer.json, vocab.json with merges.txt, or tokenizer.model"

NEEDED_FOLDER = "give a folder with config.json, safetensors weights and a tokenizer"
# Keys of a configuration; the last is that of MLX.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")

NEAR = 0.75  # similarity of 1 at most: above it one name may be a typo of the other


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is complete on this machine. Other nodes see `name`: the hub id, or the folder's own name.

    `folder` has its configuration and weights. If the model is an adapter in the folder `adapter`, they are those of
    its base, whose name is `base_name`.
    """

    name: str
    folder: Path
    adapter: Path | None = None
    base_name: str = ""

    @property
    def path(self) -> Path:
        """The folder by which other processes of this machine find the model."""
        return self.adapter or self.folder

    @property
    def base(self) -> ModelSource:
        """The model without its adapter."""
        return self if self.adapter is None else ModelSource(self.base_name, self.folder)

    @property
    def tokenizer_folder(self) -> Path:
        return self.adapter if self.adapter is not None and _has_tokenizer(self.adapter) else self.folder

    @property
    def num_embedding_rows(self) -> int | None:
        """The number of rows of the embedding, None if the configuration does not name it. Raises ModelError."""
        config, key = read_json(self.folder / CONFIG_FILE), "vocab_size"
        text = config.get("text_config")
        number = (text if isinstance(text, dict) else config).get(key, config.get(key))
        return number if isinstance(number, int) and number > 0 else None

    @property
    def generation_eos_ids(self) -> list[int]:
        """The end-of-sequence ids that stop generation; chat models name several. Raises ModelError."""
        path = self.folder / GENERATION_CONFIG_FILE
        if not path.is_file():
            return []
        eos = read_json(path).get("eos_token_id")
        if isinstance(eos, int):
            return [eos]
        return [token for token in eos if isinstance(token, int)] if isinstance(eos, list) else []

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors in the weights' files, by name. Raises ModelError."""
        headers = map(read_header, self.weights_files)
        return {name: tuple(entry["shape"]) for header in headers for name, entry in header.tensors.items()}

    @property
    def weight_dtypes(self) -> frozenset[str]:
        """The types of these tensors, as safetensors names them. Raises ModelError."""
        headers = map(read_header, self.weights_files)
        return frozenset(entry["dtype"] for header in headers for entry in header.tensors.values())

    @property
    def weights_files(self) -> tuple[Path, ...]:
        """The safetensors files in a fixed order. Raises ModelError if some are missing."""
        folder, index = self.folder, self.folder / WEIGHTS_INDEX_FILE
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(f"{index} names no weight files")
            shards = tuple(folder / name for name in sorted(set(weight_map.values())))
            if missing := [shard.name for shard in shards if not shard.is_file()]:
                raise ModelError(
                    f"folder {folder} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing)}"
                )
            return shards
        single = folder / SINGLE_WEIGHTS_FILE
        if not single.is_file():
            pickled = " (pickled weights are not read: convert them)" if any(folder.glob("*.bin")) else ""
            raise ModelError(f"folder {folder} has no weights: expected {SINGLE_WEIGHTS_FILE} or its index{pickled}")
        return (single,)


def resolve_model(model: str, *, trains: bool = True, on_progress: OnProgress = unwatched) -> ModelSource:
    """Find `model`, a folder or a hub id `org/name`, and check that it is complete. For an adapter, find its base too.

    A hub id is looked up in the local cache first, then downloaded; only the download reports progress. Raises
    ModelError for a missing or incomplete folder, and NetworkError if the hub does not serve the model. Raises
    UntrainableModelError if it cannot be trained, unless `trains` is False.
    """
    source = _find(model, trains, on_progress)
    return source if source.adapter is None else _on_its_base(source, trains, on_progress)


def _find(model: str, trains: bool, on_progress: OnProgress) -> ModelSource:
    """Return the source as `resolve_model` does, without the base of an adapter."""
    folder = Path(model).expanduser()
    if not folder.is_dir() and is_gguf(model):
        folder = gguf_folder(model, on_progress=on_progress)
    if folder.is_dir():
        folder = folder.resolve()
        return _checked(folder, folder.name, trains)
    check_name(model)
    if (cached := cached_snapshot(model)) is not None:
        try:
            return _checked(cached, model, trains)
        except UntrainableModelError:
            raise
        except ModelError as error:
            logger.info("the cached copy of %s is incomplete, fetching the rest: %s", model, error)
    return _checked(fetch_snapshot(model, on_progress=on_progress), model, trains)


def check_name(model: str) -> None:
    """Raise ModelError if `model` is neither a folder nor like an id on the hub, or if it is the typo of a folder."""
    path = Path(model).expanduser()
    if path.is_dir() or is_gguf(model):
        return
    if path.is_file():
        raise ModelError(f"{model} is a file: {NEEDED_FOLDER}")
    with suppress(OSError):
        beside = [folder.name for folder in path.parent.iterdir() if folder.is_dir()]
        if close := difflib.get_close_matches(path.name, beside, n=1, cutoff=NEAR):
            raise ModelError(f"no such folder: {model}; did you mean --model {path.parent / close[0]} ?")
    if not HUB_ID.fullmatch(model):
        raise ModelError(f"no such folder: {model} (an id on the hub looks like org/name)")


def check_hub_id(name: str) -> None:
    """Raise ModelError unless `name` looks like an id on the hub."""
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"{name!r} is not an id on the hub: write OWNER/NAME")


def _checked(folder: Path, name: str, trains: bool) -> ModelSource:
    """Return the source in `folder`; for an adapter, without its base."""
    try:
        paths = sorted(folder.iterdir())
        for path in paths:
            if path.suffix in SMALL_FILES:
                check_regular(path)  # transformers reads it, and a pipe would block it for ever
    except (OSError, FileError) as error:
        raise ModelError(str(error)) from None
    has_weights = any((folder / file).exists() for file in (SINGLE_WEIGHTS_FILE, WEIGHTS_INDEX_FILE))
    if (folder / ADAPTER_CONFIG_FILE).exists() and not has_weights:  # some trainers add the base's config.json
        return ModelSource(name, folder, adapter=folder)
    if not has_weights and any(path.suffix == SUFFIX for path in paths):
        raise ModelError(
            f"folder {folder} has its weights in a GGUF file: give the file itself, --model {folder}/NAME.gguf"
        )
    source, config = ModelSource(name, folder), read_json(folder / CONFIG_FILE)
    if "model_type" not in config:
        raise ModelError(f"{folder / CONFIG_FILE} names no model_type: it is not a transformers model")
    if trains and (method := _quantization(config)):
        raise UntrainableModelError(
            f"{folder} is quantized ({method}): quantized weights cannot be trained; give the unquantized model"
        )
    for path in source.weights_files:
        read_header(path)
    if not _has_tokenizer(folder):
        raise ModelError(f"folder {folder} has no tokenizer: expected {TOKENIZER_HINT}")
    return source


def _on_its_base(source: ModelSource, trains: bool, on_progress: OnProgress) -> ModelSource:
    """Return the source of an adapter with the base that it names."""
    folder = source.folder
    settings = read_adapter(folder)
    base = read_json(folder / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{folder / ADAPTER_CONFIG_FILE} names no base_model_name_or_path: write the base model there")
    beside = folder / base
    try:
        found = _find(str(beside) if beside.is_dir() else base, trains, on_progress)
    except FtisError as error:
        raise type(error)(f"the adapter {folder} needs its base model {base}: {error}") from error
    if found.adapter is not None:
        raise UntrainableModelError(
            f"the base of the adapter {folder}, {base}, is an adapter too: merge that one first"
        )
    check_fits(folder, settings, found.weight_shapes)
    return ModelSource(source.name, found.folder, adapter=folder, base_name=found.name)


def _quantization(config: Mapping[str, Any]) -> str:
    """Return the method by which a configuration says that weights are quantized; empty if they are not."""
    text = config.get("text_config")
    for each in (config, text if isinstance(text, dict) else {}):
        if found := next((each[key] for key in QUANTIZATION_KEYS if each.get(key)), None):
            return str(found.get("quant_method") or "unknown method") if isinstance(found, dict) else str(found)
    return ""


def _has_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILE_SETS)
