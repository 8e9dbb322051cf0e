"""`ftis-node` whose learner has a slow disk, for tests: each checkpoint takes SLOW_SAVE_S seconds more.

The same module is the node, and the learner's worker that it starts.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ftis_node.__main__ import main
from ftis_node.learner import client, worker
from ftis_node.learner.messages import LearnerBoot
from ftis_node.workers.worker import run_worker

if TYPE_CHECKING:
    from pathlib import Path


def run_slow_worker() -> None:
    """Run the worker. Only this process imports torch."""
    from ftis_node.learner.checkpoint import checkpoint_manager

    write_checkpoint = checkpoint_manager.write_checkpoint

    def write_slowly(*arguments: Any, **options: Any) -> Path:
        time.sleep(float(os.environ["SLOW_SAVE_S"]))
        return write_checkpoint(*arguments, **options)

    checkpoint_manager.write_checkpoint = write_slowly
    run_worker(worker.build, boot_type=LearnerBoot)


if __name__ == "__main__":
    if "--endpoint" in sys.argv:
        run_slow_worker()
    defaults = client.LearnerClient.__init__.__kwdefaults__
    assert defaults is not None
    defaults["worker_module"] = "tests.node.slow_save"
    main()
