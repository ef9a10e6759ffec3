"""An adapter belongs to one base: with any other it is refused, wherever a base is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import sampled
from messages import refusal, reported

import finetune
from finetune.config import dump
from finetune.errors import ArtifactError, ConfigError
from finetune.extras.doctor import run_check as run_directory
from finetune.model.source import identity
from finetune.recipe import provenance, resume
from finetune.storage import checkpoint
from finetune.storage.rundir import RunDirectory

USES: dict[str, Callable[[RunDirectory], object]] = {
    "generate": lambda run: finetune.generate(run, "x", max_new_tokens=2),
    "generate with the base": lambda run: finetune.generate(run, "x", which="base", max_new_tokens=2),
    "evaluate": finetune.evaluate,
    "merge": finetune.merge,
}


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


@pytest.fixture
def run(run: RunDirectory, base: Path) -> RunDirectory:
    """A run on that base: the same files, in another place."""
    run.config_file.write_text(dump(run.config().changed({"model.name": str(base)})))
    return run


def overwrite(base: Path) -> None:
    """A few zeros in the middle of the weights, where a sample would not have looked."""
    file = base / "model.safetensors"
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size // 2 + 12345)
        opened.write(bytes(4096))


def base_finding(run: RunDirectory) -> tuple[str, str]:
    [found] = [found for found in run_directory.examine(run.path).findings if found.about == "base"]
    return found.status, found.what


def test_the_weights_of_another_base_are_refused(run: RunDirectory, base: Path) -> None:
    overwrite(base)
    for use in USES.values():
        with refusal(ArtifactError, "was trained on another base", base):
            use(run)
    assert not run.merged.exists()
    status, what = base_finding(run)
    assert (status, "was trained on another base" in what) == ("error", True)


@pytest.mark.slow
@pytest.mark.parametrize("use", sampled(USES, "merge"))
def test_the_same_files_elsewhere_are_the_same_base(
    use: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    USES[use](run)
    assert "not known" not in capsys.readouterr().err
    assert base_finding(run) == ("ok", f"as in training, {run.config().model.name}")


@pytest.mark.parametrize("checkpoints", [True, False])
def test_doctor_compares_the_base_of_an_unfinished_run_with_its_checkpoint(
    checkpoints: bool, run: RunDirectory, base: Path
) -> None:
    shutil.rmtree(run.adapter)
    if not checkpoints:
        shutil.rmtree(run.checkpoints)
    assert base_finding(run) == ("ok", f"{'as in training' if checkpoints else 'complete'}, {base}")
    overwrite(base)
    status, what = base_finding(run)
    assert (status, "was trained on another base" in what) == ("error" if checkpoints else "ok", checkpoints)
    (base / "model.safetensors").unlink()
    status, what = base_finding(run)
    assert (status, "it has no model.safetensors" in what) == ("error", True)
    run.config_file.write_text(dump(run.config().changed({"model.name": "missing.gguf"})))
    status, what = base_finding(run)
    assert (status, "missing.gguf: no such file" in what) == ("error", True)


@pytest.mark.slow
@pytest.mark.parametrize("use", sampled(["generate", "evaluate", "merge"], "generate"))
def test_a_run_of_an_earlier_version_is_used_with_a_note(
    use: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run.adapter / "fingerprint.json"
    file.write_text(json.dumps({"tokenizer": json.loads(file.read_text())["tokenizer"]}))
    USES[use](run)
    reported(capsys.readouterr().err, "does not record")
    assert base_finding(run)[0] == "warning"


def test_doctor_says_where_the_base_is_not_at_hand(run: RunDirectory) -> None:
    run.config_file.write_text(dump(run.config().changed({"model.name": "someone/nothing"})))
    status, what = base_finding(run)
    assert status == "warning"
    assert "not available" in what


def test_a_damaged_fingerprint_is_not_taken_for_a_missing_one(run: RunDirectory) -> None:
    file = run.adapter / "fingerprint.json"
    kept = json.loads(file.read_text())
    for damaged in (kept | {"base": 7}, kept | {"base": []}, [kept], 1):
        file.write_text(json.dumps(damaged))
        with refusal(ArtifactError, "fingerprint.json:"):
            finetune.generate(run, "x", max_new_tokens=2)


@pytest.mark.slow
def test_the_base_of_a_whole_model_is_checked_before_an_evaluation(quick, base: Path) -> None:
    job = ["adapter.kind=none", "quantization.kind=none", "training.learning_rate=1e-4", "training.max_steps=1"]
    run = finetune.train(quick(*job, f"model.name={base}")).run
    assert base_finding(run)[0] == "ok"
    overwrite(base)
    assert isinstance(finetune.generate(run, "x", max_new_tokens=2), str), "it needs no base"
    with refusal(ArtifactError, "was trained on another base"):
        finetune.evaluate(run)
    assert base_finding(run)[0] == "error"


@pytest.mark.slow
def test_new_random_weights_are_noted(quick, capsys: pytest.CaptureFixture[str]) -> None:
    run = finetune.train(quick("model.weights=random", "training.max_steps=1")).run
    finetune.generate(run, "x", max_new_tokens=2)
    reported(capsys.readouterr().err, "random weights, which")


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_resume_compares_whole_files_and_says_so_where_it_cannot(run: RunDirectory, base: Path) -> None:
    start = resume.find(run)
    assert start.checkpoint
    now = checkpoint.manifest_of(start.checkpoint)["made_with"]
    assert identity.comparable(now["base"])
    overwrite(base)
    other = {**now, "base": identity.of_base(run.config().model)}
    with refusal(ConfigError, "`model.name`"):
        provenance.changes_since(run, start.checkpoint, other)
    manifest = json.loads((start.checkpoint / checkpoint.MANIFEST).read_text())
    manifest.pop("sha256")
    manifest["made_with"]["base"] = "0" * 64  # as earlier versions wrote it, of samples
    signed = {**manifest, "sha256": checkpoint._sha256(checkpoint._json(manifest))}
    (start.checkpoint / checkpoint.MANIFEST).write_bytes(checkpoint._json(signed))
    assert provenance.changes_since(run, start.checkpoint, now) == {"base": ["0" * 64, now["base"]]}
