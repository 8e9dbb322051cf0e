"""The folder of published weights: in memory if they fit, and removed at the end."""

import shutil

from ftis_node.config.home import Home
from ftis_node.workers.weight_store import weights_folder


def test_each_node_has_a_private_folder_in_memory_and_removes_it(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    with weights_folder(Home(tmp_path / "a"), version_bytes=10, memory_disk=memory) as first:
        with weights_folder(Home(tmp_path / "b"), version_bytes=10, memory_disk=memory) as second:
            assert first.parent == second.parent == memory
            assert first != second
            assert first.stat().st_mode & 0o777 == 0o700
        (first / "left").write_text("a file of a killed node")
        with weights_folder(Home(tmp_path / "a"), version_bytes=10, memory_disk=memory) as again:
            assert again == first
            assert list(again.iterdir()) == []
    assert list(memory.iterdir()) == []


def test_weights_too_large_for_memory_are_published_in_the_home(tmp_path):
    home = Home(tmp_path / "home")
    too_large = shutil.disk_usage(tmp_path).free // 4
    with weights_folder(home, version_bytes=too_large, memory_disk=tmp_path) as folder:
        assert folder == home.weights
    with weights_folder(home, version_bytes=1, memory_disk=tmp_path / "nowhere") as folder:
        assert folder == home.weights


def test_published_versions_in_the_home_are_removed_and_followed_ones_kept(tmp_path):
    home = Home(tmp_path / "home")
    home.create()
    with weights_folder(home, version_bytes=1, memory_disk=tmp_path / "nowhere") as folder:
        for name in ("weights-00000001", "followed"):
            (folder / name).mkdir(parents=True)
            (folder / name / "file").write_text("bytes")
    assert [path.name for path in home.weights.iterdir()] == ["followed"]


def test_a_symbolic_link_of_that_name_is_not_used(tmp_path):
    home, elsewhere = Home(tmp_path / "home"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    with weights_folder(home, version_bytes=1, memory_disk=tmp_path) as folder:
        name = folder.name
    (tmp_path / name).symlink_to(elsewhere)
    with weights_folder(home, version_bytes=1, memory_disk=tmp_path) as folder:
        assert folder == home.weights
    assert elsewhere.is_dir()
