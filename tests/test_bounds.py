"""Every queue in a node has a bound, and every connection is opened within a time limit.

The tests read the source, so a new queue without a bound fails. `UNBOUNDED` has the exceptions with their reasons.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ftis_node"
PACKAGES = (
    *("doctor", "evaluation", "gossip", "generation", "learner", "memory", "node", "records", "replay"),
    *("swarm", "tasks", "telemetry", "validation", "workers"),
)
FILES = sorted(path for name in PACKAGES for path in (PACKAGE / name).rglob("*.py"))
SIZED_QUEUES = {"Queue", "LifoQueue", "PriorityQueue", "JoinableQueue"}
CONNECTING = {"open_connection", "open_unix_connection"}
UNBOUNDED = {
    "generation/engines/torch_engine.py": "requests of the daemon, at most `groups_in_flight()` and one load",
    "generation/engines/vllm_driver.py": "the same",
    "doctor/doctor.py": "one result for each check of the doctor",
    "telemetry/tracking.py": "`offer` checks the capacity first",
}


def _name(call: ast.Call) -> str:
    function = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _bound(call: ast.Call, keyword: str, position: int) -> ast.expr | None:
    """Return the argument that sets the bound; None if it is missing, 0 or None."""
    given = call.args[position] if len(call.args) > position else None
    found = next((each.value for each in call.keywords if each.arg == keyword), given)
    return None if isinstance(found, ast.Constant) and found.value in (0, None) else found


def unbounded_queues(source: str) -> list[int]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if (_name(call) in SIZED_QUEUES and _bound(call, "maxsize", 0) is None)
        or _name(call) == "SimpleQueue"
        or (_name(call) == "deque" and _bound(call, "maxlen", 1) is None)
    ]


def unlimited_connects(source: str) -> list[int]:
    """Return the lines that open a connection outside of any `async with asyncio.timeout(...)`."""

    def walk(node: ast.AST, limited: bool) -> Iterator[int]:
        if isinstance(node, ast.AsyncWith):
            contexts = [item.context_expr for item in node.items]
            limited = limited or any(isinstance(each, ast.Call) and _name(each) == "timeout" for each in contexts)
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            limited = False
        if isinstance(node, ast.Call) and _name(node) in CONNECTING and not limited:
            yield node.lineno
        for child in ast.iter_child_nodes(node):
            yield from walk(child, limited)

    return list(walk(ast.parse(source), limited=False))


def test_every_queue_has_a_bound():
    found = {str(path.relative_to(PACKAGE)): unbounded_queues(path.read_text()) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines and name not in UNBOUNDED} == {}
    assert [name for name in UNBOUNDED if not found[name]] == [], "these need no exception any more"


def test_every_connection_is_opened_within_a_time_limit():
    found = {str(path.relative_to(PACKAGE)): unlimited_connects(path.read_text()) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_an_unbounded_queue_is_found_and_a_bounded_one_is_not():
    for source in (
        "asyncio.Queue()",
        "asyncio.Queue[int](0)",
        "Queue(maxsize=0)",
        "queue.SimpleQueue()",
        "deque(rows)",
    ):
        assert unbounded_queues(source) == [1]
    for source in ("asyncio.Queue(64)", "Queue(maxsize=capacity)", "deque(maxlen=8)", "deque([], 4)"):
        assert unbounded_queues(source) == []


def test_a_connection_without_a_time_limit_is_found():
    unlimited = "async def f():\n    await asyncio.open_unix_connection(path)\n"
    limited = "async def f():\n    async with asyncio.timeout(3):\n        await asyncio.open_unix_connection(path)\n"
    assert unlimited_connects(unlimited) == [2]
    assert unlimited_connects(limited) == []
