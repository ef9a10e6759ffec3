"""Checks of `finetune doctor MODEL` on a small copy of a model, made with the code that all commands run.

All on the CPU, so that the result is the same on every machine.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune import kernels, recipe
from finetune.choices import load_config
from finetune.config import Config, MemorySection, ModelSection
from finetune.data.batching import MicroBatching
from finetune.errors import ArtifactError, ConfigError, FinetuneError, NumbersError
from finetune.export import publish
from finetune.extras.doctor.findings import Status
from finetune.generation import answering
from finetune.generation.caches import CACHES
from finetune.generation.settings import Settings
from finetune.kernels import self_test
from finetune.model import base as bases
from finetune.model import build, small_copy
from finetune.model.adapters.adapter import casts_by_autocast
from finetune.model.precision import autocast
from finetune.model.recompute import checkpointing
from finetune.model.source import gguf_base
from finetune.model.source.catalog import attention_of
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import log_probs
from finetune.report.terminal import Terminal
from finetune.resolve import planning
from finetune.runtime import libraries
from finetune.storage.rundir import RunDirectory
from finetune.training import trial
from finetune.training.collator import StepCollator
from finetune.training.probe_table import PROBES, Subject

_CPU = torch.device("cpu")
_NOTHING_SAVED = MemorySection(checkpointing="none")
_STEPS = 3
_LENGTHS = (17, 11)
"""Tokens of the rows that are compared padded and packed."""
_ANSWER_TOKENS = 8
# Relative distance of logits, computed in bfloat16 by the same operators from the same weights.
_SAME = 1e-3
# The same for weights in NF4 beside those in 16 bit; a layer that decodes to other values gives about 1.4.
_QUANTIZED = 0.7
# The same for weights that the merge rounds to bfloat16.
_MERGED = 0.02


class Differs(Exception):
    """Two ways to compute the same gave different results; the message says which and by how much."""


@dataclass(frozen=True)
class Copy:
    """The model `name`, and the `folder` of its small copy and what is made of that."""

    name: str
    folder: Path

    @cached_property
    def whole(self) -> Any:
        """The architecture of the model itself; of a GGUF file, which is not unpacked for that, as unquantized."""
        if self.name.lower().endswith(".gguf"):
            return gguf_base.architecture(Path(self.name))
        return bases.load_architecture(ModelSection(name=self.name), listed=True)

    @property
    def base(self) -> Path:
        """The directory of the small copy."""
        return self.folder / "base"

    @cached_property
    def architecture(self) -> Any:
        """The architecture of the small copy."""
        return bases.load_architecture(ModelSection(name=str(self.base)))

    @cached_property
    def tokenizer(self) -> Any:
        """The built-in tokenizer, to which the copy's vocabulary is cut."""
        return load_tokenizer(ModelSection(name="builtin:tiny-llama"))

    def job(self, kind: str = "none", precision: str = "fp32", **sections: Mapping[str, Any]) -> Config:
        """The config of a job on the small copy."""
        given: dict[str, dict[str, Any]] = {
            "model": {"name": str(self.base), "tokenizer": "builtin:tiny-llama"},
            "quantization": {"kind": kind},
            "adapter": {"rank": 4},
            "data": {"train": str(self.folder / "rows.jsonl"), "max_length": 64, "eval": "none"},
            "training": {
                "max_steps": _STEPS, "batch_size": 4, "micro_batch": 2, "learning_rate": 3e-3, "precision": precision,
            },
            "memory": {"check": "off", "checkpointing": "none"},
            "output": {"dir": str(self.run(kind).path), "merge": False},
        }  # fmt: skip
        for section, values in sections.items():
            given[section] = {**given.get(section, {}), **values}
        return load_config(given)

    def run(self, kind: str) -> RunDirectory:
        """The run of a job with this kind of quantization."""
        return RunDirectory(self.folder / f"run-{kind}")

    def tried(self, **given: Mapping[str, Any]) -> _Tried:
        """A job, by its sections, as what passes are made through."""
        config = self.job("none", "fp32", **given)
        attention, _ = build.choose_attention(config, self.architecture, "cpu")
        return _Tried(config, self.architecture, attention)

    def loaded(self, kind: str) -> Any:
        """The base in bfloat16, or quantized."""
        return build.load(self.job(kind, "bf16"), self.architecture, _CPU)

    @cached_property
    def padded(self) -> dict[str, Tensor]:
        """Two rows of unequal length, padded."""
        words = self.architecture.get_text_config().vocab_size
        ids = torch.randint(words, (len(_LENGTHS), max(_LENGTHS)), generator=torch.Generator().manual_seed(1))
        inside = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
        return {"input_ids": ids, "attention_mask": inside.long(), "labels": ids.masked_fill(~inside, -100)}


