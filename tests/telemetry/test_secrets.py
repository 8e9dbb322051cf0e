"""A secret in any form is redacted in log lines, tracebacks, events and statuses; other text is unchanged."""

import base64
import json
import logging

import pytest

from ftis_node.cli.app import run
from ftis_node.telemetry import secrets
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.log import set_up_logging
from ftis_node.telemetry.secrets import HIDDEN, keep_secret, keep_variables_secret, redacted, show_traceback
from ftis_node.telemetry.status import NodeStatus, Status

SEED = bytes((7 * number + 5) % 251 for number in range(32))


@pytest.fixture(autouse=True)
def secret_seed(monkeypatch):
    monkeypatch.setattr(secrets, "_forms", set())
    keep_secret(SEED)


@pytest.fixture
def restored_logging():
    root, own = logging.getLogger(), logging.getLogger("ftis_node")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], root.level, own.level = before


@pytest.mark.parametrize(
    "form",
    [
        SEED.hex(),
        SEED.hex().upper(),
        repr(SEED),
        SEED.decode("latin-1"),
        base64.b64encode(SEED).decode(),
        base64.urlsafe_b64encode(b"\x08\x01\x12\x40" + SEED + bytes(32)).decode(),  # as libp2p keeps a private key
        base64.b64encode(b"x" + SEED).decode(),
        base64.b64encode(b"xy" + SEED).decode(),
    ],
)
def test_each_form_of_a_secret_is_redacted(form):
    shown = redacted(f"before {form} after")
    assert shown.startswith("before ") and shown.endswith(" after") and HIDDEN in shown
    assert form[8:24] not in shown


def test_access_tokens_are_found_by_their_form_and_in_the_environment():
    token = "hf_" + "Abc123" * 5
    assert redacted(f"401 for {token}.") == f"401 for {HIDDEN}."
    assert redacted("Authorization: Bearer abcdefgh12345678xyz") == f"Authorization: Bearer {HIDDEN}"
    address = "https://me:word@host:4318/x"  # not-a-secret: an example
    assert redacted(f"got '{address}'") == f"got 'https://{HIDDEN}@host:4318/x'"
    keep_variables_secret({"WANDB_API_KEY": "0123456789ab-key"})
    assert redacted("key 0123456789ab-key") == f"key {HIDDEN}"


def test_other_text_and_short_secrets_are_unchanged():
    keep_secret("")
    keep_secret("short")
    text = "a group of 12 short completions by 12D3KooWabc, hf_small, http://host:4318/@a, ssh://git@host"
    assert redacted(text) == text


@pytest.mark.usefixtures("restored_logging")
def test_log_lines_and_tracebacks_contain_no_secret(capsys):
    set_up_logging()
    log = logging.getLogger("ftis_node.x")
    try:
        raise ValueError(f"cannot use {SEED!r}")
    except ValueError as error:
        log.exception("failed with %s", SEED.hex())
        show_traceback(type(error), error, error.__traceback__)
    printed = capsys.readouterr().err
    assert (printed.count(HIDDEN), printed.count("ValueError: cannot use b'<secret>'")) == (3, 2)
    assert SEED.hex() not in printed and repr(SEED)[2:-1] not in printed


@pytest.mark.usefixtures("restored_logging")
def test_an_error_of_the_command_line_contains_no_secret(capsys):
    assert run(["status", "--home", f"/no/home/{SEED.hex()}"]) == 2
    assert capsys.readouterr().err == (f"ftis-node: no node has run in /no/home/{HIDDEN}: give its home with --home\n")


def test_events_and_statuses_contain_no_secret(tmp_path):
    events = EventLog(tmp_path / "events.jsonl")
    events.write("failed", problem=f"seed {SEED.hex()}", blob=SEED)
    events.close()
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["problem"], event["blob"]) == (f"seed {HIDDEN}", HIDDEN)
    document = Status(node=NodeStatus(name=base64.b64encode(SEED).decode().rstrip("="))).to_json()
    assert Status.from_json(document).node.name.startswith(HIDDEN)
