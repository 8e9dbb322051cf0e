"""`ftis-node ensemble`: accuracy of several models together on a task."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.completion import ENGINES, ENSEMBLE_MODES, one_of, some_of, task_specs
from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document
from ftis_node.cli.progress import show_fraction
from ftis_node.telemetry.terminal_text import columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftis_node.evaluation.result import EnsembleResult, EvaluationRow


TaskOption = Annotated[
    str, typer.Option("--task", help="Task SPEC, such as gsm8k or math500:PATH.", autocompletion=task_specs)
]
ModelsOption = Annotated[str, typer.Option("--models", help="Hub ids or folders, comma-separated.")]
SwarmOption = Annotated[
    list[str] | None,
    typer.Option("--swarm", help="Folder of exported models or of nodes' homes; repeatable, or comma-separated."),
]
ModeOption = Annotated[
    str,
    typer.Option(
        "--mode",
        help=f"{', '.join(ENSEMBLE_MODES)}, comma-separated, or all.",
        autocompletion=some_of(*ENSEMBLE_MODES, "all"),
    ),
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Maximum number of problems.")]
KOption = Annotated[int, typer.Option("--k", min=1, help="Also estimate pass@k and the majority of k samples.")]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=3, help="Maximum tokens of prompt and completion together.")
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="auto, vllm or torch, for the answers of single models; mixtures use torch.",
        autocompletion=one_of(*ENGINES),
    ),
]
DevPromptsOption = Annotated[
    int, typer.Option("--dev-prompts", min=1, help="Number of training prompts for the prior of the mode cached.")
]
DecayOption = Annotated[
    float, typer.Option("--decay", help="Weight of a dev prompt relative to the next newer one, at most 1.")
]
GatePromptsOption = Annotated[
    int, typer.Option("--gate-prompts", min=1, help="Number of training prompts for the mode gate.")
]
GateTaskOption = Annotated[
    str | None,
    typer.Option("--gate-task", help="Task SPEC of these prompts; default: --task.", autocompletion=task_specs),
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the samples; default: random.")]
TextOption = Annotated[Path | None, typer.Option("--text", help="Text file whose perplexity is also measured.")]

TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--template", help="Name of the chat template, for a tokenizer that has several.", show_default="the home's"
    ),
]


def ensemble(
    task: TaskOption,
    models: ModelsOption = "",
    swarm: SwarmOption = None,
    mode: ModeOption = "posterior,vote",
    limit: LimitOption = 512,
    k: KOption = 1,
    max_tokens: MaxTokensOption = 760,
    engine: EngineOption = "auto",
    dev_prompts: DevPromptsOption = 32,
    decay: DecayOption = 0.9,
    gate_prompts: GatePromptsOption = 256,
    gate_task: GateTaskOption = None,
    seed: SeedOption = None,
    text: TextOption = None,
    home: HomeOption = None,
    template: TemplateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure several models together on held-out problems: each alone, their mixture, their vote.

    Prompts are rendered by `[prompts]` of the home's node.toml, those of a home in --swarm by that home's settings.

    JSON shape: {task, n, k, experts: [{name, model, domain, pass_at_1, n, k, pass_at_k, truncated, unscored, too_long,
    completion_tokens_mean, majority_at_k, generated_tokens, forward_tokens}], modes: [{name, chosen, and the same but
    model and domain}], prior: {name: probability} or null, gate: {prompts, right: {name: share}, generated_tokens,
    forward_tokens} or null, text: [{name, tokens, nats, nats_per_token, perplexity}]}.
    """
    from ftis_node.evaluation.ensemble import MODES, run_ensemble
    from ftis_node.node.startup.prompts import prompts_for_command

    prompts = prompts_for_command(home_at(home), template=template)
    with show_fraction("ensemble") as progress:
        result = run_ensemble(
            _parts([models]),
            [Path(folder) for folder in _parts(swarm or [])],
            task,
            modes=MODES if mode == "all" else _parts([mode]),
            limit=limit,
            k=k,
            max_tokens=max_tokens,
            engine=engine,
            dev_prompts=dev_prompts,
            decay=decay,
            gate_prompts=gate_prompts,
            gate_task=gate_task,
            seed=seed,
            text=text,
            prompts=prompts,
            on_progress=progress,
        )
    print_document(_document(result), lambda: _lines(result), as_json=as_json)


def _parts(values: Iterable[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _document(result: EnsembleResult) -> dict[str, Any]:
    names = [entry.name for entry in result.experts]
    return {
        "task": result.task,
        "n": result.n,
        "k": result.k,
        "experts": [_flat(entry, leave_out=("chosen",)) for entry in result.experts],
        "modes": [_flat(entry, leave_out=("model", "domain")) for entry in result.modes],
        "prior": dict(zip(names, result.prior, strict=True)) if result.prior is not None else None,
        "gate": dataclasses.asdict(result.gate) | {"right": dict(zip(names, result.gate.right, strict=True))}
        if result.gate is not None
        else None,
        "text": [
            {**dataclasses.asdict(figures), "nats_per_token": figures.nats_per_token, "perplexity": figures.perplexity}
            for figures in result.text
        ],
    }


def _flat(entry: EvaluationRow, *, leave_out: Sequence[str]) -> dict[str, Any]:
    values = dataclasses.asdict(entry)
    figures = values.pop("result")
    return {**{key: value for key, value in values.items() if key not in leave_out}, **figures}


def _lines(result: EnsembleResult) -> list[str]:
    sampled = (f"pass@{result.k}", f"maj@{result.k}") if result.k > 1 else ()
    header = ("", "pass@1", *sampled, "generated", "forward", "domain")
    rows = [_row(entry, sampled=bool(sampled)) for entry in (*result.experts, *result.modes)]
    lines = [f"{result.task}: {result.n} problems", *columns(header, rows, num_left=1)]
    for entry in result.modes:
        if entry.chosen is not None:
            chosen = ", ".join(f"{name} {number}" for name, number in entry.chosen.items())
            lines.append(f"{entry.name} chose {chosen}")
    if result.prior is not None:
        lines.append(f"cached prior {_by_expert(result, result.prior)}")
    if result.gate is not None:
        gate = result.gate
        lines.append(
            f"gate learned from {gate.prompts} prompts, right {_by_expert(result, gate.right)}; "
            f"generated {gate.generated_tokens:,}, forward {gate.forward_tokens:,}"
        )
    if result.text:
        rows = [(f.name, f"{f.tokens:,}", f"{f.nats_per_token:.4f}", f"{f.perplexity:.3f}") for f in result.text]
        lines += ["", *columns(("text", "tokens", "nats/token", "perplexity"), rows, num_left=1)]
    return lines


def _by_expert(result: EnsembleResult, shares: Sequence[float]) -> str:
    return ", ".join(f"{entry.name} {share:.3f}" for entry, share in zip(result.experts, shares, strict=True))


def _row(entry: EvaluationRow, *, sampled: bool) -> tuple[str, ...]:
    shares = [entry.result.pass_at_1, *((entry.result.pass_at_k, entry.majority_at_k) if sampled else ())]
    tokens = (f"{entry.generated_tokens:,}", f"{entry.forward_tokens:,}")
    return (entry.name, *("-" if share is None else f"{share:.3f}" for share in shares), *tokens, entry.domain or "")
