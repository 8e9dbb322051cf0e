"""Two nodes learn from two files with the same problems: weighted rewards from sampling to gradient."""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from ftis_node.cli.app import run as run_command
from ftis_node.config.home_files import remembered_paths
from ftis_node.node.startup.run_plan import plan_run
from ftis_node.tasks import load_task
from ftis_node.telemetry.events import read_events
from tests.node.support import manifest_text
from tests.node.test_domains import STEPS, home_of, stepped

pytestmark = pytest.mark.timeout(600)  # includes training the models

QUERY = r"prompt=problem&answer=result&style=plain&reward=exact:0.75,regex:0.25&pattern=^[0-9]{2}$"
NUM_PROBLEMS = 200


def write_sums(folder: Path) -> tuple[Path, Path]:
    """Write the same problems as JSON lines and as CSV."""
    arithmetic = load_task("arithmetic")
    pairs = {arithmetic[i].prompt[0]["content"]: arithmetic[i].answer for i in range(NUM_PROBLEMS)}
    lines, table = folder / "sums.jsonl", folder / "copy.csv"
    lines.write_text(
        "".join(json.dumps({"problem": left, "result": int(right)}) + "\n" for left, right in pairs.items())
    )
    table.write_text("result,problem\n" + "".join(f"{right},{left}\n" for left, right in pairs.items()))
    return lines, table


async def test_two_nodes_learn_from_a_data_set_with_weighted_rewards(tmp_path, tiny_models, capsys):
    lines, table = write_sums(tmp_path)
    template = tmp_path / "template.toml"
    template.write_text(manifest_text(foreign_wait_s=60.0))
    first = plan_run(str(template), f"dataset:{lines}?{QUERY}", home=home_of(tmp_path / "first", 9))
    run_file = tmp_path / "run.toml"
    run_file.write_text(first.manifest.to_toml())
    step, homes = first.manifest.step, [home_of(tmp_path / str(number), number) for number in range(2)]
    plans = [
        plan_run(str(run_file), f"dataset:{file}?name=sums", home=home)
        for file, home in zip((lines, table), homes, strict=True)
    ]
    assert [plan.manifest.run_id for plan in plans] == [first.manifest.run_id] * 2
    async with AsyncExitStack() as stack:
        nodes = await stepped(stack, tiny_models["s"], homes, plans)
        rewards = set()
        for parts in nodes:
            assert not parts.peers.counters.refused
            events = [event for event in read_events(parts.home.events, name="admitted") if not event["own"]]
            assert len(events) >= STEPS * step.foreign_groups
            assert {event["prompt"].split("/")[0] for event in events} == {"dataset:sums"}
            summaries = parts.store.reader.list_groups(limit=100)
            rewards |= {reward for summary in summaries for reward in summary.rewards}
            trained = list(read_events(parts.home.events, name="step"))
            assert len(trained) == STEPS
            assert any(0 < event["foreign_reward_mean"] < 1 for event in trained)
    assert {0.25, 1.0} <= rewards <= {0.0, 0.25, 1.0}
    home = nodes[1].home
    assert remembered_paths(home) == {"dataset:sums": str(table)}
    assert plan_run(None, None, home=home, data_paths=remembered_paths(home)).task_spec == plans[1].task_spec
    assert run_command(["replay", "list", "--home", str(home.root)]) == 0
    assert "dataset:sums" in capsys.readouterr().out
