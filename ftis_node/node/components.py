"""All components of one node, as `startup/assemble.py` builds them.

Only the composition root (`startup/`, `daemon.py`, experiments and tests) holds this record. A component never gets it:
`startup/wiring.py` passes each one the components that it uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ftis_node.config.home import Home
from ftis_node.gossip import Gossip
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import ModelSource, PromptTokenizer
from ftis_node.node.context import NodeContext, NodeCounters, NodeDescription
from ftis_node.node.peers.manager import PeerManager
from ftis_node.node.peers.registry import PeerRegistry
from ftis_node.node.peers.serve import Confirmations
from ftis_node.node.protocols import Generation, Learning
from ftis_node.node.storage.disk_space import DiskSpace
from ftis_node.node.supervision.background import DiskThread
from ftis_node.node.supervision.failures import FailureBoard
from ftis_node.node.training.evaluation import EvaluationHistory
from ftis_node.node.training.group_limits import GenerateBudget, SlotPool
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.tasks.base import Task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.tracking import Tracking


@dataclass(frozen=True, slots=True)
class NodeComponents:
    """Record of all components by name.

    `task` is the run's task, with the problems of all nodes. `domain` has the problems that this node generates for. It
    is the same object as `task` if the node has no separate domain.
    """

    context: NodeContext
    about: NodeDescription
    home: Home
    source: ModelSource
    tokenizer: PromptTokenizer
    task: Task
    domain: Task
    eval_tasks: tuple[Task, ...]
    scorer: IsolatedScorer
    new_peers_scorer: IsolatedScorer
    generation: Generation
    learner: Learning
    gossip: Gossip
    buffer: ReplayBuffer
    reader: ReplayReader
    disk: DiskThread
    slots: SlotPool
    counters: NodeCounters
    registry: PeerRegistry
    confirmations: Confirmations
    evaluations: EvaluationHistory
    peers: PeerManager
    arrangement: WorkerPlacement = WorkerPlacement()
    space: DiskSpace = field(default_factory=DiskSpace)
    budget: GenerateBudget = field(default_factory=GenerateBudget)
    tracking: Tracking = field(default_factory=Tracking)
    failures: FailureBoard = field(default_factory=FailureBoard)
