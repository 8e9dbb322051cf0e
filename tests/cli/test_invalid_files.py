"""A folder, pipe, device, broken link or deep nesting in place of a file gives one line that names the file."""

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.config.home_files import mark
from ftis_node.config.manifest import load_manifest, parse_canonical
from ftis_node.errors import ConfigError, FileError, ModelError
from ftis_node.files import check_database, open_to_write, parse_toml, read_file, read_object, read_text, replace_file
from ftis_node.learner.checkpoint.checkpoint import read_checkpoint
from ftis_node.models import resolve_model
from ftis_node.models.model_files import read_header
from ftis_node.replay.database import open_writer
from ftis_node.report.facts import EventTotals
from ftis_node.telemetry.history import HistoryReader
from ftis_node.workers.durable import STATE_FILE
from tests.cli.test_usage_errors import error_of

DEEP_JSON = b'{"a": ' * 100_000
DEEP_TOML = b"a = " + b"[" * 50_000


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home")
    made.root.mkdir()
    mark(made, epoch=0)
    made.run_toml.write_text(load_manifest("arithmetic-ftis").to_toml())
    return made


def join(capsys: pytest.CaptureFixture[str], home: Home, model: Path, *arguments: str) -> str:
    given = ("--home", str(home.root), "--model", str(model), "--listen", "/ip4/127.0.0.1/tcp/0")
    return error_of(capsys, "join", *given, *arguments)


def broken_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


INVALID: dict[str, Callable[[Path], None]] = {
    "folder": lambda path: path.mkdir(), "pipe": lambda path: os.mkfifo(path), "broken link": broken_link,
    "device": link_to_device,
    "nested too deep": lambda path: path.write_bytes(DEEP_TOML if path.suffix == ".toml" else DEEP_JSON),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("home.json", "folder"), ("node.toml", "pipe"), ("run.toml", "device"), ("identity.key", "broken link"),
        ("replay.sqlite", "pipe"), ("peers.sqlite", "folder"),
        *((name, "nested too deep") for name in ("home.json", "node.toml", "run.toml")),
    ],
)  # fmt: skip
def test_a_home_file_that_is_not_as_a_node_writes_it_is_an_error(capsys, home, model, name, kind):
    (home.root / name).unlink(missing_ok=True)
    INVALID[kind](home.root / name)
    line = join(capsys, home, model)
    assert str(home.root / name) in line and (kind != "nested too deep" or kind in line)


def test_a_folder_in_place_of_a_run_is_no_unknown_preset(tmp_path):
    with pytest.raises(FileError, match="is a folder"):
        load_manifest(str(tmp_path))


def test_a_folder_in_place_of_a_file_that_a_node_writes_is_an_error(tmp_path):
    with pytest.raises(FileError, match="is a folder"):
        replace_file(tmp_path, b"{}")


def test_deep_nesting_in_settings_and_status_is_an_error(capsys, home):
    for path in (home.settings, home.status):
        path.write_bytes(DEEP_JSON)
    of_home = ("--home", str(home.root))
    assert str(home.settings) in error_of(capsys, "export", *of_home, "--out", str(home.root / "out"))
    assert str(home.status) in error_of(capsys, "status", *of_home)


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["replay", "export", "--text", "--out", "rows.jsonl"]]
)
def test_a_status_with_values_of_other_types_is_an_error(capsys, home, command):
    open_writer(home.replay).close()
    home.status.write_text('{"node": 5}')
    line = error_of(capsys, *command, "--home", str(home.root))
    assert f"the status of the node in {home.root} cannot be read" in line and "start it again" in line


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"a": ' * 70 + b"1" + b"}" * 70),
        ("model.safetensors", (200_000).to_bytes(8, "little") + b"[" * 200_000),
        ("model.safetensors.index.json", DEEP_JSON),
    ],
)
def test_deep_nesting_in_a_model_is_an_error(capsys, home, model, tmp_path, name, content):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / name).write_bytes(content)
    assert str(copy / name) in join(capsys, home, copy)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_an_invalid_file_of_a_tokenizer_is_an_error(capsys, home, model, tmp_path, name):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / name).write_bytes(DEEP_JSON)
    assert str(copy) in join(capsys, home, copy)
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(ModelError, match=name):
        resolve_model(str(copy))


def test_a_header_that_describes_no_tensors_is_an_error(tmp_path):
    file = tmp_path / "weights.safetensors"
    offsets = '"data_offsets": [0, 4]'
    for entry in (f'{{"dtype": 3, "shape": [1], {offsets}}}', f"{{{offsets}}}", '{"data_offsets": 4}'):
        header = f'{{"a": {entry}}}'.encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(ModelError, match="damaged"):
            read_header(file)


def test_deep_nesting_in_a_checkpoint_is_an_error(tmp_path):
    for name in ("checksums.json", STATE_FILE):
        (tmp_path / name).write_bytes(DEEP_JSON)
        with pytest.raises(ModelError, match=name):
            read_checkpoint(tmp_path, owner=None)  # type: ignore[arg-type]
        (tmp_path / "checksums.json").write_text(f'{{"{STATE_FILE}": "0"}}')


@pytest.mark.parametrize("file", ["/dev/zero", "pipe"])
def test_an_invalid_file_of_peers_is_an_error(capsys, home, model, tmp_path, file):
    path = tmp_path / file  # an absolute path replaces tmp_path
    if file != "/dev/zero":
        INVALID[file](path)
    line = join(capsys, home, model, "--peers", f"@{path}")
    assert str(path) in line and len(line) < 400


