"""`ftis-node join`: runs a node until it is stopped or has done its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, home_at


def join(
    model: Annotated[str, typer.Option("--model", help="Hub id or folder of the model to train.")],
    run: Annotated[
        str | None, typer.Option("--run", help="Preset or manifest file.", show_default="the preset that fits --task")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Task SPEC, such as gsm8k, gsm8k:PATH, rg:chain_sum, a=3+b=1.")
    ] = None,
    eval_task: Annotated[
        str | None, typer.Option("--eval-task", help="Task SPEC to evaluate on.", show_default="held-out problems")
    ] = None,
    peers: Annotated[list[str] | None, typer.Option("--peers", help="Multiaddr of a peer. Repeatable.")] = None,
    home: HomeOption = None,
    role: Annotated[str | None, typer.Option("--role", help="full, generator or learner.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="auto, vllm or torch.")] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--full", help="Train a LoRA adapter, or all weights.")] = None,
    listen: Annotated[list[str] | None, typer.Option("--listen", help="Multiaddr to listen on. Repeatable.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name shown to people.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of prompts, sampling and adapters.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Stop after this many steps in all.")] = None,
    track: Annotated[
        list[str] | None, typer.Option("--track", help="Tracker: tensorboard, wandb or trackio. Repeatable.")
    ] = None,
    status_port: Annotated[int | None, typer.Option("--status-port", help="Local HTTP port; 0: any free one.")] = None,
) -> None:
    """Generate, share and learn: run a node until stopped or until --steps are done.

    Without --peers the node works alone and says so. A home keeps its run: starting it again resumes at the same step.
    """
    from ftis_node.config.node import load_node_settings
    from ftis_node.node.plan import plan_run
    from ftis_node.node.run import run_until_stopped

    where = home_at(home)
    settings = load_node_settings(
        where.node_toml,
        model=_absolute_folder(model),
        role=role,
        engine=engine,
        lora=lora,
        listen=tuple(listen) if listen else None,
        peers=tuple(peers) if peers else None,
        name=name,
        seed=seed,
        status_port=status_port,
        tracking={"to": tuple(track)} if track else None,
    )
    run_until_stopped(settings, plan_run(run, task, eval_task=eval_task, home=where), where, steps=steps)


def _absolute_folder(model: str) -> str:
    """A folder by its full path, so that a resumed node finds it from anywhere; a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else model
