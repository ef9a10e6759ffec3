"""The command line as a person meets it: what is printed, and the exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from finetune import cli
from finetune.rundir import RunDirectory

TINY = Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Run `finetune ARGUMENTS` in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["finetune", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def job(tmp_path: Path, rows_file: Path) -> list[str]:
    """Arguments of a training job of seconds."""
    return [
        str(TINY), "training.max_steps=2", "training.batch_size=4", "training.micro_batch=2", "output.merge=false",
        f"data.train={rows_file}", "data.eval_share=0.2", f"output.dir={tmp_path / 'run'}",
    ]  # fmt: skip


def test_train_prints_losses_peaks_and_answers(call, job: list[str], tmp_path: Path) -> None:
    code, out, _ = call("train", *job)
    assert code == 0
    for expected in ("held-out loss base", "peak memory", "backward", "before", "after", str(tmp_path / "run")):
        assert expected in out
    assert RunDirectory(tmp_path / "run").finished


def test_train_as_json(call, job: list[str]) -> None:
    code, out, _ = call("train", *job, "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["steps"] == 2
    assert summary["base_eval_loss"] > 0


def test_every_problem_of_a_config_at_once_with_exit_2(call, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("model:\n  nam: x\ntraining:\n  learning_rate: fast\n  batch_size: 10\n  batch_size: 12\n")
    code, _, err = call("train", config, "memory.limit=24GB")
    assert code == 2
    for expected in (
        f"{config}:2:",
        "did you mean `name`",
        f"{config}:4:",
        f"{config}:6:",
        "override `memory.limit=24GB`",
    ):
        assert expected in err


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["data.train=nowhere.jsonl"], 3, "nowhere.jsonl: no such file"),
        (["data.train=builtin:python_dogs"], 3, "did you mean `builtin:python_docs`"),
        (["model.name=./nowhere"], 7, "no such model directory"),
        (["model.name=someone/nothing"], 4, "the hub cannot be reached"),
        (["adapter.targets=[q_pro]"], 2, "did you mean `q_proj`"),
        (["training.precision=fp16"], 4, "bf16 or fp32"),
        (["output.dir=/proc/nowhere"], 4, "set `output.dir`"),
    ],
)
def test_what_is_missing_or_wrong_has_its_exit_code_and_no_finished_run(
    call, job: list[str], tmp_path: Path, overrides: list[str], code: int, words: str
) -> None:
    found, _, err = call("train", *job, *overrides)
    assert found == code
    assert words in err
    assert err.startswith("error: ")
    assert not RunDirectory(tmp_path / "run").finished
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_wrong_row_is_named_by_line_and_field(call, job: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
                    '{"messages": [{"role": "user", "content": 7}]}\n')  # fmt: skip
    code, _, err = call("train", *job, f"data.train={rows}")
    assert code == 3
    assert f"{rows}:2: `messages[0].content` must be text, not a number" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["merge", "eval", "report"])
def test_a_directory_that_is_no_run_is_refused(call, tmp_path: Path, command: str) -> None:
    code, _, err = call(command, tmp_path)
    assert code == 7
    assert "not a run directory" in err


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


def test_eval_states_loss_and_perplexity_of_base_and_adapter(call, trained: RunDirectory) -> None:
    code, out, _ = call("eval", trained.path, "--json")
    assert code == 0
    losses = json.loads(out)
    lines = [line["eval_loss"] for line in trained.metrics() if "eval_loss" in line]
    assert losses["base"] == pytest.approx(lines[0], rel=1e-4)
    assert losses["adapter"] == pytest.approx(lines[-1], rel=1e-4)
    _, out, _ = call("eval", trained.path)
    assert "perplexity" in out


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
    assert code == 130
    assert "start the same command again" in err


def test_out_of_memory_exits_6_with_the_levers(call, job: list[str], tmp_path: Path, monkeypatch) -> None:
    import torch

    from finetune.training.trainer import Trainer

    def exhausted(self, *arguments, **named) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Trainer, "compute_loss", exhausted)
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


def test_module_and_help_start_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "finetune", "--help"], capture_output=True, text=True, check=True
    )
    assert "train" in done.stdout
    assert "merge" in done.stdout
    assert " torch" not in done.stderr, "help must not wait for torch"


def test_import_offers_the_functions_of_the_readme() -> None:
    import finetune

    for name in ("load_config", "train", "merge", "generate", "evaluate"):
        assert callable(getattr(finetune, name))
    with pytest.raises(AttributeError):
        finetune.nothing_of_the_kind  # noqa: B018
