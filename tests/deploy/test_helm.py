"""deploy/helm: Helm renders valid objects, whose references and commands are valid, and each value has its effect."""

import json
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import pytest
import yaml

import ftis_node
from ftis_node.config.node import load_node_settings
from ftis_node.config.roles import Role
from tests.deploy.files import DEPLOY, check_command, documents, program

VERSION = "1.34"  # of Kubernetes
CHART = DEPLOY / "helm" / "ftis-node"
PEER_ID = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
NEEDED = {"bootstrap": {"peerId": PEER_ID}}
ANYWHERE = {"type": "NodePort", "libp2pNodePort": 31400, "metricsNodePort": 31500, "announceHost": "k8s.example.org"}
EVERYTHING: dict[str, Any] = {
    "service": ANYWHERE | {"annotations": {"a": "b"}},
    "manifest": 'name = "mine"\n\n[sampling]\ngroup_size = 4\n',
    "model": "Qwen/Qwen2.5-0.5B",
    "role": "full",
    "gpu": {"count": 4},
    "peers": [f"/dns4/meet.example.org/tcp/4001/p2p/{PEER_ID}"],
    "bootstrap": {
        "peerId": PEER_ID,
        "announce": ["/dns4/k8s.example.org/tcp/31399"],
        "service": {"type": "NodePort", "nodePort": 31399, "annotations": {"a": "b"}},
    },
    "image": {"pullSecrets": [{"name": "registry"}], "pullPolicy": "Always", "tag": "0.1.0"},
    "extraEnv": [{"name": "HF_HOME", "value": "/var/cache/ftis-node/hub"}],
    "extraArgs": ["--log-format=json"],
    "runtimeClassName": "nvidia",
    "priorityClassName": "batch",
    "nodeSelector": {"zone": "a"},
    "affinity": {"podAntiAffinity": {}},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "podAnnotations": {"team": "rl"},
    "persistence": {"home": {"storageClass": "fast"}, "cache": {"enabled": False}},
    "metrics": {name: {"enabled": True} for name in ("podMonitor", "prometheusRule", "dashboard")},
}

helm_program = program("helm")
pytestmark = pytest.mark.skipif(helm_program is None, reason="helm is not installed: `make kubernetes-tools`")


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(helm_program), *map(str, arguments)], capture_output=True, text=True, check=False)


def run_template(
    folder: Path, *more: Mapping[str, Any], files: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    options: list[str | Path] = []
    for name in files:
        options += ["--values", CHART / name]
    for number, values in enumerate(more):
        path = folder / f"values-{number}.yaml"
        path.write_text(yaml.safe_dump(dict(values)))
        options += ["--values", path]
    return helm("template", "ftis-node", CHART, "--namespace", "ftis", "--kube-version", VERSION, *options)


def template(folder: Path, *more: Mapping[str, Any], files: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    done = run_template(folder, NEEDED, *more, files=files)
    assert done.returncode == 0, done.stderr
    (folder / "rendered.yaml").write_text(done.stdout)
    return [one for one in documents(folder / "rendered.yaml") if one]


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: one["spec"]["template"]["spec"] for name, one in of_kind(objects, "StatefulSet").items()}


def settings_of(objects: list[dict[str, Any]]) -> str:
    return of_kind(objects, "ConfigMap")["ftis-node-settings"]["data"]["node.toml"]


def test_the_peers_of_the_pods_are_the_bootstrap_node_and_those_given(tmp_path):
    peers = of_kind(template(tmp_path, EVERYTHING), "ConfigMap")["ftis-node-peers"]["data"]["peers"].split(",")
    announced = pods(template(tmp_path))["ftis-node-bootstrap"]["containers"][0]["args"][-1].removeprefix("--announce=")
    assert peers == [f"{announced}/p2p/{PEER_ID}", *EVERYTHING["peers"]]
    alone = template(tmp_path, {"bootstrap": {"enabled": False, "peerId": ""}, "peers": EVERYTHING["peers"]})
    assert of_kind(alone, "ConfigMap")["ftis-node-peers"]["data"]["peers"].split(",") == EVERYTHING["peers"]
    assert set(pods(alone)) == {"ftis-node"}


@pytest.mark.parametrize("preset", sorted(path.stem for path in (DEPLOY / "node").glob("*.toml")))
def test_a_preset_is_the_file_of_its_card(preset, tmp_path):
    rendered = settings_of(template(tmp_path, {"preset": preset}))
    assert tomllib.loads(rendered) == tomllib.loads((DEPLOY / "node" / f"{preset}.toml").read_text())


def test_settings_extend_and_override_the_preset_and_keep_their_types(tmp_path):
    given = {
        "lora": False, "seed": 7, "listen": ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"],
        "data_paths": {"rg:chain_sum": 'a "quoted" path'},
        "generation": {"engine_options": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.25}},
        "buffer": {"max_disk_bytes": 5 << 30}, "swarm": {"shutdown_serve_s": 7.5},
    }  # fmt: skip
    rendered = settings_of(template(tmp_path, {"settings": given, "gpu": {"count": 2}}))
    preset = tomllib.loads((DEPLOY / "node" / "gpu-24gb.toml").read_text())
    wanted = preset | given | {"generation": preset["generation"] | given["generation"]}  # type: ignore[operator]
    assert tomllib.loads(rendered) == wanted
    whole = re.findall(r"^\"(seed|max_disk_bytes|tensor_parallel_size|max_batch)\" = (\d+)$", rendered, re.MULTILINE)
    assert dict(whole) == {"seed": "7", "max_disk_bytes": str(5 << 30), "tensor_parallel_size": "2", "max_batch": "48"}
    (tmp_path / "node.toml").write_text(rendered)
    settings = load_node_settings(tmp_path / "node.toml")
    assert (settings.buffer.max_disk_bytes, settings.lora, settings.generation.max_batch) == (5 << 30, False, 48)


