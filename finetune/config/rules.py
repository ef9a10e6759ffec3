"""Rules that join keys of a config."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config import serving
from finetune.config.field_types import GIVEN, source_name
from finetune.config.sections import Config, entries
from finetune.config.serving import GGUF, PACKED


@dataclass(frozen=True)
class ValueSet:
    """Some values of a key, or with `but` all others."""

    named: tuple[Any, ...]
    but: bool = False

    def __contains__(self, value: Any) -> bool:
        return (value in self.named) is not self.but


def only(*values: Any) -> ValueSet:
    return ValueSet(values)


def but(*values: Any) -> ValueSet:
    return ValueSet(values, but=True)


@dataclass(frozen=True)
class Rule:
    """`key` may have none of `values` while `other` has one of `others`; `message` says why, and what to do."""

    key: str
    values: ValueSet
    other: str
    others: ValueSet
    message: str

    def broken(self, config: Config) -> bool:
        return config.value(self.key) in self.values and config.value(self.other) in self.others


SERVING = tuple(
    Rule(
        "output.runtime", only(name), "output.serve", but(None, *runtime.reads),
        f"{name} does not read that form; set another `output.runtime`, or an `output.serve` of "
        f"{', '.join(runtime.reads)}",
    )
    for name, runtime in serving.RUNTIMES.items()
    if {*serving.SERVED} - {*runtime.reads}
)  # fmt: skip
"""Rules that hold before anything follows from what is served (`serving.consequences`)."""

_WITH_MODULES = but([], ["score"])
"""Not the head for scores, which training such a model adds by itself."""
_WHOLE = "needs whole weights, of which a rank has shards"


def of_shards(kind: str) -> list[Rule]:
    """The rules for a `distributed.kind` whose ranks hold shards of what is trained."""
    rules = [
        Rule(key, values, "distributed.kind", only(kind), f"{reason}; set `{remedy}`, or `distributed.kind: ddp`")
        for key, values, reason, remedy in (
            *(
                ("quantization.kind", only(form), f"the scales of {form} weights cannot be sharded", "nf4` or `none")
                for form in ("int8", *PACKED)
            ),
            ("adapter.init", but("default"), f"an initialization from the weights {_WHOLE}", "default"),
            ("adapter.dora", only(True), f"DoRA {_WHOLE}", "false"),
            ("data.new_tokens", but([]), f"training rows of the embedding and the head {_WHOLE}", "[]"),
            (
                "training.precision", only("fp16"),
                "fp16's loss scale would differ between ranks with sharded gradients", "bf16",
            ),
            ("kernels.fused", only("on"), f"trying a kernel on a layer {_WHOLE}", "auto"),
            ("kernels.compile", but("none"), "sharded layers are not compiled", "none"),
        )
    ]  # fmt: skip
    with_head = Rule(
        "distributed.kind", only(kind), "training.objective", only("reward", "classification"),
        "a model with a head for scores is not divided among ranks; set `distributed.kind: ddp`",
    )  # fmt: skip
    return [*rules, with_head]


RULES = [
    *SERVING,
    Rule(
        "adapter.kind", only("none"), "quantization.kind", but("none"),
        "a quantized base cannot be trained itself; set `quantization.kind: none` to train every weight, or "
        "`adapter.kind: lora`",
    ),
    *(
        Rule(
            "adapter.kind", only("none"), other, others,
            "`ranks`, `expert_rank`, `dora`, `rslora`, `init` and `start_from` are LoRA's; remove them or set "
            "`kind: lora`",
        )
        for other, others in (
            ("adapter.ranks", but({})), ("adapter.expert_rank", but("auto", 0)), ("adapter.dora", only(True)),
            ("adapter.rslora", only(True)), ("adapter.init", but("default")), ("adapter.start_from", but(None)),
        )
    ),
    Rule(
        "adapter.init", but("default"), "adapter.start_from", but(None),
        "the adapter to start from has its weights; set `adapter.init: default`, or remove `start_from`",
    ),
    Rule(
        "optimizer.lora_plus", but(None), "adapter.kind", only("none"), "without an adapter there is no B; remove it"
    ),
    Rule(
        "adapter.init", only("pissa"), "quantization.kind", but("none"),
        "PiSSA takes apart unquantized weights; set `quantization.kind: none`, or `adapter.init: loftq` for a 4-bit "
        "base",
    ),
    Rule(
        "adapter.init", only("loftq"), "quantization.kind", but("nf4", "fp4"),
        "LoftQ starts from a 4-bit base's error; set `quantization.kind: nf4`",
    ),
    Rule(
        "adapter.dora", only(True), "quantization.kind", only(*PACKED, "published"),
        "DoRA needs the norms of weights that are held packed; set `dora: false`, or `quantization.kind: none`",
    ),
    *(
        Rule(
            key, values, "quantization.kind", only(*GGUF, "gguf"),
            f"{reason} of which the embedding is packed; remove it, or set `quantization.kind: nf4`",
        )
        for key, values, reason in (
            ("data.new_tokens", but([]), "rows cannot be added to a base"),
            ("model.vocabulary", but(None), "the vocabulary cannot be raised in a base"),
        )
    ),
    *(
        Rule(key, values, "output.serve", only(None), "nothing is to be served; remove it, or set `output.serve`")
        for key, values in (("output.runtime", but(None)), ("output.way", but("auto")))
    ),
    *(
        Rule("output.serve", but(None), other, others, f"{reason}; remove it, or set `{remedy}`")
        for other, others, reason, remedy in (
            (
                "adapter.kind", only("none"),
                "every weight is trained, and no base is served (`finetune export RUN --to gguf --type q4_k_m "
                "--rounded` rounds such a model after training)", "adapter.kind: lora",
            ),
            (
                "training.objective", only("reward", "classification"),
                "a model with a head for scores is served as it is", "training.objective: supervised",
            ),
        )
    ),
    *(
        Rule(
            key, values, "output.way", only("adapter"),
            f"what serves an adapter {reason}; set `{remedy}`, or `output.way: rounded`",
        )
        for key, values, reason, remedy in (
            ("adapter.dora", only(True), "cannot rescale the weights of its base", "adapter.dora: false"),
            ("adapter.extra_modules", _WITH_MODULES, "refuses whole modules beside it", "adapter.extra_modules: []"),
            ("data.new_tokens", but([]), "refuses rows of tokens beside it", "data.new_tokens: []"),
            ("model.vocabulary", but(None), "has the vocabulary of its base", "model.vocabulary: null"),
            ("adapter.init", only("pissa", "loftq"), "has the base as it is", "adapter.init: default"),
        )
    ),
    Rule(
        "output.merge", only(True), "output.way", only("adapter"),
        "the merged model in 16 bit is not what is served; set `merge: false`, or `output.way: rounded`",
    ),
    Rule(
        "adapter.init", only("loftq"), "model.weights", only("random"),
        "LoftQ compares with the weights on disk, and random weights have none; set `adapter.init: default`",
    ),
    Rule(
        "adapter.dtype", only("bfloat16"), "training.precision", only("fp16"),
        "fp16 with loss scaling needs trained weights in float32; set `adapter.dtype: float32`",
    ),
    Rule(
        "training.micro_batch", only("auto"), "training.micro_batch_tokens", but(None),
        "`auto` chooses rows; leave it out beside `micro_batch_tokens`",
    ),
    Rule(
        "memory.offload", only("checkpoints"), "memory.checkpointing", only("none", 0),
        "nothing is checkpointed that could be offloaded; set `checkpointing: all` or `offload: none`",
    ),
    Rule(
        "kernels.compile", only("layers"), "memory.offload", only("checkpoints"),
        "layers whose inputs are offloaded cannot be compiled; set `none`, or `memory.offload: none`",
    ),
    *of_shards("fsdp"),
    Rule(
        "kernels.compile", but("none"), "distributed.context", but(1),
        "layers that exchange tokens with other ranks are not compiled; set `none`, or `distributed.context: 1`",
    ),
    Rule(
        "training.neftune_noise_alpha", but(None), "distributed.context", but(1),
        "each rank would draw the noise of whole rows, of which it has a slice; remove it, or set "
        "`distributed.context: 1`",
    ),
    *(
        Rule("preference.reference", only("in_step"), other, others, f"{reason}; set `cached`, or `{remedy}`")
        for other, others, reason, remedy in (
            ("adapter.kind", only("none"), "there is no adapter to switch off", "adapter.kind: lora"),
            *(
                (key, values, "the model without its adapter is not the one that training starts from", remedy)
                for key, values, remedy in (
                    ("adapter.init", but("default"), "adapter.init: default"),
                    ("adapter.start_from", but(None), "adapter.start_from: null"),
                    ("data.new_tokens", but([]), "data.new_tokens: []"),
                )
            ),
        )
    ),
    *(
        Rule(
            other, others, "training.objective", only("reward", "classification"),
            f"a model with a head for scores {reason}; set `{remedy}`",
        )
        for other, others, reason, remedy in (
            ("adapter.kind", only("none"), "is trained by an adapter and its head alone", "adapter.kind: lora"),
            ("adapter.init", but("default"), "starts from the plain base", "adapter.init: default"),
            ("adapter.start_from", but(None), "starts from an adapter of zero", "adapter.start_from: null"),
            ("data.new_tokens", but([]), "has no head with rows for tokens", "data.new_tokens: []"),
        )
    ),
    Rule(
        "data.loss_on", only("all"), "training.objective", only("kto"),
        "answers are told from prompts by what is trained; set `assistant`",
    ),
    Rule(
        "data.loss_on", only("last", "all"), "training.objective", only("reward", "classification"),
        "a head scores the end of each row; remove it",
    ),
    Rule(
        "data.loss_on", only("end"), "training.objective", but("reward", "classification"),
        "only a reward model and a classifier have a head that scores the end of a row; set `assistant`",
    ),
    Rule(
        "model.labels", but([]), "training.objective", but("reward", "classification"),
        "only a reward model and a classifier have a head with labels; remove it",
    ),
    Rule(
        "data.teacher_tokens", but(32), "training.objective", but("distillation"),
        "only distillation has a teacher; remove it, or set `training.objective: distillation`",
    ),
    Rule(
        "data.labels", but([]), "training.objective", but("classification"),
        "only a classifier has classes; remove it, or set `training.objective: classification`",
    ),
    Rule(
        "output.merge", only(True), "model.weights", only("random"),
        "random weights are not kept, so nothing can be merged; set `output.merge: false`",
    ),
    *(
        Rule(
            key, values, "model.vision", but("none"),
            f"{reason} with images yet; set `{remedy}`, or `model.vision: none` for rows of text",
        )
        for key, values, reason, remedy in (
            ("model.trust_remote_code", only(True), "no foreign code is run", "model.trust_remote_code: false"),
            ("model.attention", but("auto", "sdpa", "eager"), "no other attention is used", "model.attention: auto"),
            (
                "quantization.kind", but("none", "nf4", "fp4"), "a base is quantized to 4 bit or not at all",
                "quantization.kind: nf4",
            ),
            ("output.serve", but(None, "16bit"), "no quantized model is exported", "output.serve: 16bit"),
            ("output.runtime", only("llama.cpp", "ollama"), "no GGUF file is written", "output.runtime: vllm"),
            ("adapter.kind", only("none"), "no base is trained in full", "adapter.kind: lora"),
            ("adapter.init", but("default"), "an adapter starts from nothing but zero", "adapter.init: default"),
            ("adapter.start_from", but(None), "an adapter starts from no other", "adapter.start_from: null"),
            ("data.packing", only(True), "rows are not packed", "data.packing: false"),
            ("data.loss_on", only("all"), "prompts are not trained", "data.loss_on: assistant"),
            ("data.new_tokens", but([]), "no token is added", "data.new_tokens: []"),
            ("training.objective", but("supervised"), "only `supervised` is trained", "training.objective: supervised"),
            ("training.neftune_noise_alpha", but(None), "no noise is added", "training.neftune_noise_alpha: null"),
            ("kernels.compile", but("none"), "layers are not compiled", "kernels.compile: none"),
            ("distributed.context", but(1), "rows are not split over ranks", "distributed.context: 1"),
        )
    ),
    Rule(
        "data.image_pixels", but(None), "model.vision", only("none"),
        "only a base that sees has images; remove it, or set `model.vision: frozen`",
    ),
    Rule(
        "training.early_stopping", but(None), "training.eval_every", only(None),
        "counts evaluations, so it needs `eval_every`",
    ),
    Rule(
        "training.early_stopping", but(None), "data.eval", only("none"), "needs held-out rows; set `data.eval`",
    ),
]  # fmt: skip
"""All rules; an engine of an extra adds its own."""


def contradictions(
    config: Config, changes: Mapping[str, Any] | None = None, *, without_adapter: bool = False
) -> list[tuple[str, str]]:
    """(key, message with remedy) of each broken rule, and of checks that are no rule of two keys.

    With `changes`, of the config with those values. `without_adapter`: for a base that cannot be served beside one.
    """
    config = config.changed(changes or {})
    broken = [(rule.key, rule.message) for rule in SERVING if rule.broken(config)]
    broken += serving.contradictions(config.output, config.quantization, without_adapter=without_adapter)
    if not broken:
        config = config.changed(serving.consequences(config.output, config.quantization.kind)[0])
    rules = [rule for rule in RULES if rule.broken(config)]
    of_serving = {rule.key for rule in rules if rule.other == "output.way"}
    # The kind follows from what is served: advice to set another would lead nowhere.
    broken += [
        (rule.key, rule.message) for rule in rules if not (rule.other == "quantization.kind" and rule.key in of_serving)
    ]
    broken += _other_checks(config, of_serving)
    return list(dict.fromkeys(broken))


def _other_checks(config: Config, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """(key, message with remedy) of each check that is no rule of two keys; not for the keys that are `known`."""
    trained = {entry.source for entry in entries(config.data.train) if not entry.source.startswith("builtin:")}
    for held_out in (entry.source for entry in entries(config.data.eval) if entry.source in trained):
        remedy = "set `data.eval: auto` for its validation split, or else a share of it by hash"
        yield "data.eval", f"`{source_name(held_out)}` is training data; {remedy}"
    beside = {"embed_tokens", "lm_head"} & {*config.adapter.extra_modules}
    if beside and config.quantization.kind in (*GGUF, "gguf") and "adapter.extra_modules" not in known:
        message = f"{config.quantization.kind} packs the embedding and the head, which cannot be trained then; set `[]`"
        yield "adapter.extra_modules", f"{message}, or `quantization.kind: nf4`"
    if config.distributed.context > 1 and config.training.objective.startswith(GIVEN):
        message = "a loss given from Python would see slices of rows; set `distributed.context: 1`"
        yield "training.objective", message
    if len(set(config.tracking.to)) < len(config.tracking.to):
        yield "tracking.to", "names a tracker twice; keep `tracking.to` to one of each"
    rows, part = config.training.batch_size, config.training.micro_batch
    if part != "auto" and not config.training.micro_batch_tokens and rows % part:
        fitting = next(n for n in range(part, 0, -1) if rows % n == 0)
        remedy = f"the nearest micro-batch that divides it is {fitting}"
        yield "training.batch_size", f"{rows} is not a multiple of `micro_batch` {part}; {remedy}"
