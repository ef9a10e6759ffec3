"""What a merge takes: host memory and time at the shapes of real models, and what a kill costs it.

- 1B: a base of the shape of Llama 3.2 1B with random weights, trained in NF4 as far as a merge can tell, merged by
  `finetune merge` in a process of its own. What it holds besides mapped files is at most 1.5 GiB; the resident peak,
  with the pages of files that the kernel can take back (how many it leaves depends on the machine), is told beside.
- 70B: the plan of a merge of Llama 3.1 70B: the shards that would be written, from files of the right headers and no
  contents, and whether the disk has room.
- kills: a small merge is killed at random moments, and at each thing that it does to a file, and called again. It must
  end with the files of an undisturbed one, and until then there is no merged model, or a whole one.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import harness
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

sys.path.insert(0, str(harness.ROOT))
sys.path.insert(0, str(harness.ROOT / "tests" / "faults"))
from children import Children, Fault

from finetune.choices import load_config
from finetune.config import Config, ModelSection, QuantizationSection
from finetune.data import fingerprint
from finetune.errors import MachineError
from finetune.export.merging import merged_files
from finetune.export.merging.bases import Bases
from finetune.model.adapters import adapter, adapter_files
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.model.source import catalog, identity
from finetune.model.source.locate import BUILTIN_BASE, locate
from finetune.model.source.tokenizer import load_tokenizer
from finetune.storage import weight_files
from finetune.storage.rundir import RunDirectory

GIB = 2**30
CPU = torch.device("cpu")
EVENTS = ("open", "fsync", "rename", "mkdir", "remove")
BOUND_1B = 1.5 * GIB


def write_base(folder: Path, architecture: Any, count: int, *, empty: bool = False) -> None:
    """A model in `count` shards with random weights, written tensor by tensor; `empty`: files of zeros that take no
    room on the disk.
    """
    folder.mkdir(parents=True)
    architecture = deepcopy(architecture)
    architecture.save_pretrained(folder)
    for file in Path(locate(BUILTIN_BASE)).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    section = ModelSection(name=str(folder))
    model = Blueprint(section, QuantizationSection(kind="none"), architecture, "eager", torch.bfloat16).weightless()
    shapes = {name: weight.shape for name, weight in model.named_parameters()}  # a tied one once
    total, done, parts = sum(shape.numel() for shape in shapes.values()), 0, [{} for _ in range(count)]
    for name, shape in shapes.items():
        parts[min(count - 1, done * count // total)][name] = torch.bfloat16, shape
        done += shape.numel()
    places: dict[str, str] = {}
    for number, tensors in enumerate(parts, start=1):
        layout, file = weight_files.FileLayout(tensors), f"model-{number:05d}-of-{count:05d}.safetensors"
        places |= dict.fromkeys(tensors, file)
        if empty:
            with open(folder / file, "wb") as opened:
                opened.write(layout.header)
                opened.truncate(layout.bytes)
        else:
            weight_files.write(folder / file, layout, map(_random, tensors.items()))
    harness.write_result(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def _random(tensor: tuple[str, tuple[torch.dtype, torch.Size]]) -> torch.Tensor:
    name, (dtype, shape) = tensor
    return torch.ones(shape, dtype=dtype) if "norm" in name else torch.empty(shape, dtype=dtype).normal_(0, 0.02)


def make_run(folder: Path, base: Path, *overrides: str, tokens: int = 256) -> tuple[RunDirectory, Config]:
    """A run as a training on `base` leaves it, with an adapter of random weights; its rows have more than `tokens`."""
    rows = folder.with_suffix(".jsonl")
    harness.write_long_rows(rows, rows=32, tokens=tokens)
    config = load_config(
        harness.ROOT / "configs" / "tiny_cpu.yaml",
        [f"model.name={base}", f"data.train={rows}", "data.eval_share=0.5", "data.max_length=512",
         "training.precision=bf16", f"output.dir={folder}", *overrides],
    )  # fmt: skip
    run = RunDirectory(folder)
    run.create(config)
    plain = QuantizationSection(kind="none")
    bare = Blueprint(config.model, plain, load_architecture(config.model), "eager", torch.float32).weightless()
    section = adapter_files.published(config.adapter)
    adapted = adapter.attach(bare, section, config.model.name, 0)
    torch.manual_seed(0)
    weights = {name: torch.randn(weight.shape) * 0.02 for name, weight in adapter_files.weights(adapted).items()}
    run.adapter.mkdir()
    save_file(weights, run.adapter / "adapter_model.safetensors", {"format": "pt"})
    adapted.peft_config["default"].inference_mode = True
    adapted.peft_config["default"].save_pretrained(str(run.adapter))
    tokenizer = load_tokenizer(config.model, config.data)
    fingerprint.save_tokenizer(tokenizer, identity.of_base(config.model), run.adapter)
    return run, config


def measured(folder: Path, name: str, count: int) -> dict[str, Any]:
    """A merge in a process of its own: its proof, time and peak of resident memory."""
    architecture = catalog.config(name)
    write_base(folder / "base", architecture, count)
    run, config = make_run(folder / "run", folder / "base")
    command = [sys.executable, "-m", "finetune", "merge", str(run.path)]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=harness.variables(), cwd=folder, stdout=subprocess.DEVNULL)
    peak, anonymous = resident_peaks(process)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"the merge of {name} ended with status {process.returncode}")
    proof = run.events()[-1]
    return {
        "shape": name, "layers": architecture.num_hidden_layers, "quantization": config.quantization.kind,
        "weights_bytes": sum(file.stat().st_size for file in run.merged.glob("*.safetensors")),
        "peak_resident_bytes": peak, "peak_anonymous_bytes": anonymous, "bound_bytes": int(BOUND_1B),
        "within": anonymous <= BOUND_1B, "seconds": round(seconds, 1),
        **{key: proof[key] for key in ("onto", "tokens", "error", "bound", "effect", "kept", "to_trained", "losses")},
    }  # fmt: skip


def resident_peaks(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Peak bytes of a process's resident memory until it ends: of all of it, and of what is no page of a file.

    The kernel keeps the first peak; the second is found by looking every 50 ms. `ru_maxrss`, which is there after the
    end, would not do: it counts the memory of the process that started this one as well.
    """
    peak = anonymous = 0
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        found = {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)
                 if key in ("VmHWM", "RssAnon")}  # fmt: skip
        peak, anonymous = max(peak, found.get("VmHWM", 0)), max(anonymous, found.get("RssAnon", 0))
        time.sleep(0.05)
    return peak, anonymous


