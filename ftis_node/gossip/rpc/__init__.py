"""Requests between two peers over libp2p streams: frames, client, server, admission control."""

from __future__ import annotations
