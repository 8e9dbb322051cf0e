"""`make breaks`, `python -m tests.breaks [NAME ...]` applies each known fault and reports the test that catches it.

A fault is a patch in `tests/breaks/PACKAGE/`, applied to one copy of the working tree. Of the tests that it names,
those of `make test` run. With `--all` scenarios run too, if the others do not catch it. The last line has the counts.
The exit code is 1 if a fault is not caught, its patch does not apply, or its tests do not run. It is 2 for an unknown
name.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError
from tests.breaks.patches import ROOT, all_breaks, chosen
from tests.breaks.running import IN_MAKE_TEST, SCENARIOS, Outcome, Result, failing, run_tests
from tests.breaks.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.breaks.patches import Break

INTERRUPTED = 130
Outcomes = dict[str, dict[str, Outcome]]  # by a break's name: by marker expression


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes the copy, as ctrl-C does
    try:
        breaks = chosen(all_breaks(), options.names)
        if options.list:
            write_line("\n".join(f"{one.name}: {one.sentence}" for one in breaks))
            return 0
        with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
            tree = Tree(ROOT, Path(folder).resolve())
            tree.check_imports()
            outcomes = run_all(tree, breaks, with_scenarios=options.all)
    except KeyboardInterrupt:
        return INTERRUPTED
    except FtisError as error:
        sys.stderr.write(f"breaks: {error}\n")
        return error.exit_code
    if options.json:
        options.json.write_text(json.dumps(document(breaks, outcomes), indent=2) + "\n")
    write_line(summary(outcomes, with_scenarios=options.all))
    return 0 if all(map(is_caught, outcomes.values())) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.breaks", description="Report which known faults the tests catch."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="package/name or a package; default: all")
    parser.add_argument(
        "--all", action="store_true", help="also run scenarios for faults that `make test` does not catch"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to FILE")
    parser.add_argument("--list", action="store_true", help="list the faults and exit")
    return parser.parse_args(arguments)


def run_all(tree: Tree, breaks: Sequence[Break], *, with_scenarios: bool) -> Outcomes:
    """Apply each fault and run its tests. A test that caught one must pass without it."""
    outcomes: Outcomes = {}
    for number, one in enumerate(breaks, start=1):
        outcomes[one.name] = run_one(tree, one, with_scenarios=with_scenarios)
        write_line(f"[{number} of {len(breaks)}] {one.name}: {'; '.join(map(line_of, outcomes[one.name].values()))}")
    for marked in (IN_MAKE_TEST, SCENARIOS):
        caught = [each[marked].test for each in outcomes.values() if is_caught(each, marked)]
        fails_anyway = failing(tree, caught, marked=marked) if caught else set()
        for name, each in outcomes.items():
            if is_caught(each, marked) and each[marked].test in fails_anyway:
                each[marked] = each[marked]._replace(result=Result.FAILS_ANYWAY)
                write_line(f"{name}: {line_of(each[marked])}")
    return outcomes


def run_one(tree: Tree, one: Break, *, with_scenarios: bool) -> dict[str, Outcome]:
    """Return the outcome of the tests of one fault, by marker expression."""
    if not tree.apply(one):
        return {IN_MAKE_TEST: Outcome(Result.DOES_NOT_APPLY)}
    try:
        found = {IN_MAKE_TEST: run_tests(tree, one.tests, marked=IN_MAKE_TEST)}
        if with_scenarios and not is_caught(found):
            found[SCENARIOS] = run_tests(tree, one.tests, marked=SCENARIOS)
    finally:
        tree.revert(one)
    return found


def is_caught(found: dict[str, Outcome], marked: str | None = None) -> bool:
    """Return whether a test with this marker, or any for None, caught the fault."""
    return any(each.result is Result.CAUGHT for key, each in found.items() if marked in (None, key))


def line_of(outcome: Outcome) -> str:
    """Return an outcome as text."""
    match outcome.result:
        case Result.CAUGHT:
            return f"caught by {outcome.test} ({outcome.seconds:.1f} s)"
        case Result.SURVIVED:
            return f"SURVIVED ({outcome.seconds:.1f} s)"
        case Result.FAILS_ANYWAY:
            return f"NOT CAUGHT: {outcome.test} fails without it"
        case _:
            return f"{outcome.result.value.upper()}{f': {outcome.detail}' if outcome.detail else ''}"


def summary(outcomes: Outcomes, *, with_scenarios: bool) -> str:
    """Return the last line: how many faults were caught."""
    by_make_test = sum(is_caught(found, IN_MAKE_TEST) for found in outcomes.values())
    whole = f", {sum(map(is_caught, outcomes.values()))} by the whole suite" if with_scenarios else ""
    return f"{by_make_test} of {len(outcomes)} caught by make test{whole}"


def document(breaks: Sequence[Break], outcomes: Outcomes) -> list[dict[str, object]]:
    """Return the outcomes as JSON objects, one per fault."""
    return [
        {
            "name": one.name,
            "break": one.sentence,
            "tests": one.tests,
            "outcomes": [{"marked": marked, **found._asdict()} for marked, found in outcomes[one.name].items()],
        }
        for one in breaks
    ]


def write_line(text: str) -> None:
    """Print a line and flush, so that a pipe shows the progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
