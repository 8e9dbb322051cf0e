"""deploy/kubernetes: the objects are valid by the schemas of Kubernetes, and their references and commands are valid.

`kubectl kustomize` renders the overlays if it is installed. Otherwise only the base is tested.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest

from ftis_node.config.workers import SAVE_LIMIT_S, LearnerSection
from tests.deploy.files import DEPLOY, ROOT, check_command, check_variable, documents, program, shell_commands

if TYPE_CHECKING:
    from pathlib import Path

KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ["gpu", "cpu", "multi-host"]
VERSION = "1.34"


def render(folder: Path, into: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k FOLDER` sends."""
    out = into / "rendered.yaml"
    with out.open("w") as file:
        subprocess.run([str(program("kubectl")), "kustomize", str(folder)], stdout=file, check=True)
    return documents(out)


@pytest.fixture(scope="module", params=["base", *OVERLAYS])
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The objects in the files of the base, and the rendered objects of each overlay."""
    if request.param == "base":
        (kustomization,) = documents(KUBERNETES / "base" / "kustomization.yaml")
        return [one for name in kustomization["resources"] for one in documents(KUBERNETES / "base" / name)]
    if program("kubectl") is None:
        pytest.skip("kubectl is not installed: `make kubernetes-tools`")
    return render(KUBERNETES / request.param, tmp_path_factory.mktemp(request.param))


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = of_kind(objects, "StatefulSet") | of_kind(objects, "Job")
    return {name: one["spec"]["template"]["spec"] for name, one in found.items()}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_every_kubernetes_object_is_valid(objects: list[dict[str, Any]]) -> None:
    assert {"StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"} <= {one["kind"] for one in objects}
    for one in objects:
        kubernetes_validate.validate(one, VERSION, strict=True)


def test_every_reference_between_objects_exists(objects: list[dict[str, Any]]) -> None:
    services, settings = of_kind(objects, "Service"), of_kind(objects, "ConfigMap")
    for name, one in of_kind(objects, "StatefulSet").items():
        pod, labels = one["spec"]["template"]["spec"], one["spec"]["template"]["metadata"]["labels"]
        assert services[one["spec"]["serviceName"]]["spec"]["selector"].items() <= labels.items(), name
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claimed = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == set(volumes) | claimed
        for volume in volumes.values():
            for item in volume.get("configMap", {}).get("items", []):
                assert item["key"] in settings[volume["configMap"]["name"]]["data"]
        assert pod["serviceAccountName"] in of_kind(objects, "ServiceAccount")
        for container in pod["containers"]:
            ports = {port["name"] for port in container["ports"]}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                check = container[probe].get("httpGet") or container[probe]["tcpSocket"]
                assert check["port"] in ports


def test_a_pod_has_minimal_rights(objects: list[dict[str, Any]]) -> None:
    for name, pod in pods(objects).items():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["enableServiceLinks"] is False  # it would set FTIS_BOOTSTRAP_PORT and similar variables
        assert pod["automountServiceAccountToken"] is False
        assert pod["terminationGracePeriodSeconds"] == (SAVE_LIMIT_S + 60 if name == "ftis-node" else 30)
        for container in containers(pod):
            context = container["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
        for container in pod["containers"]:
            places = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {"/var/lib/ftis-node", "/var/cache/ftis-node", "/tmp"} <= places


def test_commands_and_variables_are_valid(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects).values():
        for container in containers(pod):
            if "args" in container:
                check_command(container["args"])
            for arguments in shell_commands((container.get("command") or [""])[-1]):
                check_command(arguments)
            for variable in container.get("env", []):
                if variable["name"].startswith("FTIS_"):
                    check_variable(variable["name"])
    node = pods(objects)["ftis-node"]
    (shm,) = [volume for volume in node["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in node["containers"][0]["volumeMounts"]


@pytest.mark.skipif(program("kubectl") is None, reason="kubectl is not installed: `make kubernetes-tools`")
def test_hosts_of_a_learner_find_their_node_and_reach_only_each_other(tmp_path: Path) -> None:
    objects = render(KUBERNETES / "multi-host", tmp_path)
    (job,) = of_kind(objects, "Job").values()
    node = of_kind(objects, "StatefulSet")["ftis-node"]
    (settings,) = [
        {one["name"]: one.get("value") for one in container["env"]}
        for container in node["spec"]["template"]["spec"]["containers"]
    ]
    learner = {name.removeprefix("FTIS_LEARNER__").lower(): settings[name] for name in settings if "LEARNER" in name}
    checked = LearnerSection.model_validate(learner)
    assert checked.hosts == 1 + job["spec"]["completions"] == 1 + job["spec"]["parallelism"]
    name, service, space = node["metadata"]["name"], node["spec"]["serviceName"], node["metadata"]["namespace"]
    assert checked.rendezvous.startswith(f"{name}-0.{service}.{space}.svc:")
    (host,) = job["spec"]["template"]["spec"]["containers"]
    assert f"--rendezvous={checked.rendezvous}" in host["args"]
    assert f"--secret-file={checked.rendezvous_secret_file}" in host["args"]
    assert (node["spec"]["replicas"], host["resources"]["limits"]["nvidia.com/gpu"]) == (1, checked.num_processes)
    policy = of_kind(objects, "NetworkPolicy")["ftis-learner-hosts"]["spec"]
    group = policy["podSelector"]["matchLabels"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": group}}]}]
    for one in (node, job):
        assert group.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    service = of_kind(objects, "Service")[job["spec"]["template"]["spec"]["subdomain"]]["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    for pod in (node["spec"]["template"]["spec"], job["spec"]["template"]["spec"]):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claimed = {claim["metadata"]["name"] for claim in node["spec"]["volumeClaimTemplates"]}
        assert {mount["name"] for one in containers(pod) for mount in one["volumeMounts"]} <= set(volumes) | claimed


def test_probes_and_scrapes_use_the_routes_of_the_monitoring_port(objects: list[dict[str, Any]]) -> None:
    (node,) = pods(objects)["ftis-node"]["containers"]
    assert node["livenessProbe"]["httpGet"]["path"] == node["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert node["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {"name": "metrics", "containerPort": 9464} in node["ports"]
    notes = of_kind(objects, "StatefulSet")["ftis-node"]["spec"]["template"]["metadata"]["annotations"]
    assert (notes["prometheus.io/port"], notes["prometheus.io/path"]) == ("9464", "/metrics")


def test_metrics_need_the_token_of_a_secret_that_only_the_group_of_the_pod_reads(objects: list[dict[str, Any]]) -> None:
    pod = pods(objects)["ftis-node"]
    (node,) = pod["containers"]
    (token_file,) = [one["value"] for one in node["env"] if one["name"] == "FTIS_OBSERVE__TOKEN_FILE"]
    (mount,) = [one for one in node["volumeMounts"] if one["mountPath"] == token_file.rpartition("/")[0]]
    (secret,) = [one["secret"] for one in pod["volumes"] if one["name"] == mount["name"]]
    assert secret == {"secretName": "ftis-observe", "defaultMode": 0o440}
    (monitor,) = documents(KUBERNETES / "pod-monitor" / "pod-monitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "ftis-observe", "key": token_file.rpartition("/")[2]}


@pytest.mark.skipif(program("kubectl") is None, reason="kubectl is not installed: `make kubernetes-tools`")
def test_an_overlay_may_include_the_pod_monitor(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    up = os.path.relpath(KUBERNETES, overlay.resolve())
    (overlay / "kustomization.yaml").write_text(f"resources: [{up}/cpu]\ncomponents: [{up}/pod-monitor]\n")
    objects = render(overlay, tmp_path)
    (monitor,) = of_kind(objects, "PodMonitor").values()
    template = of_kind(objects, "StatefulSet")["ftis-node"]["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    jobs = set(re.findall(r'job="([^"]*)"', (DEPLOY / "prometheus" / "alerts.yaml").read_text()))
    assert jobs == {template["metadata"]["labels"][monitor["spec"]["jobLabel"]]}
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_the_page_names_the_objects_to_create_first(objects: list[dict[str, Any]]) -> None:
    page = (ROOT / "docs/operate/deploy.md").read_text()
    pod_list = pods(objects).values()
    secrets = [volume["secret"]["secretName"] for pod in pod_list for volume in pod["volumes"] if "secret" in volume]
    maps = [
        variable["valueFrom"]["configMapKeyRef"]
        for pod in pod_list
        for container in pod["containers"]
        for variable in container.get("env", [])
        if "configMapKeyRef" in variable.get("valueFrom", {})
    ]
    assert secrets
    for name in secrets:
        assert f"create secret generic {name}" in page
    for one in maps:
        assert f"create configmap {one['name']}" in page
        assert f"--from-literal={one['key']}=" in page


def test_kustomizations_name_existing_files_and_all_of_them() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        (kustomization,) = documents(path)
        named = kustomization.get("resources", []) + [one["path"] for one in kustomization.get("patches", [])]
        assert all((path.parent / name).exists() for name in named)
        here = {file.name for file in path.parent.glob("*.yaml")} - {path.name}
        assert here <= set(named)
