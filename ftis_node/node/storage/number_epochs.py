"""The epochs of a node's sequence numbers: each start begins one, so that no number is used twice.

The epoch is the Unix time in seconds, or the last epoch plus one if that is larger. The last epoch is in the buffer and
in the marker of the home, and the larger one counts. So numbers stay unique if the buffer is deleted, damaged or
restored from an old copy, or if the clock is set back. A home from a backup has a later time.
"""

from __future__ import annotations

import time

from ftis_node.config.home import Home
from ftis_node.config.home_files import mark, marked_epoch
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.swarm.sequence import epoch_base, epoch_of


def begin_epoch(home: Home, buffer: ReplayBuffer) -> int:
    """Begin an epoch, which is on the disk when this returns. Return the number before that of its first group.

    The buffer has it first: a buffer with an older epoch than the marker is a copy from before the last start.
    Raises OSError and sqlite3.Error.
    """
    epoch = max(int(time.time()), marked_epoch(home) + 1, epoch_of(buffer.last_number()) + 1)
    buffer.raise_last_number(epoch_base(epoch))
    mark(home, epoch=epoch)
    return epoch_base(epoch)
