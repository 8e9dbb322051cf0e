"""`ftis-node` with a slow learner: each checkpoint takes SLOW_SAVE_S seconds longer, each pass SLOW_PASS_S.

The module is both the node and the learner worker that the node starts.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from ftis_node.__main__ import main
from ftis_node.learner import client, worker
from ftis_node.learner.batch import MicroBatch
from ftis_node.learner.messages import LearnerBoot
from ftis_node.workers.worker import run_worker


def run_slow_worker() -> None:
    """Run the worker. Only this process imports torch."""
    from ftis_node.learner.checkpoint import checkpoint_manager
    from ftis_node.learner.model import policy

    write_checkpoint = checkpoint_manager.write_checkpoint

    def write_slowly(*arguments: Any, **options: Any) -> Path:
        time.sleep(float(os.environ.get("SLOW_SAVE_S", "0")))
        return write_checkpoint(*arguments, **options)

    checkpoint_manager.write_checkpoint = write_slowly
    logprobs = policy.Policy.logprobs

    def compute_slowly(self: policy.Policy, micro_batch: MicroBatch) -> Tensor:
        time.sleep(float(os.environ.get("SLOW_PASS_S", "0")))
        return logprobs(self, micro_batch)

    policy.Policy.logprobs = compute_slowly  # type: ignore[method-assign]
    run_worker(worker.build, boot_type=LearnerBoot)


if __name__ == "__main__":
    if "--endpoint" in sys.argv:
        run_slow_worker()
    defaults = client.LearnerClient.__init__.__kwdefaults__
    defaults["worker_module"] = "tests.node.slow_save"
    main()
