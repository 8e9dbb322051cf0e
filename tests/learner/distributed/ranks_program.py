"""Two ranks that run learners in sequence: `python ranks_program.py TASKS OUT`. The process forks the second rank.

TASKS is a JSON list of [boot, first step, last step]. Rank 0 writes the results of each learner to OUT.
"""

import json
import os
import sys
from pathlib import Path

import msgspec
from learner_rig import make_group, random_groups

from ftis_node.learner.distributed.launch import run_commands
from ftis_node.learner.distributed.ranks import RankGroup, RankTask
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import LearnerBoot
from ftis_node.workers.liveness import die_with_owner
from ftis_node.workers.wire import dec_hook

SIZES = {"num_groups": 3, "group_size": 4, "max_length": 10}


def train(learner, first, last):
    """Return figures of the steps, the proof of the last one, and the results of a check and an audit after it."""
    replies = [learner.train(random_groups(seed=step, **SIZES), step=step) for step in range(first, last + 1)]
    version = learner.state().policy_version
    group = make_group([[7, 8, 9], [4, 5]], [0.0, 1.0], logprobs=[[-5.0, -5.5, -6.0], [-5.0, -6.0]], version=version)
    learner.offer_check(group)
    learner.check()
    return {
        "checked": learner._checked[1].kl,
        "audited": learner.audit(group).kl,
        "loss": [reply.report.loss for reply in replies],
        "grad_norm": [reply.report.grad_norm for reply in replies],
        "proof": list(replies[-1].proof.logprobs),
        "entropy": [reply.report.entropy for reply in replies],
        "kl_to_start": [reply.report.kl_to_start or 0.0 for reply in replies],
        "kl_from_start": [reply.report.kl_from_start or 0.0 for reply in replies],
        "packs": learner.policy.packs,
    }


def fork_rank(out):
    """Fork, and return the rank that each of the two processes is, their number, and the file of both."""
    rank = 0 if os.fork() else 1
    die_with_owner(os.getppid())
    return rank, 2, f"{out}.store"


def main():
    address = fork_rank(sys.argv[2])
    tasks = [
        (msgspec.convert(boot, LearnerBoot, dec_hook=dec_hook), first, last)
        for boot, first, last in json.loads(sys.argv[1])
    ]
    done = []
    ranks = RankGroup(*address, tasks[0][0])
    for boot, first, last in tasks:
        learner = Learner(boot, ranks=ranks)
        if ranks.rank:
            run_commands(learner, ranks)
            continue
        done.append(train(learner, first, last))
        with ranks.lead(RankTask("end")):
            pass
    ranks.close()
    if ranks.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(done))
        assert os.wait()[1] == 0, "the other rank failed"


if __name__ == "__main__":
    main()
