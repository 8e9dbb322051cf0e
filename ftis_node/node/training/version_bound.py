"""The bound of the weight versions that a follower of this node's learner may name."""

from __future__ import annotations

from ftis_node.config.limits import KEPT_CHECKPOINTS
from ftis_node.learner.checkpoint.saving import MAX_UNSAVED_STEPS
from ftis_node.node.context import NodeContext
from ftis_node.node.worker_interfaces import Learning
from ftis_node.records.bounds import MAX_INTEGER


def newest_offered(context: NodeContext, learner: Learning) -> int | None:
    """Return the newest version of this node's weights that an honest follower may name; None if it offers none.

    Until the learner reports its version, and until its first step, a follower may name any version. It may have those
    of a learner that has begun again. The bound includes one version more, since the loop offers a version before its
    step is complete. It also includes the steps that the kept checkpoints span. A learner that dies may go back by that
    many steps, while groups of its followers are on their way. A version has the number of its step, so it counts the
    steps without an update.
    """
    if context.settings.role != "learner":
        return None
    state = learner.state
    if state is None or not (state.policy_version or context.state.policy_version):
        return MAX_INTEGER
    unsaved = context.settings.learner.checkpoint_every_steps or MAX_UNSAVED_STEPS
    return max(state.step, context.state.step) + 1 + unsaved * KEPT_CHECKPOINTS
