"""Screen of keys, terms and current problems."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType

from ftis_node.dashboard.context import TextPage
from ftis_node.view.health_answers import answer_texts, problems, refusal_texts
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import Line, Span, Tone, labeled, line

KEYS = (
    ("arrows, j, k", "select a row, or scroll"),
    ("Enter", "open the peer, or the group"),
    ("g", "the newest groups of the buffer; Enter opens one"),
    ("l", "in a group: every token with its log-prob"),
    ("r", "in a list of groups: read the buffer again"),
    ("e", "the event log; a shows routine events too"),
    ("w", "the whole swarm: all nodes of the run, and who learns from whom"),
    ("n", "in the whole swarm: the next run"),
    ("/", "search in peers or events; Enter keeps the filter, Esc clears it"),
    ("s", "sort: the next column of the peers or nodes, or the newest event first"),
    ("mouse", "select, open, scroll; a click on a column sorts by it"),
    ("?", "this help, from every screen"),
    ("Esc", "back"),
    ("q", "quit; the node keeps running"),
)
TERMS = (
    ("contributing", "yes: peers confirmed that they received groups of this node"),
    ("learning", "yes: steps change the model; the line adds the reward's trend"),
    ("healthy", "yes: no problem with workers, steps, peers, clock, disk, memory"),
    ("answers", "own completions: tokens, cut, without signal, entropy, KL"),
    ("trained on", "groups used in steps since the home was created"),
    ("groups", "sent, confirmed by a peer, received, refused; since the start"),
    ("kept", "share of completions that the filter kept"),
    ("advantage", "reward minus the mean of its group, before the method scales it"),
    ("trust", "good, probation (all its groups are audited), banned, trusted"),
    ("score", "0 for a new peer, at most 10; below -3 probation, at -10 banned"),
    ("accepted", "groups of that peer that passed validation"),
    ("confirmed", "our groups that the peer has confirmed"),
    ("used", "groups of a node that others trained on, by signed receipts"),
    ("rank", "the place of this node by used; without receipts by share"),
    ("share", "of all groups that nodes learned from others, in last steps"),
    ("learners", "the nodes whose last steps used groups of this one"),
    ("as of", "the age of a node's figures; seen: of the last contact"),
)


class HelpScreen(TextPage):
    BINDINGS: ClassVar[list[BindingType]] = [("question_mark", "back", "back")]

    def on_mount(self) -> None:
        self.write(help_lines(self.app.snapshot))


def help_lines(snapshot: NodeSnapshot | None) -> list[Line]:
    """Return the help below the node's current problems, or the command that starts a stopped node again."""
    lines: list[Line] = []
    found: dict[str, None] = {}
    if snapshot is not None and snapshot.is_live:
        bad = (text for tone, text in answer_texts(snapshot) if tone is Tone.BAD)
        found = dict.fromkeys((*bad, *problems(snapshot), *(text for _, text in refusal_texts(snapshot))))
    if found:
        lines = [line(Span("current problems", Tone.BAD)), *(line("  ", problem) for problem in found), line()]
    if snapshot is not None and snapshot.has_ended:
        lines = [line(Span("start it again:", Tone.WARN)), line("  ", snapshot.start_command), line()]
    for title, rows in (("keys", KEYS), ("terms", TERMS)):
        lines += [
            line(Span(title, Tone.STRONG)),
            *(labeled(f"  {name}", what, width=16) for name, what in rows),
            line(),
        ]
    return lines[:-1]
