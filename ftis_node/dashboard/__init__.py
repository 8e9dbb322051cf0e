"""`ftis-node dashboard`: one screen that says whether a node contributes, learns and is healthy.

    the node's local port --.                                            .--> HeadLines, Answers, MetricsPanel
    status.json, lock -------+-> Watcher --NodeSnapshot--> DashboardApp --view-+--> Plot (two)
    events.jsonl ------------'   (a thread)  once a second               `--> PeersTable, EventLines
    replay.sqlite -----------------> groups.py (a thread, when asked for) ---> GroupsScreen, GroupScreen

Nothing blocks the loop that draws: files, SQLite and HTTP are read in threads, and what they find arrives as a message.
What is written where is decided by the pure functions of `view/`; a widget only puts it on the screen. The dashboard
reads and never changes a node.
"""
