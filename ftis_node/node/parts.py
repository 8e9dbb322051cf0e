"""The parts that the loops share, made once by `build.py` and handed to each loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.generation.client import GenerationClient
    from ftis_node.gossip.base import Gossip
    from ftis_node.learner.client import LearnerClient
    from ftis_node.models import ModelSource, PromptTokenizer
    from ftis_node.node.disk import Disk
    from ftis_node.node.figures import Figures
    from ftis_node.node.slots import Slots
    from ftis_node.records.identity import Identity
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.replay.reader import ReplayReader
    from ftis_node.tasks.base import Task
    from ftis_node.tasks.scoring import IsolatedScorer
    from ftis_node.telemetry.events import EventTrail


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a node consists of. Rooms do not know each other; the loops connect them."""

    settings: NodeSettings
    manifest: RunManifest
    home: Home
    identity: Identity
    name: str
    source: ModelSource
    tokenizer: PromptTokenizer
    task: Task
    eval_task: Task | None
    scorer: IsolatedScorer
    generation: GenerationClient
    learner: LearnerClient
    gossip: Gossip
    buffer: ReplayBuffer
    reader: ReplayReader
    disk: Disk
    slots: Slots
    events: EventTrail
    figures: Figures
