"""Merges the adapter into its base, weight by weight from file to file, and publishes the result once it is proven.

    the base's shards ─▶ each weight: (quantized and back) + update in float32, rounded once ─▶ shards of the same names
                                                                                                          │
    base with adapter ─▶ logits ──────────────── compared ──────────────── logits ◀─── run from the files ◀┘

No model is ever in memory: host memory is that of the largest weight in float32, three times, or of a layer while the
logits are computed. A shard that is written is kept, so a merge that was killed goes on with the next one. A model
that differs from base plus adapter by more than rounding explains is never published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from finetune.config import Config, ModelSection
from finetune.config.field_types import unknown
from finetune.data import fingerprint
from finetune.data import prepare as data_prepare
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export import proof, shards
from finetune.export.bases import ONTO, Bases, Merging, Onto
from finetune.export.card import model_card, public
from finetune.export.export_formats import FORMATS
from finetune.model.adapters.adapter_files import check_files
from finetune.model.base import from_safetensors, load_architecture, refuse_missing
from finetune.model.source import file_hashes, identity
from finetune.model.source.locate import hub_call, pinned_code, weights_directory
from finetune.model.source.tokenizer import load_tokenizer
from finetune.runtime import libraries
from finetune.runtime.environment import describe
from finetune.storage.files import not_written, staged, write_json, write_text
from finetune.storage.rundir import RunDirectory

_CLASS = "AutoModelForCausalLM"


def merge(
    run: RunDirectory, config: Config, device: torch.device, note: Callable[[str], None], onto: str | None = None
) -> dict[str, Any]:
    """Publish the merged model and return its proof (see `proof.Proof`) with the identity of the base.

    `onto` is a key of ONTO, by default the 16-bit base (the quantized one for LoftQ). `note` is called if tokenizer or
    base cannot be verified, or the rows are not here. Raises ConfigError for a base that there is not, and for a run
    that trained no adapter; ArtifactError if the adapter is missing, if tokenizer or base are not those it was trained
    with, or if the merged model is not equivalent to base plus adapter; MachineError if writing fails. A failure leaves
    the adapter and an earlier merged model untouched.
    """
    if config.adapter.kind == "none":
        raise ConfigError(
            f"{run.path} trained every weight and has no adapter to merge: {run.merged} is already the whole model. "
            f"`finetune export {run.quoted} --to merged` adds a model card, and `--to gguf` converts it"
        )
    if config.model.weights == "random":
        raise ArtifactError(f"{run.path} has a base of random weights, which were not saved; there is nothing to merge")
    chosen = _chosen(config, onto)
    tokenizer = load_tokenizer(config.model, run.chat_template)
    check_files(run.adapter, config.adapter)
    fingerprint.check(tokenizer, run.adapter)
    rows, rows_of = data_prepare.compared_rows(config.data, tokenizer, proof.ROWS, proof.ROW_TOKENS, note)

    folder = weights_directory(config.model.name, config.model.revision, download=True)
    base_identity = identity.of_base(config.model, note)
    fingerprint.check_base(config.model, base_identity, run.adapter, note)
    bases = Bases(config, run.adapter, identity.loaded_files(folder), device)
    made_from = {
        "onto": chosen, "base": base_identity, "dtype": str(bases.dtype),
        "adapter": file_hashes.sha256(run.adapter / "adapter_model.safetensors"),
    }  # fmt: skip
    try:
        with staged(run.merged, made_from if base_identity else None) as written:
            fingerprint.save(tokenizer, base_identity, written)
            shards.write_settings(bases, folder, tokenizer, written)
            shards.write_weights(bases.merging(chosen), written)
            record = {
                "format": "merged",
                "onto": chosen,
                "compared_with": f"{bases.named(chosen)} with the adapter",
                "rows_of": rows_of,
                **_prove(bases, chosen, rows, written, held_out=rows_of == data_prepare.HELD_OUT),
                "base": public(config.model.name),
                "base_sha256": base_identity and base_identity.rpartition(":")[2],
            }
            identity.confirmed(config.model, base_identity)
            write_json(written / "merge.json", {**record, "environment": describe(device)})
            (written / "README.md").write_text(
                model_card(run, config, record, FORMATS["merged"].help), encoding="utf-8"
            )
    except (OSError, SafetensorError) as error:  # safetensors 0.8 raises its own error for a full disk
        identity.confirmed(config.model, base_identity)
        raise MachineError(
            f"{not_written(run.merged, error)}; the adapter is safe in {run.adapter}, and "
            f"`finetune merge {run.quoted}` merges it"
        ) from None
    return record


def whole(run: RunDirectory, config: Config) -> dict[str, Any]:
    """Give the model of a run that trained every weight a model card; it is what `merge` would make.

    Raises ArtifactError if there is none, or if the tokenizer is not the one that it was trained with.
    """
    if not (run.merged / "config.json").is_file():
        raise ArtifactError(f"{run.merged}: no trained model; did training finish?")
    fingerprint.check(load_tokenizer(config.model, run.chat_template), run.merged)
    record = {"format": "merged"}
    write_text(run.merged / "README.md", model_card(run, config, record, "safetensors, for transformers and vLLM"))
    return record


def load_merged(
    run: RunDirectory, section: ModelSection, device: torch.device, dtype: torch.dtype | None = None
) -> Any:
    """The published merged model of the base in `section`, in `dtype` (None: as written), with the base's own code if
    `section` allows it.

    Raises ArtifactError if there is none, for a damaged file, or a missing weight.
    """
    folder = run.merged
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder}: no merged model; run `finetune merge {run.quoted}`")

    def load() -> Any:
        code = pinned_code(section)
        if section.trust_remote_code:
            # transformers 5.23 loads a class without a repository prefix from the folder itself, and runs the folder's
            # `custom_generate/generate.py` when it reads the generation config; neither is the pinned code.
            code["config"] = architecture = load_architecture(section)
            place = getattr(architecture, "auto_map", {}).get(_CLASS)
            if place and "--" not in place:
                architecture.auto_map[_CLASS] = f"{section.name}--{place}"
            code["generation_config"] = GenerationConfig.from_pretrained(str(folder))
        return from_safetensors(
            str(folder), dtype=dtype or "auto", device_map={"": device}, output_loading_info=True, **code
        )

    model, report = hub_call(f"merged model {folder}", load)
    refuse_missing(report, f"merged model {folder}", "restore the folder from a backup, or merge or train again")
    return model


def _chosen(config: Config, onto: str | None) -> Onto:
    """The base to merge into. Raises ConfigError where there is no such base."""
    # LoftQ's adapter corrects the error of one quantization.
    needed: Onto | None = "quantized" if config.adapter.init == "loftq" else None
    if onto is None:
        return needed or "16-bit"
    if onto not in ONTO:
        raise ConfigError(f"base {unknown(onto, ONTO)}")
    if onto == "quantized" and config.quantization.kind == "none":
        raise ConfigError("`quantized`: the base of this run was not quantized; merge onto `16-bit`")
    if onto == "16-bit" and needed:
        raise ConfigError("`16-bit`: an adapter of LoftQ corrects the quantized base; merge onto `quantized`")
    return "quantized" if onto == "quantized" else "16-bit"


def _prove(bases: Bases, chosen: Onto, rows: list[list[int]], folder: Path, *, held_out: bool) -> dict[str, Any]:
    """The proof of the model that was written to `folder`; for a quantized base, also how both merges compare with the
    model that was trained.

    Raises ArtifactError if the model is not equivalent to its base with the adapter.
    """
    bases.make_buffers()
    written = bases.run_of_files(folder, rows)
    merging = bases.merging(chosen)
    adapted = bases.run(bases.adapted, merging.adapted, rows)
    base = bases.run(bases.bare, merging.base, rows)
    trained, others = adapted, {}
    if bases.config.quantization.kind != "none":
        quantized = merging if chosen == "quantized" else bases.merging("quantized")
        other = bases.merging("16-bit") if chosen == "quantized" else quantized
        others = {"16-bit" if chosen == "quantized" else "quantized": bases.run(bases.bare, other.merged, rows)}
        if chosen == "16-bit":
            trained = bases.run(bases.adapted, quantized.adapted, rows)
    comparison = proof.Comparison(mixture=bases.mixture)
    likeness = {onto: proof.Likeness() for onto in (chosen, *others, "trained", "base")}

    def compare(place: int) -> None:
        merged, truth, before = written.logits(place), trained.logits(place), base.logits(place)
        after = truth if trained is adapted else adapted.logits(place)
        comparison.add(merged, after, before)
        following = torch.tensor(rows[place][1 :: bases.stride], dtype=torch.long)
        for onto, logits in ((chosen, merged), ("trained", truth), ("base", before)):
            likeness[onto].add(truth, logits, following)
        del merged, before, after, logits
        for onto, run in others.items():
            likeness[onto].add(truth, run.logits(place), following)

    for place in range(len(rows)):
        # glibc keeps freed blocks of the size of a row's logits.
        libraries.return_freed_memory()
        compare(place)
    result = comparison.result(proof.bound(bases.layers, proof.ROUNDOFF[bases.dtype]))
    if not result.error <= result.bound:
        result = _measured(bases, merging, rows, folder)
    _refuse_unless_equal(result)
    measured = {onto: each.result() for onto, each in likeness.items()}
    record: dict[str, Any] = {**asdict(result), "computed_in": str(bases.compute_dtype).removeprefix("torch.")}
    if others:
        record["to_trained"] = {onto: {key: measured[onto][key] for key in ("kl", "agreement")} for onto in ONTO}
    if held_out:
        record["losses"] = {onto: each["loss"] for onto, each in measured.items()}
    return record


def _measured(bases: Bases, merging: Merging, rows: list[list[int]], folder: Path) -> proof.Proof:
    """The proof in float32, with the bound that the measured effect of rounding gives; see `proof`."""
    bases.compute_in_float32()
    written = bases.run_of_files(folder, rows)
    adapted, rounded = (bases.run(bases.adapted, fetch, rows) for fetch in (merging.adapted, merging.rounded_at_random))
    base = bases.run(bases.bare, merging.base, rows)
    comparison, rounding = (proof.Comparison(mixture=bases.mixture) for _ in range(2))
    for place in range(len(rows)):
        libraries.return_freed_memory()
        truth = adapted.logits(place)
        comparison.add(written.logits(place), truth, base.logits(place))
        rounding.add(rounded.logits(place), truth, truth)
    effect = rounding.result(1.0).error
    return comparison.result(min(1.0, proof.MEASURED * effect))


def _refuse_unless_equal(result: proof.Proof) -> None:
    if result.holds:
        return
    if result.error <= result.bound:
        raise ArtifactError(
            f"the merged model has only {result.kept:.0%} of what the adapter changed (by {result.effect:.2%}): its "
            "weights are rounded more coarsely than that. Nothing was published; use the adapter with its base instead"
        )
    raise ArtifactError(
        f"the merged model is not the trained one: its logits differ by {result.error:.2%} from base plus adapter, but "
        f"rounding explains only {result.bound:.2%} (the adapter itself changed them by {result.effect:.2%}). Nothing "
        "was published; use the adapter with its base instead"
    )
