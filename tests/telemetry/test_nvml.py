"""Names of the GPUs that CUDA sees, with an NVML of two GPUs in the test's memory: no GPU is at hand."""

from types import SimpleNamespace

import pytest

from ftis_node.telemetry.nvml import VISIBLE_GPUS, gpu_handle, visible_names

NVML = SimpleNamespace(
    nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetHandleByUUID=str.lower
)


@pytest.mark.parametrize(
    ("seen", "gpus", "handles"),
    [(None, (), [0, 1]), (None, (1,), [1]), ("1", (), [1]), ("GPU-b, GPU-a", (1,), ["gpu-a"]), ("", (), [])],
)
def test_the_nodes_gpus_are_those_that_cuda_sees(monkeypatch, seen, gpus, handles):
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    if seen is not None:
        monkeypatch.setenv(VISIBLE_GPUS, seen)
    assert [gpu_handle(NVML, name) for name in visible_names(NVML, gpus)] == handles


def test_a_gpu_that_cuda_does_not_see_is_an_error(monkeypatch):
    monkeypatch.setenv(VISIBLE_GPUS, "1")
    with pytest.raises(IndexError):
        visible_names(NVML, (7,))
