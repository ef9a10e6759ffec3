"""Starting again: what goes on, what is refused, and what is never touched."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from jobs import adapter_weights, same_adapter
from messages import refusal, reported
from safetensors.torch import load_file, save_file

import finetune
from finetune import recipe
from finetune.config import Config, KernelsSection, serving
from finetune.errors import ArtifactError, ConfigError, DataError, MachineError
from finetune.export.merging import merged_files
from finetune.model.build import Blueprint
from finetune.recipe import provenance
from finetune.storage.files import write_text
from finetune.storage.rundir import RunDirectory
from finetune.training.step import Step


def forget_the_end(run: RunDirectory) -> None:
    """What a kill between the last checkpoint and the export leaves."""
    shutil.rmtree(run.adapter)
    kept = [event for event in run.events() if event["event"] not in ("trained", "finished", "best_loaded")]
    write_text(run.events_file, "".join(json.dumps(event) + "\n" for event in kept))


def config_of(run: RunDirectory, **changes: Any) -> Config:
    """The config that goes on with a copy of a run, without a forecast."""
    return run.config().changed({"output.dir": str(run.path), "memory.check": "off", **changes})


@pytest.mark.usefixtures("hurried")
def test_a_run_killed_after_its_last_step_is_only_exported(run: RunDirectory) -> None:
    """The last step lies within an epoch, where transformers would train one more."""
    expected, lines = adapter_weights(run), run.metrics_file.read_text()
    forget_the_end(run)
    finetune.train(config_of(run))
    assert run.finished
    assert run.metrics_file.read_text() == lines
    torch.testing.assert_close(adapter_weights(run), expected, rtol=0, atol=0)


def test_another_config_is_refused_by_name_and_changes_nothing(run: RunDirectory) -> None:
    before = run.config_file.read_bytes()
    for interrupted in (False, True):
        if interrupted:
            forget_the_end(run)
        with refusal(ConfigError, "adapter.rank", "training.seed", "--fresh"):
            finetune.train(config_of(run, **{"adapter.rank": 8, "training.seed": 7}))
        assert run.config_file.read_bytes() == before


def test_fresh_moves_nothing_when_the_new_job_cannot_start(run: RunDirectory) -> None:
    with pytest.raises(DataError):
        finetune.train(config_of(run, **{"data.train": "nowhere.jsonl"}), fresh=True)
    assert run.finished
    assert not run.path.with_name("run.1").exists()


def test_a_merge_does_not_make_an_interrupted_run_finished(run: RunDirectory) -> None:
    kept = [event for event in run.events() if event["event"] != "finished"]
    write_text(run.events_file, "".join(json.dumps(event) + "\n" for event in kept))
    finetune.merge(run)
    assert not run.finished


def test_a_run_that_stopped_early_says_so_and_is_not_trained_again_and_a_killed_one_is_only_exported(
    quick, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its count of evaluations without a gain comes back with the checkpoint."""
    config = quick(
        "training.max_steps=40", "training.eval_every=1", "training.early_stopping=2", "training.learning_rate=0.5",
        "training.schedule=constant", "optimizer.kind=adamw_torch_fused", "output.save_every=1", "output.best=false",
        "quantization.kind=none", "adapter.targets=[q_proj]",
    )  # fmt: skip
    run = finetune.train(config).run
    expected, lines = adapter_weights(run), run.metrics_file.read_text()
    assert run.steps_done < 40, "the job was meant to stop early"
    reported(capsys.readouterr().out, f"step {run.steps_done} of 40")
    before = run.events()
    finetune.train(config)
    assert run.events() == before
    forget_the_end(run)
    finetune.train(config)
    assert run.metrics_file.read_text() == lines
    torch.testing.assert_close(adapter_weights(run), expected, rtol=0, atol=0)


def test_more_epochs_continue_a_run_whether_it_came_to_its_end_or_was_killed_before(quick) -> None:
    def job(epochs: int):
        keys = ["training.batch_size=16", "data.eval=none", "training.eval_every=null", "quantization.kind=none"]
        return quick("training.max_steps=null", f"training.epochs={epochs}", *keys)

    run = finetune.train(job(1)).run
    epoch = run.steps_done
    finetune.train(job(2))
    assert run.steps_done == 2 * epoch
    forget_the_end(run)
    finetune.train(job(3))
    assert run.steps_done == 3 * epoch
    assert [line["step"] for line in run.metrics() if "loss" in line] == list(range(1, 3 * epoch + 1))


