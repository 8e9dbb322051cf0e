"""The page of a run is self-contained, has the figures of the event log, and escapes the texts of peers."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.report import html_page
from ftis_node.report.timeline import MAX_ENTRIES, TimelineBuilder
from ftis_node.swarm.reasons import REFUSALS, full_sentence
from tests.report.support import ATTACK, NUM_STEPS, PEER_ID, step_events, write_home
from tests.validation.test_reasons import ROWS

IMAGE = "data:image/svg+xml;base64,"
SVG_TEXT = "{http://www.w3.org/2000/svg}text"
CHARTS = ["Accuracy", "Reward", "Loss", "KL", "Distance from the start", "Length", "Cut and without signal", "Entropy"]
CHARTS += ["Kept and truncated", "Groups of each step", "Speed", "Gradient norm"]
CHARTS += ["Engine against learner", "Groups over time"]
VOID_TAGS = {"meta", "br", "img", "link", "input", "hr", "source"}
MIDDLE = ATTACK[ATTACK.index("<img") : ATTACK.index("\x1b")]


class Page(HTMLParser):
    """Tags with attributes, and the text of each element in order; it asserts that tags are nested."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(self.source)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.append((self._open[-1], data.strip()))

    def rows(self) -> list[list[str]]:
        """Return the cells of every table row as plain text."""
        cells = (
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
            for row in re.findall(r"<tr>(.*?)</tr>", self.source, re.S)
        )
        return [[" ".join(re.sub(r"<[^>]+>", " ", cell).split()) for cell in row] for row in cells]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("report")
    home = write_home(folder / "home")
    assert run(["report", "--home", str(home.root), "--out", str(folder / "run.html")]) == 0
    return Page(folder / "run.html")


def test_the_page_loads_no_resource_and_runs_no_script(page: Page) -> None:
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form", "video", "audio", "use"}
    for tag, attributes in page.tags:
        assert all(attributes.get(name, IMAGE).startswith(IMAGE) for name in ("src", "srcset")), tag
        assert " " not in attributes.get("srcset", ""), "one image"
        assert not {"href", "xlink:href", "action", "data"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert "url(" not in (attributes.get("style") or ""), tag
    (style,) = [text for tag, text in page.texts if tag == "style"]
    assert "url(" not in style
    assert "@import" not in style
    assert any("default-src 'none'" in (attributes.get("content") or "") for _, attributes in page.tags)


def test_texts_of_peers_are_escaped(page: Page) -> None:
    shown = [text for _, text in page.texts if MIDDLE in text]
    assert len(shown) >= 6, "the peer's name, model, ban, reason and completion, and the node's model"
    assert "\x1b" not in page.source
    assert "\u202e" not in page.source


def test_the_figures_are_those_of_the_event_log(page: Page) -> None:
    strong = [text for tag, text in page.texts if tag == "strong"]
    last_ten = sum(event["reward_mean"] for event in step_events()[-10:]) / 10
    assert strong[:3] == [str(NUM_STEPS), "75 %", f"{last_ten:.3g}"]
    assert "62.5 %" in strong, "300 of 480 groups are foreign"
    assert strong[4] == "1,041" and "groups of this node that 3 peers trained on, by receipts" in page.source
    assert strong[6:8] == ["5", "38"], "turns of an episode, and 38 refused groups"
    assert "<small>3 observations between them</small>" in page.source
    rows = page.rows()
    (peer,) = [row for row in rows if row[0].startswith("&lt;script") and len(row) == 8]
    assert peer[5:7] == ["60", "38"], "the peer's groups are counted as those of the whole log"
    assert [f"reward_mismatch {full_sentence('reward_mismatch')}", "37"] in rows
    assert [row[:4] for row in rows if row[1:2] == ["arithmetic"]] == [
        [str(step), "arithmetic", f"{step / 80:.3f}", "64"] for step in (0, 20, 40, 60)
    ]
    (first,) = [row for row in rows if row[0] == "1–6"]
    assert first[1] == "0.035", "the mean of 0.01 to 0.06"
    assert first[6:9] == ["18", "30", "600"]
    (idle,) = [row for row in rows if row[0] == "13–18"]
    assert idle[-1] == "5"


def test_answers_before_and_after_are_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"before": {"text": ATTACK * 99, "is_right": False}, "after": {"text": "42", "is_right": True}}
    document = {
        **{"model": "/home/someone/out-s", "pass_at_1": 0.64, "n": 512, "task": "sums", "k": 1},
        "compared": {"model": ATTACK, "pass_at_1": 0.1289, "n": 512},
        "difference": {"gained": 270, "lost": 8, "pass_at_1": 0.51, "standard_error": 0.02},
        "problems": [{"problem": f"{number}+2=", "right_answer": "42", **answers} for number in range(9)],
    }
    home, compared, out = write_home(tmp_path / "home"), tmp_path / "eval.json", tmp_path / "run.html"
    command = ["report", "--home", str(home.root), "--out", str(out), "--compared", str(compared)]
    compared.write_text(json.dumps(document))
    assert run(command) == 0
    page = Page(out)
    assert "Accuracy 12.9 % before, 64 % after, on 512 problems of sums." in page.source
    assert "After: …/out-s. 270 problems gained, 8 lost." in page.source and "someone" not in page.source
    assert page.source.count("Correct: 42") == 5 and "4+2=" in page.source and "5+2=" not in page.source
    assert "\x1b" not in page.source and "<script>alert" not in page.source
    compared.write_text(json.dumps({"model": "m"}))
    capsys.readouterr()
    assert run(command) == 2
    assert "eval --model TRAINED --task SPEC --compare BASE --show 5 --json" in capsys.readouterr().err


