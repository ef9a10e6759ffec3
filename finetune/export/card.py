"""The model card of an export: how it was made, and what was measured."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

from finetune.config import Config, ModelSection, entries
from finetune.config.field_types import GIVEN
from finetune.data.examples import learnt
from finetune.data.readers import reader
from finetune.export import server_commands
from finetune.export.finished_run import FinishedRun
from finetune.model.source.locate import card as card_of
from finetune.report import words
from finetune.storage.rundir import RunDirectory


def model_card(finished: FinishedRun, record: dict[str, Any], written_as: str) -> str:
    """README.md of an export in the hub's format; `written_as` is its form, `record` its proof, if any."""
    from huggingface_hub import ModelCardData

    run, config = finished.run, finished.config
    model, adapter, scored = config.model, config.adapter, config.scorer is not None
    on_hub = not Path(model.name).exists() and not model.name.startswith("builtin:")
    licence = _licence(model) if on_hub else {}
    # Llama's licences want both (3.1 and later: 1.b.i).
    llama = str(licence.get("license_name") or licence.get("license")).startswith("llama")
    task = "text-classification" if scored else "text-generation"
    data = ModelCardData(
        base_model=model.name if on_hub else None,
        library_name="peft" if record["format"] == "adapter" else "transformers",
        pipeline_tag=task if model.vision == "none" else "image-text-to-text",
        tags=["finetune", *(["lora"] if adapter.kind == "lora" else []), *(["gguf"] if "type" in record else [])],
        datasets=[one.source for one in entries(config.data.train) if _is_hub_name(one.source)] or None,
        **licence,
    )

    how = "All weights were trained" if adapter.kind == "none" else (
        f"A rank-{adapter.rank} LoRA adapter (alpha {adapter.alpha:g}, base in {config.quantization.kind}) was trained"
    )  # fmt: skip
    rows = ", ".join(
        _escaped(str(one))
        if one.source.startswith(GIVEN)
        else _code(str(one.model_copy(update={"source": public(one.source)})))
        for one in entries(config.data.train)
    )
    prompts = None
    if not scored:
        prompts = server_commands.prompts(record["format"], learnt(run.events()), config.data.separator)
    settings = _settings(config)
    starts = [event.get("start_from") for event in run.events() if event["event"] == "started"]
    if starts and (start := starts[-1]):
        settings["started from"] = f"{_code(public(start['name']))} (sha256 {_escaped(start['sha256'])})"

    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {'Llama: ' if llama else ''}{_escaped(public(model.name))}, fine-tuned",
        *(["Built with Llama."] if llama else []),
        f"{how} on {rows}. It is written as {written_as}.",
        *([f"## Prompts\n\nThe model was {prompts}."] if prompts else []),
        *([f"## Classes\n\n{', '.join(map(_code, labels))}"] if (labels := config.data.labels) else []),
        "## Settings\n\n" + _table(settings),
        *(["## Training\n\n" + _table(measured)] if (measured := _measured(run, config.training.objective)) else []),
        *(["## Proof\n\n" + _proof(record, scores=scored)] if "error" in record else []),
    ]
    return "\n\n".join(sections) + "\n"


def _licence(model: ModelSection) -> dict[str, Any]:
    """The licence keys of the base's own card; none if that is unavailable."""
    data = card_of(model)  # without one, the card names the base alone
    values = {key: data.get(key) for key in ("license", "license_name", "license_link")}

    def is_text(value: Any) -> bool:
        """Whether it is one text or several, as the hub takes it; YAML may also contain cycles."""
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))

    return {key: value for key, value in values.items() if value and is_text(value)}


def public(source: str) -> str:
    """The name of a base or data source for others: of a local path only the last part."""
    known = source.startswith("builtin:") or _is_hub_name(source)
    return source if known else os.path.basename(os.path.abspath(source))


def _is_hub_name(source: str) -> bool:
    here = source.startswith((".", "/", "~")) or glob.has_magic(source) or reader(Path(source)) or Path(source).exists()
    return source.count("/") == 1 and not source.startswith("builtin:") and not here


def _settings(config: Config) -> dict[str, str]:
    training, adapter, rope = config.training, config.adapter, config.model.rope_scaling
    variants = [name for name in ("rslora", "dora") if getattr(adapter, name)]
    return {
        "learning rate": words.learning_rate(training),
        "batch size": str(training.batch_size),
        "optimizer": config.optimizer.kind,
        **({"LoRA+ ratio": f"{config.optimizer.lora_plus:g}"} if config.optimizer.lora_plus else {}),
        **({"NEFTune alpha": f"{alpha:g}"} if (alpha := training.neftune_noise_alpha) else {}),
        **({"rotary scaling": f"{rope.rope_type}, factor {rope.factor:g}"} if rope else {}),
        "precision": training.precision,
        "longest row": f"{config.data.max_length} tokens",
        **({"model of images": config.model.vision} if config.model.vision != "none" else {}),
        **({"most pixels of an image": f"{pixels:,}"} if (pixels := config.data.image_pixels) else {}),
        **({} if adapter.targets == "all-linear" else {"adapter targets": ", ".join(map(_code, adapter.targets))}),
        **({"other ranks": _code(str(adapter.ranks))} if adapter.ranks else {}),
        **({"adapter variants": ", ".join(variants)} if variants else {}),
    }


def _measured(run: RunDirectory, objective: str) -> dict[str, str]:
    lines = run.metrics()
    losses = {line["step"]: line["eval_loss"] for line in lines if line.get("eval_loss") is not None}
    published = last = max(losses, default=0)
    for event in run.events():
        if event["event"] == "best_loaded":
            published = event["step"]
        elif event["event"] == "resumed":
            published = last
    trained = [line for line in lines if "eval_loss" not in line]
    peaks = [bytes for line in trained for peak in line["memory"].values() for bytes in peak.values()]
    facts = {}
    if trained:
        facts["steps"] = str(trained[-1]["step"])
    if 0 in losses and published in losses:
        unit = " (nats per trained token)" if objective == "supervised" else ""
        facts["evaluation loss"] = f"{losses[0]:.4f} before, {losses[published]:.4f} after{unit}"
    if peaks:
        facts["peak memory"] = f"{max(peaks) / 2**30:.2f} GiB"
    return facts


def _proof(record: dict[str, Any], *, scores: bool) -> str:
    against = record.get("compared_with", "base plus adapter")
    file = "export.json" if "not_proven" in record else "merge.json"
    chosen = "highest score" if scores else "most likely next token"
    text = (
        f"Its logits, computed from the written files, were compared with {against}, on {record['rows']} rows of "
        f"{record['rows_of']} ({record['tokens']} tokens): they differ by {record['error']:.3%} (bound "
        f"{record['bound']:.3%}, the effect of training {record['effect']:.3%}), and agree on the {chosen} "
        f"at {record['agreement']:.2%} of positions. `{file}` has the figures and the hash of the base."
    )
    if lost := words.served(record):
        text += f"\n\n{_escaped(lost)}"
    for title, key in (("Known differences", "known_differences"), ("Not proven here", "not_proven")):
        if record.get(key):
            text += f"\n\n{title}:\n\n" + "\n".join(f"- {one}" for one in record[key])
    return text


def _table(facts: dict[str, str]) -> str:
    # A | ends a cell even within code.
    cells = {name: fact.replace("|", r"\|") for name, fact in facts.items()}
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {cell} |" for name, cell in cells.items())])


# Text that is not trusted, in Markdown: on one line, without markup or HTML, and without ending a table's cell.


def _escaped(text: str) -> str:
    """`text` within a paragraph."""
    return re.sub(r"([\\`*_\[\]<>&|~$#])", r"\\\1", _line(text))


def _code(text: str) -> str:
    """`text` as a code span (CommonMark 6.1): its fences are longer than any in the text, which cannot be escaped."""
    text = _line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    # One space is taken off at each end, unless the text is nothing but spaces.
    space = " " if text.strip(" ") and (text[0] in "` " or text[-1] in "` ") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _line(text: str) -> str:
    """`text` with line breaks and other unprintable characters replaced."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
