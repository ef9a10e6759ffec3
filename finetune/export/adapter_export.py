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

import json
from dataclasses import asdict
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
from finetune.export.compressed_layouts import LAYOUTS
from finetune.export.conversion import Conversion
from finetune.export.gguf import gguf_model, held_base, llama_cpp
from finetune.export.server_experts import Experts
from finetune.model import build
from finetune.model.adapters import adapter, adapter_files, plain_form, plain_peft
from finetune.model.base import base_dtype
from finetune.model.source import identity, prequantized
from finetune.model.source.locate import weights_directory
from finetune.model.structure import packed, streamed
from finetune.storage import weight_files

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""A (rank, in) and B (out, rank) of each adapted layer in float32, by its name in the base."""

GGUF = "adapter.gguf"
_BASE = "base"  # a folder of its own, as transformers would take the adapter beside a base for a part of it
_PREFIX = "base_model.model."


def check(job: Conversion) -> None:
    """Raise ConfigError for a run without an adapter, or whose adapter other programs cannot read."""
    section = job.config.adapter
    if section.kind == "none":
        raise ConfigError(
            f"{job.run.path} trained every weight and has no adapter: {job.run.merged} is the whole model. Export "
            "`merged` or `gguf` instead"
        )
    if job.config.quantization.snap:
        raise ConfigError(
            f"the adapter of {job.run.path} was trained to be rounded with its base (`output.way: exact`), and beside "
            "it would give less than the base alone; export `gguf` instead"
        )
    if why := _why_not_plain(job):
        raise ConfigError(
            f"the adapter of {job.run.path} has no form for other programs: {why}. Export `merged` or `gguf` instead; "
            f"PEFT reads {job.run.adapter} as it is"
        )
    if held_base.wanted(job):
        held_base.check(job)


def _why_not_plain(job: Conversion) -> str | None:
    """The reason why vLLM, SGLang and llama.cpp cannot load the run's adapter; None if they can."""
    section, in_gguf = job.config.adapter, held_base.wanted(job)
    base = build.weightless(job.config.model, job.architecture)
    if in_gguf and adapter.adapted_experts(base, section):
        return "its base is served as a GGUF file, and llama.cpp takes no adapter on experts (`adapter.expert_rank: 0`)"
    found = plain_form.obstacle(
        section, base, job.architecture.model_type,
        stored=None if job.config.model.weights == "random" else identity.stored_names(job.config.model),
        largest_rank=None if in_gguf else serving.RUNTIMES[serving.runtime_of(job.config.output)].largest_rank,
    )  # fmt: skip
    return found.why if found else None


