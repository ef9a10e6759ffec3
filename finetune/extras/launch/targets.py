"""The clusters that a job can be launched on. A new target is one entry in TARGETS and its template.

Importing this module loads no library: `finetune --help` reads the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A cluster's standard tool, the template of its file in `templates/`, and the command that submits the file.

    `head` is the address of the first node and `first` whether this node is it, as shell words that torchrun's
    rendezvous gets; without `first` the node with the name `head` is. `needs` are the options that the file
    needs. `copied`: the nodes have only a copy of the working directory, at another path. `array`: the template can
    also start a task for each member of a sweep.
    """

    help: str
    template: str
    submit: str
    head: str
    first: str = ""
    needs: tuple[str, ...] = ()
    copied: bool = False
    array: bool = False

    @property
    def suffix(self) -> str:
        """The end of the file's name, such as `.sbatch`."""
        return "." + self.template.removesuffix(".j2").partition(".")[2]


TARGETS: dict[str, Target] = {
    "slurm": Target(
        "a batch script for SLURM", "slurm.sbatch.j2", "sbatch {file}",
        head='"$head:$((20000 + SLURM_JOB_ID % 10000))"', array=True,
    ),
    "skypilot": Target(
        "a task for SkyPilot's managed jobs", "skypilot.sky.yaml.j2", "sky jobs launch {file}",
        head='"$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):29500"', first="$((SKYPILOT_NODE_RANK == 0))",
        needs=("gpu", "image"), copied=True,
    ),
    "kubernetes": Target(
        "a TrainJob for Kubeflow Trainer (2.2 or newer)", "kubernetes.trainjob.yaml.j2", "kubectl create -f {file}",
        head='"$PET_MASTER_ADDR:$PET_MASTER_PORT"', first="$((PET_NODE_RANK == 0))", needs=("image",), copied=True,
    ),
}  # fmt: skip
