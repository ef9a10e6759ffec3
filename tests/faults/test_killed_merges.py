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


@pytest.fixture(scope="module")
def trained(shallow_base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run on a base of four shards."""
    folder = tmp_path_factory.mktemp("merging")
    merging.write_base(folder / "base", AutoConfig.from_pretrained(shallow_base), 4)
    run, _ = merging.make_run(folder / "run", folder / "base", "quantization.kind=none", tokens=32)
    rows = folder / "run.jsonl"  # the proof takes most of a merge's time: of a row or two it is enough
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    return run


def test_it_is_completed_with_the_same_files_and_keeps_other_processes_away(
    children: Children, run: RunDirectory
) -> None:
    """`make bench` kills one at 20 random moments, and at each thing that it does to a file."""
    incomplete = run.merged.with_name("merged.incomplete")

    def files() -> dict[str, bytes]:
        written = [file for file in run.merged.iterdir() if file.name not in ("merge.json", "README.md")]
        return {file.name: file.read_bytes() for file in written}

    def shards() -> dict[str, int]:
        return {file.name: file.stat().st_ino for file in incomplete.glob("*.safetensors")}

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
        assert f"in use by process {first.pid}" in ended.in_one_line
    first.send(signal.SIGCONT)
    assert first.wait().code == 0
    whole = files()

    # In the third of four shards, and between the two renames, where the earlier merge was under another name.
    kept = []
    for fault in (Fault("open", r"model-00003-of-00004\.safetensors\.part"), Fault("rename", r"merged\.incomplete$")):
        ended = children.run(["merge", run.path], fault)
        assert ended.code == -signal.SIGKILL, ended.output
        kept.append(shards())
    assert [len(each) for each in kept] == [2, 4]
    assert kept[0].items() <= kept[1].items()
    ended = children.run(["merge", run.path])
    assert ended.code == 0, ended.output
    assert files() == whole
    assert sorted(path.name for path in run.path.iterdir() if "merged" in path.name) == ["merged"]
