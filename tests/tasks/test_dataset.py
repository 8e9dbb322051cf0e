"""`dataset:`: the problems of a spec, how two nodes agree on them, and errors of one line."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.errors import ConfigError, TaskError
from ftis_node.node.startup.run_plan import plan_run
from ftis_node.records.group import PromptRef
from ftis_node.tasks import dataset_rows as rows_module
from ftis_node.tasks import held_out_spec, load_task, validated_domain
from ftis_node.tasks.dataset_rows import RowSource, read_rows
from ftis_node.tasks.dataset_task import pinned
from ftis_node.tasks.spec import parse_spec
from tests.conftest import raises_line

ROWS = [{"q": "1+1=", "a": 2, "level": "easy"}, {"q": "2+2=", "a": 4, "level": "easy"}, {"q": "1+1=", "a": 3}]
QUERY = "prompt=q&answer=a&reward=exact&style=plain"
PROBLEMS = [("1+1=", "2"), ("2+2=", "4")]  # the third row repeats the first question


def write(path: Path, rows: list[dict[str, object]] = ROWS) -> Path:
    """Write the rows in the format of the file's suffix."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("q,level,a\n" + "".join(f'"{row["q"]}",,{row["a"]}\n' for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_problems_and_digest_do_not_depend_on_the_format(tmp_path, suffix):
    file = write(tmp_path / f"sums{suffix}")
    task = load_task(f"dataset:{file}?{QUERY}")
    assert (task.name, task.split) == ("dataset:sums", "train")
    assert [(task[i].prompt[0]["content"], task[i].answer) for i in range(len(task))] == PROBLEMS
    assert task[1].ref == PromptRef("dataset:sums", "train", 1)
    assert task.resolve(task[1].ref) == task[1]
    for ref in (PromptRef("dataset:sums", "train", 2), PromptRef("sums", "train", 0), PromptRef(task.name, "test", 0)):
        with pytest.raises(KeyError):
            task.resolve(ref)
    digest = hashlib.sha256(b'["1+1=","2"]\n["2+2=","4"]\n').hexdigest()[:32]
    assert pinned(parse_spec(f"dataset:{file}?{QUERY}")).canonical == (
        f"dataset:sums?answer=a&prompt=q&reward=exact&sha256={digest}&style=plain"
    )


def test_the_reference_is_the_text_after_the_marker(tmp_path):
    file = write(tmp_path / "train.jsonl", [{"q": "x?", "a": "#### 1\n#### 1,080 "}])
    task = load_task(f"dataset:{file}?prompt=q&answer=a&after=####")
    assert task[0].answer == "1,080"
    assert [message["role"] for message in task[0].prompt] == ["system", "user"]


def test_references_are_texts_or_numbers(tmp_path):
    cells = ["nan", " inf ", 10**400, -3, 2.50, 7.0, 1e300, "0.0"]
    file = write(tmp_path / "train.jsonl", [{"q": str(i), "a": cell} for i, cell in enumerate(cells)])
    task = load_task(f"dataset:{file}?{QUERY}")
    answers = [task[index].answer for index in range(len(task))]
    assert answers == ["nan", "inf", str(10**400), "-3", "2.5", "7", str(int(1e300)), "0.0"]


def test_a_folder_has_both_splits_and_the_digest_covers_the_training_problems(tmp_path):
    write(tmp_path / "train.csv")
    spec = parse_spec(f"dataset:{tmp_path}?name=s&{QUERY}")
    assert held_out_spec(spec) is None
    write(tmp_path / "test.jsonl", [{"q": "3+3=", "a": 6}])
    assert load_task(held_out_spec(pinned(spec)), split="test")[0].answer == "6"


