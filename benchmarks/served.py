"""What each way to a served model keeps of what training gained, by base, form and seed.

    python benchmarks/served.py --folder RUNS [--bases 125M] [--ways adapter] [--kinds q4_0] [--seeds 0]

An adapter is trained on a base in 16 bit with each seed, and for two ways on one in NF4, as QLoRA and the default of
`output.way: rounded` do. Of a way's model, the loss on all held-out rows is L: it keeps (L_base - L) / (L_base -
L_16bit) of the gain. A way is a function in WAYS, from the trained run and a kind to the model
that is served and the one that was trained. Means have 95% intervals over seeds (Student's t).

Each cell (base, seed, way, kind) is written as it ends, and a later call measures those that the output lacks. With
`--folder`, it also finds bases and runs.

The built-in base has rows of 192 and 512 weights: where these are not whole blocks, forms of llama.cpp fall back to
blocks of 32, and others leave the weight in 16 bit. `forms` says how many weights have which form.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grown_base
import harness
import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from finetune.choices import config_of
from finetune.config import Config
from finetune.data import prepare, sources
from finetune.data.encoded import IGNORE
from finetune.data.media import NOTHING
from finetune.data.prepare import ComparedRows
from finetune.evaluation import run_models
from finetune.evaluation.intervals import half_width
from finetune.export import compressed_export, publish
from finetune.export.conversion import Conversion
from finetune.export.finished_run import FinishedRun
from finetune.export.gguf import gguf_export, llama_cpp
from finetune.export.rounding import rounded_run
from finetune.forms import FORMS, packed
from finetune.model.source.locate import locate
from finetune.model.structure import recipes
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory

CPU = torch.device("cpu")
CONFIG = harness.ROOT / "configs/tiny_cpu.yaml"
KINDS = ("q4_0", "q4_k_m", "iq4_xs", "int4", "mxfp4", "nvfp4", "q5_k_m", "q6_k", "q8_0", "fp8")
_LEAST_SEEDS = 3
"""How many seeds an interval is written for."""


@dataclass(frozen=True)
class Base:
    """A base of so many channels; `settings`: from the folder of its runs to theirs, beside configs/tiny_cpu.yaml."""

    settings: Callable[[Path], list[str]]
    width: int


def _built_in(folder: Path) -> list[str]:
    return ["training.eval_every=150"]


def _large(folder: Path) -> list[str]:
    """A base of 125M weights, which each machine makes anew, 6,000 tokens of rows, and as many steps as take a minute
    or two on a core.
    """
    if not (folder / "base/config.json").is_file():
        grown_base.write(folder / "base")
    rows = [json.dumps(row.fields) for row in sources.rows("builtin:python_docs")]
    rows = rows[:: len(rows) // _ROWS]
    for name, part in (("train", rows[_HELD_OUT:_ROWS]), ("eval", rows[:_HELD_OUT])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")
    return [
        f"model.name={folder / 'base'}", f"data.train={folder / 'train.jsonl'}", f"data.eval={folder / 'eval.jsonl'}",
        "data.max_length=160", "training.batch_size=8", "training.max_steps=32", "training.learning_rate=1e-3",
        "training.eval_every=null",
    ]  # fmt: skip


_ROWS, _HELD_OUT = 176, 48
"""Rows of the job of the large base, and how many of them are held out."""
BASES = {"built-in": Base(_built_in, 192), "125M": Base(_large, 768)}


@dataclass(frozen=True)
class Trained:
    """A finished run: the merged model and the base in float32, and held-out rows; `settings` are those of its base."""

    settings: list[str]
    run: RunDirectory
    config: Config
    tokenizer: Any
    base: Any
    merged: Any
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Served:
    """The model that is served, the one that was trained, and what else there is to say of them."""

    model: Any
    trained: Any
    facts: dict[str, Any]


def _plain(job: Trained, kind: str) -> Served:
    """Each weight rounded by itself, as llama.cpp and compressed-tensors do."""
    weights = dict(job.merged.named_parameters())
    forms = {name: form for name, form in _forms(job, kind).items() if name in weights}  # a tied one once
    return _served(job, {name: packed.pack(form, weights[name].data) for name, form in forms.items()})


def _rounded(job: Trained, kind: str) -> Served:
    """As `finetune export --rounded`."""
    weights, facts = rounded_run.rounded(
        _conversion(job, kind, []), lambda model, kind: _forms(job, kind), lambda text: None
    )
    return _served(job, weights, facts)


def _on_nf4(way: Callable[[Trained, str], Served]) -> Callable[[Trained, str], Served]:
    """`way` after training with the same seed on a base in NF4, merged into the one in 16 bit."""

    def served(job: Trained, kind: str) -> Served:
        run = _finished(
            job.run.path.with_name(f"{job.run.path.name}-nf4"), job.settings, job.config.training.seed, "nf4"
        )
        finished = FinishedRun(run, config_of(run))
        model, _ = run_models.model_of(finished, "adapter")
        merged = finished.load_merged(CPU, torch.float32)
        found = way(dataclasses.replace(job, run=run, config=finished.config, merged=merged), kind)
        return dataclasses.replace(found, trained=model)

    return served


def _conversion(job: Trained, kind: str, rows: list[list[int]]) -> Conversion:
    return Conversion(
        run=job.run, config=job.config, tokenizer=job.tokenizer, device=CPU, kind=kind,
        compared=ComparedRows(rows, [], NOTHING, ""), base_identity=None,
        load_merged=lambda dtype: FinishedRun(job.run, job.config).load_merged(CPU, dtype),
    )  # fmt: skip


def _adapter(job: Trained, kind: str) -> Served:
    """Trained on the base in the codes of the file, and read back from the files of base and adapter."""
    run, model = _trained_for(job, kind, "adapter")
    record = publish.export_model(run, "adapter", terminal=Terminal(quiet=True))
    folder = run.path / "plain-adapter"
    held, lora = record["held_base"], folder / "adapter.gguf"
    base, facts = _read_back(job, kind, folder / held["file"], Path(locate(job.config.model.name)), model, lora)
    return Served(
        PeftModel.from_pretrained(base, folder), model, {"weights_differing": held["weights_differing"]} | facts
    )


def _read_back(
    job: Trained, kind: str, files: Path, source: Path, trained: Any, lora: Path | None = None
) -> tuple[Any, dict[str, Any]]:
    """The model in a GGUF file, and what llama.cpp computes with it and `lora`; or that in a folder of quantized
    weights, made of the model in `source`.
    """
    if kind in recipes.RECIPES:
        read = gguf_export.load(files, job.base.config, torch.float32, CPU)
        return read, {"llama_cpp": _in_llama_cpp(job, files, trained, lora)}
    model = copy.deepcopy(job.base)
    weights = compressed_export.read(source, files, model.config, kind)
    for name, weight in model.named_parameters():
        weight.data = weights[name].float()
    return model, {}


def _in_llama_cpp(job: Trained, file: Path, model: Any, lora: Path | None = None) -> dict[str, float]:
    """Mean and largest KL divergence in nats of a file in llama.cpp from the trained `model`, at a few places."""
    rows = [row["input_ids"] for row in job.rows[:8]]
    with torch.no_grad():
        said = [model(torch.tensor([row])).logits[0] for row in rows]
    conversion = _conversion(job, "", rows)
    found, expected = (torch.cat(part) for part in llama_cpp.logits(file, conversion, said, said, lora)[:2])
    each = divergences(expected.log_softmax(-1), found.log_softmax(-1))
    return {"kl": float(f"{each.mean():.3g}"), "kl_max": float(f"{each.max():.3g}")}


def _trained_for(job: Trained, kind: str, way: str) -> tuple[RunDirectory, Any]:
    """The run of the same seed that is trained for a kind in a way, and its model."""
    run = RunDirectory(job.run.path.with_name(f"{job.run.path.name}-{way}-{kind}"))
    if not run.adapter.is_dir():
        harness.finetune(
            "train", CONFIG, *job.settings, f"output.dir={run.path}", "output.merge=false", f"output.serve={kind}",
            f"training.seed={job.config.training.seed}", f"output.way={way}", threads=1,
        )  # fmt: skip
    model, _ = run_models.model_of(FinishedRun(run, config_of(run)), "adapter")
    return run, model


WAYS: dict[str, Callable[[Trained, str], Served]] = {
    "plain rounding": _plain,
    "rounded with the rows": _rounded,
    "NF4, plain rounding": _on_nf4(_plain),
    "NF4, rounded with the rows": _on_nf4(_rounded),
    "adapter": _adapter,
}


def _taken(base: str, way: str, kind: str) -> bool:
    """Whether a way takes a kind: training in one leaves no row that its blocks do not divide in 16 bit, and servers
    have one factor of NVFP4 for several weights.
    """
    return way != "adapter" or (kind != "nvfp4" and not BASES[base].width % FORMS[kind].serving.block)


def _forms(job: Trained, kind: str) -> dict[str, str]:
    with torch.device("meta"):
        bare = type(job.merged)(copy.deepcopy(job.merged.config))
    return gguf_export.forms(bare, kind) if kind in recipes.RECIPES else compressed_export.forms(bare, kind)


def _served(job: Trained, weights: dict[str, nn.Parameter], facts: dict[str, Any] | None = None) -> Served:
    model = copy.deepcopy(job.merged)
    sizes: Counter[str] = Counter()
    for name, weight in weights.items():
        how = packed.packing_of(weight)
        assert how is not None
        model.get_parameter(name).data = packed.values(weight).float()
        sizes[how.form] += how.shape.numel()
    return Served(model, job.merged, {"forms": dict(sizes), **(facts or {})})


def trained(folder: Path, settings: list[str], seed: int) -> Trained:
    """The run of a seed on a base in 16 bit, trained if `folder` does not have it."""
    run = _finished(folder / f"run{seed}", settings, seed, "none")
    config = config_of(run)
    finished = FinishedRun(run, config)
    tokenizer = finished.tokenizer()
    data = prepare.prepare(config.data, tokenizer)
    assert data.eval is not None
    merged = finished.load_merged(CPU, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(locate(config.model.name), dtype=torch.float32)
    return Trained(settings, run, config, tokenizer, base, merged, list(data.eval))


def _finished(path: Path, settings: list[str], seed: int, kind: str) -> RunDirectory:
    """The run in `path` on a base of a kind of quantization, trained and merged if it is not there."""
    run = RunDirectory(path)
    if not run.is_merged:
        harness.finetune(
            "train", CONFIG, *settings, f"output.dir={path}", f"training.seed={seed}", f"quantization.kind={kind}",
            threads=1,
        )  # fmt: skip
    return run


@torch.no_grad()
def logits(model: Any, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Log-probabilities (trained tokens, vocabulary) of each row, in float32."""
    found = []
    for row in rows:
        labels = torch.tensor(row["labels"][1:])
        found.append(model(torch.tensor([row["input_ids"]])).logits[0, :-1][labels != IGNORE].log_softmax(-1))
    return found


