"""Two ranks that load and compare policies: `python shards_program.py BOOTS OUT`. The process forks the second rank.

BOOTS is a JSON list of boots. Rank 0 writes an object for each policy to OUT. `different` has the names of tensors that
differ from those of a model that is loaded whole. In the run `packing-fails` attention does not support packed rows.
"""

import json
import os
import sys
from pathlib import Path

import msgspec
import peft  # noqa: F401  a later import would count as memory of the model
import torch
from ranks_program import fork_rank
from transformers import AttentionInterface

from ftis_node.config.workers import LearnerSection
from ftis_node.learner.distributed.ranks import RankGroup
from ftis_node.learner.distributed.sharded_tensors import whole
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model import attention
from ftis_node.learner.model.policy_loading import load_policy
from ftis_node.workers.wire import dec_hook


def differing(boot, policy):
    """Return the names of parameters and buffers that differ from those of a policy that is loaded whole."""
    expected = load_policy(msgspec.structs.replace(boot, settings=LearnerSection())).causal_lm
    named = [*expected.named_parameters(remove_duplicate=False), *expected.named_buffers()]
    found = dict(policy.causal_lm.named_parameters(remove_duplicate=False)) | dict(policy.causal_lm.named_buffers())
    assert found.keys() == dict(named).keys()
    return [
        name
        for name, value in named
        if not torch.equal(whole(found[name]).detach().to(value.dtype), value) or found[name].is_meta
    ]


def loaded(boot, ranks):
    if boot.run_id == "packing-fails":
        fail_when_packed()
    policy = load_policy(boot, ranks)
    causal_lm = policy.causal_lm
    return {
        "different": differing(boot, policy),
        "tied": causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight,
        "packs": policy.packs,
    }


def fail_when_packed():
    """Replace the attention by one that does not support packed rows."""

    def attend(*arguments, plan=None, **more):
        if plan is not None:
            raise TypeError("packed rows are not supported")
        return attention.attend(*arguments, **more)

    attention.register = lambda: AttentionInterface.register(attention.ATTENTION, attend)


def main():
    address = fork_rank(sys.argv[2])
    boots = [msgspec.convert(boot, LearnerBoot, dec_hook=dec_hook) for boot in json.loads(sys.argv[1])]
    torch.set_num_threads(1)
    ranks = RankGroup(*address, boots[0])
    done = [loaded(boot, ranks) for boot in boots]
    ranks.close()
    if ranks.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(done))
        assert os.wait()[1] == 0, "the other rank failed"


if __name__ == "__main__":
    main()
