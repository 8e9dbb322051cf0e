"""`ftis-node status`: one screen that says whether the node contributes, learns and is healthy."""

from __future__ import annotations

from typing import Any

import typer

from ftis_node.cli.common import HomeOption, JsonOption, home_at, print_json
from ftis_node.cli.reading import read_document


def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show what a node does, or last did.

    JSON shape: {schema, node, run, model, generation, learner, swarm, replay, eval: [{step, task, pass_at_1, n}]}.
    """
    document = read_document(home_at(home), "/status")
    if as_json:
        print_json(document)
    else:
        typer.echo("\n".join(_lines(document)))


def _lines(document: dict[str, Any]) -> list[str]:
    node, run, model = document["node"], document["run"], document["model"]
    generation, learner = document["generation"], document["learner"]
    swarm, replay = document["swarm"], document["replay"]
    lines = [
        f"node        {node['name']} ({node['peer_id']}), {node['state']}, up {node['uptime_s']:.0f} s",
        f"run         {run['name']} ({run['id'][:12]}), {run['method']} on {run['task']}",
        f"model       {model['name']}, {model['parameters']:,} parameters, {model['trainable_parameters']:,} trained",
        f"generation  {generation['state']} ({generation['engine']}), {generation['tokens_per_s']:.0f} tokens/s, "
        f"{generation['groups_made']} groups, version {generation['policy_version']}",
        f"learner     {learner['state']}, step {learner['step']}, loss {_number(learner['loss'])}, "
        f"reward {_number(learner['reward_mean'])}, rate {_number(learner['learning_rate'])}, "
        f"KL to the start {_number(learner['kl_to_start'])}, "
        f"groups used: {learner['own_groups']} own, {learner['foreign_groups']} foreign",
        f"mismatch    {_mismatch(learner)}",
        f"swarm       {swarm['state']}: {swarm['reason']}",
        f"            {swarm['peers_connected']} connected, {swarm['groups_sent']} sent, "
        f"{swarm['groups_confirmed']} confirmed, {swarm['groups_received']} received, "
        f"{sum(swarm['groups_refused'].values())} refused",
        f"replay      {replay['waiting']} waiting, {replay['ready']} ready, {replay['taken']} taken, "
        f"{replay['disk_bytes'] / 1e6:.1f} MB",
    ]
    lines += [
        f"eval        step {e['step']}: pass@1 {e['pass_at_1']:.3f} ({e['n']} of {e['task']})" for e in document["eval"]
    ]
    return lines


def _mismatch(learner: dict[str, Any]) -> str:
    """What engine and learner disagree by."""
    if learner["mismatch_kl"] is None:
        return "not measured yet"
    return (
        f"KL {learner['mismatch_kl']:.2g}, {learner['mismatch_share']:.1%} of ratios off by more than 1 % "
        f"(version {learner['mismatch_version']})"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
