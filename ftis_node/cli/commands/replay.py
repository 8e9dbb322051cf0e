"""`ftis-node replay`: the rollouts in the buffer, as a list, one by one, in numbers, or exported."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.completion import STATES, group_ids, one_of
from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_json
from ftis_node.errors import UsageError
from ftis_node.telemetry.terminal_text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.records.group import Completion, Group
    from ftis_node.records.text_group import TextCompletion, TextGroup
    from ftis_node.replay.reader import GroupSummary, ReplayReader

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Show or export the replay buffer of a running or stopped node."
)


class ExportFormat(StrEnum):
    """Formats of `replay export`."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    ENVELOPE = "envelope"


@app.command("list")
def list_groups(
    home: HomeOption = None,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of groups, newest first.")] = 20,
    state: Annotated[
        str | None,
        typer.Option(
            "--state", help="Only groups in this state: ready, taken or released.", autocompletion=one_of(*STATES)
        ),
    ] = None,
) -> None:
    """List groups, newest first.

    JSON shape: [{id, own, sender, number, state, reason, step, task, prompt_index, model, policy_version, created_at,
    admitted_at, num_tokens, rewards: [..]}].
    """
    summaries = _open(home).list_groups(limit=limit, state=state)
    if as_json:
        print_json([dataclasses.asdict(summary) for summary in summaries])
        return
    for summary in summaries:
        typer.echo(_line(summary))


@app.command("show")
def show(
    group_id: Annotated[
        str,
        typer.Argument(help="The group's id, or its first characters (4 or more).", autocompletion=group_ids),
    ],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one group: prompt, completions, result of validation, use.

    JSON shape: the row of `list`, and completions: [{token_ids, logprobs, text, num_tokens, mean_logprob,
    lowest_logprob, finish_reason, reward, claimed_reward}] (of a group that came as text: text, mean_logprob,
    sender_tokens, ...), prompt: {task, split, index, text, answer, missing}, verdict, refusal, detail, used,
    weights_of, tokenizer, temperature, texts_missing, events: [..]. A rejected group has id, verdict and events only.
    """
    from ftis_node.cli.group_screen import group_document, screen
    from ftis_node.replay.group_history import read_group_history

    story = read_group_history(home_at(home), group_id)
    if story is None:
        raise UsageError(f"{group_id!r} matches no group, or several: `ftis-node replay list` shows the ids")
    if as_json:
        print_json(group_document(story))
    else:
        typer.echo("\n".join(screen(story)))


@app.command("stats")
def stats(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show totals of the buffer.

    JSON shape: {ready, taken, released: {reason: n}, tokens, disk_bytes, groups_own, groups_foreign, tokens_own,
    tokens_foreign, trained_own, trained_foreign}.
    """
    figures = dataclasses.asdict(_open(home).figures())
    if as_json:
        print_json(figures)
        return
    for name, value in figures.items():
        typer.echo(f"{name:16} {json.dumps(value)}")


@app.command("export")
def export(
    out: Annotated[Path, typer.Option("--out", help="File to write; for envelopes a folder.")],
    home: HomeOption = None,
    format_: Annotated[ExportFormat, typer.Option("--format", help="Format to write.")] = ExportFormat.JSONL,
) -> None:
    """Export the stored groups: rollouts as JSON lines or Parquet, or the signed envelopes, one file each."""
    reader = _open(home)
    try:
        count = _EXPORTERS[format_](reader, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; give another --out") from None
    typer.echo(f"{count} groups written to {out}")


def _open(home: Path | None) -> ReplayReader:
    from ftis_node.replay.reader import ReplayReader

    return ReplayReader(home_at(home).replay)


def _line(summary: GroupSummary) -> str:
    origin = "own    " if summary.own else "foreign"
    fate = f"{summary.state}({summary.reason})" if summary.reason else summary.state
    mean = sum(summary.rewards) / len(summary.rewards)
    return printable(
        f"{summary.id[:12]}  {origin}  {summary.task}/{summary.prompt_index}  {fate}"
        f"{f' step {summary.step}' if summary.step is not None else ''}  reward {mean:.2f}  {summary.num_tokens} tokens"
    )


def _contents(completion: Completion | TextCompletion) -> dict[str, Any]:
    from ftis_node.records.group import Completion

    if isinstance(completion, Completion):
        return {"token_ids": completion.token_ids.tolist(), "logprobs": completion.logprobs.tolist()}
    return {
        "text": completion.text,
        "mean_logprob": completion.mean_logprob,
        "sender_tokens": completion.num_tokens,
    }


def _row(summary: GroupSummary, group: Group | TextGroup) -> dict[str, Any]:
    completions: Sequence[Completion | TextCompletion] = group.completions
    rows = [
        {**_contents(completion), "finish_reason": completion.finish_reason.value, "reward": reward}
        for completion, reward in zip(completions, summary.rewards, strict=True)
    ]
    return {**dataclasses.asdict(summary), "completions": rows}


def _rows(reader: ReplayReader) -> Any:
    from ftis_node.records.envelope import open_envelope
    from ftis_node.records.text_codec import unpack_any

    return (_row(summary, unpack_any(open_envelope(envelope).body)) for summary, envelope in reader.all_groups())


def _export_jsonl(reader: ReplayReader, out: Path) -> int:
    count = 0
    with out.open("w", encoding="utf-8") as file:
        for count, row in enumerate(_rows(reader), start=1):  # noqa: B007  # the last count is the result
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return count


def _export_parquet(reader: ReplayReader, out: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(_rows(reader))
    pq.write_table(pa.Table.from_pylist(rows), out)
    return len(rows)


def _export_envelopes(reader: ReplayReader, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    for summary, envelope in reader.all_groups():
        (out / f"{summary.id}.envelope").write_bytes(envelope)
        count += 1
    return count


_EXPORTERS = {
    ExportFormat.JSONL: _export_jsonl,
    ExportFormat.PARQUET: _export_parquet,
    ExportFormat.ENVELOPE: _export_envelopes,
}
