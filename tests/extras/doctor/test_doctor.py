"""`finetune doctor`: what it says of a machine, and of run directories that were damaged for real."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from messages import refusal
from safetensors.torch import load_file, save_file

from finetune import cli
from finetune.config import Config
from finetune.errors import ArtifactError
from finetune.extras.doctor import machine
from finetune.extras.doctor import run_check as run_directory
from finetune.extras.doctor.findings import Examination, Finding
from finetune.recipe import inputs
from finetune.resolve import Job
from finetune.runtime import driver
from finetune.storage.files import write_lines
from finetune.storage.rundir import RunDirectory


def wrong(run: RunDirectory) -> list[Finding]:
    """What is not well with a run, and the check that the exit code says so."""
    found = run_directory.examine(run.path)
    assert (found.exit_code == 7) == any(one.status == "error" for one in found.findings)
    return [one for one in found.findings if one.status != "ok"]


def flip(file: Path, at: int) -> None:
    """Turn over the lowest bit of one byte; negative places count from the end."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def cut(file: Path, size: int) -> None:
    os.truncate(file, size)


# -- a machine ---------------------------------------------------------------------------------------------------------


def test_a_machine_is_described_by_versions_memory_disks_and_choices() -> None:
    found = {one.about: one for one in machine.examine().findings}
    assert found["torch"].what.startswith(importlib.metadata.version("torch"))
    assert {"python", "peft", "bitsandbytes library", "host memory", "runs", "model cache", "hub", "threads"} <= set(
        found
    )
    if not torch.cuda.is_available():
        assert found["attention"].what.startswith("sdpa")
        assert "adamw_8bit" in found["optimizer"].what
    assert "HF_HUB_OFFLINE" in found["hub"].what
    assert all(one.remedy for one in found.values() if one.status == "error")


def test_a_version_outside_the_range_is_a_warning_and_a_missing_one_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine.importlib.metadata, "requires", lambda _: ["torch<2", "no-such-thing>=1", "wandb; extra == 'trackers'"]
    )
    _, torch_found, missing = machine._versions()
    assert (torch_found.status, torch_found.remedy) == ("warning", "pip install 'torch<2'")
    assert (missing.status, missing.remedy) == ("error", "pip install 'no-such-thing>=1'")
    assert Examination([missing], 4).exit_code == 4
    assert Examination([torch_found], 4).exit_code == 0


