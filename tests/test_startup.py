"""What a command loads before it says something: libraries that take seconds to import come after its first line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from finetune.runtime import libraries

TINY = Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml"
SLOW = ("torch", "transformers", "datasets", "peft", "trl", "accelerate", "bitsandbytes", "numpy", "matplotlib")

# Runs each command in a fork of this process, and records the modules at its first line of output and at its end.
WATCHED = """
import json, os, sys

class Watched:
    first_line = modules = None
    imported = 0

    def __init__(self, stream):
        self._stream = stream

    def write(self, text):
        if Watched.modules is None:
            Watched.first_line, Watched.modules = text.splitlines()[0], sorted(sys.modules)
        written = self._stream.write(text)
        if ends_at is not None and text.startswith(ends_at):
            self._stream.flush()
            os._exit(recorded(0))
        return written

    def isatty(self):
        return on_a_terminal

    def __getattr__(self, name):
        return getattr(self._stream, name)

def recorded(code):
    with open(name + ".json", "w") as file:
        json.dump([Watched.first_line, Watched.modules, sorted(sys.modules), code or 0, Watched.imported], file)
    return 0

from finetune import cli
from finetune.runtime import libraries
importing = libraries.importing

def counted():
    Watched.imported += 1
    return importing()

libraries.importing = counted
for name, ends_at, on_a_terminal, imports, arguments in json.loads(sys.argv[1]):
    if imports:  # which take most of the time, and once for all commands that need them
        with importing():
            for each in imports:
                __import__(each)
    if os.fork():
        assert os.wait()[1] == 0, name
        continue
    sys.argv = ["finetune", *arguments]
    sys.stdout, sys.stderr = Watched(sys.stdout), Watched(sys.stderr)
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code
    os._exit(recorded(code))
"""


@dataclass(frozen=True)
class Ended:
    """A command that ended: its first line, the modules loaded by then and at its end, its exit code, and how often it
    imported libraries without what they do not need.
    """

    first_line: str
    at_first_line: set[str]
    at_the_end: set[str]
    exit_code: int
    imported: int


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, shallow_base: Path) -> dict[str, Ended]:
    """Commands that ended, some with their first line or step."""
    folder = tmp_path_factory.mktemp("watched")
    forecast = [str(TINY), "data.train=someone/rows", "data.max_length=64", "kernels.fused=on", "--gpu", "24GiB"]
    job = [str(TINY), f"data.train={rows_file}", "data.eval_share=0.2", f"output.dir={folder / 'run'}"]
    heavy, shallow = ["torch", "transformers", "peft"], f"model.name={shallow_base}"
    commands = [
        ("plan, first line", "", False, [], ["plan", *forecast]),
        ("fit, first line", "", False, [], ["fit", *forecast]),
        ("on a terminal", "", True, [], ["train", *job]), ("plan", None, False, heavy, ["plan", *forecast, shallow]),
        ("first step", "step 1/", False, heavy, ["train", *job, shallow]),
    ]  # fmt: skip
    again = [("kept plan", None, False, [], ["plan", *forecast, shallow, "--html", str(folder / "plan.html")])]
    for some in (commands, again):
        process = [sys.executable, "-c", WATCHED, json.dumps(some)]
        done = subprocess.run(process, cwd=folder, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "Traceback" not in done.stderr, said
    assert "eval_loss" in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    recorded = {name: json.loads((folder / f"{name}.json").read_text()) for name, *_ in [*commands, *again]}
    return {
        name: Ended(line, {*first}, {*last}, *more) for name, (line, first, last, *more) in recorded.items()
    }  # fmt: skip


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


def test_a_look_at_rows_of_text_imports_neither_torch_nor_what_makes_a_model(tmp_path: Path, rows_file: Path) -> None:
    page = str(tmp_path / "look.html")
    looks = [[], ["data.packing=true", "--json"], ["--html", page], [f"data.train={rows_file}", "data.eval_share=0.2"]]
    arguments = json.dumps([["data", str(TINY), *look] for look in looks])
    ended = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    ends = [json.loads(line.removeprefix("ended ")) for line in ended.stderr.splitlines() if line.startswith("ended ")]
    assert ends == [[0, ["numpy", "transformers"]]] * len(looks)


def test_the_doctor_of_a_machine_imports_torch_and_what_it_checks(tmp_path: Path) -> None:
    code = """
