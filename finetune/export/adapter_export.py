"""The adapter rewritten so that no server can misread it, in PEFT's format and as a GGUF file for llama.cpp; with the
base in the form that training held it in, unless its files are so already.

vLLM and SGLang read `r`, `lora_alpha` and `use_rslora` of adapter_config.json and ignore patterns; llama.cpp's
converter reads `lora_alpha` alone. So the scale of each layer is folded into its B, every rank is padded with zeros to
one, and `lora_alpha` is the rank: a plain adapter of scale 1, which computes the same.

vLLM maps an adapter's names like those of the base's files, and serves the bare base without a word where no layer has
such a name (vllm#34186, vllm#48019, vllm#49354). So the names are those of the base's files; for a composite checkpoint
those of transformers' class for the whole of it, with which PEFT reads the files too, if vLLM maps both alike. The
layers that a server would find are counted (`server_names`), and fewer than trained are refused. Experts are written
as vLLM reads them (`server_experts`), with a rank of their own.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors.torch import load_file, save_file

from finetune.config import AdapterSection, ModelSection, serving
from finetune.data import fingerprint
from finetune.errors import ArtifactError, ConfigError
from finetune.export import compressed_export, proof, server_names
from finetune.export.card import public
from finetune.export.conversion import Conversion, Exporter, ExportRequest
from finetune.export.gguf import gguf_model, held_base, llama_cpp
from finetune.export.server_experts import Experts
from finetune.forms import FORMS, packed
from finetune.model import build
from finetune.model.adapters import adapter, adapter_files, plain_form, plain_peft
from finetune.model.base import base_dtype
from finetune.model.source import identity, prequantized
from finetune.model.source.locate import weights_directory
from finetune.model.structure import streamed
from finetune.storage import weight_files

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""A (rank, in) and B (out, rank) of each adapted layer in float32, by its name in the base."""

GGUF = "adapter.gguf"
_BASE = "base"  # a folder of its own, as transformers would take the adapter beside a base for a part of it
_PREFIX = "base_model.model."


def check(job: ExportRequest) -> None:
    """Raise ConfigError for a run without an adapter, or whose adapter other programs cannot read."""
    section = job.config.adapter
    if section.kind == "none":
        raise ConfigError(
            f"{job.run.path} trained every weight and has no adapter: {job.run.merged} is the whole model. Export "
            "`merged` or `gguf` instead"
        )
    in_gguf, why = held_base.wanted(job), ""
    base = build.weightless(job.config.model, job.architecture)
    if in_gguf and adapter.adapted_experts(base, section):
        why = "its base is served as a GGUF file, and llama.cpp takes no adapter on experts (`adapter.expert_rank: 0`)"
    elif obstacle := plain_form.obstacle(
        section, base, job.architecture.model_type,
        stored=None if job.config.model.weights == "random" else identity.stored_names(job.config.model),
        largest_rank=None if in_gguf else serving.RUNTIMES[serving.runtime_of(job.config.output)].largest_rank,
    ):  # fmt: skip
        why = obstacle.why
    if why:
        raise ConfigError(
            f"the adapter of {job.run.path} has no form for other programs: {why}. Export `merged` or `gguf` instead; "
            f"PEFT reads {job.run.adapter} as it is"
        )
    if in_gguf:
        held_base.check(job)


@dataclass(frozen=True)
class _PlainAdapter:
    """The plain adapter as it was written to `folder`: `pairs` on linear layers, of one `rank`, and those `on_experts`.

    `renamed` has the name of each layer in the files. `layers_served`: how many layers a server finds; None if it was
    not counted. `without_gguf`: why there is no GGUF file of it; None if there is one.
    """

    section: AdapterSection
    folder: Path
    pairs: Pairs
    renamed: dict[str, str]
    rank: int
    on_experts: Experts
    layers_served: int | None
    without_gguf: str | None

    @property
    def layers(self) -> int:
        """The number of adapted layers, experts included."""
        return len(self.pairs) + len(self.on_experts)

    @property
    def as_in_peft(self) -> bool:
        """Whether all names are those of PEFT's layers."""
        return self.on_experts.as_in_peft and all(name == new for name, new in self.renamed.items())

    def on(self, base: Any) -> Any:
        """`base` with this adapter, read from its files."""
        plain = {"rank": self.rank, "alpha": self.rank, "ranks": {}, "rslora": False, "init": "default"}
        if self.on_experts:
            plain["expert_rank"] = self.on_experts.rank
        read = adapter.adapted(base, self.section.model_copy(update=plain), inference_mode=True)
        stored = load_file(self.folder / adapter_files.WEIGHTS)
        layers = [name.removesuffix(".lora_A.weight") for name in stored if name.endswith(".lora_A.weight")]
        pairs = {
            name.removeprefix(_PREFIX): (stored[f"{name}.lora_A.weight"], stored[f"{name}.lora_B.weight"])
            for name in layers
        }
        with torch.no_grad():
            for name, layer in _layers(read).items():
                if isinstance(layer, ParamWrapper):
                    down, up = self.on_experts.joined(name, pairs)
                    layer.scaling["default"] = 1.0
                else:
                    down, up = pairs[self.renamed[name]]
                layer.lora_A["default"].weight.copy_(down)
                layer.lora_B["default"].weight.copy_(up)
        return read.eval()