@dataclass(frozen=True)
class _Tried:
    """A job on a small copy, and passes through it as a step runs them."""

    config: Config
    architecture: Any
    attention: str

    def model(self, memory: MemorySection = _NOTHING_SAVED) -> Any:
        """The model, the same weights each time, with an adapter that is not zero; in eval mode, in which nothing is
        dropped at random, unless layers are recomputed.
        """
        config = self.config
        torch.manual_seed(0)
        base = build.blueprint(config, self.architecture, self.attention).load(_CPU)
        model = build.trainable(
            base, config.model, config.adapter, memory, seed=config.training.seed, device_type="cpu"
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * (0.5 / weight.shape[-1] ** 0.5))
        log_probs.attach(model)
        return model.train(memory.checkpointing != "none")

    @contextlib.contextmanager
    def passes(self, model: Any, *, fused_loss: bool = False) -> Iterator[None]:
        """A context for passes of the job, which score their tokens in two tiles."""
        precision = self.config.training.precision
        with (
            autocast(precision, _CPU),
            casts_by_autocast(model, self.config.adapter, precision),
            log_probs.tiles(max(_LENGTHS), fused=fused_loss),
        ):
            yield

    def results(self, model: Any, inputs: dict[str, Tensor], *, fused_loss: bool = False) -> dict[str, Tensor]:
        """The loss and the gradients of the adapter."""
        with self.passes(model, fused_loss=fused_loss):
            scores = model(**inputs, use_cache=False, fused_lm_head=True)
            return _with_gradients(model, -scores.log_probs.sum() / scores.label_mask.sum())


def _with_gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    gradients = zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True)
    return {"output": loss.detach()[None], **{f"gradient of {name}": one for name, one in gradients if one is not None}}


@dataclass(frozen=True)
class Check:
    """One line of the table: what it `tries`, and the checks it `needs` to have worked; `run` returns what it saw.

    A FinetuneError is a refusal, which says why; any other exception is a failure.
    """

    tries: str
    run: Callable[[Copy], str]
    needs: tuple[str, ...] = ()


# -- the checks --------------------------------------------------------------------------------------------------------


def _structure(copy: Copy) -> str:
    """The model itself on the meta device, as `train` checks it before data and weights."""
    config = copy.job()
    attention, _ = build.choose_attention(config, copy.whole, "cpu")
    mixture = trial.check_model(config, copy.whole, attention, config.adapter)
    name = copy.whole.architectures[0] if copy.whole.architectures else copy.whole.model_type
    return f"{name}, a mixture of experts" if mixture else name


