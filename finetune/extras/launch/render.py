"""Writes the file with which a cluster starts torchrun on each node of a job."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from finetune.choices import load_config
from finetune.config import located
from finetune.config.field_types import pick
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.extras.launch.targets import TARGETS, Target
from finetune.model.base import load_architecture
from finetune.model.distributed import context
from finetune.storage.files import write_text
from finetune.training.checks import check_shares

RESTARTS = 3
"""How often torchrun starts the ranks again; each time the run resumes from its last checkpoint."""
SAVE_SECONDS = 300
"""Time for a step and a save between a signal and the end of the ranks."""


def write(
    config: Path, overrides: Sequence[str], on: str, *, nodes: int, gpus: int, output: Path | None = None,
    gpu: str | None = None, image: str | None = None, volume: str = "finetune", swept: Sequence[str] = (),
    members: Sequence[Sequence[str]] = (),
) -> tuple[Path, str]:  # fmt: skip
    """Write the file of the target `on` for `nodes` nodes with `gpus` GPUs each; its path and the command it is for.

    With `members`, the overrides of each member of a sweep of the keys `swept`, a task for each trains it on one GPU.
    `gpu` is the name of a card, `image` a container image with finetune, `volume` one that all nodes can mount. Raises
    ConfigError for a config that cannot be trained so or that the nodes would not find, an unknown target, a missing
    option, or an `output` that is the config; MachineError.
    """
    target = pick(TARGETS, on, "--on:")
    given = {"gpu": gpu, "image": image}
    if missing := [f"--{name}" for name in target.needs if not given[name]]:
        raise ConfigError(f"--on {on} needs {' and '.join(missing)}")
    asked = load_config(config, overrides)
    if members and not target.array:
        able = " or ".join(name for name, each in TARGETS.items() if each.array)
        raise ConfigError(f"--on {on} cannot start a sweep; use {able}, or train its members one by one")
    if not members:
        try:
            check_shares(asked.training, asked.distributed, nodes * gpus)
        except ConfigError as error:
            raise ConfigError(f"{error} (--nodes {nodes} --gpus-per-node {gpus})") from None
        if asked.distributed.context > 1:
            # A model that this machine does not have passes: the cluster may have it on a disk of its own.
            with contextlib.suppress(ArtifactError, MachineError):
                context.check(load_architecture(asked.model, listed=True), asked.distributed.context)
    name = located(config).stem
    run = Path(asked.output.dir or f"runs/{name}")
    file = output or Path(f"{name}{target.suffix}")
    if file.resolve() == config.resolve():
        raise ConfigError(f"--output: {file} is the config itself; give another name")
    if target.copied:
        here, path = Path.cwd().resolve(), config.resolve()
        if not path.is_relative_to(here):
            raise ConfigError(
                f"{config}: not in this directory, of which alone the nodes have a copy; put the config and its data "
                "here"
            )
        config = path.relative_to(here)
    for word in map(str, (config, file, Path.cwd(), run, *overrides, *swept, *filter(None, (gpu, image, volume)))):
        if not word.isprintable():  # a line break would end a comment of the file, and let the rest be run
            raise ConfigError(f"{word!r} has a character that cannot be printed, which these files cannot hold; rename")
    text = _render(
        target.template,
        name=("finetune-" + re.sub("[^a-z0-9]+", "-", run.name.lower())[:40].strip("-")).strip("-"),
        file=file,
        nodes=nodes,
        gpus=gpus,
        gpu=gpu,
        image=image,
        volume=volume,
        directory=shlex.quote(str(Path.cwd())),
        save_seconds=SAVE_SECONDS,
        restarts=RESTARTS,
        members=[*map(shlex.join, members)],
        train=_train(target, gpus, config, overrides),
        train_alone=f"python -m finetune train {shlex.join([str(config), *overrides])}",
        compare=f"finetune sweep --full {shlex.join([str(config), *overrides, *swept])}",
        run=shlex.quote(f"output.dir=/shared/{run.name}"),
    )
    write_text(file, text)
    return file, target.submit.format(file=shlex.quote(str(file)))


def _train(target: Target, gpus: int, config: Path, overrides: Sequence[str]) -> str:
    """The command that each node runs, one option a line."""
    rendezvous = ",".join(["join_timeout=1800", *([f"is_host={target.first}"] if target.first else [])])
    return " \\\n  ".join(
        [
            "torchrun", "--nnodes=$nodes", f"--nproc-per-node={gpus}", f"--max-restarts={RESTARTS}",
            f"--shutdown-timeout={SAVE_SECONDS}", "--rdzv-backend=c10d", f"--rdzv-endpoint={target.head}",
            f'--rdzv-conf="{rendezvous}"', f"-m finetune train {shlex.join([str(config), *overrides])}",
        ]
    )  # fmt: skip


def _render(template: str, **values: object) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("finetune.extras.launch"), undefined=StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    # YAML would read JSON's two escapes for a character beyond U+FFFF as two characters.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.get_template(template).render(values)