def make(job: Conversion, folder: Path) -> dict[str, Any]:
    """Write the plain adapter to `folder` and prove it with PEFT's layers. Returns the facts of export.json."""
    config = job.config
    groups = file_groups(config.model)
    names = served_names(*groups) if groups else {}
    base = build.load(config, job.architecture, job.device)
    base_logits = proof.logits(base, job.rows, job.compared.shown)
    in_gguf = held_base.write(job, base, folder / _BASE) if held_base.wanted(job) else None
    held = _write_base(job, base, folder / _BASE)
    packings = [how for weight in base.parameters() if (how := packed.packing_of(weight))]
    counted = {"count": sum(how.shape.numel() for how in packings), "differing": 0} if held else None
    adapted = adapter_files.load_adapter(base, job.run.adapter, config.adapter)
    trained = proof.logits(adapted, job.rows, job.compared.shown)
    written = _write_adapter(job, adapted, names, groups[1] if groups else [], folder)
    if in_gguf and written.without_gguf:
        raise ConfigError(
            f"{written.without_gguf}; its base is held as a GGUF file has it. Train with `output.way: rounded`"
        )
    mistaken = plain_peft.mistaken(adapted.get_base_model(), written.pairs)
    read = written.on(adapted.unload())
    # The products are summed in another order; the base is rounded to the same dtype in both.
    roundoff = proof.ROUNDOFF[base_dtype(config.adapter, config.training.precision)]
    logits = proof.logits(read, job.rows, job.compared.shown)
    result = job.compare("plain adapter", read, logits, trained, base_logits, roundoff)
    served = job.served(logits, trained, base_logits)
    differences = list[str]()
    not_proven = [written.without_gguf or f"{GGUF} was not run: llama.cpp needs the base as a GGUF file"]
    if in_gguf:
        differences += in_gguf[2]
        held, counted, not_proven = _prove_in_gguf(job, in_gguf, written, trained, base_logits)
    own_gguf = in_gguf is not None and in_gguf[0].is_relative_to(folder)
    differences += [llama_cpp.FLOOR] if in_gguf and packings else []
    differences += [compressed_export.ACTIVATIONS] if any(how.form == "fp8" for how in packings) else []
    differences += _limits(job, written, own_config=not own_gguf, mistaken=bool(mistaken))
    targets = {name.rpartition(".")[2] for name in written.pairs}
    return {
        "rank": written.rank,
        "expert_rank": written.on_experts.rank or None,
        "targets": sorted(targets | (plain_form.PROJECTIONS if written.on_experts else set())),
        "layers": written.layers,
        "layers_served": written.layers_served,
        "gguf": None if written.without_gguf else GGUF,
        "held_base": held or None,
        **({"weights": counted} if counted else {}),
        **asdict(result),
        **served,
        "compared_with": "base plus adapter as trained, in PEFT",
        "base_overrides": _overrides(job),
        "known_differences": differences,
        "not_proven": [*not_proven, *_unproven_by_servers(job, written, named=bool(names))],
    }


def _write_adapter(
    job: Conversion, adapted: Any, names: dict[str, str | None], groups: list[streamed.ConversionGroup], folder: Path
) -> _PlainAdapter:
    """Write the adapter of a PeftModel in both formats. Raises ConfigError if a server would not find all of it."""
    model_type = job.architecture.model_type
    pairs = plain(adapted)
    renamed = {name: _served(names, name) for name in pairs}
    on_experts = Experts(adapted, groups, model_type)
    rank = write(pairs, renamed, adapted.peft_config["default"], public(job.config.model.name), folder, on_experts)
    layers_served = None
    if names and (on_experts or model_type in server_names.RULES):
        # Refused if a server would not find all layers.
        stored = weight_files.shapes(folder / adapter_files.WEIGHTS)
        layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in stored}
        in_files = [name for file in _files(job.config.model) for name in weight_files.shapes(file)]
        server_names.served(sorted(layers), in_files, job.architecture.model_type)
        layers_served = len(pairs) + len(on_experts)
    fingerprint.save_tokenizer(job.tokenizer, job.base_identity, folder)
    without_gguf: str | None = f"no {GGUF}: it has no form here for experts"
    if not on_experts:
        try:
            gguf_model.write_lora(job.architecture, pairs, rank, folder / GGUF)
            without_gguf = None
        except ConfigError as error:  # llama.cpp cannot express it
            (folder / GGUF).unlink(missing_ok=True)
            without_gguf = f"no {GGUF}: {error}"
    return _PlainAdapter(job.config.adapter, folder, pairs, renamed, rank, on_experts, layers_served, without_gguf)


