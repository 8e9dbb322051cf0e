"""Selection of the checkpoint from which a learner resumes, on one rank or several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.learner.checkpoint.checkpoint import name_of, newest_usable, read_checkpoint, tidy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from ftis_node.learner.checkpoint.checkpoint import Checkpoint, CheckpointOwner
    from ftis_node.learner.distributed.ranks import Ranks
    from ftis_node.learner.messages import CheckpointSkipped


def find_checkpoint(
    folder: Path,
    *,
    owner: CheckpointOwner,
    shapes: Mapping[str, torch.Size],
    ranks: Ranks,
    on_skipped: Callable[[CheckpointSkipped], None],
) -> Checkpoint | None:
    """Return the newest readable checkpoint, None in a home without any. Rank 0 chooses and cleans up; each rank reads.

    Raises as `newest_usable` does.
    """
    if ranks.rank:
        name = ranks.broadcast(b"").decode()
        with ranks.agreed():
            return read_checkpoint(folder / name, owner=owner, shapes=shapes) if name else None
    found, damaged = newest_usable(folder, owner=owner, shapes=shapes)
    for skipped in damaged:
        on_skipped(skipped)
    tidy(folder, damaged)
    ranks.broadcast(b"" if found is None else name_of(found.state.step).encode())
    with ranks.agreed():
        return found