def test_charts_show_every_curve_and_none_has_a_reference(page: Page) -> None:
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [str(image["alt"]).partition(":")[0] for image in images] == CHARTS
    assert images[2]["alt"] == "Loss: loss from -0.001 to -0.06"
    stacked = ElementTree.fromstring(base64.b64decode(str(images[9]["src"]).removeprefix(IMAGE)))
    references = [value for one in stacked.iter() for name, value in one.items() if name.endswith("href")]
    assert all(value.startswith("#") for value in references)
    ticks = [float(one.text or "nan") for one in stacked.iter(SVG_TEXT)]
    assert max(ticks[-4:]) == 7.5, "the sum of 3 own groups and 5 from peers"


def test_the_timeline_has_the_events_in_order(page: Page) -> None:
    entries = [re.sub(r"<[^>]+>", "", text) for text in re.findall(r"</time><span>(.*?)</span>", page.source, re.S)]
    expected = [
        "Started", "Joined: ", "No signal: steps 12 to 17 had no effect",
        "38 groups refused: reward_mismatch 37, &lt;script&gt;",
    ]  # fmt: skip
    expected += [" is banned: &lt;script&gt;", "Restarted after an end without a stop event"]
    expected += ["The learner lost step 45 and repeats it: see …/learner.log &lt;script&gt;"]
    expected += ["Implausible log-probs from &lt;script&gt;", "&lt;script&gt;"]
    expected += ["Resumed at step 43 of the newest valid checkpoint; step 44 was done"]
    expected += ["clock was moved by -3,600 s", "Stopped at step 60"]
    assert len(entries) == len(expected)
    for part, text in zip(expected, entries, strict=True):
        assert part in text


def test_the_page_has_no_address_or_path_of_the_machine(page: Page, tmp_path: Path) -> None:
    assert "203.0.113.7" not in page.source
    assert "someone" not in page.source
    assert str(tmp_path.parent.parent) not in page.source


def test_the_page_of_a_node_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(tmp_path / "home")
    home.create()
    evaluation = '{"time":2.0,"event":"eval","step":0,"task":"arithmetic","pass_at_1":0.1,"n":8}'
    home.events.write_text('{"time":1.0,"event":"start"}\n' + evaluation + "\n")
    out = tmp_path / "none.html"
    assert run(["report", "--home", str(home.root), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = Page(out)
    assert "has completed no step yet" in page.source
    assert "figure" not in {tag for tag, _ in page.tags}, "one point has no curve"
    assert ["0", "arithmetic", "0.100", "8"] in [row[:4] for row in page.rows()]


def test_invalid_use_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--home", str(tmp_path)]) == 2
    home = write_home(tmp_path / "home")
    assert run(["report", "--home", str(home.root), "--out", str(tmp_path / "no/where.html")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "no node has run in" in first
    assert "cannot write" in second


def test_the_page_of_a_long_run_is_bounded(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    with home.events.open("w") as events:
        for step in range(1, 4_001):
            events.write(json.dumps({"time": step * 100.0, "event": "step", "step": step, "loss": step % 7}) + "\n")
            events.write(json.dumps({"time": step * 100.0, "event": "peer_joined", "peer": PEER_ID}) + "\n")
            events.write("damaged\n" if step % 1000 == 0 else "")
    out = tmp_path / "long.html"
    assert run(["report", "--home", str(home.root), "--out", str(out)]) == 0
    assert out.stat().st_size < 200_000
    source = Page(out).source
    assert "4 damaged lines were skipped" in source
    assert f"{4_000 - MAX_ENTRIES:,} earlier events are left out" in source


def test_few_refusals_are_left_out_and_an_effective_step_ends_an_entry_of_skipped_ones() -> None:
    log = TimelineBuilder()
    for second in range(9):
        log.add({"time": second, "event": "refused", "reason": "stale"})
    for step, skipped in ((1, "x"), (2, None), (3, "x")):
        log.add({"time": 10 + step, "event": "step", "step": step, "skipped": skipped})
    entries, left_out = log.finish()
    assert [(entry.kind, entry.first["step"], entry.count) for entry in entries] == [
        ("step_skipped", 1, 1),
        ("step_skipped", 3, 1),
    ]
    assert left_out == 0


def test_every_refusal_reason_has_a_sentence() -> None:
    assert set(REFUSALS) == set(ROWS)


def test_the_style_sheet_defines_every_class_of_the_page() -> None:
    folder = Path(html_page.__file__).parent
    used = re.findall(r'class="([a-z ]+)"', (folder / "page.html.j2").read_text(encoding="utf-8"))
    known = set(re.findall(r"\.([a-z]+)", (folder / "page.css").read_text(encoding="utf-8")))
    assert {name for names in used for name in names.split()} - known == set()