def _limits(job: Conversion, written: _PlainAdapter, *, own_config: bool, mistaken: bool) -> list[str]:
    """What the files cannot say and what PEFT cannot read of them, as sentences.

    `own_config`: the base is served with its own config.json. `mistaken`: PEFT would take some layers for experts.
    """
    differences = []
    if own_config and (overrides := _overrides(job)):
        differences.append(
            f"the base must be served with {json.dumps(overrides)} in its config.json, as the commands do; the files "
            "of an adapter cannot say so"
        )
    if mistaken or not written.as_in_peft:
        on = " on AutoModelForCausalLM" if written.layers_served else ""
        differences.append(
            f"these files are for servers, which look up the names in the base's files; PEFT{on} reads "
            f"{job.run.adapter.name}/ instead"
        )
    return differences


def _unproven_by_servers(job: Conversion, written: _PlainAdapter, *, named: bool) -> list[str]:
    """What is not proven of vLLM and SGLang; `named`: the base's files have tensors by whose names layers are found."""
    unproven = ["vLLM and SGLang were not run; their limits are checked as of vLLM 0.33"]
    if written.on_experts:
        unproven.append("SGLang's names for experts, so that no command for it is given")
    if not named:
        unproven.append("whether the base's files have layers of these names: they are not safetensors files")
    elif written.layers_served is None and "text_config" in job.architecture.sub_configs:
        unproven.append("whether vLLM finds these layers, whose names in this type of checkpoint are unknown here")
    return unproven


def _prove_in_gguf(
    job: Conversion, in_gguf: tuple[Path, held_base.HeldWeights, list[str]], written: _PlainAdapter,
    trained: list[torch.Tensor], base_logits: list[torch.Tensor],
) -> tuple[dict[str, Any], dict[str, int] | None, list[str]]:  # fmt: skip
    """Compare the base in a GGUF file, with the adapter, with what was trained.

    `in_gguf`: the file, its weights and llama.cpp's differences. Returns the facts of export.json on the base, the
    number of its weights and of those that differ (None: not decoded), and what was not proven.
    """
    file, weights, differences = in_gguf
    base = held_base.read(job, file, weights, base_dtype(job.config.adapter, job.config.training.precision))
    whole = base and written.on(base)
    counted = held_base.weights(job, file, weights, read=whole is not None)
    held: dict[str, Any] = {
        "weights_differing": counted and counted["differing"],
        "file": f"{_BASE}/{file.name}" if file.is_relative_to(written.folder) else str(file.absolute()),
        "kind": job.config.output.serve if job.config.quantization.kind == "none" else job.config.quantization.kind,
    }
    if whole:
        held |= job.served(proof.logits(whole, job.rows), trained, base_logits)["served"]
    lora = written.folder / GGUF
    held["llama_cpp"], not_proven = held_base.run(job, file, lora, trained, base_logits, differences)
    if counted is None:
        not_proven.append("that programs but llama.cpp decode the base's weights to what was trained on")
    return held, counted, not_proven


def _write_base(job: Conversion, base: Any, folder: Path) -> dict[str, Any]:
    """Write `base`, as training holds it, to `folder` for vLLM; nothing if its files are so already."""
    kind, model = job.config.quantization.kind, job.config.model
    own = model.weights == "pretrained" and not prequantized.form(job.architecture)
    if not (kind in FORMS and FORMS[kind].is_of_safetensors) or not own or held_base.wanted(job):
        return {}
    folder.mkdir()
    held = held_base.packed_of(job, base)
    source = weights_directory(model.name, model.revision)
    written = compressed_export.write(source, folder, job.architecture, kind, held)
    for name, weight in held.items():
        if not torch.equal(written[name], packed.exact(weight).cpu()):
            raise ArtifactError(
                f"{folder} decodes `{name}` to other weights than were trained on. Nothing was published"
            )
    return {"file": folder.name, "kind": kind, "weights_differing": 0}


def file_groups(model: ModelSection) -> tuple[Any, list[streamed.ConversionGroup]] | None:
    """The base without weights, and how the tensors of its safetensors files become its weights; None without such
    files.
    """
    if not (files := _files(model)):
        return None
    base = build.weightless(model)
    return base, streamed.Weights(base, files).groups