def plan(folder: Path, name: str, count: int) -> dict[str, Any]:
    """The numbers of a merge that this machine need not have room for."""
    write_base(folder / "base", catalog.config(name), count, empty=True)
    config = load_config(
        harness.ROOT / "configs" / "tiny_cpu.yaml",
        [f"model.name={folder / 'base'}", "data.train=rows.jsonl", "training.precision=bf16"],
    )
    plain = QuantizationSection(kind="none")
    bare = Blueprint(config.model, plain, load_architecture(config.model), "eager", torch.float32).weightless()
    adapted = adapter.attach(bare, config.adapter, config.model.name, 0)
    place = folder / "adapter"
    place.mkdir()
    layout = weight_files.FileLayout(
        {name: (torch.float32, weight.shape) for name, weight in adapter_files.weights(adapted).items()}
    )
    with open(place / "adapter_model.safetensors", "wb") as opened:
        opened.write(layout.header)
        opened.truncate(layout.bytes)
    adapted.peft_config["default"].save_pretrained(str(place))
    started = time.perf_counter()
    bases = Bases(config, place, identity.loaded_files(folder / "base"), CPU)
    planned = merged_files.layouts(bases)
    seconds = time.perf_counter() - started
    target = folder / "merged"
    target.mkdir()
    said = "fits"
    try:
        if sum(each.bytes for each in planned.values()) > shutil.disk_usage(target).free:
            merged_files.write_weights(bases.merging("16-bit"), target)
    except MachineError as error:
        said = harness.without_paths(str(error))
    tensors = [dtype.itemsize * shape.numel() for each in planned.values() for dtype, shape in each.tensors.values()]
    return {
        "shape": name, "shards": len(planned), "tensors": len(tensors),
        "weights_bytes": sum(each.bytes for each in planned.values()), "largest_tensor_bytes": max(tensors),
        "adapter_bytes": layout.bytes, "merged_weights": sum(name in bases.updates for name in bases.weights),
        "planning_seconds": round(seconds, 1), "disk": said, "written": len(list(target.iterdir())),
    }  # fmt: skip