def test_a_missing_installation_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a network, to which the checkout was carried."""

    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    found = {one.about: one for one in machine.examine().findings}
    assert found["finetune"].status == "warning"
    assert {"python", "host memory", "bitsandbytes library"} <= found.keys()


def test_a_folder_for_runs_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine.os, "access", lambda folder, _: Path(folder) != tmp_path)  # root may write anywhere
    [runs] = [one for one in machine._memory_and_disks() if one.about == "runs"]
    assert (runs.status, runs.remedy) == ("error", "set `output.dir` to a folder of your own")


def test_the_driver_version_is_read_if_the_system_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "VERSION_FILE", tmp_path / "version")
    built = f"torch is built for {torch.version.cuda}"
    assert next(machine._gpus("cuda")).what == built
    for version, text in (
        ("535.104.05", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: 12.3.0\n"),
        ("550.54.14", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\n"),
    ):
        driver.VERSION_FILE.write_text(text)
        assert next(machine._gpus("cuda")).what == f"{built}, driver {version}"


def test_a_gpu_that_torch_cannot_use_is_an_error_for_the_doctor_and_a_line_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(driver, "VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(driver, "_DEVICE_FILE", tmp_path / "nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config, cpu = Config(), torch.device("cpu")

    def notes() -> list[str]:
        lines: list[str] = []
        inputs._check_machine(Job(config, config, say=lines.append), cpu)
        return lines

    assert [one.status for one in machine._gpus("cpu")] == ["warning"]
    assert notes() == []
    driver.VERSION_FILE.touch()
    for cuda, reason in ((None, "this torch was built without CUDA"), ("13.0", "torch for CUDA 13.0 cannot use it")):
        with subtests.test(cuda=cuda):
            monkeypatch.setattr(torch.version, "cuda", cuda)
            [gpu] = machine._gpus("cpu")
            assert (gpu.status, gpu.what) == ("error", f"there is one, but {reason}")
            [line] = notes()
            assert reason in line
            assert gpu.remedy in line
            assert "\n" not in line
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert notes() == [], "it is hidden on purpose"


def test_no_token_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    found = next(machine._environment())
    assert "with a token" in found.what
    assert "canary" not in str(found)


# -- a run directory ---------------------------------------------------------------------------------------------------


def test_a_sound_run_has_nothing_wrong(trained: RunDirectory) -> None:
    assert wrong(trained) == []
    found = {one.about: one.what for one in run_directory.examine(trained.path).findings}
    assert found["state"] == "finished, 20 steps"
    assert found["adapter"] == "intact, weights finite"


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with refusal(ArtifactError, "not a run directory"):
        run_directory.examine(tmp_path)


def _not_a_number(run: RunDirectory) -> None:
    file = run.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)


def _other_rank(run: RunDirectory) -> None:
    file = run.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 4}))


def _checkpoint(run: RunDirectory) -> Path:
    return run.complete_checkpoints()[-1]


def _append(file: Path, text: str) -> None:
    with open(file, "a") as opened:
        opened.write(text)


DAMAGES: dict[str, tuple[Callable[[RunDirectory], object], str, str]] = {
    "config gone": (lambda run: run.config_file.unlink(), "config.yaml", "no such file"),
    "config cut": (lambda run: run.config_file.write_text("model: {nam: x"), "config.yaml", "not valid YAML"),
    "events gone": (lambda run: run.events_file.unlink(), "events.jsonl", "missing"),
    "event bit": (lambda run: flip(run.events_file, 0), "events.jsonl", "line 1 is skipped"),
    "a list": (lambda run: _append(run.metrics_file, "[1]\n"), "metrics.jsonl", "line 24 is skipped"),
    "environment cut": (lambda run: cut(run.environment_file, 40), "environment.json", "not as this program writes it"),
    "weights gone": (lambda run: (run.adapter / "adapter_model.safetensors").unlink(), "adapter", "No such file"),
    "weights cut": (lambda run: cut(run.adapter / "adapter_model.safetensors", 5000), "adapter", "exceeds the file"),
    "header bit": (lambda run: flip(run.adapter / "adapter_model.safetensors", 0), "adapter", "adapter_model"),
    "weight bit": (lambda run: flip(run.adapter / "adapter_model.safetensors", -4), "adapter", "not as it was written"),
    "rank": (_other_rank, "adapter", "`r` is 4"),
    "nan": (_not_a_number, "adapter", "not finite"),
    "template": (lambda run: _append(run.adapter / "chat_template.jinja", "x"), "tokenizer", "another tokenizer"),
    "fingerprint": (lambda run: cut(run.adapter / "fingerprint.json", 9), "tokenizer", "fingerprint.json: not as"),
    "checkpoint weights gone": (
        lambda run: [file.unlink() for file in _checkpoint(run).glob("*.safetensors")], "checkpoints/step-00000020", "",
    ),
    "checkpoint cut": (
        lambda run: cut(_checkpoint(run) / "adapter_model.safetensors", 5000), "checkpoints/step-00000020", "adapter",
    ),
    "replaced": (lambda run: run.adapter.rename(f"{run.adapter}.replaced"), "adapter.replaced", "was being replaced"),
    "merged empty": (lambda run: run.merged.mkdir(), "merged", "config.json"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_its_remedy(run: RunDirectory, damage: str) -> None:
    inflict, about, words = DAMAGES[damage]
    inflict(run)
    found = [one for one in wrong(run) if one.about == about]
    assert found, f"{about} is not among what is wrong"
    assert found[0].status == "error"
    assert words in found[0].what
    assert found[0].remedy


def test_a_run_that_cannot_be_resumed_is_not_sound(run: RunDirectory) -> None:
    """Unfinished, and of its checkpoints none is whole: first damaged, then gone."""
    events = [event for event in run.events() if event["event"] not in ("trained", "finished")]
    write_lines(run.events_file, events)
    shutil.rmtree(run.adapter)
    for checkpoint in run.complete_checkpoints():
        cut(checkpoint / "adapter_model.safetensors", 5000)
    found = {one.about: one for one in wrong(run)}
    assert found["state"].status == "error"
    assert "refuses to resume it" in found["state"].what
    assert found["checkpoints/step-00000020"].remedy == "restore it from a backup"
    assert found["checkpoints/latest"].status == "warning"
    for checkpoint in run.complete_checkpoints():
        shutil.rmtree(checkpoint)
    assert "refuses to resume it" in {one.about: one for one in wrong(run)}["state"].what
    write_lines(run.events_file, [event for event in events if event["event"] != "saved"])
    assert "state" not in {one.about for one in wrong(run)}


def test_checking_a_run_does_not_contact_the_hub(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the base is on the hub, and nothing says that there is no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address))
    run.config_file.write_text(run.config_file.read_text().replace("builtin:tiny-llama", "someone/some-model"))
    [finding] = [one for one in wrong(run) if one.about == "tokenizer"]
    assert finding.status == "warning"
    assert asked == []


def test_torn_lines_and_leftovers_are_warnings(run: RunDirectory) -> None:
    _append(run.metrics_file, '{"step": 21, "lo')
    (run.checkpoints / "step-00000021.incomplete").mkdir()
    assert [(one.about, one.status) for one in wrong(run)] == [
        ("metrics.jsonl", "warning"),
        ("checkpoints/step-00000021.incomplete", "warning"),
    ]


def test_a_process_training_in_the_run_is_named(run: RunDirectory) -> None:
    with open(run.path / "lock", "w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ["process 4711 is training here" in one.what for one in wrong(run)] == [True]
    assert wrong(run) == []


def test_the_command_prints_a_line_each_or_json_and_exits_7(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (run.adapter / "adapter_model.safetensors").unlink()
    for option, expected in (((), "error    adapter"), (("--json",), '"sound": false')):
        monkeypatch.setattr(sys, "argv", ["finetune", "doctor", str(run.path), *option])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 7
        out, err = capsys.readouterr()
        assert err == ""
        assert expected in out
