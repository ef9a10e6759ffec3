"""The merged model as a GGUF file, proven by the installed programs that read one."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.field_types import pick
from finetune.config.serving import GRIDS
from finetune.errors import ConfigError, MachineError
from finetune.export import proof
from finetune.export.conversion import Conversion, Exporter, ExportRequest
from finetune.export.gguf import gguf_model, gguf_recipes, gguf_vocabulary, llama_cpp
from finetune.export.gguf.gguf_types import TYPES
from finetune.forms import FORMS
from finetune.model.source import gguf_families
from finetune.model.source.locate import hub_call
from finetune.model.structure import experts, quantizers
from finetune.runtime import libraries, patches


def check(job: ExportRequest) -> None:
    """Raise ConfigError if llama.cpp cannot express the model or its tokenizer, MachineError if this machine lacks the
    program that makes or proves the file.
    """
    if job.config.scorer:
        raise ConfigError(
            f"{job.run.path} is a {job.config.scorer}, whose head has no GGUF form here; export `merged`, which "
            "transformers loads as a sequence classifier"
        )
    if job.config.model.vision != "none":
        raise ConfigError(
            f"{job.run.path} was trained on images, for which llama.cpp needs the projector in a file of its own, "
            "which is not written here; export `merged`, which vLLM and transformers serve with images"
        )
    if job.kind not in TYPES:
        raise ConfigError(
            f"{job.run.path} was trained in {job.kind}, which GGUF files do not have; export `{job.kind}`, which vLLM "
            "serves"
        )
    family = gguf_model.check(job.architecture, job.tokenizer)
    if not family.readable and not llama_cpp.installed():
        raise MachineError(
            f"a GGUF file of `{family.arch}` is proven by llama.cpp alone: `pip install xllamacpp` (34 MB)"
        )
    if TYPES[job.kind].mixed:
        gguf_recipes.check(job.kind)


def forms(model: Any, kind: str) -> dict[str, str]:
    """The form of each weight of `model` (on the meta device) that is packed in a file of `kind`. Raises ConfigError.

    Without those that are rounded by themselves once their columns are in llama.cpp's order.
    """
    quantized = {name: form for name, form in FORMS.items() if form.gguf and form.is_served}
    form = pick(quantized, kind, "GGUF type to round to")
    forms = quantizers.recipe_of(model, kind if form.recipe else "q8_0")
    forms = {name: form for name, form in forms.items() if not name.endswith(gguf_families.OTHER_COLUMNS)}
    if form.recipe:
        return forms
    assert form.gguf
    columns = form.gguf.block
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {f"{name}.weight" for name, module in model.named_modules() if module in ends}
    within = {name for name in forms if name not in tables and model.get_parameter(name).shape[-1] % columns == 0}
    return {name: kind if name in within else form for name, form in forms.items()}


def file_name(kind: str) -> str:
    return f"model-{kind}.gguf"


def make(job: Conversion, folder: Path) -> dict[str, Any]:
    """Write the GGUF file to `folder` and prove it. Returns the facts of export.json."""
    file, mixed = folder / file_name(job.kind), TYPES[job.kind].mixed
    # Prompts within llama.cpp's context that leave room for the next token.
    longest = gguf_model.context(job.architecture)[0] - 1
    rows, labels = ([row[:longest] for row in each] for each in (job.rows, job.compared.labels))
    job = replace(job, compared=job.compared._replace(ids=rows, labels=labels))
    # In float32 if a CPU has room for it, else as the model is written: the files are twice as large then, and the
    # reader holds two copies for a while.
    stored_bytes = sum(file.stat().st_size for file in job.run.merged.glob("*.safetensors"))
    has_room = job.device.type == "cpu" and 4 * stored_bytes < psutil.virtual_memory().available
    model = job.load_merged(torch.float32 if has_room else None)
    trained = proof.logits(model, job.rows)
    approximated, expected = [], trained
    if said := gguf_families.family(model.config).approximate(model):
        expected = proof.logits(model, job.rows)
        error = proof.compare(expected, trained, trained, 1.0, mixture=experts.is_mixture(model)).error
        approximated = [f"{said}: its logits differ by {error:.2%} on the rows that were compared"]
    dtype, config = model.dtype, model.config
    model = model.to("meta")  # its modules are looked at below
    libraries.return_freed_memory()
    differences = gguf_model.write(
        job.run.merged, config, job.tokenizer, file, job.kind, starts_with_bos=job.starts_with_bos, packed=job.packed
    )
    # Products are summed alike in both, so what a computation in 16 bit rounds counts as much as the weights.
    roundoff = max(TYPES[job.kind].roundoff, proof.ROUNDOFF[dtype])
    base = job.base_logits(dtype)
    readable = is_readable(config, job.kind)
    following: list[list[int]] | None = None
    if readable:
        written = load(file, config, dtype, job.device)
        read_back = proof.logits(written, job.rows)
        del written
        libraries.return_freed_memory()
        found, known, moved = read_back, expected, base
        if mixed:  # `compare` reports what 4 to 6 bits change; llama.cpp must agree with this file
            expected = read_back
    else:
        found, known, moved, following = llama_cpp.logits(file, job, expected, base)
        roundoff *= llama_cpp.ROUNDINGS
    result = job.compare(f"GGUF file ({job.kind})", model, found, known, moved, roundoff)
    ran, not_proven = llama_cpp.compare(
        file, job, expected,
        tokenizes_alike=gguf_vocabulary.SPACES_AFTER_SPECIAL not in differences,
        same_top=readable or not mixed,
        nearly=llama_cpp.NEARLY if mixed else 0.0,
    )  # fmt: skip
    if job.packed:  # raises unless every weight is as it was rounded
        gguf_model.differing(job.run.merged, config, file, job.packed)
    differing = gguf_model.differing(job.run.merged, config, file, {})
    return {
        "type": job.kind,
        "file": file.name,
        "weights": differing,
        **asdict(result),
        **job.served(found, known, moved, following),
        "compared_with": "the merged model, in " + ("transformers' own GGUF reader" if readable else "llama.cpp"),
        "computed_in": str(dtype).removeprefix("torch."),
        "llama_cpp": ran,
        "known_differences": [*differences, *approximated, *([llama_cpp.FLOOR] if job.kind in GRIDS else [])],
        "not_proven": not_proven,
    }


def is_readable(config: Any, kind: str) -> bool:
    """Whether transformers reads a file of this type; it ignores factors of matrices."""
    form = FORMS.get(kind)
    has_factors = form is not None and form.module and form.codec.gguf.factor
    return gguf_families.family(config).readable and not has_factors


def load(file: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in a GGUF file by transformers' reader, whose own configuration lacks what files store in tensors."""
    config = copy.deepcopy(gguf_families.text(config))
    vars(config).pop("quantization_config", None)  # set if the base is a GGUF file
    if config.model_type == "gemma3_text":  # the file's norms contain its attention scale
        config.query_pre_attn_scalar = gguf_families.gemma_scale(config)
    if config.model_type == "mistral":  # llama.cpp, and so the reader, takes it for a Llama
        fields = config.to_dict()
        config = AutoConfig.for_model("llama", **{key: fields[key] for key in fields.keys() - {"model_type"}})
    with patches.GGUF_PROGRESS.by(lambda tensors, **_: tensors):
        return hub_call(
            f"GGUF file {file}",
            lambda: AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=file.name, config=config, dtype=dtype, device_map={"": device}
            ),
        )


EXPORTER = Exporter(check, make, forms)
