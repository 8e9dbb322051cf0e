"""The objects that the chart makes: references, rights, commands, variables and probes."""

from typing import Any

import kubernetes_validate
import pytest

from ftis_node.config.workers import SAVE_LIMIT_S
from tests.deploy.files import ROOT, check_command, check_variable, shell_commands
from tests.deploy.test_helm import EVERYTHING, VERSION, of_kind, pods, pytestmark, template

__all__ = ["pytestmark"]
CASES = {"gpu": ({}, ()), "cpu": ({}, ("values-cpu.yaml",)), "everything": (EVERYTHING, ())}


@pytest.fixture(params=CASES, scope="module")
def objects(request, tmp_path_factory):
    """The objects of the chart with its own values, with those for CPUs, and with all values given."""
    values, files = CASES[request.param]
    return template(tmp_path_factory.mktemp("chart"), values, files=files)


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a pod, those of its initialization first."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_every_reference_between_objects_exists(objects):
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


def test_a_pod_has_minimal_rights(objects):
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


def test_objects_commands_and_variables_are_valid(objects):
    for one in objects:
        if not one["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(one, VERSION, strict=True)
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


def test_probes_and_scrapes_use_the_routes_of_the_monitoring_port(objects):
    (node,) = pods(objects)["ftis-node"]["containers"]
    assert node["livenessProbe"]["httpGet"]["path"] == node["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert node["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {"name": "metrics", "containerPort": 9464} in node["ports"]
    notes = of_kind(objects, "StatefulSet")["ftis-node"]["spec"]["template"]["metadata"]["annotations"]
    assert (notes["prometheus.io/port"], notes["prometheus.io/path"]) == ("9464", "/metrics")


def test_the_page_names_the_secrets_to_create_first(objects):
    page = (ROOT / "docs/operate/deploy.md").read_text()
    secrets = {
        volume["secret"]["secretName"]
        for pod in pods(objects).values()
        for volume in pod["volumes"]
        if "secret" in volume
    }
    assert secrets
    for name in secrets:
        assert f"create secret generic {name}" in page
