"""What each way to a served model keeps of what training gained, by form and seed.

configs/tiny_cpu.yaml is trained on a base in 16 bit with each seed. Of a way's model, the loss on all held-out rows is
L: it keeps (L_base - L) / (L_base - L_16bit) of the gain. A way is a function in WAYS, from the trained run and a kind
to the model that is served and the one that was trained. Means have 95% intervals over seeds (Student's t).

The built-in base has rows of 192 and 512 weights: where these are not whole blocks, forms of llama.cpp fall back to
blocks of 32, and others leave the weight in 16 bit. `forms` says how many weights have which form.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from finetune.config import Config
from finetune.data import prepare
from finetune.data.encoded import IGNORE
from finetune.export import compressed_export, finished_run, publish
from finetune.export.conversion import Conversion
from finetune.export.gguf import gguf_export
from finetune.export.rounding import rounded_run
from finetune.inference import jobs
from finetune.model.source.locate import locate
from finetune.model.structure import packed, recipes
from finetune.report.terminal import Terminal
from finetune.settings import config_of
from finetune.storage.rundir import RunDirectory

CPU = torch.device("cpu")
KINDS = ("q4_0", "q4_k_m", "iq4_xs", "int4", "mxfp4", "nvfp4", "q5_k_m", "q6_k", "q8_0", "fp8")
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's t for 95% intervals, by the number of seeds."""


@dataclass(frozen=True)
class Trained:
    """A finished run on a base in 16 bit: its models in float32, and its held-out rows."""

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
    conversion = Conversion(
        job.run, job.config, job.tokenizer, [], "", CPU, kind, None,
        lambda dtype: finished_run.load_merged(job.run, job.config.model, CPU, dtype),
    )  # fmt: skip
    weights, facts = rounded_run.rounded(conversion, lambda model, kind: _forms(job, kind), lambda text: None)
    return _served(job, weights, facts)


def _adapter(job: Trained, kind: str) -> Served:
    """Trained on the base in the codes of the file, and read back from the files of base and adapter."""
    run, model = _trained_for(job, kind, "adapter")
    record = publish.export_model(run, "adapter", terminal=Terminal(quiet=True))
    folder = run.path / "plain-adapter"
    base = gguf_export.load(folder / record["held_base"]["file"], job.base.config, torch.float32, CPU)
    facts = {"weights_differing": record["held_base"]["weights_differing"]}
    return Served(PeftModel.from_pretrained(base, folder), model, facts)


def _exact(job: Trained, kind: str) -> Served:
    """Trained as it is rounded, and read back from its file."""
    run, model = _trained_for(job, kind, "exact")
    record = publish.export_model(run, "gguf", type=kind, terminal=Terminal(quiet=True))
    file = run.path / "gguf" / record["file"]
    facts = {"weights_differing": record["weights"]["differing"]}
    return Served(gguf_export.load(file, job.base.config, torch.float32, CPU), model, facts)


def _trained_for(job: Trained, kind: str, way: str) -> tuple[RunDirectory, Any]:
    """The run of the same seed that is trained for a kind in a way, and its model."""
    run = RunDirectory(job.run.path.with_name(f"{job.run.path.name}-{way}-{kind}"))
    if not run.adapter.is_dir():
        harness.finetune(
            "train", harness.ROOT / "configs/tiny_cpu.yaml", f"output.dir={run.path}", "output.merge=false",
            f"training.seed={job.config.training.seed}", "training.eval_every=150", f"output.serve={kind}",
            f"output.way={way}", threads=1,
        )  # fmt: skip
    model, _ = jobs.model_of(run, config_of(run), "adapter")
    return run, model


WAYS: dict[str, Callable[[Trained, str], Served]] = {
    "plain rounding": _plain,
    "rounded with the rows": _rounded,
    "adapter": _adapter,
    "exact": _exact,
}
_LLAMA_CPP = ("adapter", "exact")
"""The ways whose files are read by transformers' reader of GGUF files."""


def _kinds(way: str, kinds: list[str]) -> list[str]:
    return [kind for kind in kinds if way not in _LLAMA_CPP or kind in recipes.RECIPES]


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


def trained(folder: Path, seed: int) -> Trained:
    """The run of a seed, trained if `folder` does not have it."""
    run = RunDirectory(folder / f"run{seed}")
    if not run.is_merged:
        harness.finetune(
            "train", harness.ROOT / "configs/tiny_cpu.yaml", f"output.dir={run.path}", f"training.seed={seed}",
            "quantization.kind=none", "training.eval_every=150", threads=1,
        )  # fmt: skip
    config = config_of(run)
    tokenizer = finished_run.tokenizer_of(run, config, run.adapter)
    data = prepare.prepare(config.data, tokenizer)
    assert data.eval is not None
    merged = finished_run.load_merged(run, config.model, CPU, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(locate(config.model.name), dtype=torch.float32)
    return Trained(run, config, tokenizer, base, merged, list(data.eval))


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
    p, q = torch.cat(trained), torch.cat(served)
    return max(0.0, float((p.exp() * (p - q)).sum(-1).double().mean()))


def measured(job: Trained, ways: list[str], kinds: list[str]) -> dict[str, Any]:
    """By way and kind: loss, share of the gain, divergence, share of equal most likely tokens."""
    base, whole = (loss(logits(model, job.rows), job.rows) for model in (job.base, job.merged))
    found: dict[str, Any] = {"base": round(base, 5), "16 bit": round(whole, 5)}
    for way in ways:
        for kind in _kinds(way, kinds):
            served = WAYS[way](job, kind)
            scores, expected = (logits(model, job.rows) for model in (served.model, served.trained))
            one = loss(scores, job.rows)
            same = float((torch.cat(scores).argmax(-1) == torch.cat(expected).argmax(-1)).double().mean())
            found.setdefault(way, {})[kind] = {
                "loss": round(one, 5), "kept": round((base - one) / (base - whole), 5),
                "kl": float(f"{divergence(expected, scores):.3g}"), "agreement": round(same, 4), **served.facts,
            }  # fmt: skip
    return found


def interval(numbers: list[float]) -> list[float]:
    """Mean, and the ends of its 95% interval."""
    mean = statistics.fmean(numbers)
    if len(numbers) not in _T:
        return [round(mean, 4)]
    half = _T[len(numbers)] * statistics.stdev(numbers) / math.sqrt(len(numbers))
    return [round(mean, 4), round(mean - half, 4), round(mean + half, 4)]


def main() -> None:
    parser = harness.parser(__doc__, "served.json")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=KINDS)
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=WAYS)
    parser.add_argument("--folder", type=Path, help="keeps the runs, and finds those of an earlier call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        seeds = {
            str(seed): measured(trained(options.folder or Path(temporary), seed), options.ways, options.kinds)
            for seed in options.seeds
        }
    kept = {
        way: {
            kind: interval([each[way][kind]["kept"] for each in seeds.values()]) for kind in _kinds(way, options.kinds)
        }
        for way in options.ways
    }
    # Ways may be measured one after the other.
    result = {"kept": harness.saved(options.output, "kept") | kept, "seeds": harness.saved(options.output, "seeds")}
    for seed, found in seeds.items():
        result["seeds"][seed] = result["seeds"].get(seed, {}) | found
    harness.save(options.output, result, threads=1)
    rows = [[kind, *(str(kept[way].get(kind, "")) for way in options.ways)] for kind in options.kinds]
    print(harness.table(["kept", *options.ways], rows))


if __name__ == "__main__":
    main()
