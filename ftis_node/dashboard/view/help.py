"""What the keys do and what the lines mean, and everything that is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.snapshot import Phase
from ftis_node.dashboard.view.answers import health_of, problems, said
from ftis_node.dashboard.view.spans import Line, Span, Tone, labelled, line

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import NodeSnapshot

KEYS = (
    ("arrows", "choose a row, or scroll"),
    ("Enter", "open the peer, or the group"),
    ("g", "the newest groups of the buffer; Enter opens one"),
    ("l", "in a group: every token with its log-prob"),
    ("e", "the event trail; there a: also what every group writes"),
    ("Esc", "back"),
    ("q", "quit; the node goes on"),
)
WORDS = (
    ("contributing", "yes: peers confirmed that they hold groups of this node"),
    ("learning", "yes: reward of the last steps clearly beats the first"),
    ("healthy", "yes: workers, steps, peers, clock, disk, memory are in order"),
    ("learnt from", "groups used in steps since the home was made"),
    ("groups", "sent, held by a peer, received, refused; since the start"),
    ("kept", "share of tokens that the filter left in the loss"),
    ("standing", "good, watched (all its groups are audited), banned, trusted"),
    ("score", "0 a stranger, up to 10 earned; below -3 watched, at -10 banned"),
    ("taken", "groups of that peer that passed the door"),
    ("holds", "our groups that the peer has confirmed"),
)


def start_lines(snapshot: NodeSnapshot) -> list[Line]:
    """The command that starts a stopped node again, to be copied."""
    if snapshot.phase is not Phase.STOPPED:
        return []
    return [line(Span("start it again with", Tone.WARN)), line("  ", snapshot.start_command), line()]


def _wrong(snapshot: NodeSnapshot) -> list[str]:
    """Every no, and all that keeps the node from being healthy."""
    verdict = health_of(snapshot)
    noes = [said(answer) for answer in (verdict.contributing, verdict.learning) if not answer.is_well]
    return [*noes, *problems(snapshot)]


def help_lines(snapshot: NodeSnapshot | None) -> list[Line]:
    """The help, under what is wrong with the node just now."""
    wrong = _wrong(snapshot) if snapshot is not None and snapshot.is_live else []
    lines: list[Line] = []
    if wrong:
        lines = [line(Span("wrong now", Tone.BAD)), *(line("  ", complaint) for complaint in wrong), line()]
    if snapshot is not None:
        lines += start_lines(snapshot)
    lines += [line(Span("keys", Tone.STRONG)), *(labelled(f"  {key}", what, width=16) for key, what in KEYS), line()]
    return [*lines, line(Span("words", Tone.STRONG)), *(labelled(f"  {word}", what, width=16) for word, what in WORDS)]
