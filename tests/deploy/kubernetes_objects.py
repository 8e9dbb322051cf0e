"""Objects of Kubernetes, as Helm renders them."""

from __future__ import annotations

from typing import Any

VERSION = "1.34"


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a kind by name."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pod of each stateful set by the set's name."""
    return {name: one["spec"]["template"]["spec"] for name, one in of_kind(objects, "StatefulSet").items()}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a pod, those of its initialization first."""
    return [*pod.get("initContainers", []), *pod["containers"]]
