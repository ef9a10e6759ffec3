"""A safetensors file with a broken or huge header is refused with exit 7, in bounded memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import refused

from finetune.errors import ArtifactError
from finetune.storage import weight_files


def file_of(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


BROKEN = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "a length of 2**64 - 1": file_of(b"{}", length=2**64 - 1),
    "a length beyond the file": file_of(b"{}", length=1000),
    "a length of zero": file_of(b"", length=0),
    "no JSON": file_of(b"\x80\x04cos\nsystem\n"),
    "a list": file_of(b"[]"),
    "nested without end": file_of(b'{"a":' + b"[" * 100_000),
    "cut in the header": file_of({"a": tensor(0, 8)})[:30],
    "cut in the data": file_of({"a": tensor(0, 8)}, b"\0" * 7),
    "more data than tensors": file_of({"a": tensor(0, 8)}, b"\0" * 9),
    "overlapping": file_of({"a": tensor(0, 8), "b": tensor(4, 12)}, b"\0" * 12),
    "one place twice": file_of({"a": tensor(0, 8), "b": tensor(0, 8)}, b"\0" * 8),
    "a hole": file_of({"a": tensor(0, 4), "b": tensor(8, 12)}, b"\0" * 12),
    "before its beginning": file_of({"a": tensor(-4, 4, [2])}, b"\0" * 8),
    "backwards": file_of({"a": tensor(8, 0, [2])}, b"\0" * 8),
    "a shape of another size": file_of({"a": tensor(0, 8, [3])}, b"\0" * 8),
    "a shape that overflows": file_of({"a": tensor(0, 8, [2**62, 4])}, b"\0" * 8),
    "an unknown type": file_of({"a": tensor(0, 8, dtype="O8")}, b"\0" * 8),
}


def test_a_broken_header_is_refused_naming_the_file(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in BROKEN:
        with subtests.test(name=name):
            file = tmp_path / "model.safetensors"
            file.write_bytes(BROKEN[name])
            with pytest.raises(ArtifactError, match=r"model\.safetensors"):
                weight_files.check(file)


def test_a_pointer_of_git_lfs_is_refused_with_what_fetches_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n")
    with pytest.raises(ArtifactError, match="`git lfs pull`"):
        weight_files.check(file)


def test_a_whole_file_passes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(file_of({"__metadata__": {"format": "pt"}, "a": tensor(0, 8), "b": tensor(8, 12)}, b"\0" * 12))
    weight_files.check(file)
    assert weight_files.shapes(file) == {"a": [2], "b": [1]}


def test_a_path_that_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(ArtifactError, match="not a regular file"):
        weight_files.check(pipe)
    with pytest.raises(ArtifactError, match="Is a directory"):
        weight_files.check(tmp_path)
    with pytest.raises(ArtifactError, match="No such file"):
        weight_files.check(tmp_path / "none.safetensors")


# The library takes headers of up to 100 MB, of which it makes 1.5 GiB.
_MEASURE = """
import resource, sys
from pathlib import Path
import numpy, safetensors
from finetune.storage import weight_files
from finetune.errors import ArtifactError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    weight_files.check(Path(sys.argv[1]))
except ArtifactError as error:
    print(error, file=sys.stderr)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("megabytes", "at_most_mib"), [(99, 8), (33, 640)])
def test_a_huge_header_takes_bounded_memory(megabytes: int, at_most_mib: int, tmp_path: Path) -> None:
    """One tensor of millions of dimensions is what the library needs most memory for: 16 bytes for each of its two."""
    file = tmp_path / "model.safetensors"
    shape = b"0," * (megabytes * 500_000)
    file.write_bytes(file_of(b'{"a":{"dtype":"F32","shape":[' + shape + b'0],"data_offsets":[0,0]}}'))
    done = subprocess.run([sys.executable, "-c", _MEASURE, file], capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 < at_most_mib
    if megabytes > 34:
        assert "longer than" in done.stderr


@pytest.mark.parametrize("name", ["a length of 2**64 - 1", "overlapping", "no JSON"])
def test_training_on_such_a_base_exits_7(name: str, base: Path, train) -> None:
    (base / "model.safetensors").write_bytes(BROKEN[name])
    refused(train(f"model.name={base}"), base / "model.safetensors")


def test_an_answer_from_such_an_adapter_exits_7(run, call) -> None:
    file = run.adapter / "adapter_model.safetensors"
    file.write_bytes(BROKEN["a hole"])
    refused(call("generate", run.path, "--prompt", "x"), file)