@pytest.mark.usefixtures("rows_in_this_process")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"q": "x", "b": 1}], "has no column 'a': its columns are 'q', 'b'"),
        ([{"q": "x", "a": 1}, {"q": " ", "a": 1}], "row 2: the column 'q' is empty"),
        ([{"q": "x", "a": 1}, {"q": "y"}], "row 2: the column 'a' must be a text or a number"),
        ([{"q": "x", "a": True}], "row 1: the column 'a' must be a text or a number"),
        ('{"q": "x", "a": ' + "1" * 5000 + "}", ":1: invalid JSON (Exceeds the limit"),
        ([{"q": "x", "a": float("nan")}], "row 1: the column 'a' must be a text or a number"),
        ([{"q": "x \ud800", "a": 1}], "row 1: the column 'q' holds an unpaired surrogate"), ([], "has no rows"),
        ("{\n", ":1: invalid JSON"), ("[" * 100_000, ":1: invalid JSON"),
        ("[1]\n", ":1: the line must be a JSON object"), (b'{"q": "\xff", "a": 1}\n', ":1: invalid JSON"),
    ],
)  # fmt: skip
def test_the_error_names_an_invalid_row(tmp_path, rows, message):
    file = tmp_path / "invalid.jsonl"
    content = rows if isinstance(rows, bytes | str) else "".join(json.dumps(row) + "\n" for row in rows)  # type: ignore[attr-defined]
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises_line(TaskError, message, str(file)):
        load_task(f"dataset:{file}?{QUERY}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "absent.jsonl: cannot be read (No such file or directory)"),
        ("x.parquet", b"PAR1 not at all", "x.parquet: invalid Parquet ("),
        ("x.csv", b'q,a\n"open,1\n', "invalid CSV (unexpected end of data)"),
        ("x.csv", b"q,a\n\xff,1\n", "invalid CSV ('utf-8'"),
        ("x.csv", b"", "has no column 'q': its columns are none"),
        ("folder", "mkdir", "has none of train.jsonl, train.parquet, train.csv"),
        ("pipe.jsonl", "mkfifo", "pipe.jsonl"),
    ],
)
def test_the_error_names_an_unreadable_file(tmp_path, name, content, message):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        getattr(os, content)(file)
    with raises_line(TaskError, message):
        load_task(f"dataset:{file}?{QUERY}")


def test_a_file_above_the_size_limit_is_an_error(tmp_path, capsys):
    file = tmp_path / "huge.jsonl"
    file.touch()
    os.truncate(file, 5 << 30)
    assert run(["tasks", f"dataset:{file}?{QUERY}"]) == 2
    assert "huge.jsonl: 5 GiB are too many, at most 4 GiB" in capsys.readouterr().err


def test_columns_above_the_size_limit_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_OUTPUT_BYTES", 2 << 20)
    file = write(tmp_path / "long.jsonl", [{"q": "x" * 1_000_000, "a": i, "more": "y" * 9_000_000} for i in range(3)])
    with pytest.raises(TaskError, match=r"its columns q and a have more than 2 MiB: take fewer rows"):
        rows_module._write_rows(RowSource(("q", "a"), file=str(file)))


@pytest.mark.parametrize("kind", rows_module.COMPRESSED.values())
def test_a_compressed_file_is_not_unpacked(tmp_path, kind):
    file = tmp_path / "rows.jsonl"
    (magic,) = (magic for magic, name in rows_module.COMPRESSED.items() if name == kind)
    file.write_bytes(magic + b"rows")
    advice = rf"rows.jsonl is compressed \({kind}\): unpack it, and give the unpacked file$"
    with pytest.raises(TaskError, match=advice):
        read_rows(RowSource(("q",), file=str(file)))


LIMITED = """
import sys
from ftis_node.tasks import dataset_rows
dataset_rows.MAX_MEMORY_BYTES = 700 << 20
dataset_rows._set_limits(60.0)
sys.exit(dataset_rows._run(sys.argv[1]))
"""


