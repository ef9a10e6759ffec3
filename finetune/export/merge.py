"""Export: merges the adapter into the unquantized 16-bit base, writes it in a format, and publishes it once proven.

The staged directory is loaded again, and its logits are compared with base plus adapter on held-out rows. An export
that differs by more than rounding explains is never published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError

from finetune.config import Config, ModelSection, QuantizationSection
from finetune.data import fingerprint
from finetune.data import prepare as data_prepare
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export import formats, proof
from finetune.export.card import model_card
from finetune.model import attention, chat_template, experts, identity
from finetune.model.adapter import check_files, load_adapter
from finetune.model.base import load_architecture, refuse_not_finite
from finetune.model.build import Blueprint
from finetune.model.tokenizer import load_tokenizer
from finetune.runtime import libraries
from finetune.runtime.environment import describe
from finetune.storage import weight_files
from finetune.storage.files import not_written, staged, write_json
from finetune.storage.rundir import RunDirectory

# Number of held-out rows, and tokens of each, on which the logits are compared.
_ROWS = 8
_ROW_TOKENS = 256

_MERGED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.bfloat16}


def merge(
    run: RunDirectory, config: Config, name: str, device: torch.device, note: Callable[[str], None]
) -> dict[str, Any]:
    """Write the export of format `name` and return its proof (see `proof.Proof`) with the identity of the base.

    `note` is called if tokenizer or base cannot be verified. Raises ConfigError for an unknown format; ArtifactError if
    there is no adapter, if tokenizer or base are not those it was trained with, or if the export is not equivalent to
    the trained model; MachineError if writing fails. A failure leaves the adapter and an earlier export untouched.
    """
    form, target = formats.find(name), run.path / name
    if not isinstance(form, formats.Format):
        raise ConfigError(f"`{name}` is made from the published model: `finetune export {run.path} --to {name}` does")
    if config.adapter.kind == "none":
        raise ArtifactError(f"{run.path} trained every weight; {run.merged} is already the whole model")
    if config.model.weights == "random":
        raise ArtifactError(f"{run.path} has a base of random weights, which were not saved; there is nothing to merge")
    dtype = _MERGED_DTYPES[config.training.precision]
    tokenizer = load_tokenizer(config.model, run.chat_template)
    check_files(run.adapter, config.adapter)
    fingerprint.check(tokenizer, run.adapter)
    rows = data_prepare.held_out_ids(config.data, tokenizer, _ROWS, _ROW_TOKENS)

    base = _base(config, dtype, device)
    base_identity = identity.of_base(config.model, note)
    fingerprint.check_base(config.model, base_identity, run.adapter, note)
    base_logits = proof.logits(base, rows)
    if not all(map(weight_files.is_finite, base_logits)):
        refuse_not_finite(config.model)
    layers = base.config.get_text_config().num_hidden_layers
    mixture = experts.is_mixture(base)
    adapted = load_adapter(base, run.adapter, config.adapter)
    adapted_logits = proof.logits(adapted, rows)
    merged = adapted.merge_and_unload(safe_merge=True)
    try:
        with staged(target) as folder:
            form.write(_ready_for_use(merged.to(dtype), tokenizer), tokenizer, folder)
            fingerprint.save(tokenizer, base_identity, folder)
            del base, adapted, merged
            libraries.return_freed_memory()
            written_logits = proof.logits(form.load(folder, config.model, dtype, device), rows)
            bound = proof.bound(layers, max(proof.ROUNDOFF[dtype], form.roundoff))
            result = proof.compare(written_logits, adapted_logits, base_logits, bound, mixture=mixture)
            _refuse_unless_equal(result, name)
            record = {
                "format": name,
                **asdict(result),
                "base": config.model.name,
                "base_sha256": base_identity and base_identity.rpartition(":")[2],
            }
            write_json(folder / "merge.json", {**record, "environment": describe(device)})
            (folder / "README.md").write_text(model_card(run, config, record, form.help), encoding="utf-8")
    except (OSError, SafetensorError) as error:  # safetensors 0.8 raises its own error for a full disk
        raise MachineError(
            f"{not_written(target, error)}; the adapter is safe in {run.adapter}, and "
            f"`finetune export {run.path} --to {name}` exports it"
        ) from None
    return record


def load_merged(run: RunDirectory, section: ModelSection, device: torch.device) -> Any:
    """The published merged model of the base in `section`. Raises ArtifactError if there is none."""
    if not (run.merged / "config.json").is_file():
        raise ArtifactError(f"{run.merged}: no merged model; run `finetune merge {run.path}`")
    return formats.load_transformers(run.merged, section, None, device)


def _base(config: Config, dtype: torch.dtype, device: torch.device) -> Any:
    """The base to merge into, unquantized in 16 bit.

    A LoftQ adapter corrects the error of one quantization, so for it the base is quantized as in training and then
    dequantized.
    """
    architecture = load_architecture(config.model)
    implementation, _ = attention.choose("auto", architecture, device.type, config.training.precision)
    loftq = config.adapter.init == "loftq"
    quantization = config.quantization if loftq else QuantizationSection(kind="none")
    base = Blueprint(config.model, quantization, architecture, implementation, dtype).load(device)
    return base.dequantize(dtype) if loftq else base


def _ready_for_use(model: Any, tokenizer: Any) -> Any:
    # The KV cache was off for training, but is needed for generation.
    model.config.use_cache = True
    # Generation must stop at the end-of-turn token of the template that was trained.
    ends = model.generation_config.eos_token_id
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    model.generation_config.eos_token_id = list(dict.fromkeys([*known, *chat_template.stop_ids(tokenizer)]))
    return model


def _refuse_unless_equal(result: proof.Proof, name: str) -> None:
    if result.holds:
        return
    if result.error <= result.bound:
        raise ArtifactError(
            f"the {name} model has only {result.kept:.0%} of what the adapter changed (by {result.effect:.2%}): its "
            "weights are rounded more coarsely than that. Nothing was published; use the adapter with its base instead"
        )
    raise ArtifactError(
        f"the {name} model is not the trained one: its logits differ by {result.error:.2%} from base plus adapter, but "
        f"rounding explains only {result.bound:.2%} (the adapter itself changed them by {result.effect:.2%}). Nothing "
        "was published; use the adapter with its base instead"
    )
