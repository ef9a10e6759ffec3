"""Files that start a job on a cluster: what is in them, and how the SLURM script behaves."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jobs import TINY
from messages import refusal

from finetune.errors import ConfigError
from finetune.extras.launch import render
from finetune.extras.launch.targets import TARGETS

OPTIONS: dict[str, Any] = {"nodes": 2, "gpus": 4, "gpu": "H100", "image": "me/finetune:1"}
CONFIG = Path(TINY.name)
AWKWARD = "data.train=[my rows.jsonl, it's.jsonl]"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(TINY, CONFIG)
    return tmp_path


def script_of(on: str, file: Path) -> str:
    """What a node runs."""
    text = file.read_text()
    if on == "slurm":
        return text
    found = yaml.safe_load(text)
    return found["run"] if on == "skypilot" else found["spec"]["trainer"]["command"][2]


@pytest.mark.parametrize("on", TARGETS)
def test_each_target_starts_torchrun_on_every_node(on: str) -> None:
    file, command = render.write(CONFIG, ["training.micro_batch=1", AWKWARD], on, **OPTIONS)
    assert command.endswith(f" {file}")
    script = script_of(on, file)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    [start] = [line for line in script.replace("\\\n", " ").splitlines() if "torchrun" in line]
    words = shlex.split(start.removesuffix("&"))
    assert {"--nnodes=$nodes", "--nproc-per-node=4", "--max-restarts=3", "--rdzv-backend=c10d"} <= set(words)
    trained = words[words.index("-m") :]
    assert trained[:6] == ["-m", "finetune", "train", str(CONFIG), "training.micro_batch=1", AWKWARD]


def test_the_files_have_the_keys_of_their_tools() -> None:
    """SkyPilot's task, and Kubeflow Trainer's TrainJob by its custom resource definition (2.3)."""
    task = yaml.safe_load(render.write(CONFIG, ["training.micro_batch=1"], "skypilot", **OPTIONS)[0].read_text())
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:4"
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3}
    assert set(task) == {"name", "num_nodes", "workdir", "resources", "volumes", "run"}
    [mount] = task["volumes"]
    assert f"output.dir={mount}/tiny_cpu" in task["run"]

    job = yaml.safe_load(render.write(CONFIG, ["training.micro_batch=1"], "kubernetes", **OPTIONS)[0].read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job["spec"]) == {"runtimeRef", "trainer", "runtimePatches"}
    assert set(job["spec"]["trainer"]) == {"numNodes", "image", "resourcesPerNode", "command"}
    [patch] = job["spec"]["runtimePatches"]
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for mount in pod["containers"][0]["volumeMounts"]
    }


MICRO = ["training.micro_batch=1"]
SPLIT = [*MICRO, "training.batch_size=4", "distributed.context=4"]
# Where, overrides, options, and words of the message.
REFUSED: list[tuple[str, list[str], dict[str, Any], str]] = [
    ("slrum", MICRO, {}, "did you mean `slurm`"),
    ("skypilot", MICRO, {"gpu": None, "image": None}, "needs --gpu and --image"),
    ("slurm", MICRO, {"nodes": 3}, "cannot be split among 12 processes"),
    ("slurm", MICRO, {"nodes": 3}, "(--nodes 3 --gpus-per-node 4)"),
    ("slurm", MICRO, {"output": Path("none") / ".." / CONFIG}, "is the config itself"),
    ("slurm", SPLIT, {}, "4 ranks cannot share 6 attention heads"),
    *((name, [], {"swept": ["a=1,2"], "members": [["a=1"]]}, "use slurm")
      for name, target in TARGETS.items() if not target.array),
]  # fmt: skip


@pytest.mark.parametrize(("on", "overrides", "options", "words"), REFUSED)
def test_a_job_that_cannot_be_trained_is_refused(
    here: Path, on: str, overrides: list[str], options: dict[str, Any], words: str
) -> None:
    with refusal(ConfigError, words):
        render.write(CONFIG, overrides, on, **{**OPTIONS, **options})
    assert list(here.iterdir()) == [here / CONFIG]
    assert CONFIG.read_text() == TINY.read_text()


def test_attention_heads_are_not_counted_where_the_model_is_unknown() -> None:
    elsewhere = [*SPLIT, "model.name=/on/a/disk/of/the/cluster", "model.tokenizer=builtin:tiny-llama"]
    assert render.write(CONFIG, elsewhere, "slurm", nodes=2, gpus=4)


SWEPT = ["training.learning_rate=1e-3,3e-3", "adapter.targets=[q_proj, v_proj],'.*a b'"]
MEMBERS = [["training.learning_rate=1e-3", "adapter.targets='.*a b'"], ['output.dir="it\'s"']]


def test_a_sweep_has_a_task_for_each_member_and_the_command_that_compares_them() -> None:
    """Also one whose micro-batches no eight ranks could share."""
    given = ["training.micro_batch=8", AWKWARD]
    file, _ = render.write(CONFIG, given, "slurm", **OPTIONS, swept=SWEPT, members=MEMBERS)
    script = file.read_text()
    asked = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"array=0-1%8", "nodes=1", "ntasks-per-node=1", "gpus-per-node=1"} <= asked
    [compare] = [line for line in script.splitlines() if line.startswith("# finetune sweep")]
    assert shlex.split(compare[2:]) == ["finetune", "sweep", "--full", str(CONFIG), *given, *SWEPT]
    train = ["python", "-m", "finetune", "train", str(CONFIG), *given]
    tail = script[script.index("case ") : script.index("# Before")] + 'printf "%s\\n" "$@"'
    for task, member in enumerate(MEMBERS):
        said = subprocess.run(["bash", "-c", tail], env={"SLURM_ARRAY_TASK_ID": str(task)}, stdout=-1, check=True)
        assert said.stdout.decode().splitlines() == member
    [start] = [line for line in script.splitlines() if line.startswith("srun")]
    words = shlex.split(start.removesuffix("&"))
    assert words[words.index("python") :] == [*train, "$@"]


@pytest.mark.parametrize("on", TARGETS)
def test_a_config_outside_the_copied_directory_is_refused(on: str, here: Path) -> None:
    overrides = ["training.micro_batch=1"]
    if not TARGETS[on].copied:  # the nodes may see other directories as well
        assert str(TINY) in render.write(TINY, overrides, on, **OPTIONS)[0].read_text()
    else:
        with refusal(ConfigError, "not in this directory"):
            render.write(TINY, overrides, on, **OPTIONS)
        absolute = render.write(here / CONFIG, overrides, on, **OPTIONS)[0].read_text()
        assert absolute == render.write(CONFIG, overrides, on, **OPTIONS)[0].read_text()


@pytest.mark.parametrize("on", TARGETS)
def test_a_name_cannot_smuggle_a_command_into_the_file(on: str, here: Path) -> None:
    config = here / "job\ntouch smuggled\n.yaml"
    config.write_text(CONFIG.read_text())
    with refusal(ConfigError, "cannot be printed"):
        render.write(config, ["training.micro_batch=1"], on, **OPTIONS)
    assert set(here.iterdir()) == {config, here / CONFIG}


# No lone surrogates, which no file holds, and no /, so that each stays the name of a file.
_NAMES = st.text(st.sampled_from("$`\"'\\;&|<>(){}[]#!*?~%:@=, -\u00a0") | st.characters(codec="utf-8"), max_size=12)


@pytest.mark.parametrize("on", TARGETS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(_NAMES.filter(lambda name: "/" not in name), min_size=5, max_size=5))
@example(names=["$(touch x)", "'; touch x #", "x: {y", "- |\n  evil", '"'])
@example(names=["\U0001f5a5"] * 5)
def test_hostile_names_are_words_and_values_of_the_file_or_refused(on: str, here: Path, names: list[str]) -> None:
    config, rows, volume, image, card = (f"a{name}a" for name in names)
    path = here / f"{config}.yaml"[-200:].lstrip()
    overrides = ["training.micro_batch=1", f"data.train=rows {rows}.jsonl"]
    options = {**OPTIONS, "gpu": card, "image": image, "volume": volume}
    try:
        path.write_text(TINY.read_text())
        file, _ = render.write(Path(path.name), overrides, on, **options, output=here / "job")
    except (ConfigError, OSError, ValueError):
        return
    text = file.read_text()
    script = script_of(on, file)
    [start] = [line for line in script.replace("\\\n", " ").splitlines() if "torchrun" in line]
    words = shlex.split(start.removesuffix("&"))
    assert words[words.index("train") :][: 2 + len(overrides)] == ["train", path.name, *overrides]
    plain, _ = render.write(CONFIG, overrides[:1], on, **OPTIONS, output=here / "plain")
    assert len(text.splitlines()) == len(plain.read_text().splitlines()), "no line of their own"
    if on != "slurm":
        found = yaml.safe_load(text)
        written = json.dumps(found, ensure_ascii=False)
        assert found.keys() == yaml.safe_load(plain.read_text()).keys()
        for value in (volume, image) if on == "kubernetes" else (volume, image, card):
            assert json.dumps(value, ensure_ascii=False)[1:-1] in written


def test_the_name_of_a_job_is_valid_for_clusters_whatever_the_run_is_called() -> None:
    """Kubernetes refuses one that ends with a hyphen."""
    for run, name in (("日本語", "finetune"), ("Ünder_20%!", "finetune-nder-20")):
        overrides = ["training.micro_batch=1", f"output.dir=runs/{run}"]
        file, _ = render.write(CONFIG, overrides, "kubernetes", **OPTIONS)
        assert yaml.safe_load(file.read_text())["metadata"]["name"] == name


def test_slurm_queues_a_job_again_that_its_time_limit_ended(here: Path) -> None:
    """With stand-ins for its commands: srun's ranks save and stop at the SIGTERM of scancel."""
    tools = {
        "scontrol": 'echo "$@" >> asked; echo head',
        "srun": 'trap "echo saved > saved; exit 1" TERM; echo $$ > pid; mv pid ranks; while :; do sleep 0.05; done',
        "scancel": 'echo "$@" >> asked; kill -TERM "$(cat ranks)"; sleep 1',  # the ranks end within the trap
    }
    for name, text in tools.items():
        (here / name).write_text(f"#!/bin/bash\n{text}\n")
        (here / name).chmod(stat.S_IRWXU)
    file, _ = render.write(CONFIG, ["training.micro_batch=1"], "slurm", **OPTIONS)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b"}
    job = subprocess.Popen(["bash", str(file)], env=os.environ | slurm | {"PATH": f"{here}:{os.environ['PATH']}"})
    while not (here / "ranks").exists():
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=600) == 1
    assert (here / "saved").exists()
    assert (here / "asked").read_text().splitlines() == ["show hostnames a,b", "--signal=TERM 7", "requeue 7"]
