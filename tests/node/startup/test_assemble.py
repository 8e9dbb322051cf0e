"""The progress line of a node's start, and the unfinished files of a killed worker that a stopping node removes."""

import json
from contextlib import closing
from pathlib import Path

from ftis_node.node.context import NodeState
from ftis_node.node.protocols import NullLearner
from ftis_node.node.startup import assemble
from ftis_node.node.startup.assemble import StartProgress
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.events import EventLog
from tests.node.nodes import components, events_of


class KilledLearner(NullLearner):
    """A learner that begins a checkpoint when it is stopped, and is killed."""

    def __init__(self, unfinished: Path) -> None:
        super().__init__(parameters=1)
        self._unfinished = unfinished

    async def stop(self) -> None:
        self._unfinished.mkdir()
        (self._unfinished / "weights.safetensors").touch()


async def test_an_unfinished_checkpoint_is_removed_at_the_end(tmp_path):
    """The learner has about five seconds to end. On a busy machine it is killed during a checkpoint."""
    unfinished = tmp_path / "checkpoints" / ".step-00000007.incomplete-0a1b2c3d"
    scorer = IsolatedScorer(load_task("arithmetic"))
    with components(
        tmp_path, learner=KilledLearner(unfinished), state=NodeState(step=6), scorer=scorer, new_peers_scorer=scorer
    ) as node:
        await assemble._stop(node)
        assert not unfinished.exists()
        assert [event["step"] for event in events_of(node, "stop")] == [6]


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
