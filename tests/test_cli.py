"""The command line as a person meets it: what is printed, and the exit code."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY, write_rows
from messages import reported

from finetune import cli
from finetune.choices import load_config
from finetune.config import dump
from finetune.export.export_formats import FORMATS
from finetune.extras.launch.targets import TARGETS
from finetune.report.scores import Scores
from finetune.storage.rundir import RunDirectory

_ROUNDED = "output.serve: q4_0 for ollama as one file, rounded after training (ollama takes no adapters at all)"


@pytest.fixture
def job(tmp_path: Path, rows_file: Path, shallow_base: Path) -> list[str]:
    """Arguments of a training job of seconds."""
    return [
        str(TINY), f"model.name={shallow_base}", "training.max_steps=2", "training.batch_size=4",
        "training.micro_batch=2", "output.merge=false", "memory.check=off", "memory.checkpointing=none",
        f"data.train={rows_file}",
        "data.eval_share=0.2", f"output.dir={tmp_path / 'run'}",
    ]  # fmt: skip


@pytest.mark.slow
def test_train_prints_losses_peaks_and_answers_or_a_summary_as_json(call, job: list[str], tmp_path: Path) -> None:
    job.append("training.schedule=constant")
    code, out, _ = call("train", *job)
    assert code == 0
    for expected in ("eval loss of the base", "peak memory", "backward", "before", "after", str(tmp_path / "run")):
        assert expected in out
    assert RunDirectory(tmp_path / "run").finished
    code, out, _ = call("train", *job, "training.max_steps=3", "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["steps"] == 3
    assert summary["base_eval_loss"] > 0


# A command line and its exit code, with words of its message. JOB is a job, and of the folders there is none.
REFUSED = [
    # paths
    ("report {tmp}/{long}", 7, "not a run directory"),
    ("report {tmp}/{deep}", 7, "not a run directory"),
    ("report {tmp}/loop", 7, "not a run directory"),
    ("report {tmp}/loop/run", 7, "not a run directory"),
    ("report {tmp}/", 7, "not a run directory"),
    ("data {tmp}/{long}", 2, "error: {tmp}/"),
    ("data {tmp}/{deep}", 2, "error: {tmp}/"),
    ("data {tmp}/loop", 2, "error: {tmp}/"),
    ("data {tmp}/loop/job.yaml", 2, "error: {tmp}/"),
    ("data {tmp}/latin.yaml", 2, "error: {tmp}/latin.yaml: is not UTF-8 text (byte 19 is 0xE9); "),
    ("init --from {tmp}/latin.yaml", 2, "error: {tmp}/latin.yaml: is not UTF-8 text (byte 19 is 0xE9); "),
    ("init --from {tmp}/latni.yaml", 2, "no such file; did you mean `{tmp}/latin.yaml`?"),
    # what is to be written
    ("data JOB --html ''", 4, "it is a folder; name a file"),
    ("data JOB --html .", 4, "it is a folder; name a file"),
    ("data JOB --html {tmp}", 4, "it is a folder; name a file"),
    ("init builtin:tiny-llama {rows} --yes --output {tmp}", 4, "it is a folder"),
    ("init builtin:tiny-llama {rows} --yes --output {tmp}/none/x", 4, "its directory does not exist"),
    ("fit JOB --output {tmp}", 4, "it is a folder"),
    ("fit JOB --output {tmp}/none/x", 4, "its directory does not exist"),
    # cards and models
    ("plan JOB --gpu 24GiB --gpus 3", 2, "cannot be split among 3 processes"),
    ("fit JOB --gpu 24GiB --gpus 3", 2, "cannot be split among 3 processes"),
    ("plan JOB --gpu 24GiB --gpus 0", 2, "Invalid value for '--gpus'"),
    ("fit JOB --gpu 24GiB --gpus 1025", 2, "Invalid value for '--gpus'"),
    ("plan JOB --gpu 'RTX 4900'", 2, "RTX 4090"),
    ("fit JOB --gpu 'RTX 4900'", 2, "RTX 4090"),
    ("plan JOB --gpu 24GB", 2, "GiB"),
    ("plan JOB --gpu T4 model.name=someone/nothing", 4, "the hub cannot be reached"),
    ("plan JOB --gpu T4 model.name=./nowhere", 7, "no such model directory"),
    ("fit JOB --gpu T4 model.name=./nowhere", 7, "no such model directory"),
    ("plan JOB --gpu T4 model.name=llama.q4.gguf", 7, "download the GGUF file and give its path"),
    ("plan JOB --gpu T4 model.name=https://huggingface.co/a/b", 7, "name on the hub: a/b"),
    ("plan JOB --gpu T4 model.name={tmp}/unknown", 7, "no_such_architecture"),
    ("plan JOB --gpu T4 model.name={tmp}/not_json", 7, "not_json"),
    # rows
    ("data JOB data.eval=none data.train={tmp}/masked.jsonl --html {tmp}/a.html", 3, "teaches nothing"),
    ("data JOB data.eval=none data.train={tmp}/empty.jsonl --html {tmp}/a.html", 3, "1 empty answer"),
    ("data JOB data.eval=none data.train={tmp}/long.jsonl data.max_length=16 data.too_long=drop --html {tmp}/a.html", 3,
     "leaves nothing to train"),
    ("data JOB data.eval=none data.train={tmp}/number.jsonl --html {tmp}/a.html", 3,
     "number.jsonl:1: `completion` must be text, not a number"),
    # training
    ("train JOB data.train=nowhere.jsonl", 3, "nowhere.jsonl: no such file"),
    ("train JOB data.train=builtin:python_dogs", 3, "did you mean `builtin:python_docs`"),
    ("train JOB model.name=./nowhere", 7, "no such model directory"),
    ("train JOB model.name=someone/nothing", 4, "the hub cannot be reached"),
    ("train JOB adapter.targets=[q_pro]", 2, "did you mean `q_proj`"),
    ("train JOB training.precision=fp16", 4, "needs a CUDA device"),
    ("train JOB output.dir=/proc/nowhere", 4, "set `output.dir`"),
    ("train JOB --training.max_steps=20", 2, "write an override without dashes, as section.key=value"),
    ("train JOB -training.max_steps=20", 2, "write an override without dashes, as section.key=value"),
    # exports
    ("export {trained} --to mergd", 2, f"did you mean `merged`? choose from {', '.join(FORMATS)}"),
    ("export {trained} --to gguf --type q3_k_m", 2, "llama-quantize model-f16.gguf model-q3_k_m.gguf q3_k_m"),
    ("export {trained} --to gguf --type ''", 2, "GGUF type `` is not known; choose from f16"),
    ("export {trained} --to gguf --push a/b/c", 2, "`--push a/b/c`"),
    ("export {trained} --to gguf --push ''", 2, "`--push `"),
    ("export {trained} --to merged --type q4_0", 2, "`--type q4_0`: `merged` has no GGUF file"),
    ("export {trained} --to fp8 --type q4_0", 2, "`--type q4_0`: `fp8` has no GGUF file"),
]  # fmt: skip
_ROWS = {
    "masked": {"input_ids": [1, 2], "labels": [-100, 2]}, "empty": {"prompt": "Say", "completion": ""},
    "long": {"prompt": "Say " * 99, "completion": "word"}, "number": {"prompt": "Say", "completion": 7},
}  # fmt: skip


@pytest.mark.parametrize(("line", "code", "words"), REFUSED)
def test_what_is_missing_or_wrong_has_its_exit_code_and_nothing_is_written(
    line: str, code: int, words: str, call, job: list[str], trained: RunDirectory, rows_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "latin.yaml").write_bytes(b"model:\n  name: caf\xe9\n")
    for name, row in _ROWS.items():
        write_rows(tmp_path / f"{name}.jsonl", [row])
    for name, text in (("unknown", '{"model_type": "no_such_architecture"}'), ("not_json", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    before = {*tmp_path.iterdir()}
    given = {"tmp": tmp_path, "long": "x" * 300, "deep": "a/" * 3_000, "trained": trained.path, "rows": rows_file}
    command = [part for word in shlex.split(line) for part in (job if word == "JOB" else [word.format(**given)])]
    found, out, err = call(*command)
    assert found == code
    assert words.format(**given) in err
    assert err.startswith(("error: ", "Usage: "))
    assert command[0] == "train" or code == 4 or out.count("\n") <= 1, "a header"
    assert "--output" not in command or not out, "before its forecast"
    assert {*tmp_path.iterdir()} - before <= {tmp_path / "run"}
    assert not RunDirectory(tmp_path / "run").finished
    assert not RunDirectory(tmp_path / "run").adapter.exists()
    assert not (trained.path / "gguf").exists()
    assert not (trained.path / "fp8").exists()


def test_a_path_that_the_system_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped, cli.errors_reported():
        (tmp_path / ("x" * 300)).write_text("")
    assert stopped.value.code == 4
    assert capsys.readouterr().err == f"error: {tmp_path / ('x' * 300)}: File name too long\n"


def test_files_to_read_and_to_write_may_be_at_home(
    call, job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(TINY, tmp_path / "job.yaml")
    code, _, err = call("data", "~/job.yaml", *job[1:], "--html=~/data.html")
    assert (code, err) == (0, "")
    assert (tmp_path / "data.html").is_file()
    code, _, err = call("report", "~/gone")
    assert code == 7
    reported(err, str(tmp_path / "gone"))


def test_a_command_without_a_config_says_how_to_begin(call) -> None:
    said = set()
    for command in ("train", "sweep", "data", "plan", "fit", "launch"):
        code, _, err = call(command)
        assert code == 2
        said.add(err)
    [message] = said
    reported(message, "`finetune init MODEL DATA`", "`finetune train builtin:tiny_cpu`")


def test_a_config_of_the_package_is_named_anywhere_and_what_is_written_is_named_after_it(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("builtin:tiny_cpu") == load_config(TINY)
    assert call("launch", "builtin:tiny_cpu", "--on", "slurm", "--gpus-per-node", "2")[0] == 0
    [script] = tmp_path.iterdir()
    assert script.stem == "tiny_cpu"
    assert "finetune train builtin:tiny_cpu" in script.read_text()
    (tmp_path / "tiny_cpu_fitted.yaml").mkdir()
    assert "tiny_cpu_fitted.yaml could not be written" in call("fit", "builtin:tiny_cpu")[2]
    for wrong, words in {
        "builtin:tiny_cpi": "did you mean `builtin:tiny_cpu`",
        "configs/tiny_cpu.yaml": "`builtin:tiny_cpu`?",
    }.items():
        code, _, err = call("data", wrong)
        assert code == 2
        reported(err, wrong, words)


@pytest.mark.slow
def test_plan_says_that_a_job_fits_and_is_served_and_draws_it(call, job: list[str], tmp_path: Path) -> None:
    picture, served = tmp_path / "memory.png", ("output.serve=q4_0", "output.runtime=ollama")
    code, out, err = call("plan", *job, *served, "--gpu", "RTX 4090", "--picture", picture)
    assert (code, err) == (0, "")
    for expected in ("fits: ", "on RTX 4090", "backward", "adapter", _ROUNDED):
        assert expected in out
    assert "rounding with the training rows, apart from training, takes" in out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert not (tmp_path / "run").exists(), "a plan writes no run"


@pytest.mark.slow
def test_what_could_not_be_exported_is_refused_by_plan_and_fit_as_by_train(
    call, job: list[str], tmp_path: Path
) -> None:
    rows, template = tmp_path / "rows.jsonl", tmp_path / "counted.jinja"
    turns = [{"role": "user", "content": "Count to two."}, {"role": "assistant", "content": "1 2"}]
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    template.write_text("{% for m in messages %}{{ messages | length }}{{ m['content'] }}{% endfor %}")
    served = [f"data.train={rows}", f"data.chat_template={template}", "output.serve=q4_0", "output.runtime=ollama"]
    errors = []
    for command, given in {"train": (), "plan": ("--gpu", "24GiB"), "fit": ("--gpu", "24GiB")}.items():
        code, _, err = call(command, *job, *served, "data.loss_on=all", "data.eval=none", *given)
        assert code == 2
        errors.append(err)
    assert errors == errors[:1] * 3
    assert "could not be exported: the chat template has no form in Ollama's language" in " ".join(errors[0].split())


def test_the_header_of_training_says_how_the_model_will_be_served(call, job: list[str], tmp_path: Path) -> None:
    served = ["output.serve=q4_0", "output.runtime=ollama", f"data.train={tmp_path / 'missing.jsonl'}"]
    code, out, err = call("train", *job, *served)
    assert code != 0
    assert _ROUNDED in " ".join((out + err).split())


@pytest.mark.slow
def test_plan_of_a_job_that_does_not_fit_names_the_levers_and_exits_6(call, job: list[str]) -> None:
    overrides = ["memory.budget=1MiB", "memory.loss_tokens=512", "memory.checkpointing=all", "data.max_length=64"]
    code, out, err = call("plan", *job, *overrides, "adapter.rank=8", "--gpu", "cpu", "--json")
    assert (code, err) == (6, "")
    found = json.loads(out)
    assert set(found) >= {
        "fits", "budget_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "host_bytes", "disk_bytes", "phases",
        "categories", "batch", "flops", "moved_bytes", "calls", "seconds", "levers",
    }  # fmt: skip
    assert found["fits"] is False
    assert found["budget_bytes"] == 2**20
    assert {"training.micro_batch": 1} in [lever["changes"] for lever in found["levers"]]
    assert all(lever["saved_bytes"] > 0 and not lever["fits"] for lever in found["levers"])


def test_data_shows_counts_and_rows_writes_a_page_and_no_run(call, job: list[str], tmp_path: Path) -> None:
    page = tmp_path / "look.html"
    code, out, err = call("data", *job, "--html", page)
    assert (code, err) == (0, "")
    for expected in ("rows teach", "evaluation", "grouped by length", "configured", "fingerprint", "<|im_end|>⟧↵"):
        assert expected in out
    assert f"wrote {page}" in out.splitlines()
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not (tmp_path / "run").exists()


def test_data_as_json(call, job: list[str]) -> None:
    code, out, err = call("data", *job, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {
        "fingerprint", "train", "eval", "longest_place", "sources", "lengths", "batch_size", "micro_batch",
        "micro_batch_tokens", "batchings", "worst_batch", "samples", "splits", "warning", "judges", "separator",
        "as_chat",
    }  # fmt: skip
    assert found["train"]["rows"] + found["eval"]["rows"] == 24
    assert found["batch_size"] == 4


def test_a_page_that_cannot_be_written_exits_4(call, job: list[str], tmp_path: Path) -> None:
    code, out, err = call("data", *job, "--html", tmp_path / "nowhere" / "look.html")
    assert code == 4
    assert "22 rows teach" in out, "the table is printed first"
    reported(err, "look.html")


@pytest.mark.slow
def test_fit_writes_a_config_with_its_reasons(call, job: list[str], tmp_path: Path, monkeypatch) -> None:
    from finetune.choices import load_config
    from finetune.resolve import fit

    # Sixteen forecasts for each limit: tests/forecast/test_fit.py has them.
    found = fit.Limits(length=4096, micro_batch=64, rank=256, smallest_card="T4")
    monkeypatch.setattr(fit, "limits", lambda forecaster, **most: found)
    target = tmp_path / "fitted.yaml"
    code, out, err = call("fit", *job, "--gpu", "T4", "--output", target, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["config"] == str(target)
    assert result["limits"]["rank"] == 256
    read = load_config(target)
    assert read.training.rows == result["chosen"]["training.micro_batch"]
    assert read.memory.checkpointing == result["chosen"]["memory.checkpointing"]
    for reason in result["reasons"].values():
        assert f"  # {reason}" in target.read_text()


@pytest.mark.slow
def test_fit_of_what_fits_nowhere_exits_6(call, job: list[str], tmp_path: Path) -> None:
    code, _, err = call("fit", *job, "training.batch_size=1", "training.micro_batch=1", "memory.budget=1MiB",
                        "--gpu", "cpu", "--output", tmp_path / "fitted.yaml")  # fmt: skip
    assert code == 6
    reported(err, "nothing fits on")
    assert not (tmp_path / "fitted.yaml").exists()


def test_a_forecast_notes_the_rows_that_were_missing(call, job: list[str]) -> None:
    code, out, _ = call("plan", *job, "data.train=nowhere.jsonl", "data.max_length=32", "--gpu", "24GiB")
    assert code == 0
    assert "nowhere.jsonl: no such file" in out
    assert "every row counts as `data.max_length` long" in " ".join(out.split())


@pytest.mark.parametrize("prompt", [["--prompt=--foo.bar"], ["--prompt", "--foo.bar"]])
def test_a_prompt_may_begin_with_dashes(call, prompt: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.evaluation import commands

    asked = []
    monkeypatch.setattr(RunDirectory, "open", RunDirectory)
    monkeypatch.setattr(commands, "generate", lambda run, prompts, *_, **__: asked.extend(prompts))
    code, _, err = call("generate", "run", *prompt)
    assert (code, err, asked) == (0, "", ["--foo.bar"])


@pytest.mark.slow
def test_an_export_prints_its_proof_what_is_not_proven_and_how_to_serve_it(
    call, trained: RunDirectory, tmp_path: Path
) -> None:
    run = shutil.copytree(trained.path, tmp_path / "run")
    code, out, _ = call("export", run, "--to", "adapter")
    assert code == 0
    for expected in ("exported and proven", "not proven here: vLLM", "vllm serve", f"run={run / 'plain-adapter'}"):
        assert expected in out
    code, out, _ = call("export", run, "--to", "adapter", "--json")
    assert code == 0
    assert json.loads(out)["serve"].keys() == {"vLLM", "SGLang", "llama.cpp"}


@pytest.mark.slow
def test_a_plan_of_inference_says_whether_it_will_serve(call, shallow_base: Path) -> None:
    plan = ["plan", TINY, f"model.name={shallow_base}", "--inference", "--batch", 2, "--context", 64, "--gpu", "cpu"]
    code, out, _ = call(*plan)
    assert code == 0
    for expected in ("fits: ", "2 prompts at a time, up to 64 tokens each", "dynamic: ", "static 0 MiB", "decoding"):
        assert expected in out
    code, out, _ = call(*plan, "memory.budget=1MiB", "--json")
    assert code == 6
    found = json.loads(out)
    assert (found["fits"], found["rows"], found["context"], found["cache"]) == (False, 2, 64, "dynamic")
    assert found["cache_bytes"] == found["caches"]["dynamic"] > 0
    drawn = ([*plan, "--picture", "a.png"], "--picture and --html")
    shared = ([*plan, "--gpus", 2], "one GPU generates answers")
    for wrong, why in ((plan[:3] + plan[4:], "add --inference"), drawn, shared):
        code, _, err = call(*wrong)
        assert code == 2
        assert why in err


def test_generate_answers_with_each_model(call, trained: RunDirectory) -> None:
    answers = {}
    for model in ("base", "adapter"):
        code, out, _ = call(
            "generate", trained.path, "--prompt", "What is `abc`?", "--model", model, "--max-new-tokens", 12
        )
        assert code == 0
        answers[model] = out.strip()
    assert answers["base"] != answers["adapter"]
    code, _, err = call("generate", trained.path, "--prompt", "x", "--model", "merged")
    assert code == 7
    assert "finetune merge" in err


@pytest.mark.parametrize("arguments", [("generate", "--prompt", "x"), ("merge",)], ids=lambda found: found[0])
def test_another_tokenizer_than_the_trained_one_exits_7(
    call, trained: RunDirectory, tiny_base: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    run, changed = RunDirectory(shutil.copytree(trained.path, tmp_path / "run")), tmp_path / "changed"
    shutil.copytree(tiny_base, changed)
    rules = json.loads((changed / "tokenizer.json").read_text())
    (changed / "tokenizer.json").write_text(json.dumps(rules | {"normalizer": {"type": "Lowercase"}}))
    run.config_file.write_text(dump(run.config().changed({"model.tokenizer": str(changed)})))
    command, *rest = arguments
    code, _, err = call(command, run.path, *rest)
    assert code == 7
    reported(err, "another tokenizer or")


@pytest.mark.slow
def test_an_ignored_optimizer_key_is_accepted_in_a_run_and_refused_in_a_config(
    call, trained: RunDirectory, tmp_path: Path
) -> None:
    """Earlier versions accepted such keys, and wrote them into the run's config."""
    run = RunDirectory(shutil.copytree(trained.path, tmp_path / "run"))
    ignored = {"optimizer.kind": "adafactor", "optimizer.beta1": 0.8, "optimizer.epsilon": 1e-6}
    run.config_file.write_text(dump(run.config().changed(ignored)))
    for command, *rest in (("generate", "--prompt", "x", "--max-new-tokens", 1), ("doctor",)):
        code, _, err = call(command, run.path, *rest)
        assert code == 0, f"{command}: {err}"
    code, _, err = call("train", run.config_file, f"output.dir={tmp_path / 'other'}")
    assert code == 2
    reported(err, "`optimizer.epsilon`", "optimizer.kind")


