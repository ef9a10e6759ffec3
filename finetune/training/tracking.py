"""Trackers that get the metrics besides the run directory. A new one is one entry in TRACKERS."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from finetune.config import TrackingSection
from finetune.errors import MachineError


@dataclass(frozen=True)
class Tracker:
    """A tracker that transformers reports to, and the package that must be installed for it."""

    help: str
    package: str


TRACKERS: dict[str, Tracker] = {
    "tensorboard": Tracker("event files in the run directory", "tensorboard"),
    "wandb": Tracker("Weights & Biases", "wandb"),
    "mlflow": Tracker("MLflow", "mlflow"),
    "trackio": Tracker("Trackio, local first", "trackio"),
}


def check(section: TrackingSection) -> None:
    """Raise MachineError naming the package to install where a tracker is missing."""
    for name in section.to:
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise MachineError(f"`tracking.to: {name}` needs the package {package}: pip install {package}")
