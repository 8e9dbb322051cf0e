"""A learner whose process has a limit of memory, for test_learner_out_of_memory.py.

`python memory_limited_learner.py MODEL HOME BUDGET EXTRA` makes a learner with this budget of tokens. It then limits
the data segment to EXTRA bytes more, trains one step and prints its report as JSON.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec
from learner_rig import make_boot, random_groups

from ftis_node.learner.core import Learner

SHAPE = {"num_groups": 8, "group_size": 16, "max_length": 300, "seed": 3}


def main(model: str, home: str, budget: int, extra: int) -> None:
    learner, groups = Learner(make_boot(model, Path(home), micro_batch_tokens=budget)), random_groups(**SHAPE)
    status = Path("/proc/self/status").read_text().split("VmData:")[1]
    limit = 1024 * int(status.split()[0]) + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.stdout.write(msgspec.json.encode(learner.train(groups, step=1).report).decode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