def test_a_parquet_file_that_unpacks_to_more_than_the_memory_is_an_error(tmp_path):
    """1.7 kB hold one text of 4 MB a thousand times."""
    indices, texts = pyarrow.array([0] * 1000, pyarrow.int32()), pyarrow.array(["x" * 4_000_000])
    table = pyarrow.table({"q": pyarrow.DictionaryArray.from_arrays(indices, texts)})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", compression="zstd", store_schema=False)
    source = RowSource(("q",), file=str(tmp_path / "t.parquet"))
    command = [sys.executable, "-c", LIMITED, json.dumps(asdict(source))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == TaskError.exit_code
    assert "t.parquet: its rows need more than" in done.stderr


def test_a_line_above_the_size_limit_is_an_error(tmp_path):
    file = tmp_path / "line.jsonl"
    file.write_bytes(b'{"q": "' + b"x" * (17 << 20))
    with pytest.raises(TaskError, match=r"line.jsonl:1: the line has more than 16 MiB"):
        read_rows(RowSource(("q",), file=str(file)))


def test_reading_has_a_time_limit(tmp_path):
    file = write(tmp_path / "long.jsonl", [{"q": str(number)} for number in range(20_000)])
    with pytest.raises(TaskError, match="not read within 0.001 s"):
        read_rows(RowSource(("q",), file=str(file)), limit_s=0.001)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "'' is no parameter of a data set"),
        ("answer=a", "names no column of questions: add prompt=COLUMN"),
        ("prompt=q", "the reward math compares with a reference: add answer=COLUMN"),
        ("prompt=q&answer=a&promt=q", "'promt=q' is no parameter of a data set"),
        ("prompt=q&answer=a&prompt=q", "the parameter 'prompt' appears twice"),
        (f"prompt=q&answer={'a' * 257}", "the parameter 'answer' must have 1 to 256 printable characters"),
        ("prompt=q&answer=a%0A", "the parameter 'answer' must have 1 to 256 printable characters"),
        ("prompt=q&answer=a&reward=math:0", "reward=math:0 is malformed"),
        ("prompt=q&answer=a&reward=math,math", "reward=math,math is malformed"),
        ("prompt=q&answer=a&reward=math:999,format:0.5", "at most 1,000"),
        ("prompt=q&answer=a&reward=no-such", "unknown reward 'no-such'"),
        ("prompt=q&reward=regex", "the reward regex and pattern=REGEX need each other"),
        ("prompt=q&reward=regex&pattern=(", "pattern=( cannot be used"),
        ("prompt=q&reward=regex&pattern=(?=x)", "(the syntax is that of RE2)"),
        ("prompt=q&reward=format&style=plain", "the reward format looks for think and answer blocks"),
        ("prompt=q&answer=a&style=fancy", "unknown style 'fancy': use think or plain"),
        ("prompt=q&reward=format&after=x", "after=MARKER reads the column of answers"),
        ("prompt=q&answer=a&after=%3D", "has no text after '='"),
        ("prompt=q&answer=a&sha256=zz", "sha256 must have 32 hex digits"),
        (f"prompt=q&answer=a&sha256={'0' * 32}", "are not those of the run"),
        ("prompt=q&answer=a&hub=../..", "hub=../.. is no repository of the hub"),
        ("prompt=q&answer=a&hub=o/n&revision=../../x", "revision=../../x is no name of a part of a data set"),
        ("prompt=q&answer=a&hub=o/n&split=https://e.x", "split=https://e.x is no name of a part of a data set"),
        ("prompt=q&answer=a=0", "has the weight 0"),
        ("name=x", "names no columns"),
    ],
)
def test_an_invalid_query_is_a_one_line_error(tmp_path, query, message):
    with raises_line(TaskError, message):
        load_task(f"dataset:{write(tmp_path / 'x.jsonl')}?{query}")


@pytest.mark.parametrize("source", ["", "a b", "../..", "über", "/", "-x"])
def test_an_invalid_source_is_a_task_error(source):
    with pytest.raises(TaskError, match="dataset:"):
        parse_spec(f"dataset:{source}?prompt=q&answer=a")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dataset:o/n?answer=a&prompt=q", "dataset:n?answer=a&hub=o/n&prompt=q"),
        ("dataset:n?prompt=q&answer=a&hub=o/n", "dataset:n?answer=a&hub=o/n&prompt=q"),
        (
            "dataset:o/n.v1?prompt=q&answer=a&reward=format:0.2,math:1.0",
            "dataset:n-v1?answer=a&hub=o/n.v1&prompt=q&reward=format,math:5",
        ),
        (
            "dataset:./x.csv?prompt=my%20q&answer=a&config=3=2+arithmetic",
            "arithmetic+dataset:x?answer=a&config=3&prompt=my%20q=2",
        ),
        ("dataset:/d/x?reward=regex&prompt=q&pattern=a%2Bb=", "dataset:x?pattern=a%2Bb%3D&prompt=q&reward=regex"),
        ("dataset:/d/x.jsonl?prompt=q&answer=2", "dataset:x?answer=2&prompt=q"),
        ("dataset:x=2+arithmetic", "arithmetic+dataset:x=2"),
    ],
)
def test_equal_queries_have_one_canonical_form(text, canonical):
    spec = parse_spec(text)
    assert (parse_spec(str(spec)), spec.canonical) == (spec, canonical)
    assert parse_spec(spec.canonical).canonical == spec.canonical


