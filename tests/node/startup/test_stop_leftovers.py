"""What a worker that had to be killed leaves half written goes with the node that is stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.node.context import NodeState
from ftis_node.node.protocols import NullLearner
from ftis_node.node.startup import assemble
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from tests.node.nodes import components, events_of

if TYPE_CHECKING:
    from pathlib import Path


class KilledLearner(NullLearner):
    """Begins a checkpoint as it is stopped, and is killed."""

    def __init__(self, half: Path) -> None:
        super().__init__(parameters=1)
        self._half = half

    async def stop(self) -> None:
        self._half.mkdir()
        (self._half / "weights.safetensors").touch()


async def test_half_a_checkpoint_is_removed_at_the_end(tmp_path: Path) -> None:
    """The learner has about five seconds to end; on a busy machine it is killed in the middle of a checkpoint."""
    half = tmp_path / "checkpoints" / ".step-00000007.incomplete-0a1b2c3d"
    scorer = IsolatedScorer(load_task("arithmetic"))
    with components(
        tmp_path, learner=KilledLearner(half), state=NodeState(step=6), scorer=scorer, new_peers_scorer=scorer
    ) as node:
        await assemble._stop(node)
        assert not half.exists()
        assert [event["step"] for event in events_of(node, "stop")] == [6]
