"""Main screen: the state of the node at a glance. plotext draws a curve in a few rows of braille."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Horizontal
from textual.screen import Screen
from textual.widgets import DataTable, Input, Static

from ftis_node.dashboard.context import DashboardContext
from ftis_node.dashboard.screens.groups import PeerScreen
from ftis_node.dashboard.widgets import Keys, PeersTable, SearchLine, TextLines
from ftis_node.telemetry.history import thinned
from ftis_node.telemetry.terminal_text import printable
from ftis_node.view.events import event_line, notable_events
from ftis_node.view.health_answers import answer_lines, next_lines, refusal_lines, worst_tone
from ftis_node.view.node_facts import head_line, node_facts
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import Line, Span, Tone, faded, labeled, line

WIDE, TALL = 164, 36  # columns that fit event lines beside the peers, and rows that fit panels
PANEL_FACTS = {
    *("trainer", "generation", "episodes", "learner", "answers", "trains", "trained on", "groups", "used", "release"),
    *("buffer", "memory"),
}
TALL_FACTS = {"trains", "buffer"}  # left out of low terminals, where peers need the rows
BORDERS = {"-good": Tone.GOOD, "-waits": Tone.WARN, "-bad": Tone.BAD}
BRAILLE = "[\u2800-\u28ff]+"
Points = Sequence[tuple[float, float]]  # (step, value), steps ascending
DOTS_A_CELL = 2  # a braille cell is two dots wide
LEAST_WIDTH, LEAST_HEIGHT = 12, 3
LEAST_SPAN = 0.02  # keeps noise on a flat curve small


class Overview(TextLines):
    """Four lines, five for a node that waits, six for a node that does not run, and two more for each kind of refusal.

    The border has the worst tone.
    """

    BORDER_TITLE = "answers"

    def show(self, snapshot: NodeSnapshot) -> None:
        lines = [head_line(snapshot), *answer_lines(snapshot)]
        if snapshot.problem and not snapshot.is_live:
            lines.append(line(Span(snapshot.problem, Tone.WARN)))
        lines += [*next_lines(snapshot), *refusal_lines(snapshot)]
        tone = worst_tone(snapshot)
        for name, border_tone in BORDERS.items():
            self.set_class(tone is border_tone, name)
        self.write(lines)


class MetricsPanel(TextLines):
    BORDER_TITLE = "work"

    def show(self, snapshot: NodeSnapshot) -> None:
        self.write(metric_lines(snapshot, is_low=self.app.size.height < TALL))


def metric_lines(snapshot: NodeSnapshot, *, is_low: bool = False) -> list[Line]:
    """Return the facts of `PANEL_FACTS`, one on a line; those of a node that does not run are faint."""
    labels = PANEL_FACTS - TALL_FACTS if is_low else PANEL_FACTS
    shown = [(label, labeled(label, *text)) for label, text in node_facts(snapshot) if label in labels]
    return [text if snapshot.is_live or label == "memory" else faded(text) for label, text in shown]


class EventLines(TextLines):
    """Lines of events, the newest at the bottom."""

    DEFAULT_CSS = "EventLines { height: 1fr; border-top: solid $foreground 40%; }"

    BORDER_TITLE = "events"
    _snapshot: NodeSnapshot | None = None

    def show(self, snapshot: NodeSnapshot) -> None:
        self._snapshot = snapshot
        num_rows = max(1, self.content_size.height)
        self.write(event_line(event) for event in notable_events(snapshot.history.events)[-num_rows:])

    def on_resize(self) -> None:
        if self._snapshot is not None:
            self.show(self._snapshot)


def reward_curve(snapshot: NodeSnapshot) -> tuple[str, Points]:
    """Return a title and the mean reward of each step."""
    steps = snapshot.history.steps
    points = tuple((point.step, point.reward_mean) for point in steps if point.reward_mean is not None)
    return f"reward of a step {points[-1][1]:.3f}" if points else "reward of a step", points


def pass_curve(snapshot: NodeSnapshot) -> tuple[str, Points]:
    """Return a title and pass@1 of the task with the newest evaluation."""
    evaluations = snapshot.history.evaluations
    if not evaluations:
        return "pass@1", ()
    last = evaluations[-1]
    title = f"pass@1 {last.pass_at_1:.3f} of {last.n} {printable(last.task)}"
    return title, tuple((point.step, point.pass_at_1) for point in evaluations if point.task == last.task)


def plot_rows(points: Points, *, width: int, height: int) -> list[str]:
    """Return `height` rows of `width` characters. Call it in one thread: plotext keeps one global figure."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return []
    if not points:
        return ["no data yet"]
    import plotext

    steps, values = zip(*thinned(points, width * DOTS_A_CELL), strict=True)
    low, high = min(values), max(values)
    slack = max(0.0, LEAST_SPAN - (high - low)) / 2
    low, high = low - slack, high + slack
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.frame(False)
    # By default plotext uses the size of this process's terminal, but a browser page has none.
    plotext.limit_size(False, False)
    plotext.plotsize(width, height)
    plotext.ylim(low, high)
    plotext.yticks([low, high], [f"{low:.2f} ", f"{high:.2f} "])
    ends = sorted({steps[0], steps[-1]})
    plotext.xticks(ends, [f"{step:.0f}" for step in ends])
    draw = plotext.plot if len(steps) > 1 else plotext.scatter
    draw(steps, values, marker="braille")
    return [row.rstrip() for row in plotext.uncolorize(plotext.build()).split("\n")[:height]]


