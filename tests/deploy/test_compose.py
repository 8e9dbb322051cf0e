"""deploy/compose.yaml: its mounts exist, its commands are valid, and the services find each other.

Docker compose reads the file if it is installed. No container is started.
"""

import re
import shutil
import subprocess
from pathlib import PurePosixPath
from typing import Any

import pytest

from ftis_node.config.workers import SAVE_LIMIT_S
from tests.deploy.files import (
    DEPLOY,
    ROOT,
    check_command,
    check_variable,
    documents,
    read_stages,
    shell_commands,
    with_base_stages,
)

(COMPOSE,) = documents(DEPLOY / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
FTIS_SERVICES = {name: service for name, service in SERVICES.items() if "ftis-node" in service["image"]}
NODES = {name: service for name, service in FTIS_SERVICES.items() if service["command"][0] == "join"}
PROVISIONING = DEPLOY / "grafana" / "provisioning"
IMAGE_VOLUMES = {"/var/lib/ftis-node", "/var/cache/ftis-node"}
KNOWN = set(  # the used keys of the compose specification; a misspelled key is not among them
    "image build command entrypoint environment volumes ports profiles depends_on restart stop_grace_period read_only "
    "cap_drop security_opt tmpfs healthcheck shm_size deploy networks group_add".split()
)


def mounts(service: dict[str, Any]) -> dict[str, str]:
    pairs = [volume.removesuffix(":ro").split(":") for volume in service.get("volumes", [])]
    return {target: source for source, target in pairs}


def test_services_have_known_keys_and_existing_mounts():
    for service in SERVICES.values():
        assert set(service) <= KNOWN
        for source in mounts(service).values():
            exists = (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            assert exists, source
        assert set(service.get("depends_on", [])) <= set(SERVICES)
    used = {source for one in SERVICES.values() for source in mounts(one).values() if not source.startswith(".")}
    assert set(COMPOSE["volumes"]) == used


def test_a_node_restarts_after_each_fault_and_has_time_to_write_a_checkpoint():
    """tini turns the exit codes 2 and 3 into 0, after which `on-failure` does not restart."""
    for service in NODES.values():
        assert service["restart"] == "on-failure"
        assert service["entrypoint"] == ["tini", "-e", "2", "-e", "3", "--", "ftis-node"]
        assert service["stop_grace_period"] == f"{SAVE_LIMIT_S + 60:.0f}s"


@pytest.mark.parametrize("name", FTIS_SERVICES)
def test_a_service_of_ftis_node_has_a_target_a_valid_command_and_its_folders(name):
    service = FTIS_SERVICES[name]
    target = re.sub(r"\$\{TARGET:-(\w+)\}", r"\1", service["build"]["target"])
    steps = with_base_stages(read_stages(), target)
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    assert service["image"].endswith(service["build"]["target"])
    if service.get("entrypoint", [""])[0] == "sh":
        commands = shell_commands(service["command"][0].replace("$$size", "s").replace("$$", ""))
        assert commands or name == "observe-token"
    else:
        commands = [service["command"]]
    for arguments in commands:
        check_command(arguments)
    made = " ".join(one.rest for one in steps if one.name == "RUN")
    folders = set(mounts(service)) | IMAGE_VOLUMES
    for place in re.findall(r"(?:^|[=@ ])(/(?:var|meet)/[\w./-]+)", " ".join(service["command"])):
        assert any(PurePosixPath(place).is_relative_to(folder) for folder in folders), place
    for folder in set(mounts(service)) - IMAGE_VOLUMES:
        assert "node.toml" in folder or re.search(rf"install .*{folder}\b", made), f"root would own {folder}"
    for variable in service.get("environment", {}):
        assert not variable.startswith("FTIS_") or check_variable(variable) is None


def test_nodes_wait_for_the_bootstrap_node_and_read_its_address():
    (written,) = [
        word.split("=")[1] for word in FTIS_SERVICES["bootstrap"]["command"] if word.startswith("--address-file")
    ]
    for service in NODES.values():
        assert f"@{written}" in service["command"]
        assert mounts(service)["/meet"] == mounts(FTIS_SERVICES["bootstrap"])["/meet"]
        assert service["depends_on"]["bootstrap"] == {"condition": "service_healthy"}
    assert written in FTIS_SERVICES["bootstrap"]["healthcheck"]["test"][-1]
    assert "--announce=/dns4/bootstrap/tcp/4001" in FTIS_SERVICES["bootstrap"]["command"]  # the name of the service


def test_prometheus_sends_the_token_that_nodes_require():
    (made,) = re.findall(r"> (\S+)$", FTIS_SERVICES["observe-token"]["command"][0])
    assert "umask 027" in FTIS_SERVICES["observe-token"]["command"][0]
    (prometheus,) = documents(DEPLOY / "prometheus" / "compose.yaml")
    assert [job["authorization"] for job in prometheus["scrape_configs"]] == [{"credentials_file": made}]
    assert SERVICES["prometheus"]["group_add"] == ["1000"]
    for service in (*NODES.values(), SERVICES["prometheus"]):
        assert service["depends_on"]["observe-token"] == {"condition": "service_completed_successfully"}
        assert mounts(service)["/meet"] == mounts(FTIS_SERVICES["observe-token"])["/meet"]
    assert {service["environment"]["FTIS_OBSERVE__TOKEN_FILE"] for service in NODES.values()} == {made}


def test_each_node_has_its_own_home_and_gpu_nodes_have_different_gpus():
    homes = [
        mounts(one)["/var/lib/ftis-node"]
        for name, one in FTIS_SERVICES.items()
        if name not in ("tiny-models", "observe-token")
    ]
    assert len(homes) == len(set(homes)) == 5
    on_gpu = [one for one in NODES.values() if one["profiles"] == ["gpu"]]
    settings = {mounts(one)["/var/lib/ftis-node/node.toml"] for one in on_gpu}
    devices = {one["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"][0] for one in on_gpu}
    assert (len(on_gpu), len(settings), len(devices)) == (2, 2, 2)
    assert all(one.get("read_only") and one["cap_drop"] == ["ALL"] for one in FTIS_SERVICES.values())


def test_prometheus_finds_the_nodes_and_grafana_finds_prometheus():
    (prometheus,) = documents(DEPLOY / mounts(SERVICES["prometheus"])["/etc/prometheus/prometheus.yaml"])
    aliases = {alias for one in NODES.values() for alias in one["networks"]["default"]["aliases"]}
    scraped = [
        (name, found["port"])
        for job in prometheus["scrape_configs"]
        for found in job.get("dns_sd_configs", [])
        for name in found["names"]
    ]
    assert scraped == [(alias, 9464) for alias in aliases]
    for rules in prometheus["rule_files"]:
        assert f"/etc/prometheus/{rules.removeprefix('/etc/prometheus/')}" in mounts(SERVICES["prometheus"])
    (source,) = documents(PROVISIONING / "datasources" / "prometheus.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    (provider,) = documents(PROVISIONING / "dashboards" / "ftis-node.yaml")
    folder = provider["providers"][0]["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounts(SERVICES["grafana"]) and str(PurePosixPath(home).parent) == folder


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_docker_compose_reads_the_file(profile):
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed: `apt-get install docker-compose`")
    command = [docker, "compose", "-f", str(DEPLOY / "compose.yaml"), "--profile", profile, "config", "--quiet"]
    assert subprocess.run(command, check=False).returncode == 0
