"""One command for all hosts, under torchrun: the node on the first host, `learner-host` on the others.

    torchrun --nnodes 2 --node-rank K --master-addr 10.0.0.1 --nproc-per-node 1 \\
        -m ftis_node.learner.distributed.torchrun -- --secret-file FILE join --model M ...

The two dashes keep torchrun from reading `--run` as an abbreviated option of torchrun.

torchrun only starts one process per host. Each replaces itself: node rank 0 by `ftis-node join`, any other by
`ftis-node learner-host`. So a lost host restarts the learner and not the node, and all messages before the first
collective operation are authenticated (`host_channel.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PORT = 29400
# torchrun's variables, which would describe other ranks than those of the learner.
PREFIXES = ("GROUP_", "LOCAL_", "MASTER_", "ROLE_", "TORCHELASTIC_")
NAMES = ("RANK", "WORLD_SIZE")


def replacement(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of `ftis-node` on this host, and its environment. Exits for wrong arguments."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m ftis_node.learner.distributed.torchrun")
    parser.add_argument("--secret-file", required=True, help="file with the secret of all hosts")
    parser.add_argument("--port", type=int, default=PORT, help="port of the rendezvous on the first host")
    parser.add_argument("join", nargs=argparse.REMAINDER, help="`join` and its options, for the first host")
    parsed = parser.parse_args(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if "RANK" not in environment or environment.get("LOCAL_WORLD_SIZE") != "1":
        parser.error("start it with torchrun and --nproc-per-node 1: learner.processes sets the processes of a host")
    if parsed.join[:1] != ["join"]:
        parser.error("the command of the first host must follow: join --model ...")
    host = environment["MASTER_ADDR"]
    rendezvous = f"[{host}]:{parsed.port}" if ":" in host else f"{host}:{parsed.port}"
    rest = {name: value for name, value in environment.items() if name not in NAMES and not name.startswith(PREFIXES)}
    if environment["RANK"] != "0":
        return ["learner-host", "--rendezvous", rendezvous, "--secret-file", parsed.secret_file], rest
    settings = {
        "FTIS_LEARNER__HOSTS": environment["WORLD_SIZE"],
        "FTIS_LEARNER__RENDEZVOUS": rendezvous,
        "FTIS_LEARNER__RENDEZVOUS_SECRET_FILE": parsed.secret_file,
    }
    return parsed.join, rest | settings


def main() -> None:
    arguments, environment = replacement(sys.argv[1:], os.environ)
    os.execve(sys.executable, [sys.executable, "-m", "ftis_node", *arguments], environment)


if __name__ == "__main__":
    main()