@pytest.mark.slow
def test_eval_prints_a_table_or_what_eval_json_holds(
    call, trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(shutil.copytree(trained.path, tmp_path / "run"))
    code, out, _ = call("eval", run.path, "--metric", "f1", "--model", "adapter", "--limit", 2, "--max-new-tokens", 2)
    assert code == 0
    for expected in ("perplexity", "f1", "adapter", " to ", "95% confidence intervals"):
        assert expected in out
    made = json.loads(run.eval_file.read_text())
    assert made["settings"]["limit"] == 2
    monkeypatch.setattr("finetune.evaluation.evaluate.evaluate", lambda *_, **__: Scores(made))
    code, out, _ = call("eval", run.path, "--json")
    assert json.loads(out) == made
    monkeypatch.undo()
    code, _, err = call("eval", run.path, "--metric", "rogue_l")
    assert code == 2
    reported(err, "`rouge_l`")


def test_schema_prints_json_and_markdown(call) -> None:
    _, out, _ = call("schema")
    assert "paged_adamw_8bit" in json.loads(out)["$defs"]["OptimizerSection"]["properties"]["kind"]["enum"]
    _, out, _ = call("schema", "--markdown")
    assert out.startswith("# Config reference")


def test_interrupted_exits_130(call, job: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune import recipe

    def interrupt(*arguments, **named) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "train", interrupt)
    code, _, err = call("train", *job)
    assert (code, err) == (130, "interrupted; start the same command again\n")


def test_out_of_memory_exits_6_with_the_levers(call, job: list[str], tmp_path: Path, monkeypatch) -> None:
    import torch

    from finetune.training.step import Step

    def exhausted(self, *arguments, **named) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Step, "micro_step", exhausted)
    code, _, err = call("train", *job, "data.eval=none", "memory.checkpointing=none")
    assert code == 6
    for lever in ("memory.checkpointing=all", "training.micro_batch=1", "data.max_length=128"):
        assert lever in err
    assert RunDirectory(tmp_path / "run").events()[-1]["event"] == "out_of_memory"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.errors import ConfigError

    monkeypatch.setattr(sys, "argv", ["finetune", "train", "nowhere.yaml", "--debug"])
    with pytest.raises(ConfigError):
        cli.main()


