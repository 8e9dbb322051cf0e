"""The public names of the package: a light import, rollouts as tables, verified envelopes."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import ftis_node
from ftis_node.config.home import Home
from ftis_node.errors import ConfigError, RecordError
from ftis_node.records.envelope import seal_group
from ftis_node.records.group import PromptRef
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.group_history import PromptResolver
from tests.conftest import accept, make_group


def test_the_import_loads_no_large_package():
    code = (
        "import sys, ftis_node; ftis_node.Manifest; ftis_node.ReplayBuffer; ftis_node.Task; ftis_node.decode_envelope\n"
        "ftis_node.Node\n"
        "sys.exit(' '.join({'torch', 'hivemind', 'transformers', 'pandas', 'datasets'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_rollouts_are_read_while_the_buffer_is_open(tmp_path, identity):
    with pytest.raises(ConfigError, match="no replay buffer"):
        ftis_node.ReplayBuffer.open(tmp_path)
    buffer = ReplayBuffer(Home(tmp_path).replay)
    assert buffer.admit(accept(make_group(identity), identity), own=False)
    rollouts = ftis_node.ReplayBuffer.open(str(tmp_path))
    frame, dataset = rollouts.to_pandas(), rollouts.to_dataset()
    buffer.close()
    assert list(frame["reward"]) == dataset["reward"][:] == [1.0, 0.0]
    assert dataset["token_ids"][0] == [10, 11, 2]


def test_an_envelope_is_decoded_only_with_a_valid_signature(identity):
    group = make_group(identity)
    data = seal_group(group, identity).to_bytes()
    assert ftis_node.decode_envelope(data).rewards == group.rewards
    with pytest.raises(RecordError) as caught:
        ftis_node.decode_envelope(data[:-1] + bytes([data[-1] ^ 1]))
    assert caught.value.reason == "signature"
    for invalid in (b"", b"\xff" * 40, data[:-1], bytes(5 << 20)):
        with pytest.raises(RecordError):
            ftis_node.decode_envelope(invalid)


def test_a_run_without_a_task_is_given_as_the_reason(tmp_path):
    """An exception here would end the dashboard."""
    home = Home(tmp_path)
    home.run_toml.write_text('name = "no task"\n')
    group: Any = SimpleNamespace(prompt_ref=PromptRef("arithmetic", "train", 1))
    assert PromptResolver(home).resolve(group).missing == "the home's run.toml names no task"
