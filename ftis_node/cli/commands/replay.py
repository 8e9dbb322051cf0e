"""`ftis-node replay`: the rollouts in the buffer, as a list, one by one, in numbers, or exported."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document
from ftis_node.errors import UsageError
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.terminal_text import MIB, columns, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftis_node.config.home import Home
    from ftis_node.replay.group_history import CompletionDetails, GroupHistory
    from ftis_node.replay.reader import GroupSummary, ReplayReader

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Show or export the replay buffer of a running or stopped node."
)

LIST_HEADER = ("GROUP", "AGE", "OF", "PROBLEM", "STATE", "STEP", "REWARD", "TOKENS")
ExportFormat = Literal["jsonl", "parquet", "envelope"]
WIDTH = 80  # of a group
MAX_LISTED = 1_000_000


@app.command("list")
def list_groups(
    home: HomeOption = None,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="Maximum number of groups, newest first.")] = 20,
    state: Annotated[
        Literal["ready", "taken", "released"] | None,
        typer.Option(help="Only groups in this state: ready, taken or released."),
    ] = None,
) -> None:
    """List groups, newest first.

    JSON shape: [{id, own, sender, number, state, reason, step, task, prompt_index, model, policy_version, created_at,
    admitted_at, num_tokens, rewards: [..]}].
    """
    summaries = _open(home).list_groups(limit=limit, state=state)
    rows = [dataclasses.asdict(summary) for summary in summaries]
    print_document(rows, lambda: _table(summaries, now=time.time()), as_json=as_json)


@app.command("show")
def show(
    group_id: Annotated[str, typer.Argument(help="The group's id, or its first characters (4 or more).")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one group: prompt, completions, result of validation, use.

    JSON shape: the row of `list`, and completions: [{token_ids, logprobs, text, num_tokens, mean_logprob,
    lowest_logprob, finish_reason, reward, claimed_reward}] (of a group that came as text: text, mean_logprob,
    sender_tokens, ...; of an episode also turns and observations), prompt: {task, split, index, text, answer, missing},
    verdict, refusal, detail, used, weights_of, tokenizer, temperature, texts_missing, events: [..]. A refused group has
    id, verdict and events only.
    """
    from ftis_node.replay.group_history import read_group_history
    from ftis_node.view.groups import group_lines
    from ftis_node.view.spans import text_lines

    history = read_group_history(home_at(home), group_id)
    if history is None:
        raise UsageError(f"{group_id!r} matches no group, or several: `ftis-node replay list` shows the ids")
    print_document(group_document(history), lambda: text_lines(group_lines(history), WIDTH), as_json=as_json)


def group_document(history: GroupHistory) -> dict[str, Any]:
    """Return the history as `replay show --json` prints it."""
    row = {"id": history.id} if history.summary is None else dataclasses.asdict(history.summary)
    rest = dataclasses.asdict(dataclasses.replace(history, completions=()))
    del rest["id"], rest["summary"]
    reason = rest.pop("reason")
    completions = [_completion_row(completion) for completion in history.completions]
    return {**row, **rest, "refusal": reason, "completions": completions}


def _completion_row(completion: CompletionDetails) -> dict[str, Any]:
    row = dataclasses.asdict(completion)
    del row["versions"], row["pieces"]
    if not completion.turns:
        del row["turns"], row["observations"]
    if not completion.token_ids:
        del row["token_ids"], row["logprobs"], row["lowest_logprob"]
        row["sender_tokens"] = row.pop("num_tokens")
    return row