def test_a_resumed_run_holds_the_memory_of_one_that_never_stopped(quick, monkeypatch) -> None:
    held: list[int] = []

    def counted(self: Step) -> torch.Tensor:
        gc.collect()
        tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        held.append(sum(storages.values()))
        return plain(self)

    plain = Step.clip
    monkeypatch.setattr(Step, "clip", counted)
    job = ["optimizer.kind=paged_adamw_8bit", "data.eval=none", "training.eval_every=null", "adapter.rank=64"]
    finetune.train(quick("training.max_steps=2", *job, run="whole"))
    never_stopped = held[-1]
    for steps in (1, 2):
        finetune.train(quick(f"training.max_steps={steps}", *job))
    assert held[-1] == pytest.approx(never_stopped, rel=0.02)


def test_more_steps_continue_a_finished_run_at_the_rate_of_the_longer_schedule(quick, capsys, monkeypatch) -> None:
    """Also where an earlier attempt to continue it failed on a full disk, just after its longer config was saved.

    How often it saves and evaluates is as its config says now.
    """
    job = ["training.schedule=linear", "training.warmup=1", "quantization.kind=none"]
    run = finetune.train(quick("training.max_steps=3", "training.eval_every=2", "output.save_every=3", *job)).run
    longer = ["training.max_steps=5", "training.eval_every=3", "output.save_every=1", "output.keep=9"]
    with monkeypatch.context() as full:
        full.setattr(RunDirectory, "remove_leftovers", Mock(side_effect=MachineError("no space left")))
        with pytest.raises(MachineError):
            finetune.train(quick(*longer, *job))
    finetune.train(quick(*longer, *job))
    lines = [line for line in run.metrics() if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert (run.steps_done, run.saved_steps) == (5, [3, 4, 5])
    assert [line["step"] for line in run.metrics() if "eval_loss" in line] == [0, 2, 3, 5]
    peak = quick().training.learning_rate
    found = [line["learning_rate"] for line in lines]
    assert found == pytest.approx([peak, peak, peak / 2, peak / 2, peak / 4])
    (event,) = [event for event in run.events() if event["event"] == "schedule_changed"]
    assert (event["step"], event["steps"], event["learning_rate"]) == (3, [3, 5], found[2:4])
    reported(capsys.readouterr().out, "step 5, not 3", "learning rate")


def test_a_base_that_is_replaced_while_it_is_loaded_is_not_trained(quick, shallow_base: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(shallow_base, tmp_path / "base"))

    def replaced(*arguments: Any) -> Any:
        loaded = Blueprint.load(*arguments)
        tensors = {name: tensor * 1.1 for name, tensor in load_file(base / "model.safetensors").items()}
        save_file(tensors, tmp_path / "other", {"format": "pt"})
        (tmp_path / "other").rename(base / "model.safetensors")
        return loaded

    with refusal(ArtifactError, "base were changed, replaced or removed"):
        recipe.train(quick(f"model.name={base}"), load_base=replaced)


def test_no_step_is_saved_that_was_trained_on_a_base_that_was_written_to(
    quick, shallow_base: Path, tmp_path: Path
) -> None:
    """On a CPU, weights in the type of their file are its pages. A file that is replaced stays mapped."""
    base = Path(shutil.copytree(shallow_base, tmp_path / "base"))
    file, other = base / "model.safetensors", tmp_path / "other"
    original = file.read_bytes()
    save_file({name: tensor * 3 for name, tensor in load_file(file).items()}, other, {"format": "pt"})
    common = [f"model.name={base}", "training.precision=bf16", "quantization.kind=none", "output.save_every=1"]
    common += ["data.eval=none", "training.eval_every=null"]

    class AtStep3(finetune.Callback):
        def __init__(self, act: Callable[[], object]) -> None:
            self.act = act

        def on_step(self, metrics: dict[str, Any]) -> None:
            if metrics["step"] == 3:
                self.act()

    with refusal(ArtifactError, "model.safetensors"):
        finetune.train(quick(*common), callbacks=[AtStep3(lambda: shutil.copyfile(other, file))])
    run = RunDirectory(tmp_path / "run")
    assert run.saved_steps[-1] == 2
    file.write_bytes(original)
    finetune.train(quick(*common), callbacks=[AtStep3(file.touch)])
    replaced = finetune.train(quick(*common, run="replaced"), callbacks=[AtStep3(lambda: other.rename(file))]).run
    assert same_adapter(run, replaced)


def test_a_start_that_came_to_nothing_may_be_tried_with_another_config(quick) -> None:
    """Out of memory says which key to change; the next start must take it."""
    with pytest.raises(ConfigError):
        finetune.train(quick("adapter.targets=[q_pro]"))
    assert finetune.train(quick("adapter.targets=[q_proj]", "adapter.rank=4")).run.finished


def test_a_folder_with_other_files_is_left_alone(quick, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "answers.json").write_text("mine")
    for fresh in (False, True):
        with refusal(MachineError, "not empty, and not a run"):
            finetune.train(quick(), fresh=fresh)
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"answers.json": "mine"}


