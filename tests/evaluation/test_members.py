"""The members of an ensemble: their names, and the models of a swarm."""

import json
import shutil

import pytest

from ftis_node.config.home import Home
from ftis_node.errors import ConfigError
from ftis_node.evaluation.ensemble import evaluate_ensemble
from ftis_node.evaluation.members import Member, as_members, swarm_members
from tests.cli.test_export import trained_home
from tests.models.tiny_models import save_tiny


def test_members_have_distinct_names():
    members = as_members(["org/x", "org/x", Member("x", "y", "arithmetic"), "org/x"])
    assert [member.name for member in members] == ["org/x", "org/x-2", "x", "org/x-3"]
    assert members[2] == Member("x", "y", "arithmetic")


@pytest.mark.timeout(240)
async def test_members_of_a_swarm_are_exports_and_homes_with_a_checkpoint(tmp_path, caplog):
    """The swarm has an exported model, the home of a learner, two of other roles, and one without a checkpoint."""
    trained_home(tmp_path, lora=True)
    swarm = tmp_path / "swarm"
    save_tiny(swarm / "exported", seed=1)
    shutil.move(tmp_path / "home", swarm / "zoe")
    settings = json.loads(Home(swarm / "zoe").settings.read_text())
    for name, role in (("link", "exchange"), ("helper", "generator")):
        other = Home(swarm / name)
        other.create()
        other.run_toml.write_text(Home(swarm / "zoe").run_toml.read_text())
        other.settings.write_text(json.dumps({**settings, "role": role}))
    (swarm / "notes").mkdir()
    new = Home(swarm / "new")
    new.create()
    new.run_toml.write_text(other.run_toml.read_text())
    new.settings.write_text(json.dumps(settings))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    members = swarm_members([swarm], scratch)
    assert [(member.name, member.domain) for member in members] == [("exported", None), ("zoe", "arithmetic")]
    assert f"{new.root} is skipped: it has no checkpoint yet" in caplog.text
    result = await evaluate_ensemble(
        members, "arithmetic", modes=["posterior", "vote"], limit=6, max_tokens=48, engine="torch"
    )
    assert [(entry.name, entry.domain) for entry in result.experts] == [("exported", None), ("zoe", "arithmetic")]
    Home(swarm / "zoe").settings.write_text(json.dumps({**settings, "name": "zoe/the first"}))
    (named,) = swarm_members([swarm / "zoe"], scratch)
    assert named.name == "zoe/the first"
    assert named.model != members[1].model
    only_helper = tmp_path / "helpers"
    only_helper.mkdir()
    shutil.move(swarm / "helper", only_helper / "helper")
    with pytest.raises(ConfigError, match="homes of nodes that learn"):
        swarm_members([only_helper], scratch)
