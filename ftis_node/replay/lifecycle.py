"""Life cycle of a group in the buffer.

    WAITING --admit--> READY --take(step)--> TAKEN --release(trained | refused)--> RELEASED
       |                 |                     `----reconcile--------------------> READY
       |                 `--release(any other reason)----------------------------> RELEASED
       `--cancel (its slot becomes free; nothing was stored)

A node reserves a slot before it generates an own group. The slot becomes free after the step has trained on the group
and published the weights. So the number of own groups in flight bounds staleness. WAITING exists in memory only.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    READY = "ready"
    TAKEN = "taken"
    RELEASED = "released"


class ReleaseReason(StrEnum):
    TRAINED = "trained"  # a step used it
    STALE = "stale"  # too old, or sampled too many versions ago
    EVICTED = "evicted"  # newer groups needed its place
    REFUSED = "refused"  # the learner refused its step, or the step changed nothing
    DISCARDED = "discarded"  # the rule of the run did not choose it
    POISONED = "poisoned"  # the learner failed in several steps with it
    COPY = "copy"  # an equal group of another peer was announced before
    AUDIT = "audit"  # its log-probs do not match the weights that it names
    DAMAGED = "damaged"  # its row changed on disk
    DELIVERED = "delivered"  # a peer has it, and this node does not train