def test_a_merge_that_fails_at_the_end_is_done_by_the_same_command(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ["training.max_steps=1", "data.eval=none", "training.eval_every=null", "quantization.kind=none"]
    config = quick("output.merge=true", *short)

    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(merged_files, "write_weights", full)
        with pytest.raises(MachineError):
            finetune.train(config)
    run = RunDirectory(config.output.dir)
    assert not run.finished
    finetune.train(config)
    assert run.finished
    assert (run.merged / "merge.json").exists()


def test_a_bad_tokenizer_and_a_quantized_extra_module_are_refused(quick, tiny_base: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    (base / "tokenizer.json").write_text("{}")
    with refusal(ArtifactError, "tokenizer"):
        finetune.train(quick(f"model.name={base}"))
    with refusal(ConfigError, "adapter.extra_modules"):
        finetune.train(quick("adapter.extra_modules=[q_proj]", "adapter.targets=[v_proj]"))


def test_full_fine_tuning_keeps_float32_weights_that_bf16_would_round(quick) -> None:
    """A step too small for bfloat16's grain still arrives."""
    overrides = ["adapter.kind=none", "quantization.kind=none", "training.precision=bf16", "data.eval=none"]
    overrides += ["training.eval_every=null", "training.learning_rate=1e-7", "optimizer.kind=sgd"]
    config = quick(*overrides, "training.max_steps=1")
    run = finetune.train(config).run
    stored = load_file(run.merged / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("way", "kind", "runtime", "cure"),
    [
        ("rounded", "nf4", "llama.cpp", "set `output.way: rounded` and `quantization.kind: nf4`"),
        ("rounded", "none", "llama.cpp", "set `output.way: rounded` and `quantization.kind: none`"),
        ("adapter", "q4_0", "ollama", "remove `output.serve` and set `quantization.kind: q4_0`"),
    ],
)
def test_a_run_whose_base_was_held_for_another_way_to_serve_says_what_to_set(
    way: str, kind: str, runtime: str, cure: str, quick: Any
) -> None:
    def as_served(config: Config) -> Config:
        return config.changed(serving.consequences(config.output, config.quantization.kind)[0])

    before = as_served(quick("output.serve=q4_0", f"output.way={way}", f"quantization.kind={kind}"))
    config = as_served(quick("output.serve=q4_0", f"output.runtime={runtime}"))
    run = RunDirectory(config.output.dir)
    run.create(before)
    with refusal(ConfigError, cure):
        provenance.refuse_changes(config, run)
    with refusal(ConfigError, "0.2"):
        provenance.refuse_changes(config.changed({"adapter.dropout": 0.2}), run)


def test_a_key_that_its_choice_ignores_may_be_removed_from_a_run_that_an_earlier_version_started(quick) -> None:
    """A config that sets it is refused, so the run could not go on otherwise."""
    config = quick("quantization.kind=none", "optimizer.kind=adafactor")
    run = RunDirectory(config.output.dir)
    run.create(config.changed({"quantization.double": False, "optimizer.epsilon": 1e-6}))
    provenance.refuse_changes(config, run)
    with refusal(ConfigError, "config:", "optimizer.weight_decay", "0.0", "0.1"):
        provenance.refuse_changes(config.changed({"optimizer.weight_decay": 0.1}), run)


def test_a_run_that_was_started_with_other_kernels_goes_on_with_them(quick, capsys: pytest.CaptureFixture[str]) -> None:
    """`off` was the default of an earlier version, whose runs have it in their config."""
    given = quick("training.max_steps=2", "data.eval=none", "training.eval_every=null")
    config = given.model_copy(update={"kernels": KernelsSection()})
    run = finetune.train(config.changed({"kernels.fused": "off", "training.max_steps": 1})).run
    finetune.train(config)
    reported(capsys.readouterr().out, "kernels.fused: off")
    assert run.config().kernels.fused == "off"
    assert run.steps_done == 2