class Kills:
    """Merges of a small model that are killed, and called again."""

    def __init__(self, folder: Path, children: Children) -> None:
        write_base(folder / "base", AutoConfig.from_pretrained(locate(BUILTIN_BASE)), 4)
        self.run, _ = make_run(folder / "run", folder / "base", tokens=32)
        self._children = children
        self.merge()  # what follows finds hashes and rows in the caches
        started = time.perf_counter()
        self.merge()
        self.seconds = time.perf_counter() - started
        self._whole = self._files()
        self.killed = self.shards_kept = self.wrong = self.partial = 0

    def merge(self, fault: Fault | None = None) -> int:
        """The exit code of a merge; without a fault it must be 0."""
        shutil.rmtree(self.run.merged, ignore_errors=True)
        ended = self._children.run(["merge", self.run.path], fault)
        if not fault and ended.code:
            sys.exit(f"a merge ended with exit code {ended.code}: {harness.last_line(ended.output)}")
        return ended.code

    def at(self, moment: float) -> None:
        """Kill one after so many seconds, unless it has ended."""
        shutil.rmtree(self.run.merged, ignore_errors=True)
        child = self._children.start(["merge", self.run.path])
        time.sleep(moment)
        child.send(signal.SIGKILL)
        self.killed += child.wait().code == -signal.SIGKILL
        self._call_again()

    def at_each(self, path: str) -> Iterator[int]:
        """Kill one at each thing that is done to a file whose path contains `path`."""
        for event in EVENTS:
            for nth in itertools.count(1):
                if self.merge(Fault(event, path, nth)) != -signal.SIGKILL:
                    break
                self.killed += 1
                self._call_again()
                yield self.killed

    def _call_again(self) -> None:
        if self.run.merged.exists():
            self.partial += self._files() != self._whole
            return
        left = {file.name: file.stat().st_ino for file in self._left().glob("*.safetensors")}
        self.merge()
        self.shards_kept += sum((self.run.merged / name).stat().st_ino == number for name, number in left.items())
        self.wrong += self._files() != self._whole

    def _left(self) -> Path:
        return self.run.merged.with_name("merged.incomplete")

    def _files(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted(self.run.merged.iterdir()) if file.name != "merge.json"}

    def as_dict(self) -> dict[str, Any]:
        return {
            "merge_seconds": round(self.seconds, 2), "kills": self.killed, "shards_kept": self.shards_kept,
            "partial_models_published": self.partial, "ended_with_other_files": self.wrong,
        }  # fmt: skip


def main() -> None:
    parser = harness.parser(__doc__, "merge.json")
    parser.add_argument("--kills", type=int, default=20, help="kills at random moments")
    parser.add_argument("--folder", type=Path, help="on a disk with 40 GB of room; by default that of temporary files")
    parser.add_argument("--only", nargs="*", default=["1B", "plan", "kills"], help="which parts")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        if "kills" in options.only:
            with Children(folder / "logs") as children:
                campaign = Kills(folder / "small", children)
                moments = random.Random(0)
                while campaign.killed < options.kills:  # a merge may end before
                    campaign.at(moments.uniform(0, campaign.seconds))
                result["kills_at_random"] = campaign.as_dict()
                campaign.killed = campaign.shards_kept = 0
                for _ in campaign.at_each("/merged"):
                    pass
                result["kills_at_each_change_of_a_file"] = campaign.as_dict()
        if "plan" in options.only:
            result["plan_70B"] = plan(folder / "plan", "meta-llama/Llama-3.1-70B", 30)
        if "1B" in options.only:
            result["merge_1B"] = measured(folder / "1B", "meta-llama/Llama-3.2-1B", 2)
    # Parts may be measured one after the other; each says what it was measured with.
    made = {"command": harness.command_line(), "environment": harness.environment()}
    parts = json.loads(options.output.read_text()) if options.output.exists() else {}
    harness.write_result(options.output, parts | {name: part | made for name, part in result.items()})
    for name, part in result.items():
        print(name, part)
    campaigns = [part for name, part in result.items() if name.startswith("kills")]
    if any(part["partial_models_published"] or part["ended_with_other_files"] for part in campaigns) or not all(
        part["within"] for name, part in result.items() if name.startswith("merge_")
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