class Plot(Static):
    """Plot with its title in the border, redrawn when its points or its size change."""

    DEFAULT_CSS = """
    Plot { width: 1fr; height: 1fr; border-top: solid $foreground 40%; border-title-style: bold; padding: 0 1 0 0; }
    Plot.-stopped { text-style: dim; }
    """

    def __init__(self, title: str, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = title
        self._points: Points = ()
        self._is_loaded = False

    def show(self, title: str, points: Points, *, is_live: bool) -> None:
        self._is_loaded = True
        self.border_title = Text(title)
        self.set_class(not is_live, "-stopped")
        if points != self._points:
            self._points = points
            self._draw()

    def on_resize(self) -> None:
        if self._is_loaded:
            self._draw()

    def _draw(self) -> None:
        rows = plot_rows(self._points, width=self.content_size.width, height=self.content_size.height)
        text = Text("\n".join(rows), no_wrap=True)
        text.highlight_regex(BRAILLE, "cyan")
        self.update(text)


class MainScreen(Screen[None]):
    app: DashboardContext
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (TALL, "-tall")]
    DEFAULT_CSS = """
    #curves { height: 6; }
    #lists { height: 1fr; layout: vertical; }
    #peers { height: auto; min-height: 3; max-height: 60%; }
    #events { height: 1fr; min-height: 2; }
    MainScreen.-low #curves { height: 5; }
    MainScreen.-no-curves #curves { display: none; }
    MainScreen.-tall #curves { height: 28%; max-height: 18; }
    MainScreen.-tall Overview, MainScreen.-tall MetricsPanel, MainScreen.-tall Plot, MainScreen.-tall PeersTable,
    MainScreen.-tall EventLines {
        border: round ansi_bright_black; border-title-color: $foreground; border-title-style: bold; padding: 0 1;
    }
    MainScreen.-tall Overview.-good { border: round ansi_green; }
    MainScreen.-tall Overview.-waits { border: round ansi_yellow; }
    MainScreen.-tall Overview.-bad { border: round ansi_red; }
    MainScreen.-wide #lists { layout: horizontal; }
    MainScreen.-wide #peers { width: 84; height: 1fr; max-height: 100%; }
    MainScreen.-wide #events { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("g", "app.show_groups", "groups"),
        ("e", "app.show_events", "events"),
        ("w", "app.show_swarm", "swarm"),
        ("slash", "search", "search"),
        ("s", "sort", "sort"),
        ("question_mark", "app.show_help", "help"),
        ("q", "app.quit", "quit"),
    ]

    def compose(self) -> ComposeResult:
        yield Overview(id="overview")
        with Horizontal(id="curves"):
            yield Plot("reward of a step", id="reward")
            yield Plot("pass@1", id="pass")
        yield MetricsPanel(id="figures")
        with Container(id="lists"):
            yield PeersTable(id="peers")
            yield EventLines(id="events")
        yield SearchLine(back_to="#peers")
        yield Keys()

    def on_mount(self) -> None:
        self.query_one(Overview).write([line(Span(f"snapshot {self.app.home.root}", Tone.FAINT))])

    def show(self, snapshot: NodeSnapshot) -> None:
        self.set_class(not snapshot.is_live, "-stopped")
        self.query_one(Overview).show(snapshot)
        self.query_one("#reward", Plot).show(*reward_curve(snapshot), is_live=snapshot.is_live)
        self.query_one("#pass", Plot).show(*pass_curve(snapshot), is_live=snapshot.is_live)
        self.query_one(MetricsPanel).show(snapshot)
        self.query_one(PeersTable).show(snapshot)
        self.query_one(EventLines).show(snapshot)

    def action_search(self) -> None:
        self.query_one(SearchLine).open()

    def action_sort(self) -> None:
        self.query_one(PeersTable).sort_next()

    @on(Input.Changed, "#search")
    def search(self, event: Input.Changed) -> None:
        self.query_one(PeersTable).search(event.value)

    @on(DataTable.RowSelected, "#peers")
    def open_peer(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.app.open_page(PeerScreen(event.row_key.value))
