"""`[observe]` of node.toml: the figures for monitoring, and when a node that hangs is told of and ends."""

from __future__ import annotations

import ipaddress
import re

from pydantic import Field, field_validator

from ftis_node.config.section import Section

ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")
MAX_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be this machine, and is reached from it alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ObserveSection(Section):
    """A second HTTP port for Prometheus and for probes: `/metrics`, `/healthz` and `/readyz`, and nothing else.

    The port of `status_port` has them too, on 127.0.0.1 alone, which a container's probes and another machine's
    Prometheus cannot reach.
    """

    listen: str = Field(
        default="",
        max_length=128,
        description="HOST:PORT of that port, such as `127.0.0.1:9464`; port 0: any free one; empty: none. Beyond "
        "this machine (`0.0.0.0:9464`) `/metrics` asks for a token; probes ask for none. Nothing can be changed there, "
        "and it tells no rollouts, addresses or keys.",
    )
    token_file: str = Field(
        default="",
        max_length=4096,
        description="File with the token that `/metrics` of that port asks for, as `Authorization: Bearer TOKEN`; one "
        "word of at least 32 characters, not readable by all. Unset: `observe.token` in the home, made at the first "
        "start, where `listen` is reached by other machines; on 127.0.0.1 none is asked for.",
    )
    event_loop_stall_warn_s: float = Field(
        default=10.0,
        ge=1,
        le=3600,
        description="The daemon's event loop stands still for so many seconds: the code that blocks it is logged.",
    )
    event_loop_stall_exit_s: float = Field(
        default=600.0,
        ge=2,
        le=86400,
        description="It stands still for so long: the node ends with exit code 1, for whatever starts it again.",
    )
    task_stuck_s: float = Field(
        default=300.0,
        ge=1,
        le=86400,
        description="A loop whose work gets nowhere for so many seconds is stuck: it is logged with where it stands, "
        "`/healthz` answers 503, and systemd's watchdog hears no more of this node.",
    )

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value and ((match := ADDRESS.fullmatch(value)) is None or int(match["port"]) > MAX_PORT):
            raise ValueError(f"observe.listen {value!r} is no HOST:PORT: write 127.0.0.1:9464, or [::1]:9464")
        return value

    @property
    def needs_token(self) -> bool:
        """Whether `/metrics` asks for a token."""
        return self.address is not None and (bool(self.token_file) or not is_loopback(self.address[0]))

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port; None where no such port is wanted."""
        host, _, port = self.listen.rpartition(":")
        return (host.strip("[]"), int(port)) if self.listen else None
