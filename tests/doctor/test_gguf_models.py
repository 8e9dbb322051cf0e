"""`doctor --model` of a GGUF file: planned from the file or the folder to which it was converted, never downloaded."""

from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.doctor.check_result import CheckResult
from ftis_node.doctor.model import check_model, memory_question
from ftis_node.models.gguf import _cache, convert
from ftis_node.models.gguf_export import write_gguf
from ftis_node.models.source import resolve_model
from tests.doctor.test_doctor import levels
from tests.models.test_gguf import save_model


def check(home: Path, model: str) -> list[CheckResult]:
    return list(check_model(memory_question(Home(home), model=model, gpus_gib=[24])))


def test_a_gguf_file_is_planned_before_and_after_its_conversion(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ftis_node.models.gguf._run_conversion", lambda path, folder, _: convert(path, folder))
    file = tmp_path / "small.gguf"
    write_gguf(resolve_model(str(save_model(tmp_path / "model"))), file)
    before = check(tmp_path, str(file))
    assert levels(before)[:2] == [("model.found", "ok"), ("memory.plan", "ok")]
    assert before[0].finding.endswith(" GB: the first `join` converts it")
    folder = resolve_model(str(file)).folder
    after = check(tmp_path, str(file))
    assert after[0].finding.startswith(f"{folder} is complete")
    assert [each for each in after if each.check == "memory"] == before[1:]
    folder.parent.rename(_cache("pypi:here==1"))
    assert levels(check(tmp_path, "pypi:here==1")) == levels(after)


@pytest.mark.parametrize(
    ("model", "level", "text"),
    [
        ("pypi:no-such-package", "warn", "pypi:no-such-package is not on this machine, so"),
        ("pypi:no package", "fail", "'no package' is no package"),
        ("org/name/file.gguf", "warn", "org/name/file.gguf is not on this machine, so"),
        ("no/such/folder/file.gguf", "fail", "no such file: no/such/folder/file.gguf"),
        ("damaged.gguf", "fail", "damaged.gguf is no readable GGUF file"),
    ],
)
def test_a_gguf_file_that_cannot_be_read_here_is_one_result(tmp_path, monkeypatch, model, level, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.gguf").write_bytes(bytes(100))
    (finding,) = check(tmp_path, model)
    assert (finding.id, finding.level) == ("model.found", level) and text in finding.finding
