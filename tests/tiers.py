"""Tests that only `make test-all` or `make test-long` runs, and tests that need more than a machine with Python.

Paths are folders, files or test functions. A path marks all tests below it.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
LONG: Final = (
    "tests/chaos/test_chaos.py::test_a_swarm_recovers_from_one_fault_of_each_kind",
    "tests/deploy/test_packages.py::test_two_builds_of_the_same_files_give_the_same_bytes",
    "tests/documented/test_site.py",
    "tests/integrations/test_trl_swarm.py::test_in_the_example_two_trainers_learn_from_each_other",
    "tests/lab/experiment/test_order_of_methods.py",
    "tests/lab/experiment/test_compare_command.py::test_tables_are_made_in_parallel_and_their_processor_time_is_counted",
    "tests/lab/test_hdee.py::test_the_command_writes_its_tables_and_keeps_finished_trials",
    "tests/network/test_laptop.py",
    "tests/network/test_nat.py::test_a_real_node_behind_a_nat_exchanges_groups_and_trains",
    "tests/network/test_outgoing_packets.py::test_a_node_sends_only_to_the_peers_that_it_was_given[vllm]",
    "tests/lab/test_tiny.py::test_a_model_mostly_makes_the_mistake_of_its_recipe",
)
"""Tests of many minutes, which `.ci/run` leaves out: `make test-long` runs them, each week and before a release."""
SCENARIOS: Final = (
    "tests/attacks", "tests/chaos/test_chaos.py::test_a_node_loses_nothing_acknowledged_in_power_cuts",
    "tests/deploy/test_image_runs.py", "tests/documented/test_running.py::test_the_node_of_the_example_trains_a_step",
    "tests/evaluation/test_new_process.py", "tests/injection/test_full_node.py",
    "tests/integrations/test_trl_swarm.py", "tests/lab/experiment/test_compare_command.py",
    "tests/bench/test_gpu_check.py::test_transfer_runs_without_vllm_and_hivemind",
    "tests/lab/test_card_check.py::test_the_figures_of_both_workers_are_in_the_file_and_the_table",
    "tests/lab/test_demo.py::test_two_nodes_train_and_answer_some_problems", "tests/lab/test_hdee.py",
    "tests/algorithms/plugins/test_plugins.py::test_installed_plugins_are_compared_with_a_built_in_one",
    "tests/bench/test_simulation.py", "tests/cli/test_first_start_errors.py", "tests/cli/test_join_output.py",
    "tests/node/test_two_homes.py",
    "tests/learner/test_learner_families.py::test_a_family_is_trained_with_an_adapter",
    "tests/learner/model/test_learner_kernels.py::test_compiled_layers_give_the_same_step",
    "tests/learner/distributed/test_learner_shards.py::test_the_shards_of_each_rank_are_those_of_the_model",
    "tests/learner/distributed/test_learner_ranks.py", "tests/learner/test_learner_shared_base.py",
    "tests/node/test_poisoned.py", "tests/node/test_roles.py", "tests/node/test_siblings.py",
    "tests/node/test_stop.py",
)  # fmt: skip
SMOKE: Final = (
    "tests/generation/test_generation_vllm_engine.py::"
    "test_log_probs_equal_a_fresh_forward_pass_before_and_after_updates",
)
"""Scenarios that `make test` runs too: the smoke test of vLLM, if it is installed."""
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "vllm": (
        "tests/generation/test_generation_adapters.py::test_each_version_is_served_as_the_learner_computes_it",
        "tests/generation/test_generation_adapters.py::test_completions_in_flight_keep_their_adapter_and_new_ones_get_the_newest",
        "tests/generation/test_generation_adapters.py::test_completions_are_aborted_when_too_old_or_without_an_adapter_slot",
        "tests/generation/test_generation_adapters.py::test_a_refused_adapter_leaves_the_previous_version",
        "tests/generation/test_generation_adapters.py::test_vllm_on_a_4_bit_base_serves_each_adapter_as_the_learner_computes_it",
        "tests/generation/test_generation_base.py::test_a_learner_computes_from_the_tensors_of_vllm",
        "tests/generation/test_generation_base.py::test_vllm_with_packed_matrices_shares_no_base",
        "tests/generation/test_generation_vllm_engine.py",
        "tests/generation/test_generation_vllm_faults.py",
        "tests/generation/test_generation_vllm_shared.py",
        "tests/generation/test_generation_vllm_parts.py::test_vllm_knows_every_variable_and_option_of_a_quick_start",
        "tests/learner/test_learner_families.py::test_vllm_serves_a_family_while_it_is_trained_or_is_refused",
        "tests/network/test_outgoing_packets.py::test_a_node_sends_only_to_the_peers_that_it_was_given[vllm]",
        "tests/node/test_siblings.py::test_every_sibling_trains_on_groups_of_every_other[vllm]",
    ),
    "root": ("tests/network",),
    "node": ("tests/conformance/test_node_peer.py",),
    "gpu": (
        "tests/generation/test_generation_vllm_shared.py::test_vllm_on_a_gpu_serves_tensors_of_another_process",
        "tests/workers/test_page_locked.py::test_a_gpu_writes_and_reads_locked_pages",
        "tests/workers/test_shared_weights.py::test_two_processes_share_weights_on_one_gpu",
        "tests/learner/model/test_learner_attention.py::test_attention_on_a_gpu_equals_masked_attention",
    ),
}
ALL_SCENARIOS: Final = (*SCENARIOS, *NEEDS["vllm"], *NEEDS["root"], *NEEDS["node"])
SHARED: Final[dict[str, tuple[str, ...]]] = {
    "vllm": (  # one process with vLLM
        "tests/generation/test_generation_adapters.py",
        "tests/generation/test_generation_vllm_engine.py",
        "tests/generation/test_generation_vllm_shared.py",
    ),
    "attacks": ("tests/attacks/",),  # they attack one node
    "trl": (  # its import takes ten seconds of a processor
        "tests/integrations/test_trl.py", "tests/integrations/test_trl_episodes.py",
        "tests/integrations/test_trl_exchange.py", "tests/integrations/test_trl_foreign.py",
    ),
    "swarm": (  # tests/small_swarm.py
        "tests/dashboard/test_real_home.py", "tests/documented/test_running.py",
        "tests/node/http_api/test_observe.py", "tests/node/training/test_tracking.py", "tests/node/test_swarm.py",
        "tests/node/test_two_homes.py",
    ),
}  # fmt: skip
"""Files that share nodes, engines or a slow import: one worker of pytest-xdist runs them all."""
LONGEST_FIRST: Final = ("attacks", "swarm")
"""Groups that take minutes. They run first, so that no worker waits for another at the end."""


def mark(items: Iterable[pytest.Item]) -> None:
    """Give each test the markers of this table, and a skip if the machine lacks a need."""
    for item in items:
        if _is_in(item.nodeid, LONG):
            item.add_marker(pytest.mark.long)
        elif _is_in(item.nodeid, ALL_SCENARIOS) and not _is_in(item.nodeid, SMOKE):
            item.add_marker(pytest.mark.scenario)
        for need, paths in NEEDS.items():
            if _is_in(item.nodeid, paths):
                item.add_marker(getattr(pytest.mark, need))
                if missing := MISSING[need]():
                    item.add_marker(pytest.mark.skip(reason=missing))


def _is_in(nodeid: str, paths: Iterable[str]) -> bool:
    """Return whether a test is one of these, or in one of these files or folders."""
    return any(nodeid == path or nodeid.startswith((f"{path}/", f"{path}::", f"{path}[")) for path in paths)


@cache
def _no_vllm() -> str:
    return "" if find_spec("vllm") else "vLLM is not installed: run `make setup-vllm`"


@cache
def _no_root() -> str:
    return "" if os.geteuid() == 0 else "needs root: run it as root, in a container for instance"


@cache
def _no_node() -> str:
    if shutil.which("node") is None:
        return "Node.js is not installed"
    is_installed = (EXAMPLES / "node-peer" / "node_modules" / "libp2p").is_dir()
    return "" if is_installed else "its packages are not installed: run `npm install` in examples/node-peer"


@cache
def _no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs an NVIDIA GPU that torch can use"


MISSING: Final[dict[str, Callable[[], str]]] = {"vllm": _no_vllm, "root": _no_root, "node": _no_node, "gpu": _no_gpu}
"""By need: why this machine cannot run a test that has it; empty if it can."""
