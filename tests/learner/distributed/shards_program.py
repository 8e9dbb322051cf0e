"""One of two ranks, for `torchrun --nproc-per-node 2 shards_program.py BOOTS OUT`. It loads and compares policies.

BOOTS is a JSON list of boots. Rank 0 writes an object for each policy to OUT. `peak_bytes` is the largest increase of
resident memory of a rank while the model is loaded and sharded. `different` has the names of tensors that differ from
those of a model that is loaded whole.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import msgspec
import peft  # noqa: F401  a later import would count as memory of the model
import torch
import transformers.models.qwen2.modeling_qwen2
from learner_rig import random_groups
from transformers import AttentionInterface

from ftis_node.config.workers import LearnerSection
from ftis_node.learner.batch import make_batch, make_packed_micro_batches
from ftis_node.learner.distributed.launch import RankAddress
from ftis_node.learner.distributed.ranks import RankGroup
from ftis_node.learner.distributed.sharded_tensors import whole
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model import attention
from ftis_node.learner.model import policy_loading as policies
from ftis_node.learner.model.policy_loading import load_policy
from ftis_node.workers.liveness import die_with_owner
from ftis_node.workers.wire import dec_hook

assert transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM


def status_bytes(field):
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1])


original_load_sharded_policy = policies.load_sharded_policy


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


def measured(boot, ranks):
    peaks = []

    def load_sharded_policy(*arguments):
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        policy = original_load_sharded_policy(*arguments)
        peaks.append(status_bytes("VmHWM") - before)
        return policy

    policies.load_sharded_policy = load_sharded_policy
    policy = load_policy(boot, ranks)
    peak = torch.tensor([peaks[0] if rank == ranks.rank else 0 for rank in range(2)])
    ranks.add_up(peak)
    different = differing(boot, policy)
    tied = policy.causal_lm.get_output_embeddings().weight is policy.causal_lm.get_input_embeddings().weight
    (micro_batch,) = make_packed_micro_batches(make_batch(random_groups()), max_tokens=10_000)
    with torch.no_grad():
        logprobs = policy.logprobs(micro_batch).double().sum().item() if policy.packs else None
    return {
        "peak_bytes": int(peak.max()),
        "different": different,
        "tied": tied,
        "packs": policy.packs,
        "logprobs": logprobs,
    }


def fail_when_packed():
    """Replace the attention by one that does not support packed rows."""

    def attend(*arguments, plan=None, **more):
        if plan is not None:
            raise TypeError("packed rows are not supported")
        return attention.attend(*arguments, **more)

    attention.register = lambda: AttentionInterface.register(attention.ATTENTION, attend)


def main():
    if "FTIS_TEST_PACKING_FAILS" in os.environ:
        fail_when_packed()
    die_with_owner(os.getppid())
    boots = [msgspec.convert(boot, LearnerBoot, dec_hook=dec_hook) for boot in json.loads(sys.argv[1])]
    torch.set_num_threads(1)
    address = RankAddress.from_environment()
    ranks = RankGroup(address, boots[0])
    done = [measured(boot, ranks) for boot in boots]
    ranks.close()
    if address.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(done))


if __name__ == "__main__":
    main()
