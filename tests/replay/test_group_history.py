"""The prompt of a stored group, rebuilt from the run in the home."""

from types import SimpleNamespace
from typing import Any

from ftis_node.config.home import Home
from ftis_node.records.group import PromptRef
from ftis_node.replay.group_history import PromptResolver


def test_a_run_without_a_task_is_given_as_the_reason(tmp_path):
    """An exception here would end the dashboard."""
    home = Home(tmp_path)
    home.run_toml.write_text('name = "no task"\n')
    group: Any = SimpleNamespace(prompt_ref=PromptRef("arithmetic", "train", 1))
    assert PromptResolver(home).resolve(group).missing == "the home's run.toml names no task"
