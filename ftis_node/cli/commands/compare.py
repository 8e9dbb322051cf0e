"""`ftis-node compare`: an experiment over methods, pairings and seeds, with table, curves and plots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ftis_node.cli.options import Device
from ftis_node.cli.progress import show_fraction
from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from ftis_node.config.manifest import RunManifest
    from ftis_node.lab.experiment.trial import Trial
    from ftis_node.lab.experiment.trial_matrix import Experiment
    from ftis_node.lab.experiment.trial_result import TrialResult
    from ftis_node.lab.hdee import Domains

DEFAULT_METHODS = "alone,nois,vis,tis,ftis"
HDEE = "hdee"
HDEE_METHODS = "alone,ftis"  # experts that train separately, and experts that share
NOT_OF_HDEE = ("controls", "share", "delay", "nodes", "speeds", "attack", "attackers", "codec")
DEFAULT_STEPS = 40
TINY_PRESETS = {"arithmetic": "arithmetic-compare", "sums": "sums-ftis", "guess": "guess-ftis"}
RULE: Final = (
    "`alone` generates all of them itself. In a swarm of n nodes each generates an n-th and receives the rest. "
    "`alone:own` generates and trains on an n-th."
)
HDEE_RULE: Final = (
    "The four arms have the same compute: 6 operations for each parameter and trained token, 2 for each generated one."
)


def compare(
    context: typer.Context,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help="size, expertise, peft, blind, sums, sums-large, unlike, or DIR,DIR[,...] (DIR:lora: an adapter); "
            "repeatable. Or hdee, hdee:DIR, hdee:DIR,DIR: an expert for each part of --task. With --model-seeds N, "
            "{seed} in a DIR is 0 to N-1."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; alone[:own][:updates=K][:METHOD], or METHOD, or METHOD:parameter=value. "
            f"Default: {DEFAULT_METHODS}."
        ),
    ] = None,
    share: Annotated[
        str,
        typer.Option(
            help="vertical, filled, horizontal, sapo:I/J[/G], newest:J or a plug-in, PLUGIN[:J]; comma-separated."
        ),
    ] = "vertical",
    delay: Annotated[
        str,
        typer.Option(
            help="none, fixed:K, lognormal:MIN-MAX, in steps; DELAY@peer: of the last node only; comma-separated."
        ),
    ] = "none",
    nodes: Annotated[
        str | None, typer.Option(help="Nodes in a swarm; comma-separated. Default: one for each model of the pairing.")
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(
            help="Without a barrier: relative speed of each node, such as 4,2,1,2. --steps are those of the fastest. "
            "Default: all nodes take each step together."
        ),
    ] = None,
    attack: Annotated[
        str, typer.Option(help="Attack of the last nodes: none, rewards, logprobs, positives, padded, mimic.")
    ] = "none",
    attackers: Annotated[int, typer.Option(min=1, help="Number of attackers with --attack.")] = 1,
    codec: Annotated[str, typer.Option(help="Codec of groups: exact, lossless, lossy; comma-separated.")] = "exact",
    controls: Annotated[
        bool,
        typer.Option(
            "--controls",
            help="Add the controls to --methods: each model alone, with a whole update and with a swarm node's part.",
        ),
    ] = False,
    model_seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds for the initial models of every pairing.")
    ] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds for every setting.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each node.")] = DEFAULT_STEPS,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts of an update, over all nodes; 0: as in --run.")] = 0,
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between evaluations; 0: as in --run.")] = 0,
    run: Annotated[str | None, typer.Option(help="Preset or TOML file with all other settings.")] = None,
    task: Annotated[str | None, typer.Option(help="Task SPEC to train on.")] = None,
    ood_task: Annotated[
        str | None, typer.Option(help="Task SPEC to evaluate without training on it. With hdee: excluded domains.")
    ] = None,
    lora_rank: Annotated[int, typer.Option(min=1, max=4096, help="Rank of adapters; alpha is twice that.")] = 8,
    jobs: Annotated[int, typer.Option(min=0, help="Trials in parallel; 0: one per core, or one on a GPU.")] = 0,
    device: Annotated[Device, typer.Option(help="Device of the models.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for models, runs and results.")] = Path("compare-out"),
) -> None:
    """Compare methods: real nodes over an in-process network, the same number of completions in every update.

    Writes results.json, curves.csv, curves.png and table.md. A second run resumes and runs only missing trials.
    """
    from ftis_node.config.workers import LoraSection
    from ftis_node.lab.experiment.pairs import resolve_pairs, tiny_models
    from ftis_node.lab.experiment.report import write_report
    from ftis_node.lab.experiment.trial_matrix import Experiment
    from ftis_node.models import pick_device

    pairs = tuple(pair or ["size"])
    domains = None
    if any(name.partition(":")[0] == HDEE for name in pairs):
        _check_hdee(context, pairs)
        domains = _domains(run, task, ood_task)
        run, task = run or domains.preset, str(domains.mixture)
    base = _base(run, task, pairs, prompts=prompts, eval_every=eval_every)
    if base.episode is not None and _split(attack) != ("none",):
        raise UsageError(f"--attack makes completions of one turn, and run {base.name} has episodes: omit --attack")
    task_spec, eval_specs = (task or "", domains.held_out) if domains else _specs(task or base.task, ood_task)
    models = out / "models"
    _check_model_seeds(model_seeds, pairs)
    seeds_of_models = range(model_seeds)
    named = () if domains else pairs
    experiment = Experiment(
        base=base,
        pairs=tuple(pair for each in seeds_of_models for pair in resolve_pairs(named, models, seed=each)),
        methods=_split(methods or (HDEE_METHODS if domains else DEFAULT_METHODS)),
        task_spec=task_spec,
        eval_specs=eval_specs,
        steps=steps,
        seeds=range(seed, seed + seeds),
        lora_adapter=LoraSection(rank=lora_rank, alpha=2 * lora_rank),
        shares=_split(share),
        delays=_split(delay),
        num_nodes=_numbers("--nodes", nodes, least=2),
        speeds=_numbers("--speeds", speeds, least=1),
        attacks=_split(attack),
        num_attackers=attackers,
        codecs=_split(codec),
        controls=controls,
        device=device,
    )
    trials = _hdee_trials(experiment, domains, pairs[0], models, seeds_of_models) if domains else experiment.trials()
    num_completions = experiment.completions_per_update
    rule = HDEE_RULE if domains else RULE
    typer.echo(f"The rule: every update takes {num_completions} completions. {rule}", err=True)
    specs = {name: how for each in seeds_of_models for name, how in tiny_models(pairs, seed=each).items()}
    usual_jobs = (os.cpu_count() or 1) if pick_device(device) == "cpu" else 1
    results = _run(trials, specs, out, jobs=jobs or usual_jobs)
    if domains:
        from ftis_node.lab.hdee_report import write_hdee_report

        typer.echo(write_hdee_report(experiment, domains, results, out))
    else:
        typer.echo(write_report(experiment, results, out))
    typer.echo(f"results.json, curves.csv, curves.png and table.md are in {out}", err=True)


def _domains(run: str | None, task: str | None, excluded: str | None) -> Domains:
    """Return the domains of --task, else those of the run, else three of arithmetic."""
    from ftis_node.config.manifest import load_manifest
    from ftis_node.lab.hdee import THREE_PARTS, read_domains
    from ftis_node.tasks import parse_spec

    own = load_manifest(run).task if run and not task else THREE_PARTS
    by_difficulty = THREE_PARTS if own == parse_spec(THREE_PARTS).canonical else own  # a run sorts the parts by name
    return read_domains(task or by_difficulty, excluded)


def _hdee_trials(experiment: Experiment, domains: Domains, pair: str, models: Path, seeds: range) -> list[Trial]:
    from ftis_node.lab.hdee import hdee_trials, starts_of

    trials = []
    with show_fraction("models") as show:
        for seed in seeds:
            starts = starts_of(pair, domains, models, seed=seed, on_progress=show)
            trials += hdee_trials(experiment, domains, starts, model_seed=seed)
    return trials


def _run(trials: list[Trial], models: dict[str, dict[str, Any]], out: Path, *, jobs: int) -> list[TrialResult]:
    """Make the tiny models that are missing, and run the trials."""
    from ftis_node.lab.experiment.pairs import make_models
    from ftis_node.lab.experiment.runner import run_trials
    from ftis_node.models import resolve_model

    out.mkdir(parents=True, exist_ok=True)
    folder = out / "models"
    used = dict.fromkeys(member.model for trial in trials for member in trial.members)
    with show_fraction(f"{len(trials)} trials") as show:
        used_models = {name: how for name, how in models.items() if str(folder / name) in used}
        make_models(used_models, folder, jobs=jobs, watch=show)
        show(None, "starting")
        for model in used:
            resolve_model(model, on_progress=show)  # before the first of many trials, and once
        return run_trials(trials, out, jobs=jobs, watch=show)


def _check_hdee(context: typer.Context, pairs: tuple[str, ...]) -> None:
    if len(pairs) > 1:
        raise UsageError("--pair hdee is a separate experiment: run it without other pairings")
    for name in NOT_OF_HDEE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise UsageError(f"--pair hdee has one node for each part of --task, and its own sharing: omit --{option}")


def _check_model_seeds(model_seeds: int, pairs: tuple[str, ...]) -> None:
    from ftis_node.lab.experiment.pairs import SEED_MARK, TINY_PAIRS

    made_here = (*TINY_PAIRS, HDEE)
    if model_seeds > 1 and not all(pair in made_here or SEED_MARK in pair for pair in pairs):
        raise UsageError(f"--model-seeds needs {', '.join(made_here)}, or folders with {SEED_MARK} in their path")


def _base(run: str | None, task: str | None, pairs: tuple[str, ...], *, prompts: int, eval_every: int) -> RunManifest:
    """Return the manifest from which all trials start. 0 and None keep its values."""
    from ftis_node.config.manifest import load_manifest, preset_for_task
    from ftis_node.lab.experiment.pairs import TINY_PAIRS
    from ftis_node.tasks import parse_spec

    own_tasks = {TINY_PAIRS.get(name, "") for name in pairs}
    if len(own_tasks) > 1 and not task:
        raise UsageError(f"{' and '.join(pairs)} have different tasks: compare them separately, or give a --task")
    own_task = own_tasks.pop() if len(own_tasks) == 1 else ""
    is_tiny = own_task and (task or own_task).startswith(own_task)
    manifest = load_manifest(run or (TINY_PRESETS[own_task] if is_tiny else preset_for_task(task or "")), task=task)
    if not (eval_every or manifest.eval.every_steps):
        raise UsageError(f"run {manifest.name} has no evaluations (eval.every_steps = 0): give --eval-every N")
    changes: dict[str, object] = {"task": parse_spec(task or manifest.task).canonical}
    if prompts:
        changes["step"] = manifest.step.model_copy(update={"own_groups": prompts, "foreign_groups": 0})
    if eval_every:
        changes["eval"] = manifest.eval.model_copy(update={"every_steps": eval_every})
    return manifest.model_copy(update=changes)


def _specs(task: str, ood_task: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the task with its paths, and the tasks to evaluate, the task's held-out problems first."""
    from ftis_node.tasks import held_out_spec, parse_spec

    spec = parse_spec(task)
    held_out = held_out_spec(spec)
    if held_out is None:
        raise UsageError(f"{task} has no held-out problems: give a folder with train and test files")
    others = (str(parse_spec(ood_task)),) if ood_task else ()
    return str(spec), (str(held_out), *others)


def _split(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise UsageError("an option has an empty list: give at least one value")
    return parts


def _numbers(option: str, text: str | None, *, least: int) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(part) for part in _split(text))
    except ValueError:
        raise UsageError(f"{option} takes numbers such as 2,4,8, not {text!r}") from None
    if min(numbers) < least:
        raise UsageError(f"{option}: each is at least {least}; for a model without peers, use the method alone")
    return numbers
