"""A stopping node removes the unfinished files of a killed worker."""

from pathlib import Path

from ftis_node.node.context import NodeState
from ftis_node.node.protocols import NullLearner
from ftis_node.node.startup import assemble
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
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
