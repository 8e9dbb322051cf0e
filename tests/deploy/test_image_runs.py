"""The steps of the image of the cpu target, executed in a clean folder without a container engine.

The commands of the Dockerfile build the wheel from the files that it copies, and install it in a separate virtual
environment. The other packages are those of the test's environment; `test_image.py` compares their versions with
pyproject.toml. Then the entry point starts like a container: with the variables of the image and no others.

    COPY and RUN of `wheel` --> /dist --> RUN of `cpu` --> /opt/venv --> ENTRYPOINT, HEALTHCHECK, SIGTERM
"""

import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ftis_node.config.manifest import RunManifest
from ftis_node.telemetry.events import read_events
from tests.deploy.files import ROOT, Instruction, environment, read_stages, with_base_stages
from tests.models.tiny_models import save_tiny
from tests.node.support import free_port

STAGES = read_stages()
STOP_LIMIT_S, WAIT_LIMIT_S = 10.0, 150.0
# The build uses the installed setuptools, without an index and without isolation (pip reads 0 as yes).
BUILD = {"PATH": "/usr/bin:/bin", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "LC_ALL": "C.UTF-8"}
pytestmark = pytest.mark.timeout(400)

MANIFEST = RunManifest(
    name="image",
    task="arithmetic",
    sampling={"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 6, "max_total_tokens": 48},
    step={"own_groups": 2, "foreign_groups": 0, "foreign_wait_s": 1.0},
    eval={"every_steps": 0},
)


@dataclass
class Started:
    """A process of the entry point; its output goes to a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` is true. Raises AssertionError if the process ends first or the time is over."""
        deadline = time.monotonic() + WAIT_LIMIT_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def wait_for_success(self, *, timeout_s: float) -> str:
        """Wait until the process ends with exit code 0. Returns its output."""
        code = self.process.wait(timeout=timeout_s)
        assert code == 0, self.log.read_text()[-3000:]
        return self.log.read_text()

    def stop(self) -> None:
        """Do `docker stop`: send SIGTERM and assert that the process ends in time with exit code 0."""
        started_at = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.wait_for_success(timeout_s=STOP_LIMIT_S + 20)
        assert time.monotonic() - started_at < STOP_LIMIT_S


@dataclass
class Image:
    """Folders in place of those of an image, and its entry point as a process."""

    root: Path
    observe_port: int
    started: list[Started] = field(default_factory=list)

    def at(self, text: str) -> str:
        """Replace the folders and the monitoring port in a text of the Dockerfile by those of this machine."""
        for folder in ("/opt/venv", "/var/lib", "/var/cache", "/dist"):
            text = text.replace(folder, f"{self.root}{folder}")
        return text.replace("0.0.0.0:9464", f"127.0.0.1:{self.observe_port}").replace(":9464", f":{self.observe_port}")

    def path(self, name: str) -> Path:
        return Path(self.at(name))

    @property
    def steps(self) -> list[Instruction]:
        return with_base_stages(STAGES, "cpu")

    def environment(self) -> dict[str, str]:
        """Return the variables of the image, with the PATH of a container, and none of this process."""
        variables = {name: self.at(value) for name, value in environment(self.steps).items()}
        variables["PATH"] = variables["PATH"].replace("${PATH}", "/usr/local/bin:/usr/bin:/bin")
        quick = {"FTIS_LISTEN": '["/ip4/127.0.0.1/tcp/0"]', "FTIS_SWARM__SHUTDOWN_SERVE_S": "0", "FTIS_ENGINE": "torch"}
        return variables | quick | {"OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> Started:
        """Do `docker run IMAGE ARGUMENTS`, by tini if it is installed."""
        (entrypoint,) = [one.words for one in self.steps if one.name == "ENTRYPOINT"]
        prefix = entrypoint if shutil.which("tini") else entrypoint[2:]
        log = self.root / f"{len(self.started)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [self.found(prefix[0]), *prefix[1:], *arguments],
                env=self.environment(),
                cwd=self.path("/var/lib/ftis-node"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Started(process, log))
        return self.started[-1]

    def found(self, program: str) -> str:
        return shutil.which(program, path=self.environment()["PATH"]) or program

    def run(self, *arguments: str) -> str:
        return self.start(*arguments).wait_for_success(timeout_s=150)

    def is_healthy(self) -> bool:
        (check,) = [one for one in self.steps if one.name == "HEALTHCHECK"]
        command = [self.at(word) for word in Instruction("CMD", {}, check.rest.removeprefix("CMD ")).words]
        done = subprocess.run(
            [self.found(command[0]), *command[1:]], env=self.environment(), capture_output=True, check=False, timeout=30
        )
        return done.returncode == 0


def execute(image: Image, stage: list[Instruction], *, folder: Path, pip: str) -> None:
    """Execute each COPY from the repository and each RUN. `pip` replaces `python -m pip`."""
    for one in stage:
        if one.name == "COPY" and "from" not in one.options:
            *sources, target = one.words
            for source in sources:
                place = folder / target / (source if target.endswith("/") else "")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)
        elif one.name == "RUN":
            script = image.at(one.rest).replace("python -m pip", pip)
            done = subprocess.run(
                ["bash", "-euc", script], cwd=folder, env=BUILD, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The cpu target. The packages of this environment are added after its own steps."""
    image = Image(tmp_path_factory.mktemp("image"), free_port())
    source = image.root / "src"
    source.mkdir()
    pip = f"{sys.executable} -m pip"
    execute(image, STAGES["wheel"], folder=source, pip=pip)
    venv = image.path("/opt/venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    execute(image, STAGES["cpu"], folder=source, pip=f"{pip} --python {venv}/bin/python")
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "packages-of-the-test.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)
    for folder in ("/var/lib/ftis-node", "/var/cache/ftis-node"):
        image.path(folder).mkdir(parents=True)
    yield image
    for process in (one.process for one in image.started if one.process.poll() is None):  # of a failed test
        for member in (*psutil.Process(process.pid).children(recursive=True), process):
            member.kill()
        process.wait()


@pytest.fixture(scope="module")
def bootstrap_address(image):
    """`ftis-node bootstrap` as in deploy/compose.yaml. The value is the `--peers` of nodes: @ and the address file."""
    port, file = free_port(), image.root / "bootstrap"
    process = image.start(
        "bootstrap", f"--home={image.root / 'bootstrap-home'}", f"--listen=/ip4/127.0.0.1/tcp/{port}",
        f"--announce=/dns4/localhost/tcp/{port}", f"--address-file={file}",
    )  # fmt: skip
    process.wait_for(file.exists)
    yield f"@{file}"
    process.stop()


def test_the_installed_package_is_complete(image):
    where = "import ftis_node, ftis_node.records.rollout_pb2; print(ftis_node.__path__[0])"
    python = [image.path("/opt/venv/bin/python"), "-P", "-c", where]
    done = subprocess.run(python, env=image.environment(), capture_output=True, text=True, check=True)
    package = Path(done.stdout.strip())
    assert package.is_relative_to(image.path("/opt/venv"))
    assert (package / "config" / "presets" / "gsm8k-ftis.toml").exists()
    assert "bootstrap" in image.run("--help")
    assert "ftis-node" in image.run("docs", "quickstart")


def test_a_node_trains_passes_the_health_check_and_ends_on_sigterm(image, bootstrap_address):
    tiny = image.start("tiny", "--size", "s", "--out", str(image.path("/var/cache/ftis-node/s")))  # in parallel
    run = image.root / "run.toml"
    run.write_text(MANIFEST.to_toml())
    model = str(save_tiny(image.root / "random"))
    node = image.start("join", "--model", model, "--run", str(run), "--peers", bootstrap_address, "--steps", "1000000")
    node.wait_for(image.is_healthy)
    node.wait_for(lambda: bool(read_events(image.path("/var/lib/ftis-node") / "events.jsonl", name="step")))
    printed = image.run("status", "--json")  # without --home: the volume is the default
    node.stop()
    status = json.loads(printed[printed.index("{") :])  # tini may first print that it is not process 1
    saved = json.loads((image.path("/var/lib/ftis-node") / "status.json").read_text())  # written at the end
    assert (status["run"]["name"], saved["learner"]["step"] >= 1) == ("image", True)
    assert "connected, but no member of this run yet" in status["swarm"]["reason"]  # the bootstrap node is no member
    assert not image.is_healthy()
    assert (image.path("/var/lib/ftis-node") / "identity.key").stat().st_mode & 0o777 == 0o600
    tiny.wait_for_success(timeout_s=150)
    assert (image.path("/var/cache/ftis-node") / "s" / "model.safetensors").exists()