def make(job: Conversion, folder: Path) -> dict[str, Any]:
    """Write the plain adapter to `folder` and prove it with PEFT's layers. Returns the facts of export.json."""
    config = job.config
    architecture = job.architecture
    groups = file_groups(config.model)
    names = served_names(*groups) if groups else {}
    base = build.load(config, architecture, job.device)
    base_logits = proof.logits(base, job.rows, job.shown)
    beside = held_base.write(job, base, folder / _BASE) if held_base.wanted(job) else None
    held = _write_base(job, base, folder / _BASE)
    packings = [how for weight in base.parameters() if (how := packed.packing_of(weight))]
    counted = {"count": sum(how.shape.numel() for how in packings), "differing": 0} if held else None
    adapted = adapter_files.load_adapter(base, job.run.adapter, config.adapter)
    trained = proof.logits(adapted, job.rows, job.shown)
    pairs = plain(adapted)
    renamed = {name: _served(names, name) for name in pairs}
    on_experts = Experts(adapted, groups[1] if groups else [], architecture.model_type)
    rank = write(pairs, renamed, adapted.peft_config["default"], public(config.model.name), folder, on_experts)
    activated = None
    if names and (on_experts or architecture.model_type in server_names.RULES):
        _check_names(job, folder)
        activated = len(pairs) + len(on_experts)
    fingerprint.save(job.tokenizer, job.base_identity, folder)
    overrides = _overrides(job)
    left_out: str | None = f"no {GGUF}: it has no form here for experts"
    if not on_experts:
        left_out = _write_gguf(architecture, pairs, rank, folder)
    if beside and left_out:
        raise ConfigError(f"{left_out}; its base is held as a GGUF file has it. Train with `output.way: rounded`")
    mistaken = plain_peft.mistaken(adapted.get_base_model(), pairs)
    read = _read(adapted.unload(), config.adapter, renamed, rank, folder, on_experts)
    # The products are summed in another order; the base is rounded to the same dtype in both.
    roundoff = proof.ROUNDOFF[base_dtype(config.adapter, config.training)]
    found = proof.logits(read, job.rows, job.shown)
    result = job.compare("plain adapter", read, found, trained, base_logits, roundoff)
    served = job.served(found, trained, base_logits)
    differences = list[str]()
    if beside:
        file, weights, differences = beside
        again = held_base.read(job, file, weights, base_dtype(config.adapter, config.training))
        whole = again and _read(again, config.adapter, renamed, rank, folder, on_experts)
        counted = held_base.weights(job, file, weights, read=whole is not None)
        held = {"weights_differing": counted and counted["differing"]}
        proven, unrun = _prove_in_gguf(job, file, whole, folder, trained, base_logits, differences)
        held |= proven
        if counted is None:
            unrun.append("that programs but llama.cpp decode the base's weights to what was trained on")
    if beside and packings:
        differences.append(llama_cpp.FLOOR)
    if any(how.form == "fp8" for how in packings):
        differences.append(compressed_export.ACTIVATIONS)
    if overrides and not (beside and beside[0].is_relative_to(folder)):
        differences.append(
            f"the base must be served with {json.dumps(overrides)} in its config.json, as the commands do; the files "
            "of an adapter cannot say so"
        )
    if mistaken or any(name != renamed[name] for name in pairs) or not on_experts.as_in_peft:
        on = " on AutoModelForCausalLM" if activated else ""
        differences.append(
            f"these files are for servers, which look up the names in the base's files; PEFT{on} reads "
            f"{job.run.adapter.name}/ instead"
        )
    unknown = names and activated is None and "text_config" in job.architecture.sub_configs
    return {
        "rank": rank,
        "expert_rank": on_experts.rank or None,
        "targets": sorted(
            {name.rpartition(".")[2] for name in pairs} | (plain_form.PROJECTIONS if on_experts else set())
        ),
        "layers": len(pairs) + len(on_experts),
        "layers_served": activated,
        "gguf": None if left_out else GGUF,
        "held_base": held or None,
        **({"weights": counted} if counted else {}),
        **asdict(result),
        **served,
        "compared_with": "base plus adapter as trained, in PEFT",
        "base_overrides": overrides,
        "known_differences": differences,
        "not_proven": [
            *(unrun if beside else [left_out or f"{GGUF} was not run: llama.cpp needs the base as a GGUF file"]),
            "vLLM and SGLang were not run; their limits are checked as of vLLM 0.33",
            *(["SGLang's names for experts, so that no command for it is given"] if on_experts else []),
            *([] if names else ["whether the base's files have layers of these names: they are not safetensors files"]),
            *(
                ["whether vLLM finds these layers, whose names in this type of checkpoint are unknown here"]
                if unknown
                else []
            ),
        ],
    }


