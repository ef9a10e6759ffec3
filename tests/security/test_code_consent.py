"""Python code shipped with a base runs only with consent from the command line or one's own config, never a run's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import transformers.dynamic_module_utils
from hostile import Trap, change, refused
from jobs import sampled
from messages import refusal
from watched import Ended, watched

import finetune
from finetune.choices import load_config
from finetune.config import dump
from finetune.errors import ArtifactError
from finetune.storage.rundir import RunDirectory

NAME, COMMIT = "someone/evil", "abcdef0123" * 4
FLAG = "--trust-remote-code"

CONFIGURATION = """
from transformers import LlamaConfig
class Config(LlamaConfig):
    model_type = "evil"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_evil import Config
class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def hub(foreign: Path, tiny_base: Path, trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a base in the hub's cache that is a Llama in all but its name, and its code a trap as well."""
    repository = foreign / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(tiny_base, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "configuration_evil.py").write_text(trap.python + CONFIGURATION)
    (snapshot / "modeling_evil.py").write_text(trap.python + MODELING)
    auto_map = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    change(snapshot / "config.json", model_type="evil", architectures=["Model"], auto_map=auto_map)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(foreign / "hub"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return snapshot


@pytest.fixture
def evil(hub: Path, run: RunDirectory) -> RunDirectory:
    """A run whose config asks for the code of that base, as if it had been trained with it."""
    asked = {"model.name": NAME, "model.revision": COMMIT, "model.trust_remote_code": True}
    run.config_file.write_text(dump(run.config().changed(asked)))
    return run


@pytest.fixture
def consented(foreign: Path, trap: Trap, tmp_path: Path) -> Callable[..., Ended]:
    """Run a command to which the person consented: it may do what the code does."""

    def call(*arguments: object) -> Ended:
        [ended] = watched(arguments, writable=[tmp_path], foreign=[foreign], folder=tmp_path)
        assert "Traceback" not in ended.err, ended.err
        return ended

    return call


COMMANDS = {
    "generate": ("generate", "RUN", "--prompt", "x", "--max-new-tokens", 2),
    "generate with the base": ("generate", "RUN", "--prompt", "x", "--max-new-tokens", 2, "--model", "base"),
    "generate with the merged model": ("generate", "RUN", "--prompt", "x", "--max-new-tokens", 2, "--model", "merged"),
    "eval": ("eval", "RUN"),
    "merge": ("merge", "RUN"),
    "export": ("export", "RUN", "--to", "merged"),
}


def on(run: RunDirectory, command: str) -> tuple[object, ...]:
    return tuple(run.path if part == "RUN" else part for part in COMMANDS[command])


@pytest.mark.slow
def test_a_run_directory_switches_no_code_on(evil: RunDirectory, call_each) -> None:
    for ended in call_each(*(on(evil, command) for command in COMMANDS), writes=evil.path):
        refused(ended, evil.config_file, f"`{NAME}` at revision {COMMIT}", FLAG)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", sampled(["generate", "generate with the base", "eval", "merge"], "generate with the base", "merge")
)
def test_the_flag_lets_that_code_run(command: str, evil: RunDirectory, consented, trap: Trap) -> None:
    """Or the tests above would show nothing."""
    (evil.adapter / "fingerprint.json").unlink()
    ended = consented(*on(evil, command), FLAG)
    assert ended.code == 0, ended.err
    assert trap.went_off


@pytest.mark.parametrize(
    "use",
    [lambda run: finetune.generate(run, "x", max_new_tokens=2), finetune.evaluate, finetune.merge],
    ids=["generate", "evaluate", "merge"],
)
def test_from_python_it_is_an_argument(use: Callable[[RunDirectory], object], evil: RunDirectory, trap: Trap) -> None:
    with refusal(ArtifactError, "trust_remote_code"):
        use(evil)
    assert not trap.went_off


@pytest.mark.slow
def test_report_and_doctor_run_none_and_doctor_says_so(evil: RunDirectory, hub: Path, call) -> None:
    assert call("report", evil.path, writes=evil.path).code == 0

    def examined() -> dict[str, dict[str, str]]:
        return {each["about"]: each for each in json.loads(call("doctor", evil.path, "--json").out)["findings"]}

    found = examined()
    assert found["foreign code"]["status"] == "warning"
    assert f"`{NAME}` at revision {COMMIT}" in found["foreign code"]["what"]
    for sound in ("config.yaml", "events.jsonl", "adapter", "state", "tokenizer"):
        assert found[sound]["status"] == "ok"
    assert any(name.startswith("checkpoints/") for name in found)
    auto_map = {"AutoTokenizer": ["tokenization_evil.Tokenizer", None]}
    change(hub / "tokenizer_config.json", tokenizer_class="Evil", auto_map=auto_map)
    assert "without that code" in examined()["tokenizer"]["what"]


def test_the_code_beside_a_merged_model_never_runs(evil: RunDirectory, hub: Path, consented, tmp_path: Path) -> None:
    """Consent is to the base's code at its revision; transformers would run a `custom_generate` of the folder too."""
    shutil.copytree(hub, evil.merged)
    inner = Trap(tmp_path / "modules")
    for name in ("configuration_evil.py", "modeling_evil.py", "custom_generate/generate.py"):
        (evil.merged / name).parent.mkdir(exist_ok=True)
        (evil.merged / name).write_text(inner.python + "def generate(*_, **__): ...\n")
    ended = consented(*on(evil, "generate with the merged model"), FLAG)
    assert ended.code == 0, ended.err
    assert not inner.went_off


# -- a config ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_config_in_a_run_directory_consents_to_nothing(evil: RunDirectory, tmp_path: Path, call_each) -> None:
    own, beside, link = evil.config_file, evil.path / "job.yaml", tmp_path / "mine.yaml"
    shutil.copy(own, beside)
    link.symlink_to(own)
    commands = [("train", own), ("plan", own), ("fit", beside), ("data", beside), ("train", link)]
    for (_, config), ended in zip(commands, call_each(*commands), strict=True):
        refused(ended, config, f"`{NAME}` at revision {COMMIT}", "model.trust_remote_code=true")


def test_a_config_of_ones_own_consents_and_so_does_an_override(evil: RunDirectory, tmp_path: Path) -> None:
    mine = Path(shutil.copy(evil.config_file, tmp_path / "mine.yaml"))
    assert load_config(mine).model.trust_remote_code
    assert load_config(evil.config_file, ["model.trust_remote_code=true"]).model.trust_remote_code
    assert not load_config(evil.config_file, ["model.trust_remote_code=false"]).model.trust_remote_code
    with pytest.raises(ArtifactError):
        load_config(evil.config_file, [f"model.revision={COMMIT}"])


def test_names_that_no_config_may_have_are_refused_in_a_run_too(run: RunDirectory, call) -> None:
    """Such as a kernel that transformers would fetch from the hub, or a template outside the table."""
    for key, value in (("model.attention", "someone/kernel"), ("data.chat_template", "../../secret")):
        before = run.config_file.read_text()
        run.config_file.write_text(dump(run.config().changed({key: value})))
        refused(call("generate", run.path, "--prompt", "x", "--model", "base"), f"`{key}`", value, code=2)
        run.config_file.write_text(before)