def _weights(copy: Copy) -> str:
    """Make the small copy."""
    if not copy.base.exists():
        model = small_copy.of(copy.whole).bfloat16()
        libraries.save_model(model, copy.base)
        rows = [{"text": f"{'Once more: ' * number}{number} times 7 makes {number * 7}."} for number in range(4)]
        (copy.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    layers = checkpointing.layers(build.weightless(ModelSection(name=str(copy.base)), copy.architecture))
    kinds = Counter(type(layer).__name__ for layer in layers)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "made"


def _sixteen_bit(copy: Copy) -> str:
    from transformers import AutoModelForCausalLM

    ours = copy.loaded("none")
    theirs = AutoModelForCausalLM.from_pretrained(
        copy.base,
        dtype=torch.bfloat16,
        attn_implementation=attention_of(ours.config),
    )
    distance = _apart(ours, theirs, copy, _SAME, "logits differ from those of transformers")
    return f"logits as transformers loads it ({distance:.1e})"


def _nf4(copy: Copy) -> str:
    quantized = copy.loaded("nf4")
    stored = [weight for weight in quantized.parameters() if weight.dtype == torch.uint8]
    if not stored:
        raise Differs("no weight is quantized")
    distance = _apart(quantized, copy.loaded("none"), copy, _QUANTIZED, "logits differ from those in 16 bit")
    return f"{len(stored)} weights in 4 bit; logits within {distance:.0%} of those in 16 bit"


def _forecast(kind: str, copy: Copy) -> str:
    forecast = planning.planner_for(copy.job(kind, "bf16"), "cpu").forecast()
    model = copy.loaded(kind)
    storages = (one.untyped_storage() for one in (*model.parameters(), *model.buffers()))
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    predicted = forecast.categories["base_weights"] + forecast.categories.get("quantization_state", 0)
    if kind == "none" and abs(predicted - held) > 0.01 * held:
        raise Differs(f"the forecast has {predicted:,} bytes of base weights, and loading takes {held:,}")
    return f"{predicted:,} bytes of base weights, of {forecast.peak_allocated_bytes:,} at the peak"


def _causal(copy: Copy) -> str:
    config = copy.job()
    PROBES["causality"].run(Subject(config, build.load(config, copy.architecture, _CPU)))
    return "no token sees a later one"


def _loss(copy: Copy) -> str:
    """The loss and the gradients of a step beside those of transformers and PEFT."""
    tried = copy.tried()
    model = tried.model()
    with tried.passes(model):
        PROBES["head"].run(Subject(tried.config, model))
    ours = tried.results(model, copy.padded)
    labels = copy.padded["labels"]
    inputs = {name: copy.padded[name] for name in ("input_ids", "attention_mask")}
    with tried.passes(model):
        logits = model(**inputs, use_cache=False).logits[:, -labels.shape[1] :]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
    theirs = _with_gradients(model, loss)
    return _same(ours, theirs, "transformers and PEFT compute", "loss and gradients as transformers and PEFT")


def _fused(copy: Copy) -> str:
    tried = copy.tried()
    model = tried.model()
    plain = tried.results(model, copy.padded)
    attached = kernels.attach(model, "auto", triton=True)
    off = PROBES["kernels"].run(Subject(tried.config, model, attached)) or ()
    fused = tried.results(model, copy.padded, fused_loss=True)
    counts = ", ".join(f"{len(modules)} {name}" for name, modules in attached.replaced.items() if modules)
    return _same(fused, plain, "the modules compute", "; ".join([counts or "the loss alone", *off]))


def _recomputed(copy: Copy) -> str:
    tried = copy.tried()
    kept, again = (
        tried.results(tried.model(MemorySection(checkpointing=level)).train(), copy.padded) for level in ("none", "all")
    )
    return _same(again, kept, "kept activations give", "the same gradients when every layer is recomputed")


def _packed(copy: Copy) -> str:
    tried = copy.tried(data={"packing": True})
    packed = tried.model()
    PROBES["packing"].run(Subject(tried.config, packed))
    ids = copy.padded["input_ids"]
    rows = [{"input_ids": row[:length].tolist(), "labels": row[:length].tolist()}
            for row, length in zip(ids, _LENGTHS, strict=True)]  # fmt: skip
    inputs = StepCollator(MicroBatching(1, 1000, packed=True), 0).micro_batch(rows)
    alone = copy.tried()
    return _same(
        tried.results(packed, inputs), alone.results(alone.model(), copy.padded), "padded rows give",
        "loss and gradients of packed rows are those of padded ones",
    )  # fmt: skip


def _trained(kind: str, copy: Copy) -> str:
    recipe.train(copy.job(kind, "bf16"), terminal=Terminal(quiet=True))
    losses = [line["loss"] for line in copy.run(kind).metrics() if "loss" in line]
    if len(losses) != _STEPS:
        raise Differs(f"{len(losses)} of {_STEPS} steps were taken")
    return f"{_STEPS} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def _merged(kind: str, copy: Copy) -> str:
    proof = publish.merge(copy.run(kind), terminal=Terminal(quiet=True))
    return f"equals base plus adapter: error {proof['error']:.1e}, allowed {proof['bound']:.1e}"


def _served(copy: Copy) -> str:
    """The merged model by the class that its config.json names, and the adapter by PEFT, beside each other."""
    import transformers
    from peft import PeftModel

    run = copy.run("none")
    architecture = transformers.AutoConfig.from_pretrained(run.merged)
    name = (architecture.architectures or [""])[0]
    kind = getattr(transformers, name, transformers.AutoModelForCausalLM)
    merged, report = kind.from_pretrained(run.merged, dtype=torch.float32, output_loading_info=True)
    # The copy of a composite model has no weights of the models beside its language model.
    _, of_copy = kind.from_pretrained(copy.base, dtype=torch.float32, output_loading_info=True)
    if lost := {*report["missing_keys"], *report["unexpected_keys"]} - {*of_copy["missing_keys"]}:
        raise Differs(f"{name} finds other names than its own in the merged files, such as `{sorted(lost)[0]}`")
    base = transformers.AutoModelForCausalLM.from_pretrained(copy.base, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(base, str(run.adapter))
    if missing := [str(each.message) for each in said if "missing adapter keys" in str(each.message)]:
        raise Differs(f"PEFT: {missing[0][:120]}")
    differ = "logits of the merged model differ from those of base and adapter"
    change = _apart(adapted, merged, copy, _MERGED, differ)
    return f"{name} loads merged/, PEFT adapter/ ({change:.1e} apart)"


def _exported(format: str, copy: Copy) -> str:
    record = publish.export_model(copy.run("none"), format, terminal=Terminal(quiet=True))
    return f"error {record['error']:.1e}, for {', '.join(record['serve'])}"


def _answers(copy: Copy) -> str:
    """Answers with each KV cache beside those of the dynamic one; the quantized one rounds, and only has to answer."""
    config = copy.job()
    model = build.load(config, copy.architecture, _CPU)
    prompts = [row[: 5 + 4 * number].tolist() for number, row in enumerate(copy.padded["input_ids"])]
    answered: dict[str, list[str]] = {}
    refused: list[str] = []
    for name in CACHES:
        settings = Settings(max_new_tokens=_ANSWER_TOKENS, cache=name)
        try:
            answered[name] = [one.text for one in answering.answers(model, copy.tokenizer, prompts, settings)]
        except ConfigError as error:
            if name == "dynamic":
                raise
            refused.append(f"{name} ({error})")
    different = [name for name, texts in answered.items() if texts != answered["dynamic"] and name != "quantized"]
    if different:
        raise Differs(f"answers with the cache `{different[0]}` are other than with `dynamic`")
    return ", ".join(answered) + (f"; refused: {'; '.join(refused)}" if refused else "")


_MODEL = ("structure", "weights")

CHECKS: dict[str, Check] = {
    "structure": Check("the model itself, without weights", _structure),
    "weights": Check("a small copy of it", _weights, ("structure",)),
    "16 bit": Check("loaded in 16 bit", _sixteen_bit, _MODEL),
    "nf4": Check("loaded in NF4", _nf4, _MODEL),
    "forecast 16 bit": Check("traced on fake tensors, in 16 bit", partial(_forecast, "none"), _MODEL),
    "forecast nf4": Check("traced on fake tensors, in NF4", partial(_forecast, "nf4"), _MODEL),
    "causal": Check("later tokens hidden", _causal, _MODEL),
    "loss": Check("a step beside transformers and PEFT", _loss, _MODEL),
    "fused": Check("fused kernels beside plain modules", _fused, _MODEL),
    "recomputed": Check("recomputed layers beside kept ones", _recomputed, _MODEL),
    "packed": Check("packed rows beside padded ones", _packed, _MODEL),
    "trained 16 bit": Check("three steps in 16 bit", partial(_trained, "none"), _MODEL),
    "trained nf4": Check("three steps in NF4", partial(_trained, "nf4"), _MODEL),
    "merged 16 bit": Check("merged after 16 bit", partial(_merged, "none"), ("trained 16 bit",)),
    "merged nf4": Check("merged after NF4", partial(_merged, "nf4"), ("trained nf4",)),
    "served": Check("loaded by transformers and PEFT alone", _served, ("merged 16 bit",)),
    "adapter": Check("exported as a plain adapter", partial(_exported, "adapter"), ("trained 16 bit",)),
    "gguf": Check("exported as GGUF", partial(_exported, "gguf"), ("merged 16 bit",)),
    "answers": Check("answers by each KV cache", _answers, _MODEL),
}


def attempt(name: str, copy: Copy) -> tuple[Status, str, int]:
    """The status of one check, what it saw or why it failed, and the exit code of a refusal."""
    try:
        return "ok", CHECKS[name].run(copy), 0
    except Differs as differs:
        return "error", str(differs), 0
    except FinetuneError as error:
        failed = isinstance(error, (ArtifactError, NumbersError)) and name not in ("structure", "causal")
        return "error" if failed else "refused", str(error), error.exit_code
    except Exception as error:  # models and libraries may raise anything
        return "error", f"{type(error).__name__}: {str(error).strip()[:300]}", 0


@torch.no_grad()
def _apart(one: Any, other: Any, copy: Copy, most: float, what: str) -> float:
    """The relative distance of two models' logits. Raises Differs, which says `what`, if it is more than `most`."""
    first, second = (
        model.eval()(input_ids=copy.padded["input_ids"], use_cache=False).logits.float() for model in (one, other)
    )
    centred = second - second.mean(-1, keepdim=True)
    distance = float((first - second).norm() / centred.norm().clamp(min=1e-30))
    if not distance <= most:  # a NaN is not, either
        raise Differs(f"{what} by {distance:.1%}")
    return distance


def _same(one: dict[str, Tensor], other: dict[str, Tensor], origin: str, said: str) -> str:
    if one.keys() != other.keys():
        name = sorted(one.keys() ^ other.keys())[0]
        raise Differs(f"the {name} is on one side alone")
    if unlike := self_test.difference(one, other, torch.float32, origin):
        raise Differs(unlike)
    return said