def test_the_schema_has_the_roles_of_a_node(tmp_path):
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert schema["role"]["enum"] == ["", *get_args(Role)]
    for role in get_args(Role):
        follow = {"follow": PEER_ID} if role == "generator" else {}
        (node,) = pods(template(tmp_path, {"role": role, **follow}))["ftis-node"]["containers"]
        check_command(node["args"])
        assert f"--role={role}" in node["args"]


def test_an_extra_container_runs_beside_the_node(tmp_path):
    mounts = [{"name": "home", "mountPath": "/var/lib/ftis-node"}]
    beside = {"name": "trainer", "image": "trainer:1", "volumeMounts": mounts}
    objects = template(tmp_path, {"role": "exchange", "extraContainers": [beside]})
    node, other = pods(objects)["ftis-node"]["containers"]
    assert (node["name"], other) == ("node", beside)
    kubernetes_validate.validate(of_kind(objects, "StatefulSet")["ftis-node"], VERSION, strict=True)


def test_a_manifest_is_mounted_at_the_path_in_the_command(tmp_path):
    objects = template(tmp_path, EVERYTHING)
    assert of_kind(objects, "ConfigMap")["ftis-node-manifest"]["data"]["manifest.toml"] == EVERYTHING["manifest"]
    (node,) = pods(objects)["ftis-node"]["containers"]
    (mount,) = [one["mountPath"] for one in node["volumeMounts"] if one["name"] == "manifest"]
    assert f"--run={mount}/manifest.toml" in node["args"]
    assert {"--model=Qwen/Qwen2.5-0.5B", "--role=full", "--gpus=4", "--log-format=json"} <= set(node["args"])
    assert node["resources"]["limits"]["nvidia.com/gpu"] == node["resources"]["requests"]["nvidia.com/gpu"] == 4


def test_changed_settings_restart_the_pods(tmp_path):
    changes: list[dict[str, Any]] = [{}, {"settings": {"seed": 1}}, {"manifest": "name = 'x'"}]
    changes.append({"peers": EVERYTHING["peers"]})
    sums = [
        of_kind(template(tmp_path, change), "StatefulSet")["ftis-node"]["spec"]["template"]["metadata"]["annotations"]
        for change in changes
    ]
    assert len({one["checksum/config"] for one in sums}) == len(changes)


def test_each_pod_announces_the_port_of_its_service(tmp_path):
    objects = template(tmp_path, EVERYTHING, {"replicas": 3})
    (node,) = pods(objects)["ftis-node"]["containers"]
    variables = {one["name"]: one for one in node["env"]}
    order = list(variables)
    assert order.index("POD_NUMBER") < order.index("FTIS_ANNOUNCE"), "$(POD_NUMBER) is not expanded"
    labels = of_kind(objects, "StatefulSet")["ftis-node"]["spec"]["template"]["metadata"]["labels"]
    for number in range(3):
        service = of_kind(objects, "Service")[f"ftis-node-{number}"]["spec"]
        ports = {one["name"]: one["nodePort"] for one in service["ports"]}
        announced = yaml.safe_load(variables["FTIS_ANNOUNCE"]["value"].replace("$(POD_NUMBER)", str(number)))
        assert announced == [f"/dns4/k8s.example.org/tcp/{ports['libp2p']}"]
        assert ports == {"libp2p": 31400 + number, "metrics": 31500 + number}
        of_this_pod = {"statefulset.kubernetes.io/pod-name": f"ftis-node-{number}"}
        assert service["selector"] == labels | of_this_pod


