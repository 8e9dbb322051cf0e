"""Frozen domain records, their wire form, and signatures.

group.py       what rooms hand to each other
codec.py       a group to bytes and back
envelope.py    signed bytes: envelope, announcement, directory record
identity.py    the Ed25519 key and the peer id
rollout_pb2.py generated from proto/rollout.proto (`make proto`)
"""

from __future__ import annotations
