"""Frozen domain records, their wire form, and signatures.

group.py        groups, their completions and prompts; a group sent as text, for peers with another tokenizer
codec.py        a group to bytes and back, as token ids and log-probs: exact; as byte planes, lossless or lossy
bounds.py       the bounds of each field of each message
parsing.py      bytes to a message within those bounds; the fields that both forms of a group share
text_codec.py   a group to bytes and back, as texts
envelope.py     signed bytes: envelope, announcement, directory record
identity.py     the Ed25519 key and the peer id
rollout_pb2.py  generated from proto/rollout.proto (`make proto`)
"""

from __future__ import annotations
