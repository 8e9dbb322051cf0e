"""The summaries that `join` prints before and after a start.

The first summary has at most ten lines. It lists which data the node sends to others, so that users can consent.
"""

from __future__ import annotations

import shlex

import msgspec

from ftis_node import __version__
from ftis_node.config.home import Home
from ftis_node.config.home_files import raised_budgets, start_command
from ftis_node.config.node import NodeSettings
from ftis_node.config.roles import ROLES
from ftis_node.node.context import NodeCounters
from ftis_node.node.startup.factories import NodeInputs
from ftis_node.telemetry.health_summary import BUDGET_UNITS, duration, plural
from ftis_node.telemetry.status import EndWord, Status
from ftis_node.workers.durable import checkpoint_step

LABEL_WIDTH = 10
CONTENT = "groups (prompts, completions, log-probs, rewards)"


def start_lines(inputs: NodeInputs, *, num_parameters: int, step: int) -> list[str]:
    settings, manifest, home = inputs.settings, inputs.manifest, inputs.home
    what = f"{inputs.source.name} ({num_parameters:,} parameters)"
    lines = [f"ftis-node {__version__} {ROLES[settings.role].does} {what} on {inputs.task.name}"]
    facts = {
        "run": f"{manifest.name} ({manifest.run_id[:12]}), method {manifest.method.name}; {_steps(settings, step)}",
        "domain": "" if inputs.domain is inputs.task else f"{inputs.domain.name}; --task {manifest.task} ends it",
        "trains": inputs.training,
        "memory": inputs.arrangement.memory,
        "peers": _peers(inputs),
        "shares": _shared(settings),
        "files": f"all in {home.root}; the workers print to {home.logs.name} in it",
        "watch": _command("dashboard", home),
        "stop": "ctrl-C; it saves the newest step (a large model: minutes), and the same command resumes",
    }
    return lines + _labeled(facts)


def end_lines(
    before: Status, after: Status, home: Home, *, settings: NodeSettings, counters: NodeCounters
) -> list[str]:
    """Return the lines for the end of a start, from its first and last status and its counters."""
    saved = checkpoint_step(home.checkpoints) if settings.learns else after.learner.step
    is_finished = after.node.end == EndWord.FINISHED
    raised = raised_budgets(msgspec.to_builtins(after.budget)) if is_finished else None
    facts = {
        "pass@1": _accuracy(after),
        "groups": _groups(before, after, counters),
        "tokens": _tokens(before, after),
    } | _next_commands(after, home, raised=raised, saved=saved if settings.learns else None)
    return [_heading(before, after, saved=saved), *_labeled(facts, indent="  ")]


def finished_lines(last: Status, home: Home, *, settings: NodeSettings) -> list[str] | None:
    """Return the lines for a home whose training budget is already used up; None if there is work to do.

    `last` is the status that the home's last start saved.
    """
    limits, used = settings.budget, last.budget
    if not settings.learns or not last.node.peer_id:
        return None
    done = {
        "learn_steps": (min(last.learner.step, used.learn_steps.used), limits.learn_steps),
        "learn_tokens": (used.learn_tokens.used, limits.learn_tokens),
    }
    reached = {name: limit for name, (amount, limit) in done.items() if limit is not None and amount >= limit}
    if not reached:
        return None
    what = ", ".join(f"{limit:,} {BUDGET_UNITS[name]}" for name, limit in reached.items())
    raised = {name: 2 * max(done[name][0], limit) for name, limit in reached.items()}
    facts = {"pass@1": _accuracy(last)} | _next_commands(last, home, raised=raised, saved=last.learner.step)
    heading = f"finished: the budget of {what} is used up, there is nothing to do"
    return [heading, *_labeled(facts, indent="  ")]


