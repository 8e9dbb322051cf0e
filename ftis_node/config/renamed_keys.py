"""Keys of older versions in node.toml, the environment and run manifests, with their present names.

A file that a person writes is refused and the error names the new key. Files of an older home are upgraded instead:
`node/startup/migrations.py` replaces them, and `with_new_keys` reads them until then.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

NODE_KEYS = {
    "door.allow": "access.allow",
    "door.trust": "access.trust",
    "door.ban_first_s": "access.ban_initial_s",
    "door.ban_longest_s": "access.ban_max_s",
    "door.groups_a_minute": "rate_limits.groups_per_minute",
    "door.tokens_a_minute": "rate_limits.tokens_per_minute",
    "door.scoring_s_a_minute": "rate_limits.scoring_s_per_minute",
    "door.strangers_groups_a_minute": "rate_limits.new_peers_groups_per_minute",
    "door.strangers_tokens_a_minute": "rate_limits.new_peers_tokens_per_minute",
    "door.strangers_scoring_s_a_minute": "rate_limits.new_peers_scoring_s_per_minute",
    "door.share_cap": "rate_limits.max_buffer_fraction_per_peer",
    "door.trusted_share": "rate_limits.max_buffer_fraction_per_trusted_peer",
    "door.max_skew_s": "validation.max_clock_skew_s",
    "door.min_mean_logprob": "validation.min_mean_logprob",
    "door.max_gain_nats": "validation.max_logprob_gap_nats",
    "door.copy_min_tokens": "validation.duplicate_min_tokens",
    "door.copy_max_share": "validation.duplicate_max_fraction",
    "door.copy_kept": "validation.duplicate_history_size",
    "door.audit_share": "validation.audit_fraction",
    "door.audit_max_kl": "validation.audit_max_kl",
    "door.audit_folders": "validation.audit_folders",
    "swarm.pull": "swarm.pull_policy",
    "swarm.small_swarm": "swarm.pull_all_max_peers",
    "swarm.linger_s": "swarm.shutdown_serve_s",
    "roles.look_s": "roles.poll_interval_s",
    "roles.look_timeout_s": "roles.poll_timeout_s",
    "roles.max_held": "roles.max_pending_versions",
    "roles.max_offered": "roles.max_published_versions",
    "roles.offer_every_steps": "roles.publish_every_steps",
    "generation.start_grace_s": "generation.startup_timeout_s",
    "generation.memory_share": "generation.gpu_memory_utilization",
    "generation.proof_tolerance": "generation.weight_check_tolerance_nats",
    "generation.max_version_span": "generation.max_policy_versions_per_completion",
    "memory.hand_over": "memory.weight_sync",
    "observe.stall_s": "observe.event_loop_stall_warn_s",
    "observe.stall_exit_s": "observe.event_loop_stall_exit_s",
    "observe.stuck_s": "observe.task_stuck_s",
}
VALUES = {"memory.placement": {"split": "shared", "sleep": "time_shared"}}
MANIFEST_KEYS = {
    "sampling.cut": "sampling.truncated_sampling",
    "step.share": "step.prompt_sharing",
    "step.choice": "step.group_selection",
    "step.patience_s": "step.foreign_wait_s",
    "step.steps_ahead": "step.max_async_level",
    "step.fill": "step.backfill_with_own",
    "step.own_domain_share": "step.own_domain_fraction",
    "step.divide": "step.task_allocation",
    "optimizer.kl_to_start": "optimizer.kl_coef",
}
ENV_PREFIX = "FTIS_"


def refuse_old_keys(tables: Mapping[str, Any], renamed: Mapping[str, str], *, source: str) -> None:
    """Raise ConfigError for the first old key or old value in `tables`, with its new name."""
    flat = _flat(tables)
    for old, new in renamed.items():
        if old in flat:
            raise ConfigError(f"{source}: {old!r} is now {new!r}: rename it")
    for key, values in VALUES.items():
        if (old := str(flat.get(key))) in values:
            raise ConfigError(f"{source}: {key} = {old!r} is now {values[old]!r}: rename it")


def refuse_old_variables(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for the first environment variable of an old key, with its new name."""
    for old, new in NODE_KEYS.items():
        if variable_of(old) in environment:
            raise ConfigError(f"the environment variable {variable_of(old)} is now {variable_of(new)}: rename it")


def variable_of(key: str) -> str:
    """Return the environment variable of a node setting: `FTIS_SECTION__KEY`."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def with_new_keys(tables: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of `tables` with each old key and each old value under its new name. A new key in it stays."""
    changed, flat = copy.deepcopy(dict(tables)), _flat(tables)
    for old, new in renamed.items():
        if old in flat:
            (old_section, old_name), (section, name) = old.split("."), new.split(".")
            del changed[old_section][old_name]
            table = changed.setdefault(section, {})
            if isinstance(table, dict):
                table.setdefault(name, flat[old])
    for key, values in VALUES.items():
        if (value := str(_flat(changed).get(key))) in values:
            section, name = key.split(".")
            changed[section][name] = values[value]
    return {name: table for name, table in changed.items() if table != {} or tables.get(name) == {}}


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all sections by `section.key`."""
    return {
        f"{section}.{key}": value
        for section, table in tables.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }
