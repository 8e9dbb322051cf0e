"""The totals of the buffer count every group once, pruned or not, and in a file of an older version."""

import random
import sqlite3
from contextlib import closing

from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.eviction import Freshness
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from tests.replay.test_buffer import ANN, BOB, ME, accepted

BY_ROWS = (
    "SELECT sum(state = 'ready'), sum(state = 'taken'), sum(length(envelope)), sum(num_tokens * (state != 'released'))"
    " FROM groups"
)


def _use(buffer: ReplayBuffer, *, rounds: int) -> None:
    """Apply every operation on groups, in an order from a fixed seed."""
    draw = random.Random(0)
    for step in range(1, rounds + 1):
        identities = [draw.choice((ME, ANN, BOB)) for _ in range(5)]
        arrivals = [(accepted(one, 10 * step + at), one is ME) for at, one in enumerate(identities)]
        buffer.admit_many([*arrivals, arrivals[0]])  # the last one repeats the first
        buffer.take(step, own=2, foreign=2)
        if step % 3:
            buffer.release_step(step, draw.choice((ReleaseReason.TRAINED, ReleaseReason.REFUSED)))
        else:
            buffer.reconcile(step - 1)
        if step % 4 == 0:
            buffer.evict_foreign(keep=2)
            buffer.release_stale(Freshness(now=1e12, max_age_s=1.0, policy_version=0, max_version_lag=8))
            buffer.prune(max_disk_bytes=2000)


def test_figures_count_every_group_once(tmp_path):
    path = tmp_path / "replay.sqlite"
    with closing(ReplayBuffer(path)) as buffer, closing(ReplayReader(path)) as reader:
        assert (reader.figures().groups_own, reader.kept_bytes(), reader.ready_foreign_bytes()) == (0, 0, 0)
        _use(buffer, rounds=6)
        figures = reader.figures()
        admitted = (figures.groups_own, figures.groups_foreign, figures.tokens_own, figures.tokens_foreign)
        trained = reader.trained_tokens(), figures.trained_own + figures.trained_foreign
        buffer.prune(max_disk_bytes=0)
        figures = reader.figures()
        assert (figures.groups_own, figures.groups_foreign, figures.tokens_own, figures.tokens_foreign) == admitted
        assert (reader.trained_tokens(), figures.trained_own + figures.trained_foreign) == trained
        assert admitted[0] + admitted[1] == 30
        with closing(sqlite3.connect(path)) as db:
            counted = db.execute(BY_ROWS).fetchone()
        assert (figures.ready, figures.taken, figures.envelope_bytes, figures.tokens) == counted
        assert all((*trained, counted[0], counted[2]))