def _prove_in_gguf(
    job: Conversion, file: Path, whole: Any | None, folder: Path, trained: list[torch.Tensor],
    base: list[torch.Tensor], differences: list[str],
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Compare the base in `file` with the adapter, `whole` (None: only llama.cpp reads it), with what was trained.

    Returns the facts of export.json, and what was not run.
    """
    held: dict[str, Any] = {
        "file": f"{_BASE}/{file.name}" if file.is_relative_to(folder) else str(file.absolute()),
        "kind": job.config.output.serve if job.config.quantization.kind == "none" else job.config.quantization.kind,
    }
    if whole:
        held |= job.served(proof.logits(whole, job.rows), trained, base)["served"]
    held["llama_cpp"], unrun = held_base.run(job, file, folder / GGUF, trained, base, differences)
    return held, unrun


def _write_base(job: Conversion, base: Any, folder: Path) -> dict[str, Any]:
    """Write `base` to `folder` as vLLM reads the form that training holds it in; nothing if its files are so already.

    Raises ArtifactError if the bytes are not those of the training, or decode to other weights.
    """
    kind, model = job.config.quantization.kind, job.config.model
    own = model.weights == "pretrained" and not prequantized.form(job.architecture)
    if kind not in LAYOUTS or not own or held_base.wanted(job):
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
    """The base without weights, and how the tensors of its safetensors files become its weights; None without them."""
    if not (files := _files(model)):
        return None
    base = build.weightless(model)
    return base, streamed.Weights(base, files).groups


def served_names(base: Any, groups: list[streamed.ConversionGroup]) -> dict[str, str | None]:
    """The name for a server of each weight of the model that is one tensor in the base's files, else None."""
    alone = {
        target: group.sources[0] if group.converter is None and len(group.sources) == 1 else None
        for group in groups
        for target in group.targets
    }
    prefix = f"{base.base_model_prefix}."
    if all(target in (source, f"{prefix}{source}") for target, source in alone.items() if source):
        # The names are the same, or the files are of a model without its head: every program adds the prefix to those.
        return {target: source and target for target, source in alone.items()}
    kind = base.config.model_type  # of the composite model, if the class is of the whole
    alike = {target for target, source in alone.items() if source and server_names.alike(target, source, kind)}
    return {target: target if target in alike else source for target, source in alone.items()}


def _files(model: ModelSection) -> list[Path]:
    """The safetensors files that the base's weights are loaded from; none for random weights."""
    if model.weights == "random":
        return []
    return identity.loaded_files(weights_directory(model.name, model.revision))


def _check_names(job: Conversion, folder: Path) -> None:
    """Raise ConfigError if a server would not find all layers of the adapter in `folder`."""
    kind = job.architecture.model_type
    stored = weight_files.shapes(folder / adapter_files.WEIGHTS)
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in stored}
    names = [name for file in _files(job.config.model) for name in weight_files.shapes(file)]
    server_names.served(sorted(layers), names, kind)


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


def _read(
    base: Any, section: AdapterSection, renamed: dict[str, str], rank: int, folder: Path, on_experts: Experts
) -> Any:
    """`base` with the plain adapter as it was written to `folder`."""
    plain = {"rank": rank, "alpha": rank, "ranks": {}, "rslora": False, "init": "default"}
    if on_experts:
        plain["expert_rank"] = on_experts.rank
    read = adapter.adapted(base, section.model_copy(update=plain), inference_mode=True)
    stored = load_file(folder / adapter_files.WEIGHTS)
    pairs = {
        name.removeprefix(_PREFIX).removesuffix(".lora_A.weight"): (down, stored[name.replace(".lora_A.", ".lora_B.")])
        for name, down in stored.items()
        if name.endswith(".lora_A.weight")
    }
    with torch.no_grad():
        for name, layer in _layers(read).items():
            if isinstance(layer, ParamWrapper):
                down, up = on_experts.joined(name, pairs)
                layer.scaling["default"] = 1.0
            else:
                down, up = pairs[renamed[name]]
            layer.lora_A["default"].weight.copy_(down)
            layer.lora_B["default"].weight.copy_(up)
    return read.eval()


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
        pairs[name] = _padded(down, rows=missing), _padded(up, columns=missing)
    return pairs


def _layers(adapted: Any) -> dict[str, Any]:
    """The adapted layers of a PeftModel by their names in its base."""
    modules = adapted.get_base_model().named_modules()
    return {name: module for name, module in modules if isinstance(module, LoraLayer) and module.lora_A}


def _padded(matrix: torch.Tensor, rows: int = 0, columns: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows)).contiguous()


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


def _write_gguf(architecture: Any, pairs: Pairs, rank: int, folder: Path) -> str | None:
    """Write the adapter for llama.cpp; returns the reason if llama.cpp cannot express it."""
    try:
        gguf_model.write_lora(architecture, pairs, rank, folder / GGUF)
    except ConfigError as error:
        (folder / GGUF).unlink(missing_ok=True)
        return f"no {GGUF}: {error}"
    return None
