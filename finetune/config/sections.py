"""The configuration: one small frozen section for each part of the job, composed into `Config`.

The docstring under a field is its help: `finetune schema`, the JSON schema and docs/config.md are generated from it.
A builder receives its own section, never the whole config. Rules that join keys are in rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from finetune.config.field_types import (
    Checkpointing,
    Choice,
    OneOrMore,
    PathOrName,
    Size,
    TargetName,
    TargetNameEnd,
    Usual,
    source_name,
)

# Above what any job needs, and below what the libraries' 32-bit counts and float32 numbers hold.
_COUNT, _ROWS, _WEIGHT, _NUMBER = 2**31 - 1, 2**20, 1000, 1e9
# No optimizer converges at a higher learning rate.
_RATE = 10
RANKS = "8 to 256"
"""The usual ranks of an adapter."""


_Rate = Annotated[float, Field(gt=0, le=_RATE)]
Positive = Annotated[int, Field(gt=0, le=_COUNT)]
RowCount = Annotated[int, Field(gt=0, le=_ROWS)]
TokenId = Annotated[int, Field(ge=0, le=_COUNT)]
Above0 = Annotated[float, Field(gt=0, le=_NUMBER)]
AtLeast0 = Annotated[float, Field(ge=0, le=_NUMBER)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Frozen, strict about types, no unknown keys; docstrings under fields become their description."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class RopeScaling(Section):
    """Rotary scaling, by the names of `rope_parameters` in a config.json of transformers."""

    rope_type: Literal["linear", "yarn", "llama3"]
    """Which frequencies are lowered: all alike (arXiv 2306.15595), or the low ones more (`yarn`, arXiv 2309.00071, and
    `llama3`)."""
    factor: Annotated[float, Field(gt=1, le=1024), Usual("2 to 8")]
    """How many times as long rows may be."""


class ModelSection(Section):
    """The base model."""

    name: PathOrName = "builtin:tiny-llama"
    """Base model: `builtin:tiny-llama`, a local directory, a GGUF file, or a hub name such as
    `meta-llama/Llama-2-7b-hf`."""
    revision: str | None = None
    """Hub branch, tag or commit. A commit makes the run repeatable."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the architecture with random weights, always the same, to measure a job without downloads."""
    tokenizer: PathOrName | None = None
    """Tokenizer, if not the model's own: `builtin:tiny-llama`, a local directory or a hub name."""
    rope_scaling: RopeScaling | None = None
    """Rotary scaling for rows longer than the base was trained on: `{rope_type: yarn, factor: 4}`; types are `linear`,
    `yarn` and `llama3`. It is part of the base from then on, merged and served as well."""
    vocabulary: Positive | None = None
    """Rows of the embedding and the head where the base has fewer; `data.new_tokens` sets this itself."""
    labels: list[str] = []
    """What a sequence classifier's head scores, in place of the next token. The objectives `reward` and
    `classification` set it."""
    vision: Literal["none", "frozen", "adapter"] = "none"
    """What is loaded of a base that also sees: `none`, its language layers alone; `frozen`, its vision model too, which
    rows with images need; `adapter`, the same with adapters on it. It is not quantized."""
    attention: Annotated[str, Choice("model.attention")] = "auto"
    """Attention implementation; which one `auto` takes is logged with the reason."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Requires `model.revision` to be a full commit hash. Honoured in your own
    config and on the command line, not in a run directory."""

    @model_validator(mode="after")
    def _pin_remote_code(self) -> Self:
        if self.trust_remote_code and not re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            raise ValueError(
                "`trust_remote_code: true` runs foreign code, so it needs `revision` to be a full 40-digit commit "
                "that you have read"
            )
        return self


class QuantizationSection(Section):
    """How the frozen base weights are stored."""

    kind: Annotated[str, Choice("quantization.kind")] = "nf4"
    """Storage of the frozen linear weights (QLoRA, arXiv 2305.14314, section 3), quantized while the base is loaded."""
    double: bool = True
    """Quantize the quantization constants as well: 4.127 instead of 4.5 bits per parameter (4-bit kinds only)."""