def served_names(base: Any, groups: list[streamed.ConversionGroup]) -> dict[str, str | None]:
    """The name by which a server finds each weight of the model; None unless the weight is a single tensor of the
    files.
    """
    alone = {
        target: group.sources[0] if group.converter is None and len(group.sources) == 1 else None
        for group in groups
        for target in group.targets
    }
    prefix = f"{base.base_model_prefix}."
    if all(target in (source, f"{prefix}{source}") for target, source in alone.items() if source):
        # The names are the same, or the files are of a model without its head: every program adds the prefix to those.
        return {target: source and target for target, source in alone.items()}
    kind = base.config.model_type  # that of the composite model, if the class is for the whole
    module_of = functools.partial(server_names.of_module, model_type=kind)
    return {
        target: target if source and module_of(target) == module_of(source) else source
        for target, source in alone.items()
    }


def _files(model: ModelSection) -> list[Path]:
    """The safetensors files that the base's weights are loaded from; none for random weights."""
    if model.weights == "random":
        return []
    return identity.loaded_files(weights_directory(model.name, model.revision))


def _served(names: dict[str, str | None], layer: str) -> str:
    """The name of a layer of the trained model in the base's files. Raises ConfigError if it has none."""
    if not names:
        return layer
    if not (name := names.get(f"{layer}.weight")):
        raise ConfigError(
            f"the adapter has no form for other programs: the base's files have no weight of their own for `{layer}`, "
            "by whose name they would find it. Export `merged` or `gguf` instead; PEFT reads adapter/ as it is"
        )
    return name.removesuffix(".weight")


def _overrides(job: Conversion) -> dict[str, Any]:
    """The settings that the base's config.json lacks: the rotary scaling it was trained with."""
    text = job.architecture.get_text_config()
    names = ("rope_parameters", "max_position_embeddings") if job.config.model.rope_scaling else ()
    return {name: getattr(text, name) for name in names}


def plain(adapted: Any) -> Pairs:
    """The LoRA pairs of the linear layers of a PeftModel, the scale in B and all ranks padded with zeros to the largest
    of any layer.
    """
    layers = _layers(adapted)
    if unusual := [name for name, layer in layers.items() if not isinstance(layer.lora_A["default"], torch.nn.Linear)]:
        raise ConfigError(f"the adapter on `{unusual[0]}` is not on a linear layer; export `merged` instead")
    rank = max(layer.r["default"] for layer in layers.values())
    pairs = {}
    for name, layer in layers.items():
        if isinstance(layer, ParamWrapper):
            continue
        missing = rank - layer.r["default"]
        down = layer.lora_A["default"].weight.detach().float().cpu()
        up = layer.lora_B["default"].weight.detach().float().cpu() * layer.scaling["default"]
        pad = torch.nn.functional.pad
        pairs[name] = pad(down, (0, 0, 0, missing)).contiguous(), pad(up, (0, missing)).contiguous()
    return pairs


def _layers(adapted: Any) -> dict[str, Any]:
    """The adapted layers of a PeftModel by their names in its base."""
    modules = adapted.get_base_model().named_modules()
    return {name: module for name, module in modules if isinstance(module, LoraLayer) and module.lora_A}


def write(
    pairs: Pairs, renamed: dict[str, str], original: Any, base: str, folder: Path, on_experts: Experts | None = None
) -> int:
    """Write `pairs` under their new names, and adapters on experts, with the targets of `original`, a LoraConfig.
    Returns the rank.

    Where names differ from the model's, the targets are the new names.
    """
    of_experts = on_experts.tensors() if on_experts else {}
    rank = max([*(len(down) for down, _ in pairs.values()), *([on_experts.rank] if on_experts else [])])
    same = all(name == new for name, new in renamed.items())
    targets = original.target_modules if same else set(renamed.values())
    options: dict[str, Any] = {}
    if on_experts and on_experts.as_in_peft:
        ranks = dict.fromkeys(original.target_parameters, on_experts.rank)
        options = {"target_parameters": original.target_parameters, "rank_pattern": ranks, "alpha_pattern": ranks}
    elif on_experts:
        targets = {*targets, *(name.rpartition(".")[2] for name in of_experts)}
    LoraConfig(
        r=rank, lora_alpha=rank, target_modules=targets, fan_in_fan_out=original.fan_in_fan_out,
        task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True, **options,
    ).save_pretrained(str(folder))  # fmt: skip
    tensors = {}
    for name, (down, up) in [*((renamed[name], pair) for name, pair in pairs.items()), *of_experts.items()]:
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = down
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = up
    save_file(tensors, folder / adapter_files.WEIGHTS, metadata={"format": "pt"})
    return rank


EXPORTER = Exporter(check, make)
