"""`[observe]` and `[tracking]` of node.toml: the port for monitoring, and experiment trackers."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

from pydantic import Field, field_validator

from ftis_node.config.section import Section

ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")
MAX_PORT = 65535


def is_loopback(host: str) -> bool:
    """Return whether an address or name is this machine, reachable from it alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ObserveSection(Section):
    """A fixed HTTP port for Prometheus and probes: `/metrics`, `/healthz` and `/readyz` only."""

    listen: str = Field(default="", max_length=128)
    """HOST:PORT of the monitoring port, such as `127.0.0.1:9464`; port 0: any free one; empty: none. Beyond this
    machine (`0.0.0.0:9464`) `/metrics` requires a token, and probes do not. The port is read-only and shows no
    rollouts, addresses or keys."""
    token_file: str = Field(default="", max_length=4096)
    """File with the token that `/metrics` of that port requires, as `Authorization: Bearer TOKEN`: one word of at least
    32 characters, not readable by all. Unset: `observe.token` in the home, made at the first start if other machines
    can reach `listen`. On 127.0.0.1 no token is required."""

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value and ((match := ADDRESS.fullmatch(value)) is None or int(match["port"]) > MAX_PORT):
            raise ValueError(f"observe.listen {value!r} is not HOST:PORT: write 127.0.0.1:9464, or [::1]:9464")
        return value

    @property
    def needs_token(self) -> bool:
        return self.address is not None and (bool(self.token_file) or not is_loopback(self.address[0]))

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port; None if the port is off."""
        host, _, port = self.listen.rpartition(":")
        return (host.strip("[]"), int(port)) if self.listen else None


class TrackingSection(Section):
    """Experiment trackers that get the metrics as well as `events.jsonl`."""

    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(default=(), max_length=3)
    """Trackers: `tensorboard` (files in the home), `wandb` (files in the home, uploaded if a key is configured),
    `trackio`. Each needs the package of its name."""

    @field_validator("to")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))
