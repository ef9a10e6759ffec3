"""What rank, learning rate, targets and number of epochs do to the evaluation loss of a small base.

configs/tiny_cpu.yaml, shortened to STEPS optimizer steps, over three grids: rank x rate (with every weight trained
beside it), targets x rate, and epochs x rate on a tenth of the rows. One setting runs with several seeds, so that a
difference can be told from noise. The base has 2M parameters and the runs are short: docs/choosing.md says
what follows from that and what does not.

Each run is written to the result as it ends, and a second call goes on with those that are missing (ten minutes for all
of them, on one core). When all are there, docs/choices.png is drawn.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness

PICTURE = harness.ROOT / "docs" / "choices.png"

STEPS, EPOCHS = 40, 8
RANKS, RATES = (1, 4, 16, 64), (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
EVERY_WEIGHT = 0
"""In place of a rank: no adapter, every weight is trained."""
TARGETS = {
    "all-linear": "all-linear",
    "attention": "[q_proj, k_proj, v_proj, o_proj]",
    "mlp": "[gate_proj, up_proj, down_proj]",
}
SEEDS = (42, 43, 44)

SHORTENED = [
    f"training.max_steps={STEPS}", "training.eval_every=null", "output.save_every=null", "output.merge=false",
    "memory.checkpointing=none", "memory.check=off",
]  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One run: what of it is tried, the rest being the config's."""

    rate: float
    rank: int = 16
    targets: str = "all-linear"
    epochs: int = 0
    seed: int = 42

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in asdict(self).items())

    def overrides(self) -> list[str]:
        found = [*SHORTENED, f"training.learning_rate={self.rate}", f"training.seed={self.seed}"]
        if self.rank == EVERY_WEIGHT:
            found += ["adapter.kind=none", "quantization.kind=none"]
        else:
            found += [f"adapter.rank={self.rank}", f"adapter.targets={TARGETS[self.targets]}"]
        if self.epochs:  # at a level rate, so that the loss after each epoch is that of a run of so many
            found += [
                "data.train=[{source: builtin:python_docs, weight: 0.1}]", "data.eval=builtin:python_docs",
                "training.max_steps=null", f"training.epochs={self.epochs}", "training.schedule=constant",
                "training.eval_every=24",  # about an epoch
            ]  # fmt: skip
        return found


def settings() -> Iterator[Setting]:
    """All runs, the most telling first."""
    for rate in RATES:
        for rank in RANKS:
            yield Setting(rate, rank)
    for rate in (1e-4, 3e-4, 1e-3, 3e-3):
        yield Setting(rate, EVERY_WEIGHT)
    for targets in ("attention", "mlp"):
        for rate in (3e-3, 1e-2, 3e-2):
            yield Setting(rate, targets=targets)
    for rate in (1e-3, 1e-2):
        yield Setting(rate, epochs=EPOCHS)
    for seed in SEEDS[1:]:
        yield Setting(3e-3, seed=seed)


def main() -> None:
    options = harness.parser(__doc__, "choices.json").parse_args()
    runs = harness.saved(options.output, "runs")
    for setting in settings():
        if setting.name not in runs:
            runs[setting.name] = asdict(setting) | trained(setting)
            harness.save(options.output, {"runs": runs}, threads=1)
            print(setting.name, runs[setting.name]["eval_losses"], flush=True)
    draw(list(runs.values()))


def trained(setting: Setting) -> dict[str, Any]:
    """Steps, epochs, CPU seconds, and the evaluation losses by step; None for one that is not finite."""
    import torch

    import finetune
    from finetune.errors import NumbersError
    from finetune.report.terminal import Terminal
    from finetune.training import sample_answers

    torch.set_num_threads(1)
    sample_answers.TOKENS = 1  # sample answers are not what is compared
    with tempfile.TemporaryDirectory(prefix="choices-") as folder:
        run, started = Path(folder) / "run", time.process_time()
        config = harness.ROOT / "configs" / "tiny_cpu.yaml"
        with contextlib.suppress(NumbersError):
            finetune.train(
                finetune.load_config(config, [*setting.overrides(), f"output.dir={run}"]), terminal=Terminal(quiet=True)
            )
        lines = harness.read_lines(run / "metrics.jsonl")
        last = harness.steps(run)[-1]
        return {
            "steps": last["step"],
            "epochs_done": last["epoch"],
            "cpu_seconds": round(time.process_time() - started, 1),
            "eval_losses": {str(line["step"]): rounded(line["eval_loss"]) for line in lines if "eval_loss" in line},
        }


def rounded(loss: float | None) -> float | None:
    return loss if loss is None else round(loss, 4)


def final(run: dict[str, Any]) -> float | None:
    """The evaluation loss after the last step."""
    return run["eval_losses"].get(str(run["steps"]))


def draw(runs: list[dict[str, Any]]) -> None:
    """Three panels: rank x rate, targets x rate, and the loss epoch by epoch."""
    from finetune.report import plots

    paper = plots.new_figure(10, 3.8)
    ranks, targets, epochs = paper.subplots(1, 3)
    short = [run for run in runs if not run["epochs"] and run["seed"] == SEEDS[0]]
    for rank in (*RANKS, EVERY_WEIGHT):
        label, style = (f"rank {rank}", "-") if rank else ("every weight", "--")
        curve(ranks, [run for run in short if run["rank"] == rank and run["targets"] == "all-linear"], label, style)
    for name in TARGETS:
        curve(targets, [run for run in short if run["rank"] == 16 and run["targets"] == name], name)
    for run in runs:
        if run["epochs"]:
            done = [int(step) / run["steps"] * run["epochs_done"] for step in run["eval_losses"]]
            epochs.plot(done, run["eval_losses"].values(), marker="o", markersize=4, label=f"rate {run['rate']:g}")
    titles = {ranks: f"{STEPS} steps, by rank", targets: f"{STEPS} steps, rank 16", epochs: "a tenth of the rows"}
    for axes, title in titles.items():
        plots.draw_frame(axes)
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=8, frameon=False, loc="upper right" if axes is epochs else "lower left")
    for axes in (ranks, targets):
        axes.set_ylim(2.8, 3.8)  # a rate that diverges is beyond; below is room for the legend
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
    ranks.set_ylabel("evaluation loss (nats per token)")
    epochs.set_xlabel("epoch")
    PICTURE.write_bytes(plots.png(paper))


def curve(axes: Any, runs: list[dict[str, Any]], label: str, style: str = "-") -> None:
    points = [(run["rate"], final(run)) for run in sorted(runs, key=lambda run: run["rate"]) if final(run) is not None]
    axes.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=label)


if __name__ == "__main__":
    main()
