"""Main screen: the state of the node at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.containers import Container, Horizontal
from textual.screen import Screen
from textual.widgets import DataTable, Input

from ftis_node.dashboard.screens.peer import PeerScreen
from ftis_node.dashboard.view.spans import Span, Tone, line
from ftis_node.dashboard.view.terminal_plot import pass_points, pass_title, reward_points, reward_title
from ftis_node.dashboard.widgets.panels import EventLines, MetricsPanel, Overview, Plot
from ftis_node.dashboard.widgets.rows_table import PeersTable
from ftis_node.dashboard.widgets.text_lines import KeysLine, SearchLine

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ftis_node.dashboard.context import DashboardContext
    from ftis_node.dashboard.snapshot import NodeSnapshot

WIDE, TALL = 164, 36  # columns that fit event lines beside the peers, and rows that fit panels


class MainScreen(Screen[None]):
    """Main screen: overview, curves, metrics, peers, events."""

    app: DashboardContext
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (TALL, "-tall")]
    DEFAULT_CSS = """
    #curves { height: 6; }
    #lists { height: 1fr; layout: vertical; }
    #peers { height: 4fr; min-height: 3; }
    #events { height: 3fr; min-height: 2; }
    MainScreen.-low.-stopped #curves { height: 5; }
    MainScreen.-tall #curves { height: 28%; max-height: 18; }
    MainScreen.-tall Overview, MainScreen.-tall MetricsPanel, MainScreen.-tall Plot, MainScreen.-tall PeersTable,
    MainScreen.-tall EventLines {
        border: round ansi_bright_black; border-title-color: $foreground; border-title-style: bold; padding: 0 1;
    }
    MainScreen.-tall Overview.-good { border: round ansi_green; }
    MainScreen.-tall Overview.-waits { border: round ansi_yellow; }
    MainScreen.-tall Overview.-bad { border: round ansi_red; }
    MainScreen.-wide #lists { layout: horizontal; }
    MainScreen.-wide #peers { width: 84; height: 1fr; }
    MainScreen.-wide #events { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("g", "app.show_groups", "groups"),
        ("e", "app.show_events", "events"),
        ("w", "app.show_swarm", "swarm"),
        ("slash", "search", "search peers"),
        ("s", "sort", "sort peers"),
        ("question_mark", "app.show_help", "help"),
        ("q", "app.quit", "quit"),
    ]

    def __init__(self, home: str) -> None:
        super().__init__()
        self._home = home

    def compose(self) -> ComposeResult:
        """Lay out all widgets; values appear when the first snapshot arrives."""
        yield Overview(id="overview")
        with Horizontal(id="curves"):
            yield Plot("reward of a step", id="reward")
            yield Plot("pass@1", id="pass")
        yield MetricsPanel(id="figures")
        with Container(id="lists"):
            yield PeersTable(id="peers")
            yield EventLines(id="events")
        yield SearchLine(back_to="#peers")
        yield KeysLine(
            ("Enter", "open peer"),
            ("g", "groups"),
            ("e", "events"),
            ("w", "swarm"),
            ("/", "search"),
            ("s", "sort"),
            ("?", "help"),
            ("q", "quit"),
        )

    def on_mount(self) -> None:
        self.query_one(Overview).write([line(Span(f"snapshot {self._home}", Tone.FAINT))])
        self.query_one(PeersTable).focus()

    def show(self, snapshot: NodeSnapshot) -> None:
        """Pass a snapshot to all widgets."""
        self.set_class(not snapshot.is_live, "-stopped")
        self.query_one(Overview).show(snapshot)
        self.query_one("#reward", Plot).show(reward_title(snapshot), reward_points(snapshot), is_live=snapshot.is_live)
        self.query_one("#pass", Plot).show(pass_title(snapshot), pass_points(snapshot), is_live=snapshot.is_live)
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