def test_the_objects_of_the_prometheus_operator_fit_the_node_and_the_other_folders(tmp_path):
    objects = template(tmp_path, EVERYTHING)
    monitor = of_kind(objects, "PodMonitor")["ftis-node"]
    pod = of_kind(objects, "StatefulSet")["ftis-node"]["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    (mount,) = [one for one in pod["spec"]["containers"][0]["volumeMounts"] if "observe" in one["name"]]
    (secret,) = [one["secret"] for one in pod["spec"]["volumes"] if one["name"] == mount["name"]]
    assert endpoint["authorization"]["credentials"]["name"] == secret["secretName"] == "ftis-observe"
    jobs = set(re.findall(r'job="([^"]*)"', (DEPLOY / "prometheus" / "alerts.yaml").read_text()))
    assert jobs == {pod["metadata"]["labels"][monitor["spec"]["jobLabel"]]}
    rule = of_kind(objects, "PrometheusRule")["ftis-node"]
    (alerts,) = documents(DEPLOY / "prometheus" / "alerts.yaml")
    assert rule["spec"] == alerts
    board = of_kind(objects, "ConfigMap")["ftis-node-dashboard"]
    assert board["data"]["ftis-node.json"].strip() == (DEPLOY / "grafana" / "ftis-node.json").read_text().strip()
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert not {"PodMonitor", "PrometheusRule"} & {one["kind"] for one in template(tmp_path)}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"bootstrap": {"peerId": ""}}, "bootstrap.peerId is empty"),
        ({"bootstrap": {"enabled": False}}, "peers is empty"), ({"role": "generator"}, "follow"),
        ({"follow": PEER_ID}, "follow"), ({"role": "bystander"}, "role"), ({"gpus": 2}, "gpus"),
        ({"gpu": {"count": "2"}}, "gpu"), ({"preset": "gpu-1gb"}, "preset gpu-1gb: the chart has no such file"),
        ({"run": "gsm8k-ftis", "manifest": "name = 'x'"}, "run and manifest name two runs"),
        ({"model": "M", "tinyModel": "s"}, "model and tinyModel name two models"),
        ({"peers": ["/dns4/meet.example.org/tcp/4001"]}, "peers"),
        ({"service": ANYWHERE | {"libp2pNodePort": 31405}}, "ends in 0"),
        ({"service": ANYWHERE, "replicas": 11}, "at most 10 replicas"),
        ({"service": {"type": "NodePort", "announceHost": "k8s.example.org"}}, "needs service.libp2pNodePort"),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused_with_the_reason(values, reason, tmp_path):
    done = run_template(tmp_path, NEEDED, values)
    assert done.returncode != 0 and reason in done.stderr


def test_every_value_has_a_schema_and_a_use():
    (values,) = documents(CHART / "values.yaml")
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    for place in value_paths(values):
        inner = schema
        for part in place:
            inner = inner["properties"][part]
        assert re.search(rf"\b{place[-1]}\b", templates), place


def value_paths(values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value. A table that a user fills, such as labels, counts as one value."""
    free = {"settings", "requests", "limits", "labels"}
    for key, value in values.items():
        yield (key,)
        if isinstance(value, dict) and key not in free:
            yield from ((key, *rest) for rest in value_paths(value))


def test_the_chart_passes_lint_and_is_packed_whole(tmp_path):
    done = helm("lint", "--strict", CHART, "--set-string", f"bootstrap.peerId={PEER_ID}")
    assert done.returncode == 0, done.stdout + done.stderr
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / f"ftis-node-{ftis_node.__version__}.tgz") as archive:
        files = {one.name.removeprefix("ftis-node/") for one in archive.getmembers() if one.isfile()}
    assert {"files/alerts.yaml", "files/dashboard.json", "files/node/gpu-24gb.toml", "values.schema.json"} <= files
    (chart,) = documents(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == ftis_node.__version__
