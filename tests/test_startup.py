"""What a command loads before it says something: libraries that take seconds to import come after its first line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune.runtime import libraries

TINY = Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml"
SLOW = ("torch", "transformers", "datasets", "peft", "trl", "accelerate", "bitsandbytes", "numpy", "matplotlib")

# Runs the command of its arguments, and tells which modules were there at the first line of output and at the end.
WATCHED = """
import json, os, sys

class Watched:
    modules = None

    def __init__(self, stream):
        self._stream = stream

    def write(self, text):
        Watched.modules = Watched.modules or sorted(sys.modules)
        written = self._stream.write(text)
        if ends_at is not None and text.startswith(ends_at):
            self._stream.flush()
            tell()
            os._exit(0)
        return written

    def __getattr__(self, name):
        return getattr(self._stream, name)

def tell():
    with open(report, "w") as file:
        json.dump({"at_first_line": Watched.modules, "at_the_end": sorted(sys.modules)}, file)

report = sys.argv.pop(1)
ends_at = {"its first line": "", "its first step": "step 1/"}.get(sys.argv[1])
on_a_terminal = sys.argv[1] == "on a terminal"
if ends_at is not None or on_a_terminal:
    del sys.argv[1]
if on_a_terminal:
    Watched.isatty = lambda stream: True
sys.stdout, sys.stderr = Watched(sys.stdout), Watched(sys.stderr)
from finetune import cli
try:
    cli.main()
finally:
    tell()
"""


@dataclass(frozen=True)
class Ended:
    """A command that ended: its exit code, its first line, and the modules loaded by then and at its end."""

    exit_code: int
    first_line: str
    at_first_line: set[str]
    at_the_end: set[str]


def watched(folder: Path, *arguments: Any) -> Ended:
    report = folder / "modules.json"
    command = [sys.executable, "-c", WATCHED, report, *arguments]
    ended = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in ended.stderr
    modules = {name: set(found) for name, found in json.loads(report.read_text()).items()}
    return Ended(ended.returncode, (ended.stdout or ended.stderr).splitlines()[0], **modules)


# Commands that need no model, with their exit codes.
WITHOUT_A_MODEL: list[tuple[int, list[str]]] = [
    (0, ["--help"]),
    (0, ["--version"]),
    (0, ["plan", "--help"]),
    (0, ["schema"]),
    (0, ["schema", "--markdown"]),
    *((2, [command, str(TINY), "training.steps=2"]) for command in ("train", "data", "plan", "fit")),
    *((7, [command, "no run"]) for command in ("merge", "eval", "report")),
    (7, ["generate", "no run", "--prompt", "?"]),
    (7, ["export", "no run", "--to", "merged"]),
    (2, ["init"]),
    (3, ["init", "builtin:tiny-llama", "no/rows.jsonl"]),
    (2, ["export", "no run", "--to", "merge"]),
    (2, ["export", "no run", "--to", "gguf", "--type", "q3_k_m"]),
]
# One after the other in one process: what one of them imports stays.
ONE_BY_ONE = f"""
import json, sys
from finetune import cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["finetune", *arguments]
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    imported = sorted(sys.modules.keys() & {set(SLOW)!r})
    sys.stderr.write("ended " + json.dumps([code, imported]) + chr(10))
"""


def test_a_command_without_a_model_imports_no_libraries(tmp_path: Path) -> None:
    arguments = json.dumps([arguments for _, arguments in WITHOUT_A_MODEL])
    ended = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in ended.stderr
    ends = [json.loads(line.removeprefix("ended ")) for line in ended.stderr.splitlines() if line.startswith("ended ")]
    expected = [(arguments, [code, []]) for code, arguments in WITHOUT_A_MODEL]
    assert list(zip([arguments for _, arguments in WITHOUT_A_MODEL], ends, strict=True)) == expected


def test_a_config_from_python_is_checked_without_the_libraries_of_a_model() -> None:
    code = f"""
