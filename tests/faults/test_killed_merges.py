"""A merge that is killed at any moment is completed by the same command, which keeps what was written."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from children import Children, Fault
from transformers import AutoConfig

from finetune.storage.rundir import RunDirectory

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import merge as merging


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in ("merge.json", "README.md")}


@pytest.fixture(scope="module")
def trained(shallow_base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run on a base of four shards."""
    folder = tmp_path_factory.mktemp("merging")
    merging.write_base(folder / "base", AutoConfig.from_pretrained(shallow_base), 4)
    return merging.make_run(folder / "run", folder / "base", "quantization.kind=none", tokens=32)[0]


def test_it_is_completed_with_the_same_files(children: Children, run: RunDirectory) -> None:
    """`make bench` kills one at 20 random moments, and at each thing that it does to a file."""
    assert children.run(["merge", run.path]).code == 0
    whole = files(run.merged)
    for fault, shards_kept in (
        (Fault("open", r"model-00003-of-00004\.safetensors\.part"), 2),
        (Fault("rename", r"merged\.incomplete$"), 4),
    ):
        ended = children.run(["merge", run.path], fault)
        assert ended.code == -9, ended.output
        incomplete = run.merged.with_name("merged.incomplete")
        kept = {file.name: file.stat().st_ino for file in incomplete.glob("*.safetensors")}
        assert len(kept) == shards_kept
        ended = children.run(["merge", run.path])
        assert ended.code == 0, ended.output
        assert files(run.merged) == whole
        resumed = (incomplete.parent / "merged" / name for name in kept)
        if fault.event == "open":
            assert [file.stat().st_ino for file in resumed] == list(kept.values())
    # Between the two renames of the second, the earlier merge was under another name: nothing is lost.
    assert sorted(path.name for path in run.path.iterdir() if "merged" in path.name) == ["merged"]


def test_while_one_merges_no_other_process_merges_exports_or_trains_there(
    children: Children, run: RunDirectory
) -> None:
    first = children.start(
        ["merge", run.path], Fault("finetune.export.merging.merged_files:write_weights", action="SIGSTOP")
    )
    first.wait_until_stopped()
    for command in (
        ["merge", run.path],
        ["export", run.path, "--to", "adapter"],
        ["train", run.config_file, f"output.dir={run.path}"],
    ):
        ended = children.run(command)
        assert ended.code == 4, ended.output
        assert f"in use by process {first.pid}" in " ".join(ended.output.split())
    first.send(signal.SIGCONT)
    assert first.wait().code == 0
    assert run.is_merged
