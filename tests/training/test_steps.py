"""What a step does: gradients that do not depend on the micro-batch, optimizers, resume, best checkpoint, faults."""

import importlib.metadata
import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker
from bitsandbytes.optim import GlobalOptimManager
from jobs import adapter_weights, sampled
from messages import refusal, reported
from safetensors.torch import load_file
from steps import ready, spoil_losses, stopped_and_resumed

import finetune
from finetune.config import OptimizerSection, TrainingSection
from finetune.errors import MachineError, NumbersError, Terminated
from finetune.runtime import ranks
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training import optimizers, schedules, tracking
from finetune.training.eval_loss import EvalLoss
from finetune.training.recorder import MetricsRecorder
from finetune.training.tracking import Trackers

UNEVALUATED = ["data.eval=none", "training.eval_every=null"]
UNQUANTIZED = "quantization.kind=none"


def training_lines(run: RunDirectory) -> list[dict]:
    return [line for line in run.metrics() if "loss" in line]


@pytest.mark.slow
def test_gradient_does_not_depend_on_the_micro_batch(quick) -> None:
    norms, losses, weights = [], [], []
    ways = (
        "training.micro_batch=1", "training.micro_batch=8", "training.micro_batch_tokens=100",
        "data.packing=true",
    )  # fmt: skip
    for way in ways:
        config = quick(
            way, "training.batch_size=8", "training.neftune_noise_alpha=5", "training.max_steps=2",
            "optimizer.kind=sgd", "optimizer.beta1=0.0", "training.warmup=0", "training.max_grad_norm=0",
            "training.learning_rate=0.1", "quantization.kind=none", *UNEVALUATED, run=way,
        )  # fmt: skip
        run = finetune.train(config).run
        norms.append([line["grad_norm"] for line in training_lines(run)])
        losses.append([line["loss"] for line in training_lines(run)])
        weights.append(adapter_weights(run))
    for other in range(1, len(ways)):
        assert losses[other] == pytest.approx(losses[0], rel=1e-5)
        assert norms[other] == pytest.approx(norms[0], rel=1e-4)
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weights[other][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_every_optimizer_trains_on_this_device(quick) -> None:
    model = ready(quick("quantization.kind=none", *UNEVALUATED)).step.model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert len(trained) == 28
    kinds = {optimizers.choose(OptimizerSection(kind=kind), "cpu")[0] for kind in optimizers.OPTIMIZERS}
    for kind in sorted(kinds):
        before = [weight.detach().clone() for weight in trained]
        for weight in trained:
            weight.grad = torch.ones_like(weight)
        optimizers.make(kind, OptimizerSection(kind=kind), 0.01, model).step()
        assert not any(map(torch.equal, before, trained)), kind


@pytest.mark.slow
def test_an_optimizer_inherits_nothing_from_that_of_an_earlier_model(quick) -> None:
    """bitsandbytes notes for the whole process which weights get 32-bit states: here, trained embeddings."""
    exceptions = GlobalOptimManager.get_instance()
    common = ("optimizer.kind=adamw_8bit", "training.max_steps=1", *UNEVALUATED)
    finetune.train(quick(*common, "adapter.kind=none", "quantization.kind=none", run="first"))
    assert list(exceptions.index2config.values()) == [{"optim_bits": 32}]
    assert exceptions.module_weight_config_triple == [], "no module is kept alive"
    finetune.train(quick(*common, run="second"))
    assert exceptions.index2config == {}


def test_the_second_factor_of_an_adapter_can_have_its_own_rate() -> None:
    model = torch.nn.Module()
    for name in ("lora_A", "lora_B", "norm"):
        model.add_module(name, torch.nn.ModuleDict({"default": torch.nn.Linear(4, 4)}))
    section = OptimizerSection(lora_plus=16, weight_decay=0.1)
    optimizer = optimizers.make("adamw_torch_fused", section, 1e-3, torch.nn.ModuleDict({"layer": model}))
    schedule = schedules.scheduler(TrainingSection(learning_rate=1e-3, warmup=0, schedule="linear"), optimizer, 10)
    names = {weight: name for name, weight in model.named_parameters()}
    found = [([names[weight] for weight in group["params"]], group["lr"]) for group in optimizer.param_groups]
    first, second, plain = found
    assert first == (["lora_A.default.weight"], 1e-3)
    assert second == (["lora_B.default.weight"], 16e-3)
    assert plain[1] == 1e-3
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(16 * optimizer.param_groups[0]["lr"])
    assert optimizer.param_groups[0]["lr"] < 1e-3


def test_a_device_that_cannot_share_memory_with_the_host_gets_the_unpaged_optimizer_and_a_line_says_so() -> None:
    name, line = optimizers.choose(OptimizerSection(kind="paged_adamw_8bit"), "cpu")
    assert name == "adamw_8bit"
    assert "paged_adamw_8bit" in str(line)
    assert "\n" not in str(line)
    assert optimizers.choose(OptimizerSection(kind="paged_adamw_8bit"), "cuda") == ("paged_adamw_8bit", None)
    for kind, optimizer in optimizers.OPTIMIZERS.items():
        name, line = optimizers.choose(OptimizerSection(kind=kind), "cuda", managed_memory=False)
        assert not optimizers.OPTIMIZERS[name].unpaged
        assert name == (optimizer.unpaged or kind)
        assert (line is None) == (name == kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "packing"), sampled([("lora", "false"), ("none", "true")], ("lora", "false")))