import finetune, sys
config = finetune.load_config({{"data": {{"train": [{{"text": "a"}}], "format": print}}}})
assert config.data.format == "python:print"
assert sys.modules.keys().isdisjoint({SLOW!r})
assert set(finetune.__all__) == finetune._HOMES.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Of one the first line alone: the process ends with it.
@pytest.mark.parametrize(("command", "until"), [("plan", []), ("fit", ["its first line"])])
def test_a_forecast_prints_its_job_before_it_imports_the_libraries(
    command: str, until: list[str], tmp_path: Path
) -> None:
    job = ["data.train=someone/rows", "data.max_length=64", "kernels.fused=on"]
    ended = watched(tmp_path, *until, command, TINY, *job, "--gpu", "24GiB")
    assert ended.exit_code == 0
    assert ended.first_line.startswith(f"{command} of {TINY}: builtin:tiny-llama")
    assert "LoRA of rank" in ended.first_line
    assert ended.at_first_line.isdisjoint(SLOW)
    # What a forecast does not take: pictures, trackers, compilers, other trainers; and our kernels, of which the fused
    # job here needs shapes alone. Triton itself is there where bitsandbytes is: it imports it.
    unneeded = {
        "matplotlib", "sklearn", "torchvision", "tensorboard", "wandb", "IPython",
        "torch._inductor.compile_fx", "torch._inductor.scheduler", "torch._inductor.codegen",
        "transformers.pipelines", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "finetune.recipe",
        "finetune.kernels.triton_kernels", "finetune.kernels.decoding_kernels",
    }  # fmt: skip
    assert ended.at_the_end.isdisjoint(unneeded)


def test_a_terminal_shows_that_libraries_are_imported(tmp_path: Path) -> None:
    ended = watched(tmp_path, "on a terminal", "train", TINY, "data.train=no.jsonl", f"output.dir={tmp_path / 'run'}")
    assert ended.exit_code == 3
    assert ended.first_line == f"train {TINY}: importing the libraries ..."
    assert ended.at_first_line.isdisjoint(SLOW)
    # A run needs the compiler only for kernels that it lacks, and pictures only at its end.
    assert ended.at_the_end.isdisjoint({"torch._inductor.compile_fx", "matplotlib"})


@pytest.mark.slow
def test_a_run_takes_its_first_step_without_what_it_does_not_need(tmp_path: Path, rows_file: Path) -> None:
    job = [f"data.train={rows_file}", "data.eval_share=0.2", f"output.dir={tmp_path / 'run'}"]
    ended = watched(tmp_path, "its first step", "train", TINY, *job)
    assert "eval_loss" in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "torch" in ended.at_the_end
    assert ended.at_the_end.isdisjoint(
        {"datasets", "pandas", "scipy", "sklearn", "matplotlib", "tensorboard", "torchvision", "IPython"}
        | {"trl.trainer", "trl.trainer.sft_trainer", "transformers.trainer", "transformers.pipelines"}
        | {"torch._inductor.compile_fx", "torch._inductor.scheduler", "torch._inductor.codegen"}
        | {"finetune.kernels.triton_kernels", "finetune.kernels.decoding_kernels"}
    )


def test_models_are_listed_as_transformers_lists_them() -> None:
    import transformers
    from transformers.utils import import_utils

    init = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    own = import_utils.define_import_structure.__wrapped__(init)
    with libraries.models_listed_once():
        assert import_utils.define_import_structure.__wrapped__(init) == own


def test_a_transformers_without_that_function_lists_its_models_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import import_utils

    monkeypatch.delattr(import_utils, "create_import_structure_from_path")
    with libraries.models_listed_once():
        assert not hasattr(import_utils, "create_import_structure_from_path")


@pytest.mark.slow
def test_a_closed_stream_is_no_error_and_takes_no_file() -> None:
    for closed in ("0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"):
        ended = subprocess.run(
            ["bash", "-c", f'"{sys.executable}" -m finetune --version {closed}'], capture_output=True
        )
        assert ended.returncode == 0, (closed, ended.stderr)
