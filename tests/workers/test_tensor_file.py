"""Weight files: tensors are read as safetensors wrote them, and damaged files are refused."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from ftis_node.errors import ModelError
from ftis_node.learner.checkpoint.publication import BLOCK_BYTES, ChecksummedBuffer
from ftis_node.workers.tensor_file import DTYPES, checksum, checksums_of, read_tensors, write_tensors
from ftis_node.workers.weight_store import file_checksums, find_difference


def write_raw(path: Path, entries: dict[str, Any], data: bytes, *, padding: int = 0) -> None:
    header = json.dumps(entries).encode() + b" " * padding
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_each_type_of_tensor_is_read_as_safetensors_wrote_it(tmp_path):
    numbers = torch.tensor([[0, 1, 1], [1, 0, 1]])
    tensors = {name: (numbers * (1 if name == "BOOL" else 3)).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "one": torch.ones(1, dtype=torch.bool)}
    save_file(tensors, tmp_path / "t")
    read = read_tensors(tmp_path / "t")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].tolist() == tensor.tolist()


@pytest.mark.parametrize("padding", [0, 1, 6])
def test_unaligned_tensors_are_read(tmp_path, padding):
    values = torch.tensor([1.5, -2.0, 3.25])
    entries = {"flag": entry("U8", [1], 0, 1), "a": entry("F32", [3], 1, 13)}
    write_raw(tmp_path / "t", entries, b"\x07" + values.numpy().tobytes(), padding=padding)
    read = read_tensors(tmp_path / "t")
    assert (read["flag"].tolist(), read["a"].tolist()) == ([7], values.tolist())


@pytest.mark.parametrize(
    "damaged",
    [
        entry("F33", [2], 0, 8),
        entry("F32", [3], 0, 8),
        entry("F32", [2, -3], 0, 8),
        entry("F32", [2], 2, 8),
        entry("F32", [1], 8, 4),
        {"dtype": "F32", "data_offsets": [0, 8]},
        entry("F32", "2", 0, 8),  # type: ignore[arg-type]
        entry(["F32"], [2], 0, 8),  # type: ignore[arg-type]
    ],
)
def test_an_inconsistent_header_is_refused(tmp_path, damaged):
    write_raw(tmp_path / "t", {"a": damaged, "b": entry("F32", [2], 0, 8)}, bytes(8))
    with pytest.raises(ModelError, match=r"weight file .*/t is damaged"):
        read_tensors(tmp_path / "t")


def test_a_change_in_memory_does_not_reach_the_file(tmp_path):
    write_tensors(tmp_path / "t", {"a": torch.ones(4), "b": torch.ones(4)})
    before = (tmp_path / "t").read_bytes()
    read = read_tensors(tmp_path / "t")
    read["a"].zero_()
    assert (read["b"].tolist(), (tmp_path / "t").read_bytes()) == ([1.0] * 4, before)


def test_repeated_reads_leak_no_memory(tmp_path):
    write_tensors(tmp_path / "t", {f"layer{number}": torch.ones(4) for number in range(500)})
    for _ in range(4):
        read_tensors(tmp_path / "t")
    before = psutil.Process().memory_full_info().uss
    for _ in range(100):
        read_tensors(tmp_path / "t")
    assert psutil.Process().memory_full_info().uss - before < 1 << 20, "50,000 tensors of 64 bytes are 3 MB"


def test_a_checksum_is_the_sum_of_the_words():
    assert checksum(torch.tensor([3, -1, 2**62, 2**62, 2**62, 2**62, 5])) == 7
    assert checksum(torch.tensor([-3])) == 2**64 - 3
    assert checksum(torch.tensor([1, 0, 2, 0, 7], dtype=torch.int16)) == 1 + (2 << 32) + 7
    assert (checksum(torch.zeros(0)), checksum(torch.tensor(1, dtype=torch.int8))) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_has_one_checksum_written_read_and_in_memory(tmp_path, dtype):
    """This holds for each size and each start of a tensor."""
    torch.manual_seed(0)
    fused = torch.randn(17, 7).to(dtype)
    tensors = {f"part{size}": part for size, part in enumerate(fused.split([1, 2, 3, 4, 7]))} | {"turned": fused.T}
    written = write_tensors(tmp_path / "t", tensors)
    assert written == {name: checksum(tensor) for name, tensor in tensors.items()}
    assert written == file_checksums(tmp_path / "t")
    assert written == {name: checksum(tensor) for name, tensor in read_tensors(tmp_path / "t").items()}


def test_a_change_of_any_bit_is_found(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "t"
    written = write_tensors(path, {"a": torch.randn(5), "b": torch.randn(3, 3).bfloat16()})
    content = path.read_bytes()
    start = len(content) - 38
    for bit in range(8 * 38):
        byte = start + bit // 8
        path.write_bytes(content[:byte] + bytes([content[byte] ^ 1 << bit % 8]) + content[byte + 1 :])
        name = "a" if byte < start + 20 else "b"
        expected = f"holds other values than were published in 1 of 2 tensors, such as {name}"
        assert find_difference(written, file_checksums(path)) == expected


def test_overlapping_tensors_are_refused(tmp_path):
    """Otherwise a header could name the same gigabytes a million times."""
    entry = {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}
    header = json.dumps({str(number): entry for number in range(20)}).encode()
    (tmp_path / "t").write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    with pytest.raises(ModelError, match="its tensors overlap"):
        file_checksums(tmp_path / "t")


class Count(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.total += 1
        return function(*args, **(kwargs or {}))


def test_the_checksums_of_a_buffer_are_those_of_its_tensors():
    sizes = (1, 3, 7, BLOCK_BYTES // 2, BLOCK_BYTES // 2 + 1, 40_000)
    values = {f"t{number}": torch.randn(size).bfloat16() for number, size in enumerate(sizes)}
    tensors = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    buffer = ChecksummedBuffer(tensors.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert all(torch.equal(tensors[name], value) for name, value in values.items())
    named = tensors | {"half": tensors["t5"].detach()[:20_000], "other": torch.randn(9)}
    assert buffer.checksums(named) == checksums_of(named)
    before = buffer.checksums(named)
    with torch.no_grad():
        tensors["t2"][6] += 1
        tensors["t5"][39_999] = -3
    after = buffer.checksums(named)
    assert after == checksums_of(named)
    assert {name for name in named if before[name] != after[name]} == {"t2", "t5"}
    with Count() as count:
        buffer.checksums(tensors)
    assert count.total < 10