class AdapterSection(Section):
    """What is trained."""

    kind: Literal["lora", "none"] = "lora"
    """`lora` trains low-rank adapters; `none` trains every weight of an unquantized base."""
    rank: Annotated[Positive, Usual(RANKS)] = 16
    """Rank r of the update BA."""
    ranks: Annotated[dict[TargetNameEnd, Positive], Usual(RANKS)] = {}
    """Other ranks for some linear layers: `{q_proj: 32, "layers[.][0-3][.].*": 8}`. A key is a layer's name, or a
    regular expression for an end of its full name, as in PEFT's `rank_pattern`; the first that matches counts. `alpha`
    is the same for all."""
    expert_rank: Literal["auto"] | Annotated[int, Field(ge=0, le=_COUNT)] = "auto"
    """Rank of the update of each expert of a mixture. `auto` is `rank` divided by the number of experts that a token
    visits, and at least 1. 0 leaves experts out of `all-linear`."""
    alpha: Above0 = 32
    """The update is scaled by alpha / rank, or by alpha / sqrt(rank) with `rslora`."""
    dropout: Annotated[ShareBelow1, Usual("0 to 0.1")] = 0.0
    """Dropout probability on the adapter's input."""
    targets: Literal["all-linear"] | Annotated[list[TargetName], Field(min_length=1), OneOrMore()] = "all-linear"
    """Modules that get an adapter: `all-linear` (every linear layer that rows of text train, and experts, but not the
    output head and routers) or a list of names, or of regular expressions for full names, such as
    `.*layers[.][0-7][.]mlp.*`. Fused experts are named as `experts.gate_up_proj`."""
    rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""
    dora: bool = False
    """Weight-decomposed adapters (arXiv 2402.09353)."""
    init: Literal["default", "pissa", "loftq"] = "default"
    """Initialization of the adapter: zero update; `pissa`, principal singular values of an unquantized base (arXiv
    2404.02948); `loftq`, the quantization error of a 4-bit base (arXiv 2310.08659)."""
    start_from: PathOrName | None = None
    """PEFT adapter whose weights this one starts from: a folder, such as `runs/faq/adapter`, or a hub name. It must be
    on the same base and have the rank, alpha, targets and variants of this section."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights. bfloat16 halves adapter and gradients, but loses updates below 2^-9 of a weight."""
    extra_modules: Annotated[list[str], OneOrMore()] = []
    """Modules trained in full and saved with the adapter, such as `embed_tokens` or `lm_head`."""
    new_rows: list[Annotated[list[TokenId], Field(min_length=2)]] = []
    """Rows of the embedding and the head that are trained alone, each with the rows whose mean it starts from;
    `data.new_tokens` sets this itself."""

    def rank_of_experts(self, active: int) -> int:
        """The rank of the update of each expert where a token visits `active` of them; 0 for none."""
        return max(self.rank // active, 1) if self.expert_rank == "auto" else self.expert_rank

    @model_validator(mode="before")
    @classmethod
    def _as_trained(cls, values: Any, info: ValidationInfo) -> Any:
        """The keys of a run that was started before `expert_rank` existed, when experts had a rank only by name."""
        if (info.context or {}).get("trained") and isinstance(values, dict) and "expert_rank" not in values:
            named = values.get("targets", "all-linear") != "all-linear"
            return {**values, "expert_rank": values.get("rank", "auto") if named else 0}
        return values

    @property
    def starts_at_zero(self) -> bool:
        """Whether the model with its new adapter is the base."""
        return self.kind == "lora" and self.init == "default" and self.start_from is None and not self.new_rows


class Source(Section):
    """One of several sources."""

    source: PathOrName
    """A source, as `data.train` takes it alone."""
    weight: Annotated[float, Field(gt=0, le=_WEIGHT)] = 1.0
    """How often each of its rows is seen per epoch; for a fraction, rows are chosen by hash."""

    def __str__(self) -> str:
        name = source_name(self.source)
        return name if self.weight == 1 else f"{name} (weight {self.weight:g})"


Sources = PathOrName | Annotated[list[PathOrName | Source], Field(min_length=1)]


def entries(sources: Sources) -> list[Source]:
    """Each form in which sources can be written, as a list of sources with weights."""
    several = [sources] if isinstance(sources, str) else sources
    return [Source(source=one) if isinstance(one, str) else one for one in several]


def named(sources: Sources) -> str:
    """The sources as a person names them: `a.jsonl, b.jsonl (weight 2)`."""
    return ", ".join(map(str, entries(sources)))


class DataSection(Section):
    """The training and evaluation rows."""

    train: Sources = "builtin:python_docs"
    """Training rows: `builtin:python_docs`, a hub data set, or a local file (JSONL, JSON, CSV, TSV, text, Excel,
    Parquet or Arrow; text files also as .gz or .zst), folder or pattern such as `corpus/*.jsonl`. A list combines
    several; rows of an item `{source: corpus/, weight: 2}` are seen twice as often. Of several splits (`train.jsonl`,
    `test-00000-of-00001.parquet`, `validation/`) only the training split is read. In a run's config, `python:` with a
    fingerprint stands for rows from Python."""
    eval: Sources = "auto"
    """Evaluation set: sources like `train`, of several splits the one for validation, or else for tests; `auto` takes
    the split for validation of `train`, or else `eval_share` of its rows by hash; `none` evaluates nothing."""
    eval_share: Annotated[float, Field(gt=0, lt=1), Usual("0.01 to 0.2")] = 0.02
    """Share of the rows that `eval: auto` holds out by hash; at least ten rows of fifty or more, and one of fewer."""
    encoding: Literal["cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1257"] | None = None
    """Encoding of text files that are not UTF-8: `cp1252` is what Excel writes as CSV in Western Europe."""
    format: Annotated[str, Choice("data.format")] = "auto"
    """Format of a row; `auto` detects it from the fields of each source's first row."""
    columns: dict[str, str] = {}
    """Columns that have other names than the format's fields: `{prompt: question}` reads the field `prompt` from the
    column `question`."""
    labels: list[str] = []
    """Classes of the objective `classification`, in the order of the head's outputs; by default those of the training
    rows, sorted."""
    teacher_tokens: Annotated[int, Field(ge=1, le=1024)] = 32
    """How many of a teacher's tokens are read at each token, the likeliest (`training.objective: distillation`)."""
    separator: str = ""
    """Text between a plain-text prompt and its completion, such as `"\\n"`; whoever asks the trained model writes it
    too, as `finetune generate` does."""
    chat_template: Annotated[PathOrName, Choice("data.chat_template", or_file=".jinja")] = "auto"
    """Chat template that renders a conversation for the model."""
    template_arguments: dict[str, bool | int | str] = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`. They become its defaults, also in exports."""
    new_tokens: Annotated[list[Annotated[str, Field(min_length=1)]], OneOrMore()] = []
    """Tokens to add to the tokenizer, such as `<tool>`: their rows of the embedding and the head start from the mean of
    the tokens that spelled them, and are trained."""
    control_tokens: Literal["text", "parse"] = "text"
    """How to treat text in a row that spells a control token, such as `</s>`: `text` tokenizes it as text, so that no
    row can forge a turn; `parse` makes it the token, for rows that are already rendered."""
    max_length: Positive = 1024
    """Longest row in tokens; the default is lowered to the positions the base has."""
    too_long: Annotated[str, Choice("data.too_long")] = "truncate"
    """How to treat longer rows; they are listed in data.jsonl."""
    image_pixels: Positive | None = None
    """Most pixels of an image; larger ones are scaled down. By default what the processor does itself. For Idefics 3
    and SmolVLM, those of the square of tiles into which an image is cut."""
    duplicates: Literal["keep", "drop"] = "keep"
    """How to treat rows with the tokens and labels of an earlier one; they are listed as well."""
    packing: bool = False
    """Concatenate the rows of a micro-batch instead of padding them, with the same gradient. A micro-batch holds
    `training.micro_batch_tokens`, or as many tokens as `micro_batch` rows of `max_length`. Both answers of a pair share
    the prompt's tokens."""
    loss_on: Literal["assistant", "last", "all", "end"] = "assistant"
    """Tokens in the loss: the assistant's turns with their end-of-turn, only the last of them, or all. For a prompt and
    completion it is the completion, for tokenized rows their labels. Messages with `train: false` or `weight: 0` are
    excluded. The objectives `reward` and `classification` set `end`: a head scores a row's last token."""


class TrainingSection(Section):
    """The optimizer steps."""

    batch_size: RowCount = 16
    """Global batch size: rows per optimizer step, over all ranks."""
    micro_batch: RowCount | Literal["auto"] = 4
    """Rows per forward pass, which does not change the gradient. `auto` takes the fastest one that fits, by the
    forecast."""
    micro_batch_tokens: Positive | None = None
    """Tokens per forward pass, padding included, instead of `micro_batch`: many short rows or few long ones."""
    epochs: Annotated[Above0, Usual("1 to 5")] = 1.0
    """Passes over the data; ignored if `max_steps` is given."""
    max_steps: Positive | None = None
    """Number of optimizer steps; overrides `epochs`."""
    objective: Annotated[str, Choice("training.objective")] = "supervised"
    """What is minimised."""
    learning_rate: Annotated[Literal["auto"] | _Rate, Usual("1e-5 to 1e-3")] = "auto"
    """Peak learning rate. `auto` is 2e-4 for LoRA with a batch of 16, goes with the square root of the batch, is higher
    for bases narrower than 2,000, and lower for preferences, Lion and `adapter.kind: none`."""
    schedule: Annotated[str, Choice("training.schedule")] = "cosine"
    """Learning-rate schedule after warm-up."""
    warmup: AtLeast0 = 0.03
    """Linear warm-up: a share of all steps if below 1, otherwise a number of steps."""
    max_grad_norm: AtLeast0 = 1.0
    """Gradient clipping: gradients are scaled down to this norm; 0 disables it."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the forward and backward pass; fp16 uses loss scaling. `auto` is the fastest that the device
    computes natively and that no other key rules out."""
    neftune_noise_alpha: Annotated[Above0, Usual("5 to 15")] | None = None
    """Uniform noise on the input embeddings in training: in [-1, 1] times this, over sqrt(L d) for a row of L tokens
    without padding, each of d channels (NEFTune, arXiv 2310.05914)."""
    group_by_length: bool = True
    """Batch rows of similar length together to reduce padding; the order of batches stays random."""
    eval_every: Positive | None = None
    """Evaluate every so many steps, besides before the first and after the last."""
    early_stopping: Positive | None = None
    """Stop after this many evaluations without a lower evaluation loss."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Random seed of adapter, data order, dropout and noise on embeddings."""
    deterministic: bool = False
    """Make repeated and resumed runs bit-equal on a GPU as well, at some cost in speed; on a CPU they always are."""

    @property
    def rows(self) -> int:
        """The rows of a micro-batch: `micro_batch` as a number, once `auto` was fitted."""
        assert self.micro_batch != "auto", "fitted before anything is built"
        return self.micro_batch

    @property
    def rate(self) -> float:
        """The peak learning rate as a number, once `auto` was resolved."""
        assert self.learning_rate != "auto", "resolved before anything is built"
        return self.learning_rate


class PreferenceSection(Section):
    """Training on preferences: the numbers of the objectives that take rows with several answers."""

    beta: Annotated[Above0, Usual("0.01 to 10")] | None = None
    """How strongly the policy is held to the reference (DPO and its family, KTO), or the scale of the mean
    log-probabilities (SimPO), or the weight of the odds ratio (ORPO); null is the method's default."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Share of pairs taken to be labelled the wrong way round; null is the method's default."""
    target_margin: AtLeast0 | None = None
    """Margin by which the chosen answer should win (SimPO's gamma); null is the method's default."""
    nll_weight: AtLeast0 = 0.0
    """Weight of the chosen answer's mean cross-entropy in the loss, which keeps that answer from becoming less likely;
    in distillation, that of the labels."""
    desirable_weight: AtLeast0 = 1.0
    """Weight of the loss of a desirable answer (KTO's lambda_D); times their number, it should be 1 to 4/3 times that
    of undesirable ones."""
    undesirable_weight: AtLeast0 = 1.0
    """Weight of the loss of an undesirable answer (KTO's lambda_U)."""
    reference: Literal["auto", "cached", "in_step"] = "auto"
    """Where the log-probabilities of the starting model come from, with the same result. `cached`: scored before the
    first step. `in_step`: computed in each step with the adapter off, which needs an adapter that starts at zero."""
    reward_centering: AtLeast0 = 0.0
    """Weight of the square of the two rewards' sum, by which rewards stay around zero (reward models)."""


class OptimizerSection(Section):
    """The update rule."""

    kind: Annotated[str, Choice("optimizer.kind")] = "paged_adamw_8bit"
    """Optimizer; one that this device does not support is replaced, with a message."""
    weight_decay: AtLeast0 = 0.0
    """Decoupled weight decay."""
    beta1: ShareBelow1 = 0.9
    """Decay of the first moment (momentum for SGD)."""
    beta2: ShareBelow1 = 0.999
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(ge=1e-30, le=_NUMBER)] = 1e-8
    """Added to the denominator."""
    lora_plus: Annotated[float, Field(ge=1, le=1024)] | None = None
    """Ratio of the learning rate of the adapter's B to that of A, which is `training.learning_rate` (LoRA+, arXiv
    2402.12354)."""


class MemorySection(Section):
    """Memory: what lowers it, what limits it, and how to inspect it."""

    checkpointing: Checkpointing = "auto"
    """Activation checkpointing, by which layers recompute what they do not keep: `none`, `all`, `every-2` (every n-th
    layer), or a number of layers. `keep-attention` recomputes all but attention, `keep-products` all but the large
    matrix products, `keep-both` all but these. Or numbers of layers, those that recompute most first: `{all: 20,
    keep-products: 12}`. `auto` takes the fastest that fits, by the forecast, and `all` without one."""
    offload: Literal["none", "checkpoints"] = "none"
    """`checkpoints` keeps the layer inputs that checkpointing saves in pinned host memory."""
    loss_tokens: Positive = 4096
    """Size of a tile of logits in tokens; smaller tiles take less memory and slightly more time."""
    budget: Size | None = None
    """Memory the job may use on the GPU, CUDA context included (or of the host, on a CPU), such as 20GiB; by default
    all that is free."""
    check: Literal["refuse", "warn", "off"] = "refuse"
    """What to do with a job that does not fit, by the forecast before training."""
    limit: Size | None = None
    """Hard limit on this process's GPU memory, CUDA context included; more is an out-of-memory error. Also caps the
    budget. No effect on a CPU."""
    snapshot: bool = False
    """Record the CUDA allocator's history and write it at the end, for pytorch.org/memory_viz. A snapshot without
    history is always written on out of memory."""
    profile_steps: Annotated[int, Field(ge=0, le=_COUNT)] = 0
    """Profile this many steps after the first, with memory, and write a trace for TensorBoard."""


class KernelsSection(Section):
    """Fused kernels for the training step."""

    fused: Literal["auto", "on", "off"] = "auto"
    """Compute adapters, gated MLPs, norms, rotary embeddings and the logits of a frozen head with fused kernels: `auto`
    wherever they apply and agree with the model's own code at start, but not in layers that are sharded or that
    `compile` compiles; `on` refuses a model where none applies or one disagrees; `off` uses PEFT's and transformers'
    modules."""
    compile: Literal["none", "layers"] = "none"
    """`layers` compiles the decoder layers that are not fused with `torch.compile`, for training steps alone. The first
    steps then take a minute or more, and the memory forecast is that of the layers as they are."""


SHARDED = {"fsdp"}
"""The kinds of `distributed.kind` whose layers compute on gathered shards; an engine of an extra adds its own."""
ONE_PASS = set[str]()
"""Those whose engine computes one pass of a model at a time."""


class DistributedSection(Section):
    """How several ranks, as torchrun starts them, share the model; one process alone holds all of it."""

    kind: Annotated[str, Choice("distributed.kind")] = "auto"
    """What each rank holds. The result does not depend on it, nor on the number of ranks."""
    stage: Literal["weights", "gradients", "optimizer"] = "weights"
    """What a rank holds in shards. `weights`: also weights, which are whole only while a layer computes. `gradients`:
    gradients and optimizer states; weights are whole from the forward to the backward pass (`fsdp`) or always
    (ZeRO 2). `optimizer`: only optimizer states (ZeRO 1)."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """`cpu` keeps the shards, their gradients and the optimizer states in host memory, where they are updated. `nvme`
    keeps the optimizer states, with gradients and a float32 copy of the trained weights, on a disk (ZeRO 3), and the
    weights in host memory."""
    nvme_path: PathOrName | None = None
    """The directory for `offload: nvme`, on a fast local disk of each machine. What is written there is removed at the
    end, or by the next run there."""
    context: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of ranks that compute each row together, each a slice of its tokens (Ulysses context parallelism, arXiv
    2309.14509). It must divide the ranks and the model's attention heads."""

    def shares(self, world_size: int) -> int:
        """The number of ranks, or of groups of ranks that split rows, among which the rows of a step are divided."""
        return max(1, world_size // self.context)

    def named(self, world_size: int) -> str:
        """The ranks, or groups of ranks, that `shares` counts, in words."""
        if self.context == 1:
            return f"{world_size} processes"
        return f"{self.shares(world_size)} groups of {self.context} processes"


class TrackingSection(Section):
    """Where metrics are sent in addition to the run directory."""

    to: Annotated[
        list[Annotated[str, Choice("tracking.to")]], OneOrMore(), Field(json_schema_extra={"uniqueItems": True})
    ] = []
    """Trackers, none by default; each must be installed."""
    project: str | None = None
    """Project or experiment there; by default `finetune`, or what `WANDB_PROJECT` or `MLFLOW_EXPERIMENT_NAME` says."""
    name: str | None = None
    """Name of the run there; the run directory's by default."""
    tags: Annotated[list[str], OneOrMore()] = []
    """Tags of the run there; trackers without tags show them among the settings."""
    log_every: Positive | None = None
    """Print a line to a log every so many steps; by default ten in all."""


class OutputSection(Section):
    """The run directory."""

    dir: PathOrName | None = None
    """Run directory; `runs/` and the name of the config file by default."""
    save_every: Positive | None = 100
    """Save a checkpoint every so many steps and after the last; null: only after the last."""
    keep: Annotated[int, Field(ge=2, le=_COUNT)] = 2
    """Number of checkpoints to keep, including the one with the lowest evaluation loss."""
    best: bool = True
    """Publish the adapter with the lowest evaluation loss instead of the last one, if it was saved and the evaluation
    set has ten different rows or more."""
    merge: bool = False
    """Merge after training, as `finetune merge` does."""
    serve: Annotated[str, Choice("output.serve")] | None = None
    """The form in which the trained model will be served, which training prepares for."""
    runtime: Annotated[str, Choice("output.runtime")] | None = None
    """The program that serves it; null: llama.cpp for GGUF files, else vLLM."""
    way: Annotated[str, Choice("output.way")] = "auto"
    """How the trained model becomes what is served."""


class Config(Section):
    """One fine-tuning job."""

    model: ModelSection = ModelSection()
    quantization: QuantizationSection = QuantizationSection()
    adapter: AdapterSection = AdapterSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    preference: PreferenceSection = PreferenceSection()
    optimizer: OptimizerSection = OptimizerSection()
    memory: MemorySection = MemorySection()
    kernels: KernelsSection = KernelsSection()
    distributed: DistributedSection = DistributedSection()
    tracking: TrackingSection = TrackingSection()
    output: OutputSection = OutputSection()

    @property
    def fitted(self) -> bool:
        """Whether nothing is left for the forecast to choose."""
        return self.training.micro_batch != "auto" and self.memory.checkpointing != "auto"

    @property
    def scorer(self) -> Literal["reward model", "classifier"] | None:
        """The kind of model that scores sequences with a head of its own and predicts no tokens; None for others."""
        scorers: dict[str, Literal["reward model", "classifier"]] = {
            "reward": "reward model", "classification": "classifier"
        }  # fmt: skip
        return scorers.get(self.training.objective)

    @property
    def caches_reference(self) -> bool:
        """Whether a reference is scored before the first step: by choice, or since no adapter can be switched off."""
        if self.preference.reference == "auto":
            # The embeddings' new rows are known only later.
            new = not self.adapter.starts_at_zero or bool(self.data.new_tokens)
            return new or self.distributed.kind in ONE_PASS
        return self.preference.reference == "cached"

    @property
    def fused(self) -> Literal["auto", "on", "off"]:
        """`kernels.fused`, where `auto` is `off` for sharded and for compiled layers."""
        left_alone = self.distributed.kind in SHARDED or self.kernels.compile != "none"
        return "off" if self.kernels.fused == "auto" and left_alone else self.kernels.fused

    def value(self, key: str) -> Any:
        """The value of a `section.key`, or of a mapping's entry `section.key.name`."""
        section, name, *entry = key.split(".")
        value = getattr(getattr(self, section), name)
        return value[entry[0]] if entry else value

    def values(self) -> dict[str, dict[str, Any]]:
        """All values by section, as they are loaded.

        A kind of quantization that follows from `output.serve` is left out while its `output.way` is not decided.
        """
        values = self.model_dump(mode="json")
        if self.output.serve and self.output.way == "auto" and "kind" not in self.quantization.model_fields_set:
            del values["quantization"]["kind"]
        return values

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """This config with other values of some `section.key`; they are taken as they are."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )
