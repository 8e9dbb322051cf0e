"""The checks of `doctor` with the findings of machines that have faults, and those of the addresses of `--peers`."""

import json
import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.doctor import engines
from ftis_node.doctor import network as doctor_network
from ftis_node.doctor.check_result import CheckResult, worst_first
from ftis_node.doctor.doctor import DoctorCheck, checks_of, exit_code_of, run_checks
from ftis_node.doctor.machine import check_disk, check_memory, read_driver
from ftis_node.doctor.model import check_model, memory_question, memory_results
from ftis_node.doctor.network import judge, nat_kind
from ftis_node.gossip.bootstrap_node import BootstrapNode
from ftis_node.gossip.dialer import AddressProbe, NetworkProbe, probe_network
from ftis_node.gossip.multiaddr import Reachability, parse_multiaddr
from ftis_node.gossip.p2pd.relay_limit import RelayLimit
from ftis_node.models import shape_of
from ftis_node.models.shape import Experts
from ftis_node.records.identity import Identity
from tests.gossip.helpers import LOOPBACK, PEER, settings
from tests.http_server import serving

ROOT = Path(__file__).parents[2]
REPO = "org/model"
CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 320, "tie_word_embeddings": True,
}  # fmt: skip


def levels(findings: Iterable[CheckResult]) -> list[tuple[str, str]]:
    return [(finding.id, finding.level) for finding in findings]


def test_the_page_lists_the_results_of_the_code():
    page = (ROOT / "docs/reference/doctor.md").read_text()
    rows = re.findall(r"^\| `([a-z]+\.[a-z0-9]+)` \| [^|]+ \| [^|]+ \|$", page, flags=re.MULTILINE)
    text = "\n".join(path.read_text() for path in (ROOT / "ftis_node/doctor").glob("*.py"))
    made = re.findall(r'CheckResult\(\s*"([a-z]+\.[a-z0-9]+)"', text) + ["peer.dial", "check.broken"]
    made += [f"route.{name}" for name in doctor_network.NAMES.values()]
    assert sorted(rows) == sorted(set(made))


def test_a_check_that_hangs_or_fails_does_not_hide_results():
    def fail():
        yield CheckResult("ram.free", "ok", "much")
        raise ZeroDivisionError("two\nlines")

    release = threading.Event()
    messages: list[str] = []
    checks = [
        DoctorCheck("disk", "the disk", 0.3, lambda: [CheckResult("disk.free", "ok", str(release.wait(30)))]),
        DoctorCheck("ram", "memory", 5.0, fail),
    ]
    findings = run_checks(checks, on_progress=messages.append)
    release.set()
    assert levels(findings) == [("check.cut", "warn"), ("ram.free", "ok"), ("check.broken", "warn")]
    assert "the disk: no answer within 0.3 s" in findings[0].finding
    assert "ZeroDivisionError" in findings[2].finding


def test_the_worst_check_comes_first_and_stays_together():
    findings = [
        *(
            CheckResult("ram.free", "ok", ""),
            CheckResult("gpu.driver", "ok", ""),
            CheckResult("gpu.memory", "warn", ""),
        ),
        *(CheckResult("memory.plan", "fail", ""), CheckResult("memory.part", "ok", "")),
    ]
    ids = ["memory.plan", "memory.part", "gpu.driver", "gpu.memory", "ram.free"]
    assert [finding.id for finding in worst_first(findings)] == ids


@pytest.mark.parametrize(
    ("failed", "code"), [(["peer.dial"], 4), (["peer.dial", "disk.free"], 3), (["memory.plan"], 3), ([], 0)]
)
def test_the_exit_code_is_the_machines_before_the_networks(failed, code):
    assert (
        exit_code_of([CheckResult("gpu.none", "warn", ""), *(CheckResult(name, "fail", "") for name in failed)]) == code
    )


def test_the_command_line_offers_the_existing_checks(tmp_path):
    from ftis_node.cli.commands.doctor import CHECKS as OFFERED

    assert tuple(check.name for check in checks_of(Home(tmp_path), NodeSettings(model="any"))) == OFFERED


def test_the_answer_of_the_driver_is_read():
    valid = "580.65.06, NVIDIA L4, 23034, 1, 8.9\n580.65.06, NVIDIA L4, 23034, 9000, 8.9\n"
    assert levels(read_driver(0, valid)) == [("gpu.driver", "ok"), ("gpu.memory", "ok"), ("gpu.memory", "warn")]
    assert list(read_driver(0, valid))[1].num_bytes == 23034 << 20
    mismatch = "Failed to initialize NVML: Driver/library version mismatch"
    assert levels(read_driver(18, mismatch)) == [("gpu.driver", "fail")]
    assert mismatch in next(read_driver(18, mismatch)).finding
    assert levels(read_driver(0, "580, GH200, [N/A], [N/A], [N/A]\n"))[1] == ("gpu.memory", "ok")


def test_a_gpu_that_cannot_work_is_reported_with_what_would():
    old, memory = list(read_driver(0, "580.65.06, Tesla T4, 15360, 1, 7.5\n"))[1:]
    assert (old.id, old.level, memory.id) == ("gpu.unusable", "fail", "gpu.memory")
    assert old.finding == "Tesla T4 has compute capability 7.5, and vLLM and bfloat16 need 8.0"
    assert 'device = "cpu" in node.toml works' in old.advice and "RTX 30" in old.advice
    facts = {"version": "2.13.0+rocm7", "cuda": None, "hip": "7.0", "has_gpu": True, "gpus": ["AMD Radeon RX 7900"]}
    amd, torch = engines.torch_results(engines.ProbeAnswer(facts), has_gpu=False)
    assert (amd.id, amd.level, torch.level) == ("gpu.unusable", "fail", "ok")


def test_a_driver_too_old_for_vllms_torch_names_the_needed_version():
    old = next(read_driver(0, "570.133.20, NVIDIA L4, 23034, 1, 8.9\n"))
    assert (old.id, old.level, old.advice) == ("gpu.driver", "warn", "install driver 580 or newer")
    assert old.finding == (
        "NVIDIA driver 570.133.20: vLLM and its torch are built for CUDA 13, which needs 580 or newer"
    )
    no_gpu = engines.ProbeAnswer({"version": "2.13.0", "cuda": "13.0", "hip": None, "has_gpu": False, "gpus": []})
    _, found = engines.torch_results(no_gpu, has_gpu=True)
    assert (found.id, found.level) == ("engine.gpu", "fail")
    assert found.advice.startswith("install NVIDIA's driver 580 or newer")


def test_an_engine_that_crashes_hangs_or_is_built_for_another_machine_is_reported(monkeypatch):
    crash = engines.run_probe("raise ImportError('libcuda.so.1: cannot open')", limit_s=20)
    assert crash.problem == "ImportError: libcuda.so.1: cannot open"
    assert "signal 11" in engines.run_probe("import os; os.kill(os.getpid(), 11)", limit_s=20).problem
    slow = engines.run_probe("import time; time.sleep(60)", limit_s=0.5)
    assert "no answer within" in slow.problem
    (cut,) = engines.torch_results(slow, has_gpu=True)
    assert (cut.id, cut.level) == ("check.cut", "warn") and "pip install" not in cut.advice
    assert levels([engines.vllm_result(slow, on_gpu=True)]) == [("check.cut", "warn")]
    on_cpu = engines.ProbeAnswer({"version": "2", "cuda": None, "hip": None, "has_gpu": False, "gpus": []})
    found = engines.torch_results(on_cpu, has_gpu=True)
    assert levels(found) == [("engine.torch", "ok"), ("engine.gpu", "fail")]
    assert levels(engines.torch_results(crash, has_gpu=False)) == [("engine.torch", "fail")]
    assert levels([engines.vllm_result(crash, on_gpu=False)]) == [("engine.vllm", "warn")]
    assert levels([engines.vllm_result(crash, on_gpu=True)]) == [("engine.vllm", "fail")]
    assert levels([engines.compiler_result()]) == [("engine.compiler", "ok")]
    monkeypatch.setattr(engines.sysconfig, "get_path", lambda *_: "/nowhere")
    assert engines.compiler_result().finding == "no /nowhere/Python.h: vLLM does not start on a GPU"


def test_a_nearly_full_disk_and_small_shared_memory_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.doctor.machine.free_bytes", lambda path: 64 << 20)
    assert levels(check_disk(tmp_path / "home", tmp_path)) == [("disk.free", "fail"), ("shm.size", "warn")]
    assert levels(check_disk(Path("/proc/self/home"), tmp_path / "no"))[0] == ("disk.writable", "fail")


def test_the_memory_limit_of_a_container_is_reported(monkeypatch):
    monkeypatch.setattr("ftis_node.doctor.machine.free_host_bytes", lambda: 1 << 20)
    (found,) = check_memory()
    assert (found.level, found.num_bytes) == ("warn", 1 << 20)
    assert found.finding.endswith("GiB free within the limit of this container or service")


def test_ports_in_use_are_reported(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = NodeSettings(model="any", listen=(f"/ip4/127.0.0.1/tcp/{port}",))
        findings = run_checks([check for check in checks_of(Home(tmp_path), settings) if check.name == "port"])
    assert levels(findings) == [("port.listen", "fail")]
    assert exit_code_of(findings) == 4 and "--listen" in findings[0].advice


def test_a_port_of_the_homes_running_node_is_no_conflict():
    findings = doctor_network.check_listen_ports(["/ip4/127.0.0.1/tcp/1"], runs_here=True)
    assert levels(findings) == [("port.listen", "ok")]


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "level", "text"),
    [
        ("192.168.1.7", "fe80::1", "warn", "private"), ("100.72.3.4", "", "warn", "carrier"),
        ("9.9.9.9", "", "ok", "public"), ("10.0.0.2", "2620:fe::9", "ok", "public"),
        ("", "", "warn", "no address"),
    ],
)  # fmt: skip
def test_the_kind_of_nat_is_reported(ipv4, ipv6, level, text):
    kind = nat_kind(ipv4, ipv6)
    assert (kind.level, text in kind.finding) == (level, True)


def test_a_machine_without_a_network_is_reported_once(monkeypatch):
    monkeypatch.setattr(doctor_network, "own_address", lambda family: "")
    assert levels(doctor_network.check_routes()) == [("route.ipv4", "warn")]


INFO = {
    "id": REPO, "sha": "f" * 40, "cardData": {"license": "apache-2.0"},
    "siblings": [{"rfilename": "model.safetensors", "size": 6_000_000_000}, {"rfilename": "config.json", "size": 9}],
    "safetensors": {"parameters": {"BF16": 3_000_000}, "total": 3_000_000},
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake hub that has the model. A test sets another `status` and `headers`."""
    reply: dict[str, Any] = {"status": 200, "headers": {"ETag": '"abc"', "X-Repo-Commit": "f" * 40}}

    def answer(path):
        return reply["status"], reply["headers"], json.dumps(CONFIG if "resolve" in path else INFO).encode()

    with serving(answer) as endpoint:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield reply


def check_hub_model(tmp_path: Path) -> list[CheckResult]:
    return list(check_model(memory_question(Home(tmp_path), model=REPO, gpus_gib=[24])))


def test_a_model_of_the_hub_is_planned_without_its_weights(hub, tmp_path):
    findings = check_hub_model(tmp_path)
    assert levels(findings)[:4] == [
        ("hub.reached", "ok"), ("hub.token", "ok"), ("model.licence", "ok"), ("memory.plan", "ok"),
    ]  # fmt: skip
    assert "6.0 GB" in findings[0].finding and "apache-2.0" in findings[2].finding
    assert shape_of(CONFIG).num_layers == 2


def test_a_4_bit_base_of_a_mixture_of_experts_is_no_plan(tmp_path):
    question = memory_question(Home(tmp_path), model=REPO, gpus_gib=[24], quantize="4bit")
    shape = replace(shape_of(CONFIG), experts=Experts(number=4, per_token=2, size=8))
    (finding,) = [each for each in memory_results(question, shape) if each.id == "memory.plan"]
    assert (finding.level, finding.advice) == ("fail", "give --quantize none")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [(401, "RepoNotFound", "the hub has no model org/model"), (403, "GatedRepo", "accept its terms on the hub")],
)
def test_a_missing_or_gated_model_is_reported(hub, tmp_path, status, code, message):
    hub.update(status=status, headers={"X-Error-Code": code})
    (finding,) = check_hub_model(tmp_path)
    assert (finding.id, finding.level) == ("hub.reached", "fail")
    assert message in finding.finding


def test_an_unreachable_hub_is_one_result(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (finding,) = check_hub_model(tmp_path)
    assert (finding.id, exit_code_of([finding])) == ("hub.reached", 4)
    assert "cannot fetch org/model" in finding.finding


ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}"
REFUSED = "failed to dial X: all dials failed * [/ip4/192.0.2.1/tcp/4001] dial tcp4 192.0.2.1:4001: connection refused"
REACHED = AddressProbe(ADDRESS, dial_s=0.02, is_in_directory=True, clock_skew_s=0.1)


def _levels(*probes: AddressProbe, reachability: Reachability = Reachability.PUBLIC) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in judge(NetworkProbe(probes, reachability))]


@pytest.mark.parametrize(
    ("skew_s", "level", "text"),
    [(0.9, "ok", "+0.90 s"), (-1.5, "warn", "1.5 s ahead of the peers'"), (3.5, "fail", "3.5 s behind the peers'")],
)
def test_clocks_that_differ_are_reported(skew_s, level, text):
    probe = AddressProbe(ADDRESS, is_in_directory=True, clock_skew_s=skew_s)
    (clock,) = [found for found in judge(NetworkProbe((probe,), Reachability.PUBLIC)) if found.id == "clock.peers"]
    assert (clock.level, text in clock.finding, "3 s" in clock.advice) == (level, True, level != "ok")


def test_an_unreachable_address_fails_if_no_other_is_reached():
    unreachable = AddressProbe(ADDRESS, error=REFUSED)
    assert _levels(unreachable) == [("peer", "fail"), ("nat", "ok")]
    assert _levels(unreachable, REACHED) == [("peer", "warn"), ("peer", "ok"), ("clock", "ok"), ("nat", "ok")]
    first = next(judge(NetworkProbe((unreachable,), Reachability.PUBLIC)))
    assert first.finding == f"{ADDRESS}: dial tcp4 192.0.2.1:4001: connection refused"
    assert first.advice.startswith("nothing listens there")


def test_a_relay_with_low_limits_and_a_peer_outside_the_directory_are_warnings():
    small = AddressProbe(ADDRESS, is_in_directory=True, relay_limit=RelayLimit(num_bytes=131072, duration_s=120))
    outside = AddressProbe(ADDRESS)
    relay, peer, nat = judge(NetworkProbe((small, outside), Reachability.LOCAL))
    assert (relay.level, peer.level, nat.check) == ("warn", "warn", "nat")
    assert "128 KiB" in relay.finding and "directory" in peer.finding


@pytest.mark.timeout(90)  # one p2pd for each address
async def test_each_address_is_dialed_separately(tmp_path):
    node = BootstrapNode(settings(tmp_path / "b"), identity=Identity.generate())
    await node.start()
    try:
        (reachable,) = node.addresses
        unreachable = reachable.replace(reachable.split("/")[4], "9", 1)
        other = reachable.replace(node.peer_id, Identity.generate().peer_id)
        peers = tuple(map(parse_multiaddr, (unreachable, reachable, other)))
        probe = await probe_network(peers, listen=(LOOPBACK,), sockets_dir=tmp_path / "p")
    finally:
        await node.close()
    first, second, third = probe.addresses
    assert "connection refused" in first.error
    assert (second.error, second.is_in_directory) == ("", True)
    assert second.clock_skew_s is not None
    assert abs(second.clock_skew_s) < 1, "both clocks are this machine's"
    assert second.relay_limit is not None and second.relay_limit.num_bytes == 1 << 32
    assert "peer id mismatch" in third.error and probe.reachability is Reachability.LOCAL