def test_errors_shorten_long_values_and_escape_control_characters(capsys, home, model):
    line = join(capsys, home, model, "--peers", "\x1b[31m" + "a" * 50_000)
    assert len(line) < 1000 and "\x1b" not in line and "aaa" in line
    line = join(capsys, home, model, "--task", "x\x07y" + "b" * 50_000)
    assert len(line) < 1000 and "\x07" not in line


def test_an_event_that_is_nested_too_deep_is_skipped(tmp_path):
    deep, too_deep = (b'{"time": 1.0, "event": "pause", "x": ' + b"[" * n + b"]" * n + b"}\n" for n in (50, 100_000))
    (path := tmp_path / "events.jsonl").write_bytes(deep + too_deep)
    event_totals = EventTotals()
    for line, head in (reader := HistoryReader(path)).read_new():
        if head is not None:
            event_totals.add(line, head)
    assert (event_totals.num_events, reader.build().damaged_lines) == (1, 1)


def test_the_reader_of_small_files_refuses_invalid_content(tmp_path):
    file = tmp_path / "file"
    for content, reason in ((b"\xff", "UTF-8"), (b"a" * 11, "larger")):
        file.write_bytes(content)
        with pytest.raises(FileError, match=reason):
            read_text(file, max_bytes=10)
    for content in (DEEP_JSON, b"[" * 100 + b"]" * 100, b"", b"\xff\xfe", b"nonsense"):
        file.write_bytes(content)
        with pytest.raises(FileError, match="file"):
            read_object(file)
    with pytest.raises(FileError, match="toml"):
        parse_toml(DEEP_TOML.decode(), source="a toml")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")
    for kind in ("folder", "pipe", "broken link", "device"):
        INVALID[kind](tmp_path / kind)
        with pytest.raises(FileError, match=kind):
            read_file(tmp_path / kind)


def test_a_folder_in_place_of_a_databases_journal_is_an_error(tmp_path):
    path = tmp_path / "replay.sqlite"
    sqlite3.connect(path).close()
    check_database(path)
    (tmp_path / "replay.sqlite-wal").mkdir()
    with pytest.raises(FileError, match="replay.sqlite-wal is a folder"):
        check_database(path)


@pytest.mark.parametrize("command", [["list"], ["stats"], ["export", "--out", "rows.jsonl"]])
def test_damaged_pages_of_the_buffer_are_an_error(capsys, home, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    open_writer(home.replay).close()
    pages = bytearray(home.replay.read_bytes())
    pages[4096:] = b"x" * (len(pages) - 4096)  # all but the first
    home.replay.write_bytes(pages)
    line = error_of(capsys, "replay", *command, "--home", str(home.root))
    assert "a database in the home is damaged" in line and "the next start of the node replaces it" in line


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "status.json.tmp", "worker.log"])
def test_files_are_not_written_through_links(tmp_path, name):
    target = tmp_path / "target"
    target.write_text("unchanged")
    link = tmp_path / "home" / name
    link.parent.mkdir()
    link.symlink_to(target)
    with pytest.raises(FileError, match=f"{name} is a link"):
        _write(Home(link.parent), name)
    assert target.read_text() == "unchanged" and link.is_symlink()


def _write(home: Home, name: str) -> None:
    from ftis_node.telemetry.events import EventLog

    if name == "lock":
        with home.owned():
            pass
    elif name == "events.jsonl":
        EventLog(home.events).close()
    elif name == "status.json.tmp":
        replace_file(home.status, b"{}")
    else:
        os.close(open_to_write(home.root / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def test_a_pipe_is_not_opened_to_write(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(FileError, match="not a regular file"):
        open_to_write(tmp_path / "pipe", os.O_WRONLY | os.O_CREAT)
    os.close(reading)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


TOML_BOMBS = {
    "hexadecimal": ("0x" + "f" * 60_000, "has a number of more than 1000 digits"),
    "dotted": ("1\n" + ".".join("k" * 20_000) + " = 1", "has a key of more than 64 parts"),
    "escaped": ("1\n" + ".".join([r'"\""'] * 10_000) + " = 1", "has a key of more than 64 parts"),
    "table": ("1\n[" + " . ".join("k" * 10_000) + "]", "has a key of more than 64 parts"),
    "large": ("1 #" + "x" * (64 << 10), "is larger than the limit of 65536 bytes"),
    "nested": ("[" * 50_000, "is nested too deep"),
}


@pytest.mark.parametrize("bomb", TOML_BOMBS)
def test_a_toml_file_that_is_costly_to_parse_is_an_error(capsys, home, model, tmp_path, bomb):
    text, complaint = TOML_BOMBS[bomb]
    file = tmp_path / "given.toml"
    file.write_text(f"schema_version = {text}\n")
    line = join(capsys, home, model, "--run", str(file))
    assert f"{file} {complaint}" in line and len(line) < 300


@pytest.mark.parametrize("number", ["9" * 5000, "[" * 60_000])
def test_a_manifest_of_the_swarm_with_such_a_value_is_an_error(number):
    canonical = (
        load_manifest("arithmetic-ftis")
        .canonical()
        .replace(b'"schema_version":1', b'"schema_version":' + number.encode())
    )
    with pytest.raises(ConfigError, match="run x was made by another version"):
        parse_canonical(canonical, source="run x")