def _next_commands(status: Status, home: Home, *, raised: dict[str, int] | None, saved: int | None) -> dict[str, str]:
    """Return what to do after an end. `saved` is the step of the newest checkpoint, None in a role without one."""
    is_trained = saved is not None and status.learner.step
    return {
        "saved": str(home.root) if saved is None else f"{home.root}, the checkpoint of step {saved}",
        "ask": _command("chat", home) if is_trained else "",
        "export": _command("export", home, "--out", "MODEL") if is_trained else "",
        "report": _command("report", home),
        "go on": start_command(home, raised=raised),
    }


def _labeled(facts: dict[str, str], *, indent: str = "") -> list[str]:
    return [f"{indent}{label:{LABEL_WIDTH}}{text}" for label, text in facts.items() if text]


def _steps(settings: NodeSettings, step: int) -> str:
    if settings.role == "exchange":
        return "it serves a trainer on this machine"
    if not settings.learns:
        return f"follows {settings.roles.follow}"
    limit = settings.budget.learn_steps
    begins = f"goes on after step {step}" if step else "begins at step 0"
    return begins + (f", ends after step {limit}" if limit is not None else ", no step limit")


def _peers(inputs: NodeInputs) -> str:
    settings = inputs.settings
    number = len(settings.peers)
    known = f"{number} address{'es' if number > 1 else ''} to dial first" if number else "none given: it works alone"
    if settings.role == "learner":
        return f"{known}; its generators: --role generator --follow {inputs.identity.peer_id}"
    return known if number else f"{known} until others dial it; what they type: {_command('invite', inputs.home)}"


def _shared(settings: NodeSettings) -> str:
    what = "weights" if settings.role == "learner" else CONTENT
    whom = "members of the run" if settings.peers else "peers that dial it"
    watchers = settings.tracking.to
    more = f"; figures go to {', '.join(watchers)}" if watchers else ""
    return f"{what}, name and addresses, with {whom}; no other file leaves{more}"


def _heading(before: Status, after: Status, *, saved: int) -> str:
    first, last = before.learner.step, after.learner.step
    groups = plural(after.generation.groups_made - before.generation.groups_made, "group")
    if after.node.role == "exchange":
        done = f"{groups} of the trainer shared"
    elif last:
        done = f"{plural(last - first, 'step')} trained" + (f" ({first} to {last})" if last > first else "")
    else:
        done = f"{groups} generated"
    spent = duration(after.node.uptime_s)
    if after.node.end == EndWord.FINISHED:
        return f"finished: {done} in {spent}"
    end = f"stopped at step {last}" if last else "stopped"
    return f"{end}, {'saved' if saved >= last else f'saved only to step {saved}'}: {done} in {spent}"


def _accuracy(status: Status) -> str:
    if not status.eval:
        return ""
    same = [entry for entry in status.eval if entry.task == status.eval[-1].task]
    first, last = same[0], same[-1]
    at_first = f"{first.pass_at_1:.3f} (step {first.step}) -> " if first is not last else ""
    return f"{at_first}{last.pass_at_1:.3f} (step {last.step}), {last.n} problems of {last.task}"


def _groups(before: Status, after: Status, counters: NodeCounters) -> str:
    own, foreign = counters.groups_trained_own, counters.groups_trained_foreign
    made = after.generation.groups_made - before.generation.groups_made
    swarm = after.swarm
    if after.node.role == "exchange":
        return f"{swarm.groups_sent} sent, {swarm.groups_confirmed} confirmed by peers; {foreign} given to the trainer"
    return (
        f"trained on {own} own and {foreign} foreign; {made} generated, {swarm.groups_sent} sent, "
        f"{swarm.groups_confirmed} confirmed by peers"
    )


def _tokens(before: Status, after: Status) -> str:
    if after.node.role == "exchange":
        return ""
    made = after.generation.tokens_made - before.generation.tokens_made
    trained = after.budget.learn_tokens.used - before.budget.learn_tokens.used
    return f"{made:,} generated, {trained:,} trained on"


def _command(name: str, home: Home, *more: str) -> str:
    return shlex.join(["ftis-node", name, "--home", str(home.root), *more])
