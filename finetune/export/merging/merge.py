"""Merges the adapter into its base, weight by weight from file to file, and publishes the result once it is proven.

    the base's shards ─▶ each weight: (quantized and back) + update in float32, rounded once ─▶ shards of the same names
                                                                                                          │
    base with adapter ─▶ logits ──────────────── compared ──────────────── logits ◀─── run from the files ◀┘

No model is ever in memory: host memory is that of the largest weight in float32, three times, or of a layer while the
logits are computed. A shard that is written is kept, so a merge that was killed goes on with the next one. A model
that differs from base plus adapter by more than rounding explains is never published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from finetune.config import AdapterSection, ModelSection, QuantizationSection
from finetune.config.field_types import pick
from finetune.data import fingerprint
from finetune.data import prepare as data_prepare
from finetune.errors import ArtifactError, ConfigError
from finetune.export import proof, staging
from finetune.export.card import model_card
from finetune.export.export_formats import FORMATS
from finetune.export.finished_run import FinishedRun
from finetune.export.merging import merged_files
from finetune.export.merging.bases import ONTO, Bases, Merging, Onto
from finetune.model.base import load_architecture
from finetune.model.skeleton import make_buffers
from finetune.model.source import file_hashes, identity, prequantized
from finetune.model.source.locate import weights_directory
from finetune.model.structure import sequence_head
from finetune.runtime import libraries
from finetune.storage.files import write_text


def merge(
    finished: FinishedRun, device: torch.device, note: Callable[[str], None], onto: str | None = None
) -> dict[str, Any]:
    """Publish the merged model and return its proof (see `proof.Proof`) with the identity of the base.

    `onto` is a key of ONTO, by default the 16-bit base (the quantized one for LoftQ). A failure leaves the adapter and
    an earlier merged model untouched.
    """
    run, config = finished.run, finished.config
    if config.adapter.kind == "none":
        raise ConfigError(
            f"{run.path} trained every weight and has no adapter to merge: {run.merged} is already the whole model. "
            f"`finetune export {run.quoted} --to merged` adds a model card, and `--to gguf` converts it"
        )
    if config.model.weights == "random":
        raise ArtifactError(f"{run.path} has a base of random weights, which were not saved; there is nothing to merge")
    chosen = _chosen(onto, config.adapter, config.quantization, config.model)
    tokenizer = finished.tokenizer(run.adapter)
    media = data_prepare.media_of(config.model, config.data, tokenizer)
    compared = data_prepare.compared_rows(config.data, tokenizer, proof.ROWS, proof.ROW_TOKENS, note, media)

    folder = weights_directory(config.model.name, config.model.revision, download=True)
    base_identity = finished.base(note)
    longest = max([proof.ROW_TOKENS, *map(len, compared.ids)])
    bases = Bases(config, run.adapter, identity.loaded_files(folder), device, compared.shown, longest)
    onto_base = "the 16-bit base" if chosen == "16-bit" else f"the dequantized {config.quantization.kind} base"
    made_from = {
        "onto": chosen, "base": base_identity, "dtype": str(bases.dtype),
        "adapter": file_hashes.sha256(run.adapter / "adapter_model.safetensors"),
    }  # fmt: skip

    def make(written: Path) -> dict[str, Any]:
        fingerprint.save_tokenizer(tokenizer, base_identity, written)
        merged_files.write_settings(bases, folder, tokenizer, written, compared.ids, media)
        merged_files.write_weights(bases.merging(chosen), written)
        return {
            "format": "merged",
            "onto": chosen,
            "compared_with": f"{onto_base} with the adapter",
            "rows_of": compared.name,
            **_prove(bases, chosen, compared, written),
        }

    return staging.publish(
        finished, run.merged, make, base_identity=base_identity, device=device, record_file="merge.json",
        written_as=FORMATS["merged"].help, made_from=made_from if base_identity else None,
        otherwise=f"; the adapter is safe in {run.adapter}, and `finetune merge {run.quoted}` merges it",
    )  # fmt: skip


def whole(finished: FinishedRun) -> dict[str, Any]:
    """Add a model card to the model of a run that trained every weight, in place of a merge."""
    merged = finished.run.merged
    if not (merged / "config.json").is_file():
        raise ArtifactError(f"{merged}: no trained model; did training finish?")
    finished.tokenizer(merged)
    record = {"format": "merged"}
    write_text(merged / "README.md", model_card(finished, record, "safetensors, for transformers and vLLM"))
    return record


def _chosen(onto: str | None, adapter: AdapterSection, quantization: QuantizationSection, model: ModelSection) -> Onto:
    """The base to merge into, where `onto` was asked for. Raises ConfigError if the run has no such base."""
    loftq = adapter.init == "loftq"
    if onto is None:
        return "quantized" if loftq else "16-bit"
    pick(ONTO, onto, "base")
    if onto == "quantized" and not prequantized.requantizes(quantization, load_architecture(model)):
        raise ConfigError("`quantized`: the base of this run was not quantized for training; merge onto `16-bit`")
    if onto == "16-bit" and loftq:
        raise ConfigError("`16-bit`: an adapter of LoftQ corrects the quantized base; merge onto `quantized`")
    return "quantized" if onto == "quantized" else "16-bit"


def _prove(bases: Bases, chosen: Onto, compared: data_prepare.ComparedRows, folder: Path) -> dict[str, Any]:
    """The proof of the model in `folder`; for a quantized base, also how both merges compare with the trained model."""
    make_buffers(bases.bare, bases.device)
    make_buffers(bases.adapted.get_base_model(), bases.device)
    rows, merging = compared.ids, bases.merging(chosen)
    written = bases.run_of_files(folder, rows)
    adapted, base = bases.run(bases.adapted, merging.adapted, rows), bases.run(bases.bare, merging.base, rows)
    # The base as it was trained on, with the adapter; and the merge onto the other base, by that base's name.
    trained, others = adapted, dict[Onto, proof.Streamed]()
    if bases.requantized:
        name: Onto = "16-bit" if chosen == "quantized" else "quantized"
        onto_other = bases.merging(name)
        others[name] = bases.run(bases.bare, onto_other.merged, rows)
        if name == "quantized":
            trained = bases.run(bases.adapted, onto_other.adapted, rows)
    comparison = proof.LogitComparison(mixture=bases.mixture)
    likeness = {onto: proof.Likeness() for onto in (chosen, *others, "trained", "base")}

    def compare(row: int) -> None:
        merged, truth, before = written.logits(row), trained.logits(row), base.logits(row)
        after = truth if trained is adapted else adapted.logits(row)
        comparison.add(merged, after, before)
        if sequence_head.is_classifier(bases.bare):  # its scores do not predict tokens
            return
        following = torch.tensor(compared.labels[row][1 :: bases.stride], dtype=torch.long)
        for onto, logits in ((chosen, merged), ("trained", truth), ("base", before)):
            likeness[onto].add(truth, logits, following)
        del merged, before, after, logits
        for onto, other in others.items():
            likeness[onto].add(truth, other.logits(row), following)

    for row in _freeing_memory(rows):
        compare(row)
    result = comparison.result(proof.bound(bases.layers, proof.ROUNDOFF[bases.dtype]))
    if not result.error <= result.bound:
        result = _measured(bases, merging, rows, folder)
    proof.refuse_unless_equal(
        result, "merged model", compared_with="base plus adapter", changed_by="the adapter",
        otherwise="; use the adapter with its base instead",
    )  # fmt: skip
    record: dict[str, Any] = {**asdict(result), "computed_in": str(bases.compute_dtype).removeprefix("torch.")}
    if sequence_head.is_classifier(bases.bare):
        _refuse_other_scores(written, bases.merged_architecture.get_text_config().pad_token_id, len(rows))
        return record
    measured = {onto: each.result() for onto, each in likeness.items()}
    if others:
        record["to_trained"] = {onto: {key: measured[onto][key] for key in ("kl", "agreement")} for onto in ONTO}
    record["served"] = measured[chosen]
    return record | (proof.gain(likeness, chosen) if compared.name == data_prepare.HELD_OUT else {})


def _refuse_other_scores(written: proof.Streamed, padding: int | None, rows: int) -> None:
    """Raise ArtifactError unless transformers' own class scores the last token of each row, however it is padded.

    Without a padding token it takes one row at a time, and its last token.
    """
    if padding is None:
        return
    own = torch.stack([written.logits(row)[-1] for row in range(rows)])
    for side in ("left", "right"):
        published = written.published_scores(padding, side)
        # The same states times the same head, but for the order of summation.
        if not torch.allclose(published, own, rtol=2**-6, atol=2**-6 * float(own.abs().max())):
            raise ArtifactError(
                f"the merged model gives rows padded on the {side} other scores in transformers than in training: it "
                f"takes token {padding} for padding. Nothing was published"
            )


def _freeing_memory(rows: list[list[int]]) -> Iterator[int]:
    """The number of each row. Before each, blocks that glibc keeps, of the size of a row's logits, are freed."""
    for row in range(len(rows)):
        libraries.return_freed_memory()
        yield row


def _measured(bases: Bases, merging: Merging, rows: list[list[int]], folder: Path) -> proof.Proof:
    """The proof in float32, with the bound that the measured effect of rounding gives; see `proof`."""
    bases.compute_dtype = torch.float32  # the written weights keep their type
    bases.bare.float()
    bases.adapted.float()
    written = bases.run_of_files(folder, rows)
    adapted, rounded = (bases.run(bases.adapted, fetch, rows) for fetch in (merging.adapted, merging.rounded_at_random))
    base = bases.run(bases.bare, merging.base, rows)
    comparison, rounding = (proof.LogitComparison(mixture=bases.mixture) for _ in range(2))
    for row in _freeing_memory(rows):
        truth = adapted.logits(row)
        comparison.add(written.logits(row), truth, base.logits(row))
        rounding.add(rounded.logits(row), truth, truth)
    effect = rounding.result(1.0).error
    return comparison.result(min(1.0, proof.MEASURED * effect))