@given(st.text(alphabet="datse:?&=%prom,answ/.+ 01j", max_size=40), st.text(max_size=20))
@example("", ".csv")
def test_any_text_is_a_spec_that_can_be_parsed_again_or_a_task_error(text, value):
    for query in (text, f"prompt={value}&answer=a", f"prompt=q&reward={value}&answer=a", f"prompt=q&answer=a={value}"):
        try:
            spec = parse_spec(f"dataset:{query}"), parse_spec(f"dataset:./d.csv?{query}")
        except TaskError as error:
            assert "\n" not in str(error) or "\n" in text + value
            continue
        for each in spec:
            assert parse_spec(str(each)) == each
            assert parse_spec(each.canonical).canonical == each.canonical


def test_nodes_with_equal_data_share_a_run_and_other_data_is_an_error(tmp_path):
    first, second = Home(tmp_path / "1"), Home(tmp_path / "2")
    first_file, second_file = write(tmp_path / "first.jsonl"), write(tmp_path / "second.csv")
    plan = plan_run(None, f"dataset:{first_file}?name=sums&{QUERY}", home=first)
    run_file = tmp_path / "run.toml"
    run_file.write_text(plan.manifest.to_toml())
    assert str(first_file) not in run_file.read_text()
    assert "sha256=" in plan.manifest.task
    for task in (f"dataset:{second_file}?name=sums", f"dataset:{second_file}?name=sums&{QUERY}"):
        joined = plan_run(str(run_file), task, home=second)
        assert joined.manifest.run_id == plan.manifest.run_id
        assert load_task(joined.task_spec)[0] == load_task(plan.task_spec)[0]
    by_path = plan_run(str(run_file), None, home=second, data_paths={"dataset:sums": str(second_file)})
    assert by_path.manifest == plan.manifest
    write(second_file, [*ROWS, {"q": "3+3=", "a": 6}])
    others = r"^dataset:sums: these 3 problems \(digest [^\n]*\) are not those of the run[^\n]*\Z"
    with pytest.raises(TaskError, match=others):
        plan_run(str(run_file), f"dataset:{second_file}?name=sums&{QUERY}", home=second)
    without_query = plan_run(str(run_file), f"dataset:{second_file}?name=sums", home=second)
    with pytest.raises(TaskError, match="are not those of the run"):
        load_task(without_query.task_spec)
    with raises_line(TaskError, "dataset:sums needs the run's data file: give it as --task dataset:PATH?name=sums"):
        load_task(plan_run(str(run_file), None, home=second).task_spec)


def test_a_run_from_a_peer_must_pin_its_data(tmp_path):
    manifest = RunManifest(name="x", task=f"dataset:s?{QUERY}")
    task = f"dataset:{write(tmp_path / 's.jsonl')}"
    with pytest.raises(ConfigError, match="does not pin its data set"):
        plan_run(manifest.run_id, task, home=Home(tmp_path / "home"), find=lambda run_id: manifest)


@pytest.mark.parametrize("text", ["dataset:" + "?&" * 250, "dataset:?" + "a=" * 250, "+dataset:?=1" * 40, "dataset:s"])
def test_a_peers_domain_outside_the_run_counts_as_none(text):
    run_task = f"arithmetic+dataset:s?{QUERY}&sha256={'0' * 32}"
    assert validated_domain(text, run_task) == ""
    own = str(replace(parse_spec(run_task), parts=parse_spec(run_task).parts[1:]))
    assert validated_domain(own, run_task) == own


def test_other_rewards_make_another_run_instead_of_a_domain(tmp_path):
    file, home = write(tmp_path / "s.jsonl"), Home(tmp_path / "home")
    mixed = plan_run(None, f"dataset:{file}?{QUERY}+arithmetic", home=home)
    run_file = tmp_path / "run.toml"
    run_file.write_text(mixed.manifest.to_toml())
    domain = plan_run(str(run_file), f"dataset:{file}?name=s", home=home)
    assert (domain.manifest, domain.domain_spec) == (mixed.manifest, str(pinned(parse_spec(f"dataset:{file}?{QUERY}"))))
    other = plan_run(str(run_file), f"dataset:{file}?prompt=q&answer=a&style=plain&reward=math", home=home)
    assert other.domain_spec is None
    assert other.manifest.run_id != mixed.manifest.run_id


def test_a_task_that_is_too_long_for_a_manifest_is_an_error(tmp_path):
    file = write(tmp_path / "s.jsonl")
    parts = [f"dataset:{file}?{QUERY}&name={'n' * 60}{number}" for number in range(6)]
    with pytest.raises(ConfigError, match="the task has .* characters, at most 512"):
        plan_run(None, "+".join(parts), home=Home(tmp_path / "home"))