def test_resumed_run_ends_bit_equal(quick, kind: str, packing: str) -> None:
    """Stopped twice, in the first epoch and in the third, with dropout, noise, 8-bit states and grouped rows."""
    overrides = [
        f"adapter.kind={kind}", f"data.packing={packing}", "adapter.dropout=0.1", "training.neftune_noise_alpha=5",
        "quantization.kind=" + ("nf4" if kind == "lora" else "none"), "training.batch_size=8", "training.micro_batch=4",
        "training.max_steps=9", "training.eval_every=4", "output.save_every=2", "kernels.fused=auto",
    ]  # fmt: skip
    whole = finetune.train(quick(*overrides, run="whole")).run

    stopped = stopped_and_resumed(quick(*overrides, run="stopped"), 3, 7)
    file = "adapter/adapter_model.safetensors" if kind == "lora" else "merged/model.safetensors"
    expected, found = load_file(whole.path / file), load_file(stopped.path / file)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [line["step"] for line in training_lines(stopped)] == list(range(1, 10))
    events = [event["event"] for event in stopped.events()]
    assert (events.count("resumed"), "schedule_changed" in events) == (2, False)


@pytest.mark.slow
def test_a_finished_run_says_so_and_is_moved_aside_for_a_fresh_one(
    run: RunDirectory, capsys: pytest.CaptureFixture, hurried: None
) -> None:
    config = run.config().changed({"output.dir": str(run.path), "memory.check": "off"})
    before = run.metrics_file.read_bytes()
    finetune.train(config)
    told = capsys.readouterr().out
    assert "is finished" in told
    assert "finetune merge" not in told
    finetune.train(config.changed({"output.merge": True}))
    assert f"`finetune merge {run.path}`" in capsys.readouterr().out
    assert run.metrics_file.read_bytes() == before
    new = config.changed({"training.max_steps": 1, "data.eval": "none", "training.eval_every": None})
    assert finetune.train(new, fresh=True).run.finished
    assert run.steps_done == 1
    assert run.path.with_name("run.1").joinpath("metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(("held_out", "judges"), [(9, False), (10, True)])
def test_the_best_checkpoint_is_published_where_ten_held_out_rows_judge_it_and_else_the_last(
    held_out: int, judges: bool, quick, rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A learning rate that ruins the model after a good start; a row that is held out twice says no more than once."""
    lines = rows_file.read_text().splitlines()[:held_out]
    (tmp_path / "held_out.jsonl").write_text("\n".join([*lines, lines[0], lines[0]]) + "\n")
    config = quick(
        f"data.eval={tmp_path / 'held_out.jsonl'}", "training.max_steps=8", "training.eval_every=2",
        "training.learning_rate=1", "training.schedule=constant", "training.warmup=8", "optimizer.kind=sgd",
        "output.save_every=2", "output.keep=2", UNQUANTIZED,
    )  # fmt: skip
    run = finetune.train(config).run
    evaluations = {line["step"]: line["eval_loss"] for line in run.metrics() if "eval_loss" in line and line["step"]}
    best = min(evaluations, key=evaluations.__getitem__)
    assert best != max(evaluations), "the job was meant to get worse"
    assert run.events()[-1]["best_step"] == best
    published = adapter_weights(run)
    saved = load_file(run.checkpoint(best if judges else 8) / "adapter_model.safetensors")
    assert all(torch.equal(published[name], saved[name]) for name in published)
    # Of more than `output.keep` checkpoints the best one stays.
    assert [checkpoint_step(path) for path in run.complete_checkpoints()] == [best, 8]
    out = capsys.readouterr().out
    assert ("too few different rows" in out) == ("publishing the last step" in out) == (not judges)
    if not judges:
        reported(out, "too few different rows")
        reported(out, "publishing the last step", f"step {best}")


@pytest.mark.slow
def test_a_signal_after_early_stopping_names_a_step_that_is_saved(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(recorder: MetricsRecorder) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsRecorder, "ended", ended)
    config = quick(
        "training.max_steps=20", "training.eval_every=3", "training.early_stopping=1", "output.save_every=4",
        "output.best=false", UNQUANTIZED,
    )  # fmt: skip
    losses = itertools.count(1.0)
    monkeypatch.setattr(EvalLoss, "value", lambda *_: next(losses))
    with pytest.raises(Terminated) as stopped:
        finetune.train(config)
    run = RunDirectory(config.output.dir)
    last = max(line["step"] for line in run.metrics())
    assert last % 4
    assert f"step {last} is saved" in str(stopped.value)
    assert run.checkpoint(last).is_dir()


def test_each_line_has_the_contracted_keys(trained: RunDirectory) -> None:
    lines = training_lines(trained)
    assert [line["step"] for line in lines] == list(range(1, 21))
    keys = {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "padding_share"}
    for line in lines:
        assert keys <= set(line)
        assert set(line["memory"]) == {"forward", "backward", "optimizer"}
        assert all(peak["resident_bytes"] > 100 * 2**20 for peak in line["memory"].values())
    assert [line["step"] for line in trained.metrics() if "eval_loss" in line] == [0, 10, 20]


@pytest.mark.slow
def test_the_time_of_a_step_holds_the_wait_for_its_numbers(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device works on the update until its numbers are read, and a save that follows begins a new clock."""

    def late(values: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return values

    monkeypatch.setattr(ranks, "summed", late)
    job = ["training.max_steps=2", "output.save_every=1", UNQUANTIZED, *UNEVALUATED]
    lines = training_lines(finetune.train(quick(*job)).run)
    assert all(line["tokens"] / line["tokens_per_second"] > 0.5 for line in lines)


def test_the_trained_run_has_what_the_contract_lists_and_a_lower_held_out_loss(trained: RunDirectory) -> None:
    names = {path.name for path in trained.path.iterdir()}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "checkpoints", "adapter"} <= names
    assert {"report.html", "training.png", "answers.json"} <= names
    environment = json.loads(trained.environment_file.read_text())
    assert environment["packages"]["torch"] == importlib.metadata.version("torch")
    assert environment["seed"] == 42
    base, *_, last = [line["eval_loss"] for line in trained.metrics() if "eval_loss" in line]
    assert last < 0.85 * base


@pytest.mark.slow
@pytest.mark.usefixtures("one_sample_answer")
def test_tensorboard_gets_the_metrics_and_the_profiler_writes_a_trace(quick) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = ["tracking.to=[tensorboard]", "memory.profile_steps=1", "training.eval_every=2", UNQUANTIZED]
    run = finetune.train(quick(*job)).run
    events = EventAccumulator(str(run.path / "tensorboard" / "finetune")).Reload()
    for split, key in (("train", "loss"), ("eval", "eval_loss")):
        written = {line["step"]: line[key] for line in run.metrics() if key in line}
        reported = {point.step: point.value for point in events.Scalars(f"{split}/loss")}
        assert reported == pytest.approx(written, abs=1e-4)
    peaks = {line["step"]: line["memory"]["backward"]["resident_bytes"] for line in training_lines(run)}
    reported = {point.step: point.value for point in events.Scalars("train/memory/backward/resident_bytes")}
    assert reported == pytest.approx(peaks, rel=1e-6)
    assert "answers/1/text_summary" in events.Tags()["tensors"]
    [trace] = run.profile.glob("*.pt.trace.json")
    assert "[memory]" in trace.read_text()


def test_trackers_end_with_a_run_that_fails(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open one would take the numbers of the next run in this process."""
    ended = []
    monkeypatch.setattr(TensorBoardTracker, "finish", lambda tracker: ended.append(tracker.run_name))
    spoil_losses(monkeypatch, 1, 2, 3)
    with pytest.raises(NumbersError):
        finetune.train(quick("tracking.to=[tensorboard]", *UNEVALUATED))
    assert ended == ["finetune"]


class Unreachable:
    """A tracker whose service answers `calls` times."""

    name = "unreachable"

    def __init__(self, calls: int) -> None:
        self.left = calls

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, object]) -> None: ...

    def log(self, values: dict[str, float], step: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("no route to host")

    def finish(self) -> None:
        self.log({}, 0)


def test_a_tracker_that_fails_is_dropped_with_one_note(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    config = quick("tracking.to=[tensorboard, wandb]")
    run = RunDirectory(config.output.dir)
    run.claim()
    notes: list[str] = []
    for number, answered in enumerate((0, 2), 1):  # it fails at the first log, and as it is closed
        other = Unreachable(9)
        made = iter([Unreachable(answered), other])
        monkeypatch.setattr(tracking, "_made", lambda *_, made=made: next(made))
        trackers = Trackers(config.tracking, run, config.model_dump(mode="json"), notes.append)
        for step in (1, 2):
            trackers.log("train", {"step": step, "loss": 2.0})
        trackers.close()
        assert [event["error"] for event in run.events()] == ["no route to host"] * number
        assert len(notes) == number
        assert other.left == 6, "the others go on"


def test_a_tracker_that_cannot_start_or_is_not_installed_is_refused(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    config = quick("tracking.to=[mlflow]")
    with refusal(MachineError, "pip install mlflow"):
        finetune.train(config)
    assert not RunDirectory(config.output.dir).finished

    def refuse() -> None:
        raise ConnectionError("no route to host")

    config, started, refuses = quick("tracking.to=[tensorboard, wandb]"), Unreachable(1), Unreachable(1)
    refuses.start = refuse
    monkeypatch.setattr(tracking, "_made", lambda name, *_: {"tensorboard": started, "wandb": refuses}[name])
    with refusal(MachineError, "tracking.to:"):
        Trackers(config.tracking, RunDirectory(config.output.dir), config.model_dump(mode="json"), pytest.fail)
    assert started.left == 0, "it was finished"


def test_project_name_tags_and_answers_reach_a_tracker(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[object] = []

    class Wandb(Unreachable):
        requires_logging_directory = False

        def __init__(self, project: str, **named: object) -> None:
            super().__init__(9)
            got.extend((project, named))

        def log(self, values: dict[str, float], step: int) -> None:
            got.append(values)

        def log_table(self, name: str, columns: list[str], data: list[list[str]]) -> None:
            got.append(data)

    assert tracking.TRACKERS.keys() <= LOGGER_TYPE_TO_CLASS.keys()
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Wandb)
    config = quick("tracking.to=wandb", "tracking.project=faq", "tracking.name=third", "tracking.tags=[a, b]")
    run = RunDirectory(config.output.dir)
    run.claim()
    write_json(run.answers_file, [{"question": "q", "reference": "r", "before": "b", "after": None}])
    trackers = Trackers(config.tracking, run, config.model_dump(mode="json"), pytest.fail)
    trackers.log("train", {"step": 1, "loss": 2.0, "skipped": True, "memory": {"backward": {"reserved_bytes": 7}}})
    trackers.answers(run)
    assert got == [
        "faq", {"name": "third", "tags": ["a", "b"]}, {"train/loss": 2.0, "train/memory/backward/reserved_bytes": 7},
        [["q", "r", "b", None]],
    ]  # fmt: skip
    # The project is else that of the tracker's own variable.
    got.clear()
    unnamed = quick("tracking.to=[wandb]")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    Trackers(unnamed.tracking, run, unnamed.model_dump(mode="json"), pytest.fail)
    monkeypatch.setenv("WANDB_PROJECT", "answers")
    Trackers(unnamed.tracking, run, unnamed.model_dump(mode="json"), pytest.fail)
    assert got == ["finetune", {"name": run.path.name}, "answers", {"name": run.path.name}]


@pytest.mark.slow
def test_a_notebooks_own_accelerator_keeps_its_settings(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state()  # of an earlier test
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    own = Accelerator(cpu=True, gradient_accumulation_steps=4)
    try:
        finetune.train(quick("training.max_steps=1", *UNEVALUATED))
        assert own.mixed_precision == "bf16"
        assert own.gradient_accumulation_steps == 4
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()
