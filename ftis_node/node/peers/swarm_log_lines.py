"""Log lines of the swarm's state: one for each change that matters to an operator.

Peers that join and leave have no line here: the directory loop logs them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence

from ftis_node.gossip import SwarmPhase, SwarmState
from ftis_node.gossip.multiaddr import is_public
from ftis_node.gossip.types import NO_PEERS_GIVEN, NOBODY_ANSWERS

SKEW_NOTE_S = 1.0
SKEW_REFUSED_S = 3.0  # hivemind peers refuse messages with more clock skew
SYNCHRONISE = "switch on time synchronization (systemd-timesyncd, chrony)"
P2PDS_PREAMBLE = re.compile(r"failed to dial.*all dials failed \* \[[^]]*\] ")
UNPRINTABLE = re.compile(r"[^ -~]+")


class SwarmLogLines:
    """Generator of log lines that remembers the last logged state."""

    def __init__(self) -> None:
        self._last_logged: tuple[str, str] | None = None
        self._was_warned = False  # of a wrong clock
        self._advised: set[int] = set()  # levels of the advice that was logged

    def lines(
        self,
        state: SwarmState,
        *,
        clock_skew_s: float | None,
        addresses: Sequence[str],
        advice: str = "",
        release: str = "",
    ) -> Iterator[tuple[int, str]]:
        """Yield level and text of each log line for the present state.

        `clock_skew_s` is the peers' clocks minus this machine's, None before a peer was met. `advice` says what to do
        if most members have a newer wire version, `release` if they run a newer release. A wrong clock and both are
        logged once per start.
        """
        message = (str(state.state), _gist(state))
        if message != self._last_logged and state.state is not SwarmPhase.STARTING:
            self._last_logged = message
            yield _connection_line(state, addresses)
        if clock_skew_s is not None and abs(clock_skew_s) >= SKEW_NOTE_S and not self._was_warned:
            self._was_warned = True
            yield logging.WARNING, clock_words(clock_skew_s)
        for level, text in ((logging.WARNING, advice), (logging.INFO, release)):
            if text and level not in self._advised:
                self._advised.add(level)
                yield level, text


def clock_words(skew_s: float) -> str:
    """Return a sentence with the error of this machine's clock and a remedy."""
    which = "behind" if skew_s > 0 else "ahead of"
    so = "they refuse what we send" if abs(skew_s) >= SKEW_REFUSED_S else f"they refuse us at {SKEW_REFUSED_S:g} s"
    return f"this machine's clock is {abs(skew_s):.1f} s {which} the peers', {so}: {SYNCHRONISE}"


def _gist(state: SwarmState) -> str:
    """Return the reason without its numbers and without the clause about the next try; "" if connected."""
    return "" if state.state is SwarmPhase.CONNECTED else re.sub(r"\d+ peers?|\d+", "#", state.reason.split(",")[0])


def _connection_line(state: SwarmState, addresses: Sequence[str]) -> tuple[int, str]:
    reason = P2PDS_PREAMBLE.sub("", UNPRINTABLE.sub(" ", state.reason))
    if state.state is SwarmPhase.CONNECTED:
        return logging.INFO, f"in the swarm: {reason}"
    if state.reason.startswith(NO_PEERS_GIVEN):
        ranked = sorted(addresses, key=lambda address: (not is_public(address), "/127.0.0.1/" in address, address))
        how = f"others join it with --peers {ranked[0]}" if ranked else "it has no address yet that others could dial"
        return logging.INFO, f"working alone: {NO_PEERS_GIVEN}; {how}"
    if state.reason.startswith(NOBODY_ANSWERS):
        return logging.WARNING, f"working alone: {reason}; `ftis-node doctor --peers ADDRESS` looks closer"
    return logging.INFO, f"working alone so far: {reason}"