def loss(scores: list[torch.Tensor], rows: list[dict[str, Any]]) -> float:
    """Cross-entropy in nats per trained token."""
    labels = torch.cat([torch.tensor([one for one in row["labels"][1:] if one != IGNORE]) for row in rows])
    return float(functional.nll_loss(torch.cat(scores).double(), labels))


def divergence(trained: list[torch.Tensor], served: list[torch.Tensor]) -> float:
    """Mean KL divergence in nats of the served model from the trained one."""
    return max(0.0, float(divergences(torch.cat(trained), torch.cat(served)).mean()))


def divergences(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL divergence in nats of log-probabilities `q` from `p` (places, vocabulary), of each place, in float64."""
    return (p.exp() * (p - q)).sum(-1).double()


Cells = list[tuple[str, str]]
"""Ways and kinds."""


def measured(job: Trained, cells: Cells) -> Iterator[dict[str, Any]]:
    """After each of the `cells`, losses, and by way and kind: loss, share of the gain, divergence, share of equal most
    likely tokens.
    """
    base, whole = (logits(model, job.rows) for model in (job.base, job.merged))
    losses = {"base": loss(base, job.rows), "16 bit": loss(whole, job.rows)}
    for way, kind in cells:
        served = WAYS[way](job, kind)
        scores = logits(served.model, job.rows)
        expected = whole if served.trained is job.merged else logits(served.trained, job.rows)
        one = loss(scores, job.rows)
        kept = (losses["base"] - one) / (losses["base"] - losses["16 bit"])
        same = float((torch.cat(scores).argmax(-1) == torch.cat(expected).argmax(-1)).double().mean())
        cell = {
            "loss": round(one, 5), "kept": round(kept, 5), "kl": float(f"{divergence(expected, scores):.3g}"),
            "agreement": round(same, 4), **served.facts,
        }  # fmt: skip
        yield {name: round(value, 5) for name, value in losses.items()} | {way: {kind: cell}}


def interval(numbers: list[float]) -> list[float]:
    """Mean, and the ends of its 95% interval."""
    mean = statistics.fmean(numbers)
    half = half_width(numbers)
    return [round(mean, 4), round(mean - half, 4), round(mean + half, 4)]


def save(path: Path, base: str, seed: int, found: dict[str, Any]) -> None:
    """Write what was found of a seed beside what the result has, and the intervals of what is complete."""
    environment = harness.environment(1)  # takes a while, in which another process may write
    bases = harness.saved(path, "bases")
    seeds = bases.setdefault(base, {"kept": {}, "seeds": {}})["seeds"]
    into = seeds.setdefault(str(seed), {})
    for name, one in found.items():
        into[name] = into.get(name, {}) | one if name in WAYS else one
    kept: dict[str, Any] = {}
    for way in WAYS:
        cells = [each.get(way, {}) for _, each in sorted(seeds.items())]
        shares = {kind: [each[kind]["kept"] for each in cells if kind in each] for kind in KINDS}
        if intervals := {kind: interval(each) for kind, each in shares.items() if len(each) >= _LEAST_SEEDS}:
            kept[way] = intervals
    bases[base]["kept"] = kept
    harness.write_result(path, {"command": harness.command_line(), "environment": environment, "bases": bases})


def main() -> None:
    parser = harness.parser(__doc__, "served.json")
    parser.add_argument("--bases", nargs="*", default=[*BASES], choices=BASES)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=KINDS)
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=WAYS)
    parser.add_argument("--folder", type=Path, help="keeps bases and runs, and finds those of an earlier call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for base in options.bases:
            folder = (options.folder or Path(temporary)).resolve() / base
            folder.mkdir(parents=True, exist_ok=True)
            cells = [(way, kind) for way in options.ways for kind in options.kinds if _taken(base, way, kind)]
            for seed in options.seeds:
                measure(options.output, base, folder, seed, cells)


def measure(output: Path, base: str, folder: Path, seed: int, cells: Cells) -> None:
    """Measure those of the `cells` that the output lacks."""
    has = harness.saved(output, "bases").get(base, {}).get("seeds", {}).get(str(seed), {})
    if missing := [(way, kind) for way, kind in cells if kind not in has.get(way, {})]:
        job = trained(folder, BASES[base].settings(folder), seed)
        for found in measured(job, missing):
            save(output, base, seed, found)
            print(base, seed, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
