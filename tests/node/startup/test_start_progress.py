"""The progress line of a node's start, and the events of the engine's phases."""

import json
from contextlib import closing

from ftis_node.node.startup.assemble import StartProgress
from ftis_node.telemetry.events import EventLog


def test_the_line_names_the_phase_of_the_engine_and_each_phase_gives_an_event(tmp_path):
    lines: list[str] = []
    with closing(EventLog(tmp_path / "events.jsonl", max_bytes=1 << 20, kept_files=1)) as events:
        progress = StartProgress(
            ["generator", "learner", "network"], "m (3 MB)", events, lambda fraction, what: lines.append(what)
        )
        progress.begin_phase("compiling (first start only)")
        progress.end("network")
        progress.end("learner")
        progress.begin_phase("")
        progress.end("generator")
        progress.begin_phase("loading weights")  # a restart during the run shows no line
        progress.begin_phase("")
    assert lines == [
        "loading m (3 MB) into generator and learner; connecting",
        "generator: compiling (first start only); loading m (3 MB) into learner; connecting",
        "generator: compiling (first start only); loading m (3 MB) into learner",
        "generator: compiling (first start only)",
        "loading m (3 MB) into generator",
        "",
    ]
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["phase"]) for event in written] == [
        ("engine_start", "compiling (first start only)"),
        ("engine_start", "loading weights"),
    ]
    assert all(0 <= event["duration_s"] < 10 for event in written)