from finetune.extras.doctor import machine
import sys
machine.examine()
assert {"torch", "bitsandbytes"} <= sys.modules.keys()
needless = {"peft", "datasets", "accelerate", "matplotlib", "torch._dynamo", "transformers.configuration_utils"}
assert needless.isdisjoint(sys.modules), needless & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_a_config_from_python_is_checked_without_the_libraries_of_a_model() -> None:
    code = f"""
import finetune, sys
config = finetune.load_config({{"data": {{"train": [{{"text": "a"}}], "format": print}}}})
assert config.data.format == "python:print"
assert sys.modules.keys().isdisjoint({SLOW!r})
assert set(finetune.__all__) == finetune._HOMES.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_forecast_prints_its_job_before_it_imports_the_libraries(command: str, watched: dict[str, Ended]) -> None:
    ended = watched[f"{command}, first line"]
    assert ended.first_line.startswith(f"{command} of {TINY}: builtin:tiny-llama")
    assert "LoRA of rank" in ended.first_line
    assert ended.at_first_line.isdisjoint(SLOW)


def test_a_terminal_shows_that_libraries_are_imported(watched: dict[str, Ended]) -> None:
    ended = watched["on a terminal"]
    assert ended.first_line == f"train {TINY}: importing the libraries ..."
    assert ended.at_first_line.isdisjoint(SLOW)


def test_importing_the_package_loads_neither_its_config_nor_an_extra() -> None:
    code = f"""
import finetune, sys
assert sys.modules.keys().isdisjoint({("pydantic", "yaml", "finetune.config", *SLOW)!r})
from finetune.training.strategies import STRATEGIES
assert [*STRATEGIES] == ["auto", "ddp", "fsdp", "deepspeed"]
assert "finetune.extras.zero.engine" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Pictures, trackers, other trainers; compilers and our kernels, of which a run here needs none, and a forecast shapes.
UNNEEDED = {
    "matplotlib", "sklearn", "tensorboard", "IPython", "transformers.pipelines",
    "torch._inductor.compile_fx", "torch._inductor.scheduler", "torch._inductor.codegen",
    "finetune.kernels.triton_kernels", "finetune.kernels.decoding_kernels",
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        ("plan", {"wandb", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "finetune.recipe"}),
        ("first step", {"datasets", "pandas", "scipy", "trl.trainer", "trl.trainer.sft_trainer",
                        "transformers.trainer"}),
    ],
)  # fmt: skip
def test_a_command_imports_nothing_that_it_does_not_need(
    command: str, unneeded: set[str], watched: dict[str, Ended]
) -> None:
    ended = watched[command]
    assert ended.exit_code == 0
    assert "torch" in ended.at_the_end
    assert ended.imported
    assert ended.at_the_end.isdisjoint(UNNEEDED | unneeded)


def test_a_plan_that_is_kept_imports_neither_torch_nor_transformers(watched: dict[str, Ended]) -> None:
    ended = watched["kept plan"]
    assert ended.exit_code == 0
    assert ended.at_the_end & {*SLOW} <= {"numpy"}
    assert not ended.imported


def test_models_are_listed_as_transformers_lists_them() -> None:
    import transformers
    from transformers.utils import import_utils

    init = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    own = import_utils.define_import_structure.__wrapped__(init)
    with libraries.models_listed_once():
        assert import_utils.define_import_structure.__wrapped__(init) == own


def test_what_libraries_print_once_the_interpreter_is_gone_is_not_shown() -> None:
    script = """if True:
        import ctypes, sys
        from finetune import cli
        sys.modules["triton"] = sys

        ctypes.pythonapi.Py_AtExit(ctypes.CDLL("libc.so.6").malloc_stats)  # as nanobind lists what it calls leaked
        sys.argv = ["finetune", "plan", "nowhere.yaml"]
        cli.main()
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "error: nowhere.yaml: no such file\n")


@pytest.mark.slow
def test_a_closed_stream_is_no_error_and_takes_no_file() -> None:
    for closed in ("0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"):
        ended = subprocess.run(
            ["bash", "-c", f'"{sys.executable}" -m finetune --version {closed}'], capture_output=True
        )
        assert ended.returncode == 0, (closed, ended.stderr)