@pytest.mark.parametrize(("command", "option", "names"), [("export", "--to", FORMATS), ("launch", "--on", TARGETS)])
def test_a_missing_choice_is_answered_with_the_entries_of_its_table(
    command: str, option: str, names: dict[str, Any], call: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = call(command, TINY)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: choose with {option}: ")
    assert [name for name, entry in names.items() if f"{name}: {entry.help}" not in err] == []


# -- an output that nobody reads any more ------------------------------------------------------------------------------

WRITERS: dict[str, tuple[list[str], str]] = {
    "data": (["data", "{run}/config.yaml", "--html", "{made}/data.html"], "{made}/data.html"),
    "eval": (["eval", "{run}"], "{run}/eval.json"),
    "merge": (["merge", "{run}"], "{run}/merged/merge.json"),
    "export": (["export", "{run}", "--to", "adapter"], "{run}/plain-adapter/README.md"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_command_writes_its_files_though_nobody_reads_its_output(
    name: str, run: RunDirectory, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As behind `| head -1`."""
    shutil.rmtree(run.merged, ignore_errors=True)
    run.eval_file.unlink(missing_ok=True)
    arguments, file = WRITERS[name]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        code, _, err = call(*(part.format(run=run.path, made=tmp_path) for part in arguments))
    assert (code, err) == (0, "")
    assert Path(file.format(run=run.path, made=tmp_path)).is_file()
