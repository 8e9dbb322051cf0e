"""`ftis-node dashboard`: one screen that shows whether a node contributes, learns and is healthy.

    the node's local port --.                                             .--> Overview, MetricsPanel
    status.json, lock -------+-> Watcher --NodeSnapshot--> DashboardApp --+--> Plot (two)
    events.jsonl ------------'   (a thread)  every two seconds                `--> PeersTable, EventLines
    replay.sqlite --> Page.load (a thread, on request) --Loaded--------------> GroupsScreen, GroupScreen

Threads read files, SQLite and HTTP, and send the results as messages, so that nothing blocks the drawing loop.
The package `view` decides the text; a widget only draws it. The dashboard never changes a node.
"""