@app.command("stats")
def stats(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show totals of the buffer.

    JSON shape: {ready, taken, released: {reason: n}, tokens, disk_bytes, groups_own, groups_foreign, tokens_own,
    tokens_foreign, trained_own, trained_foreign}.
    """
    figures = dataclasses.asdict(_open(home).figures())
    print_document(figures, lambda: _figures(figures), as_json=as_json)


@app.command("export")
def export(
    out: Annotated[Path, typer.Option(help="File to write; for envelopes a folder.")],
    home: HomeOption = None,
    format_: Annotated[ExportFormat, typer.Option("--format", help="Format to write.")] = "jsonl",
    text: Annotated[
        bool, typer.Option("--text", help="Add prompt, completions as text, expected answer and the sender's name.")
    ] = False,
    flat: Annotated[bool, typer.Option("--flat", help="Write one row per completion, not per group.")] = False,
) -> None:
    """Export the stored groups: rollouts as JSON lines or Parquet, or the signed envelopes, one file each.

    A row is that of `list`, with completions: [{token_ids, logprobs, finish_reason, reward}] (of a group that came as
    text: text, mean_logprob, sender_tokens, ...). --text adds sender_name, prompt, answer and each completion's text.
    --flat: completion_index, completion, token_ids, logprobs, mean_logprob, num_tokens, finish_reason, reward.
    Episodes have turn_lengths and observation_ids.
    """
    if format_ == "envelope" and (text or flat):
        raise UsageError("--text and --flat add to rows, and an envelope has none: choose --format jsonl or parquet")
    try:
        with closing(_open(home)) as reader:
            if format_ == "envelope":
                typer.echo(f"{_write_envelopes(reader, out)} groups written to {out}")
            else:
                _export_rows(home_at(home), reader, out, format_=format_, text=text, flat=flat)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; give another --out") from None


def _export_rows(home: Home, reader: ReplayReader, out: Path, *, format_: ExportFormat, text: bool, flat: bool) -> None:
    from ftis_node.replay.export import TextRows, flat_rows, group_rows, write_jsonl, write_parquet

    texts = TextRows(home, _names(home)) if text else None
    rows = group_rows(reader) if texts is None else texts.group_rows(reader)
    rows = flat_rows(rows) if flat else rows
    if format_ == "parquet":
        count = write_parquet(rows, out, with_texts=text, is_flat=flat)
    else:
        count = write_jsonl(rows, out)
    typer.echo(f"{count} {'completions' if flat else 'groups'} written to {out}")
    for reason, number in texts.missing.most_common() if texts else ():
        typer.echo(f"{number} texts are missing: {printable(reason)}", err=True)


def _names(home: Home) -> dict[str, str]:
    from ftis_node.node.http_api.node_client import read_document

    if not home.status.exists():
        return {}
    rows = [read_document(home, "/status")["node"], *read_document(home, "/peers")]
    return {row["peer_id"]: row["name"] for row in rows if row.get("name")}


def _open(home: Path | None) -> ReplayReader:
    from ftis_node.replay.reader import ReplayReader

    return ReplayReader(home_at(home).replay)


def _table(summaries: Sequence[GroupSummary], *, now: float) -> list[str]:
    rows = [_cells(summary, now) for summary in summaries]
    return columns(LIST_HEADER, rows) if rows else ["no groups"]


def _cells(summary: GroupSummary, now: float) -> tuple[str, ...]:
    state = f"{summary.state} ({summary.reason})" if summary.reason else summary.state
    return (
        summary.id[:12],
        duration(now - summary.admitted_at),
        "own" if summary.own else "foreign",
        f"{summary.task}/{summary.prompt_index}",
        state,
        "-" if summary.step is None else str(summary.step),
        f"{summary.reward_mean:.2f}",
        f"{summary.num_tokens:,}",
    )


def _figures(figures: dict[str, Any]) -> Iterator[str]:
    for name, value in figures.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(value.items()))
            yield f"{label:20}{sum(value.values()):,}" + (f" ({reasons})" if reasons else "")
        elif name.endswith("_bytes"):
            yield f"{label.removesuffix('bytes') + 'size':20}{value / MIB:,.1f} MiB"
        else:
            yield f"{label:20}{value:,}"


def _write_envelopes(reader: ReplayReader, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    for summary, envelope in reader.all_groups():
        (out / f"{summary.id}.envelope").write_bytes(envelope)
        count += 1
    return count
