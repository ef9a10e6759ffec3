"""Writes into README and docs/ what is recorded or generated: figures, tables, printed output, whole references.

    python benchmarks/write_docs.py      (a part of `make docs`)

A figure of a page is a link, `[0.918][loop]`: `loop` is a key of FIGURES, and the link leads to the file of
benchmarks/results/ that the figure is read from. Tables and printed output stand between `<!-- written: NAME -->` and
`<!-- end -->`, where NAME is a key of BLOCKS. The targets of the links are written after `<!-- sources -->` at the end
of the page. To change a figure, record its result anew; a test asserts that this script changes nothing.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from finetune import settings
from finetune.forecast.devices import DISK_READ_BYTES, DISK_WRITE_BYTES
from finetune.runtime import patches

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
GIB, MIB = 2**30, 2**20


def generated() -> dict[Path, str]:
    """The files of docs/ that are made from code as a whole, with their text."""
    docs = ROOT / "docs"
    return {
        docs / "config.md": settings.reference(),
        docs / "config.schema.json": json.dumps(settings.schema(), indent=2) + "\n",
        docs / "patches.md": patches_page(),
        docs / "architectures.md": architectures_page(),
    }


def patches_page() -> str:
    """The registry of patches as Markdown."""
    libraries: dict[str, list[str]] = {}
    for entry in patches.entries().values():
        library, _, other = entry.read_at.partition(", ")
        of = ", ".join(part for part in (entry.objects, other) if part)
        what = f"- `{entry.target.replace(':', '.')}`" + (f" ({of})" if of else "")
        until = entry.until if entry.until.startswith("never") else f"until {entry.until}"
        libraries.setdefault(library, []).append(f"{what}: {entry.why} *{until[0].upper()}{until[1:]}*")
    parts = [
        "# Patches\n\nEvery attribute of a library that finetune replaces, why, and until when, by the version that "
        "was read. `make docs` writes this page from `finetune/runtime/patches.py` ([how to upgrade](upgrading.md))."
    ]
    parts += ["\n".join([f"## {library}\n", *lines]) for library, lines in libraries.items()]
    return "\n\n".join(parts) + "\n"


_COLUMNS = {
    "trained": ("trained 16 bit", "trained nf4"),
    "merged": ("merged 16 bit", "merged nf4"),
    "forecast": ("forecast 16 bit", "forecast nf4"),
    "packed": ("packed",),
    "recomputed": ("recomputed",),
    "fused": ("fused",),
    "servers": ("served", "adapter"),
    "GGUF": ("gguf",),
    "answers": ("answers",),
}
"""Columns of the table of architectures, each with the checks of `finetune doctor MODEL` that it stands for."""
_SIGNS = {"error": "fails", "refused": "refused", "skipped": "–", "ok": "yes"}


def architectures_page() -> str:
    """What `finetune doctor` says of every architecture as Markdown."""
    tried = result("architectures")["architectures"]
    rows, refusals, reasons = [], [], []
    for name, entry in tried.items():
        statuses = {check: one["status"] for check, one in entry["checks"].items()}
        said = [[statuses.get(check, "skipped") for check in checks] for checks in _COLUMNS.values()]
        signs = [next(sign for status, sign in _SIGNS.items() if status in each) for each in said]
        rows.append(f"| `{name}` | {' | '.join(signs)} |")
        if statuses["structure"] == "refused":
            refusals.append(f"- `{name}`: {_one_line(entry['checks']['structure']['what'])}")
            continue
        about = ("structure", "weights", "causal", "loss", *(check for checks in _COLUMNS.values() for check in checks))
        wrong = [check for check in about if statuses.get(check) == "error"]
        wrong = [check for check in ("trained 16 bit",) if statuses.get(check) == "refused"] or wrong
        if wrong:
            reasons.append(f"- `{name}`, {wrong[0]}: {_one_line(entry['checks'][wrong[0]]['what'])}")
    exact = sum(row.split(" | ")[1:3] == ["yes", "yes"] for row in rows)
    version = result("architectures")["environment"]["packages"]["transformers"]
    return "\n".join(
        [
            "# Architectures",
            "",
            f"What `finetune doctor MODEL` says of the {len(tried)} architectures of transformers {version} with a "
            f"causal language model: {exact} train and merge exactly; {len(refusals)} are refused by `finetune init` "
            "and `finetune train` in one sentence, before data and weights. Each is tried as a small copy with random "
            "weights, of transformers' own default config, on a CPU: loaded in 16 bit and NF4, traced, trained for "
            "three steps, merged, exported, and answered from with each KV cache. For a published model, run "
            "`finetune doctor NAME`: it reads its config.json alone.",
            "",
            "`yes`: works, and equals what it is compared with. `refused`: a command says why, and what to do. "
            "`fails`: a defect here or in a library, listed below. `–`: not reached. `make docs` writes this page from "
            "`benchmarks/results/architectures.json`, and `python benchmarks/architectures.py` records that.",
            "",
            f"| architecture | {' | '.join(_COLUMNS)} |",
            f"| --- |{' --- |' * len(_COLUMNS)}",
            *rows,
            "",
            "## What is refused as a whole",
            "",
            *refusals,
            "",
            "## What fails",
            "",
            *reasons,
            "",
        ]
    )


def _one_line(text: str) -> str:
    """A message on one line, without signs that Markdown reads."""
    return re.sub(r"([<>|\\*_])", r"\\\1", " ".join(text.replace("`", "").split()))[:300]


def pages() -> list[Path]:
    """The pages that people write."""
    pages = sorted({*(ROOT / "docs").glob("*.md")} - generated().keys())
    return [ROOT / "README.md", *pages]


@functools.cache
def result(name: str) -> Any:
    return json.loads((ROOT / RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def recorded(name: str) -> list[str]:
    """The lines of a recorded output in docs/."""
    return (ROOT / "docs" / f"{name}.txt").read_text(encoding="utf-8").splitlines()


# -- figures -----------------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A number of a file of results: by its path there, or computed from the file; its format, and its unit."""

    file: str
    value: str | Callable[[Any], float]
    form: str = ""
    unit: int = 1

    def text(self) -> str:
        found = result(self.file)
        if isinstance(self.value, str):
            for key in self.value.split("/"):
                found = found[int(key) if isinstance(found, list) else key]
        else:
            found = self.value(found)
        return format(found if self.unit == 1 else found / self.unit, self.form)


def _of_faults(count: Callable[[Iterable[int]], int], key: str, tool: str) -> Callable[[Any], int]:
    return lambda found: count(
        counts[key] for name, both in found["tools"].items() if name.startswith(tool) for counts in both.values()
    )


def _of_ranks(key: str) -> list[float]:
    """One figure of the jobs with copies, FSDP and DeepSpeed."""
    return [result(f"faults_ranks{sharing}")["found"][key] for sharing in ("", "_fsdp", "_deepspeed")]


def _of_mutants(count: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda found: sum(count(area) for area in found["areas"].values())


def _of_gguf(count: Callable[[Any], bool]) -> Callable[[Any], int]:
    return lambda found: sum(count(model[kind]) for model in found["models"].values() for kind in found["bounds"])


def _largest_errors(found: Any) -> list[float]:
    """The errors of peaks, the largest first."""
    return sorted((abs(row["relative_errors"]["peak"]) for row in found["settings"].values()), reverse=True)


def _forecast_seconds(job: str) -> Callable[[Any], float]:
    return lambda found: found["jobs"][job]["median_seconds"]


def _off_by(key: str) -> Callable[[Any], float]:
    return lambda found: max(abs(row[key]) for row in found["memory"])


def _cells(found: Any) -> Iterator[Any]:
    """What was measured of adapters on what is served, by any base, seed and kind."""
    for base in found["bases"].values():
        for seed in base["seeds"].values():
            yield from seed.get("adapter", {}).values()


def _least_kept(found: Any) -> float:
    """The smallest mean share of the gain that a form of five bits and more keeps."""
    kept = found["bases"]["built-in"]["kept"].values()
    return min(mean for way in kept for kind, (mean, *_) in way.items() if kind in _FINE)


def _slower(found: Any) -> list[float]:
    return [budget["slower_than_it"] for budget in found["budgets"]]


def _times_as_fast(found: Any) -> list[float]:
    """As TRL's best setting, by the predicted seconds of a step, of each model and card."""
    return [one["times_as_fast"]["one length"]["best"] for cards in found["steps"].values() for one in cards.values()]


def _swapped_seconds(found: Any) -> float:
    swapped = found["plans"][-1]["plan"]["swapped_bytes"]
    return swapped / DISK_READ_BYTES + swapped / DISK_WRITE_BYTES


_EXPONENT = "findings/batch/exponent of the batch"
_LOOP = "ratios/loop_seconds/median"
_LONG = "forecast/ways/fused kernels, tiles, inputs on the host"
_SERVED_STEPS = "steps/Llama-3.1-8B/RTX 4090/served"
_QUANTIZED_INPUTS = "int8, inputs in 8 bit"

FIGURES = {
    # the README's run
    "tiny-steps": Figure("tiny_cpu", "summary/steps"),
    "tiny-before": Figure("tiny_cpu", "summary/base_eval_loss", ".4f"),
    "tiny-after": Figure("tiny_cpu", "summary/best_eval_loss", ".4f"),
    "merge-error": Figure("tiny_cpu", "merge/error", ".2%"),
    "merge-bound": Figure("tiny_cpu", "merge/bound", ".2%"),
    "merge-effect": Figure("tiny_cpu", "merge/effect", ".1%"),
    # the run on preferences
    "counted-rows": Figure("counted_images", "runs/0/rows", ","),
    "counted-steps": Figure("counted_images", "runs/0/steps"),
    "counted-held-out": Figure("counted_images", "runs/0/held_out"),
    "images-rows": Figure("beside_images", "job/rows", ","),
    "pairs-trained": Figure("preferences", "rows/train", ","),
    "pairs-steps": Figure("preferences", "steps"),
    # the forecast
    "forecast-settings": Figure("forecast_cpu", "summary/compared"),
    "forecast-architectures": Figure("forecast_cpu", "summary/architectures"),
    "forecast-median": Figure("forecast_cpu", "summary/median_absolute_error", ".2%"),
    "forecast-worst": Figure("forecast_cpu", lambda found: _largest_errors(found)[0], ".1%"),
    "forecast-second": Figure("forecast_cpu", lambda found: _largest_errors(found)[1], ".2%"),
    "small-measured": Figure("forecast_cpu", "settings/small-llama, small tiles/measured/peak", ".2f", MIB),
    "small-forecast": Figure("forecast_cpu", "settings/small-llama, small tiles/forecast/peak", ".2f", MIB),
    "small-tracked": Figure("forecast_memtracker", "settings/small-llama, small tiles/mem_tracker/bytes", ".2f", MIB),
    "forecast-seconds-7b": Figure("forecast_speed", _forecast_seconds("meta-llama/Llama-2-7b-hf"), ".1f"),
    "forecast-seconds-70b": Figure("forecast_speed", _forecast_seconds("meta-llama/Llama-2-70b-hf"), ".1f"),
    "forecast-seconds-chosen": Figure("forecast_speed", _forecast_seconds("meta-llama/Llama-2-7b-hf, chosen"), ".0f"),
    "fit-slower": Figure("fit_cpu", lambda found: max(_slower(found)), ".1%"),
    # speed
    "loop": Figure("overhead", f"allocators/kept/{_LOOP}", ".3f"),
    "process": Figure("overhead", "allocators/kept/ratios/process_seconds/median", ".2f"),
    "dpo-process": Figure("beside_dpo", "beside/trl/ratios/process_seconds/median", ".2f"),
    "images-process": Figure("beside_images", "beside/trl/ratios/process_seconds/median", ".2f"),
    "dpo-pairs": Figure("beside_dpo", "job/pairs", ","),
    "step-least": Figure("step_cost", lambda found: min(_times_as_fast(found)), ".2f"),
    "step-most": Figure("step_cost", lambda found: max(_times_as_fast(found)), ".2f"),
    "preparation-rows": Figure("preparation", "job/rows", ","),
    "preparation-ours": Figure("preparation", "rows_per_second/finetune", ",.0f"),
    "preparation-ratio": Figure("preparation", "ratio/median", ".2f"),
    "preparation-mib": Figure("preparation", "peak_resident_bytes/finetune", ",.0f", MIB),
    "preparation-trl-mib": Figure("preparation", "peak_resident_bytes/trl", ",.0f", MIB),
    # kills, saves and tests
    "save-interval": Figure("faults", "save_interval_steps"),
    "kills": Figure("faults", _of_faults(sum, "kills", "finetune")),
    "rank-runs": Figure("faults_ranks", lambda _: sum(_of_ranks("runs"))),
    "rank-kills": Figure("faults_ranks", lambda _: sum(_of_ranks("kills"))),
    "rank-difference": Figure("faults_ranks", lambda _: max(_of_ranks("largest_difference_of_a_weight")), ".1e"),
    "trainer-kills": Figure("faults", _of_faults(sum, "kills", "Hugging Face Trainer")),
    "trainer-stuck": Figure("faults", _of_faults(sum, "runs_that_could_not_resume", "Hugging Face Trainer")),
    "mutants": Figure("mutations", _of_mutants(lambda area: area["mutants"]), ","),
    "mutants-found": Figure("mutations", _of_mutants(lambda area: area["killed"] + area["timed_out"]), ","),
    "mutants-accepted": Figure("mutations", _of_mutants(lambda area: len(area["accepted"]))),
    # memory
    "int8-inputs": Figure("int8_cpu", f"logits/{_QUANTIZED_INPUTS}", ".1%"),
    "int8": Figure("int8_cpu", "logits/int8", ".1%"),
    "int8-nf4": Figure("int8_cpu", "logits/nf4", ".1%"),
    "long-short-row": Figure("long_context", "resident/resident_bytes/4096", ".0f", MIB),
    "long-long-row": Figure("long_context", "resident/resident_bytes/32768", ".0f", MIB),
    "long-card": Figure("long_context", f"{_LONG}/needed_bytes", ".1f", GIB),
    "long-host": Figure("long_context", f"{_LONG}/host_bytes", ".1f", GIB),
    "swapped-seconds": Figure("plan_many_gpus", _swapped_seconds, ".0f"),
    # what is served
    "step-adapter": Figure("step_cost", f"{_SERVED_STEPS}/q4_k_m/times", ".3f"),
    # merge, exports, answers
    "merge-kills": Figure("merge", "kills_at_random/kills"),
    "merge-failpoints": Figure("merge", "kills_at_each_change_of_a_file/kills"),
    "rounding-kills": Figure("rounding", "kills/kills"),
    "rounding-tokens": Figure("rounding", "rounding_1B/tokens", ","),
    "rounding-seconds": Figure("rounding", "rounding_1B/seconds", ".0f"),
    "rounding-peak": Figure("rounding", lambda found: found["rounding_1B"]["peak_bytes"] / 2**30, ".2f"),
    "rounding-forecast": Figure("rounding", lambda found: found["rounding_1B"]["forecast_bytes"] / 2**30, ".2f"),
    "gguf-families": Figure("gguf_in_llama_cpp", lambda found: len(found["models"])),
    "gguf-answers": Figure("gguf_in_llama_cpp", _of_gguf(lambda each: True)),
    "gguf-same-answers": Figure(
        "gguf_in_llama_cpp", _of_gguf(lambda each: each["answer_tokens_alike"] == each["answer_tokens"])
    ),
    "kept-finer": Figure("served", _least_kept, ".3f"),
    "adapter-kl": Figure("served", lambda found: max(cell["kl"] for cell in _cells(found)), ".1g"),
    "served-in-llama-cpp": Figure(
        "served", lambda found: max(cell["llama_cpp"]["kl"] for cell in _cells(found) if "llama_cpp" in cell), ".4f"
    ),
    "cache-settings": Figure("answers", lambda found: len(found["memory"])),
    "cache-error": Figure("answers", _off_by("cache_off"), ".3%"),
    "answer-peak-error": Figure("answers", _off_by("peak_off"), ".2%"),
    # rank, rate and epochs
    "sweep-full": Figure("sweeps", lambda found: found["jobs"]["2M"]["beside"]["full/lone"]["seconds"], ".2f"),
    "sweep-halved": Figure("sweeps", lambda found: found["jobs"]["2M"]["beside"]["halved/lone"]["seconds"], ".2f"),
    "sweep-trl": Figure("sweeps", lambda found: found["jobs"]["2M"]["beside"]["halved/trl"]["seconds"], ".2f"),
    "root-mean": Figure("evidence", f"{_EXPONENT}/mean", ".2f"),
    "root-low": Figure("evidence", f"{_EXPONENT}/low", ".2f"),
    "root-high": Figure("evidence", f"{_EXPONENT}/high", ".2f"),
}
"""Figures by their names in the pages."""


# -- tables and printed output -----------------------------------------------------------------------------------------


def _table(heads: str, rows: Iterator[str]) -> str:
    """A table of Markdown: cells are separated by ` | `."""
    columns = heads.count("|") + 1
    return "\n".join([f"| {heads} |", "|" + " --- |" * columns, *(f"| {row} |" for row in rows)])


def _output(lines: list[str]) -> str:
    return "\n".join(["```", *(line.rstrip() for line in lines), "```"])


def _excerpt(name: str, starts: list[str]) -> str:
    """The first lines of a recorded output, in order, that begin so; "..." stands for lines that are left out."""
    lines, shown, at = recorded(name), [], 0
    for start in starts:
        if start == "...":
            shown.append(start)
            continue
        at = next(number for number in range(at, len(lines)) if lines[number].startswith(start))
        shown.append(lines[at])
        at += 1
    return _output(shown)


def _between(name: str, first: str, last: str) -> list[str]:
    lines = recorded(name)
    start = next(number for number, line in enumerate(lines) if line.startswith(first))
    end = next(number for number, line in enumerate(lines) if number > start and line.startswith(last))
    return lines[start : end + 1]


def _first_minutes() -> str:
    """Twelve lines from a table of questions to an answer."""
    return _excerpt(
        "first_minutes",
        [
            "$ head", "question,answer", "What is", "$ finetune init", "wrote", "$ finetune train", "memory  ",
            "step 0", "...", "step 60:", "$ finetune generate runs/facts --prompt", "It is Fredville.",
        ],
    )  # fmt: skip


def _tiny_memory() -> str:
    return _output(_between("tiny_cpu", "┏━━━━━━━━━━━━┳━━━━━━━━━━┳", "tensors, in a step"))


def _preferences_eval() -> str:
    both = ["│ - base", "│ - adapter"]
    return _excerpt(
        "preferences_eval",
        [
            "┏", "┃  ", "┡", "│ pair loss", *both, "...", "│ accuracy", *both, "...", "└",
        ],
    )  # fmt: skip


def _llama7b_plan() -> str:
    return _excerpt(
        "llama7b_plan",
        ["fits: ", "batch", "...", "base weights", "...", "layer inputs", "activations", "...", "allocator slack",
         "at the peak"],
    )  # fmt: skip


def _data_look() -> str:
    lines = recorded("tiny_cpu_data")
    shown = [line for line in lines[:4] if line.split()[0] != "evaluation"]
    blocks = [
        _between("tiny_cpu_data", "training rows by length", "129 to 192"),
        ["", *_between("tiny_cpu_data", "the first rows as the model sees them", "    ⟦")],
    ]
    return _output([*shown, "...", *(line for block in blocks for line in block), "..."])


def _forecast_phases() -> str:
    summary = result("forecast_cpu")["summary"]
    errors = {**summary["phases"], "peak": summary}
    return _table(
        " | ".join(errors),
        iter([" | ".join(f"{found['largest_error']['error']:+.2%}" for found in errors.values())]),
    )


def _forecast_peers() -> str:
    names = {
        "ours": "this forecast",
        "fitcheck": f"fitcheck-llm {result('forecast_peers')['fitcheck']['version']}",
        "fitcheck, tensors only": "fitcheck-llm, tensors only",
        "activation formula, with head": "activation formula (arXiv 2205.05198)",
        "accelerate": "accelerate estimate-memory",
    }
    peers = result("forecast_peers")["summary_above_100m_parameters"]
    return _table(
        " | settings it can express | mean error | worst",
        (
            f"{name} | {found['settings']} | {found['mean_absolute_error']:.1%} | {found['worst']['error']:+.1%}"
            for peer, name in names.items()
            for found in [peers[peer]["expressed"]]
        ),
    )


def _forecast_memtracker() -> str:
    return _table(
        "setting | measured peak | `finetune plan` | MemTracker",
        (
            f"{name} | {row['measured_bytes'] / MIB:.1f} MiB | {row['ours']['error']:+.2%} | "
            f"{row['mem_tracker']['error']:+.2%}"
            for name, row in result("forecast_memtracker")["settings"].items()
        ),
    )


def _beside_trl() -> str:
    def row(name: str, job: Any) -> str:
        besides = [job["beside"][side] for side in ("trl", "trl-kept")]
        times = (
            f"{ratios['loop_seconds']['median']:.2f} ({ratios['loop_cpu_seconds']['median']:.2f})"
            for ratios in (beside["ratios"] for beside in besides)
        )
        sides = (("finetune", "trl"), ("finetune-kept", "trl-kept"))
        peaks = (" / ".join(f"{job['resident_bytes'][side] / MIB:,.0f}" for side in pair) for pair in sides)
        apart = max(beside["largest_loss_difference"] for beside in besides)
        return f"{name} | {' | '.join(times)} | {' | '.join(peaks)} | {apart:.0e}"

    heads = " | TRL recomputes all | TRL recomputes nothing | MiB, ours / TRL, all | MiB, nothing | losses"
    return _table(heads, (row(name, job) for name, job in result("beside_peers_cpu")["jobs"].items()))


def _step_over_least() -> str:
    def row(card: str, one: Any) -> str:
        over = one["over_least"]
        parts = " | ".join(f"{over[part]:.2f}" for part in ("arithmetic", "traffic", "launches"))
        return f"{card} | {one['ours']['seconds']:.2f} | {over['times']:.2f} | {parts}"

    return _table(
        "card | seconds | times the least | of it, more arithmetic | traffic | launches",
        (row(*one) for one in result("step_cost")["steps"]["Llama-3.1-8B"].items()),
    )


def _batching() -> str:
    found = result("batching")

    def row(name: str, padding: Any) -> str:
        trained = found["training"].get(name)
        speed = f"{trained['padding_share']:.2%} | {trained['speed_up']:.2f}" if trained else "not measured | "
        return f"{name} | {padding['padding_share']:.2%} | {padding['micro_batches']:,} | {speed}"

    heads = "batches | padding, 100k rows | passes | padding, trained | speed-up"
    return _table(heads, (row(name, padding) for name, padding in found["padding"].items()))


def _kill_table() -> str:
    keys = ("kills", "resumes", "runs_that_could_not_resume", "runs_that_ended_with_other_weights", "steps_lost_max")
    return _table(
        " | kills | resumes | could not resume | other weights | most steps lost",
        (
            f"{name}, {how} | " + " | ".join(str(counts[key]) for key in keys)
            for file in ("faults", "faults_dpo")
            for name, both in result(file)["tools"].items()
            for how, counts in both.items()
        ),
    )


def _beside_defaults() -> str:
    def row(name: str, job: Any) -> str:
        one = job["beside"]["trl"]
        ratios = {name: each["median"] for name, each in one["ratios"].items()}
        times = f"{ratios['process_seconds']:.2f} ({ratios['process_cpu_seconds']:.2f}) | {ratios['loop_seconds']:.2f}"
        resident = " / ".join(f"{one['resident_bytes'][side] / MIB:,.0f}" for side in ("finetune", "plain"))
        return f"{name} | {job['steps']} | {times} | {resident} | {one['largest_loss_difference']:.0e}"

    heads = "parameters | steps | process | loop | MiB, ours / TRL | losses"
    return _table(heads, (row(*one) for one in result("beside_defaults")["jobs"].items()))


def _around(one: Any, form: str, to: str = "\N{EN DASH}") -> str:
    return f"{one['mean']:{form}} ({one['low']:{form}}{to}{one['high']:{form}})" if one else ""


def _counted_images() -> str:
    def row(seed: str, one: Any) -> str:
        right = one["measures"]["exact_match"]
        before, after = (
            "{value:.1%} ({low:.1%}\N{EN DASH}{high:.1%})".format(**right[name]) for name in ("base", "adapter")
        )
        return f"{seed} | {before} | {after} | {one['seconds']:.0f}"

    heads = "seed | right before | right after | seconds"
    return _table(heads, (row(seed, one) for seed, one in result("counted_images")["runs"].items()))


_FINE = ("q5_k_m", "q6_k", "q8_0", "fp8")
"""Forms of five bits and more, of which one figure says enough."""


def _served(base: str) -> str:
    kept = result("served")["bases"][base]["kept"]

    def row(kind: str) -> str:
        ranges = (dict(zip(("mean", "low", "high"), way.get(kind, ()), strict=False)) for way in kept.values())
        return f"{kind} | " + " | ".join(_around(one, ".3f") for one in ranges)

    kinds = dict.fromkeys(kind for way in kept.values() for kind in way if kind not in _FINE)
    return _table(f" | {' | '.join(kept)}", map(row, kinds))


_WAYS = (
    "all of it", "layer inputs stay on the card", "the MLP takes the row whole", "no fused kernels",
    "no fused kernels, and the MLP takes the row whole",
)  # fmt: skip


def _long_rows() -> str:
    ways = result("long_context")["forecast"]["ways"].values()
    return _table(
        " | 131,072 tokens take | longest row that fits",
        (
            f"{name} | {way['needed_bytes'] / GIB:.1f} GiB | {way['longest_row']:,} tokens"
            for name, way in zip(_WAYS, ways, strict=True)
        ),
    )


_JOBS = (
    "QLoRA", "QLoRA, shards in host memory", "16-bit LoRA", "16-bit LoRA", "full fine-tuning of 8B",
    "full fine-tuning of 8B", "the same, states in host memory", "the same, states on a disk",
)  # fmt: skip


def _plans() -> str:
    def row(job: str, one: Any) -> str:
        plan = one["plan"]
        needed, budget, host = (f"{plan[key] / GIB:.1f}" for key in ("needed_bytes", "budget_bytes", "host_bytes"))
        return (
            f"{job} | {one['gpus']} x {one['card']} | {plan['sharding']['kind']}, {plan['sharding']['stage']} | "
            f"{needed} of {budget} GiB, {'fits' if plan['fits'] else 'does not fit'} | {host} GiB | "
            f"{plan['seconds']:.1f} s"
        )

    heads = "job | GPUs | shared by | one GPU needs | its host | a step"
    plans = result("plan_many_gpus")["plans"]
    return _table(heads, (row(job, one) for job, one in zip(_JOBS, plans, strict=True)))


def _mixtures() -> str:
    """Plans of adapters on experts."""
    changed = {
        "quantization.kind=none": "16 bit", "quantization.kind=published": "MXFP4, as published",
        "adapter.expert_rank=1": "`expert_rank: 1`",
    }  # fmt: skip

    def row(one: Any) -> str:
        stored = [] if any("quantization" in change for change in one["changes"]) else ["NF4"]
        how = "; ".join([*stored, *(changed[change] for change in one["changes"])])
        needs, budget = (f"{one['plan'][key] / GIB:.2f}" for key in ("needed_bytes", "budget_bytes"))
        fits = f"{needs} of {budget} GiB" + ("" if one["plan"]["fits"] else ", does not fit")
        return f"{one['model']} | {how} | {one['rows']} x {one['tokens']:,} | {one['gpu']} | {fits}"

    plans = (one for one in result("plan_mixtures")["plans"] if "adapter.expert_rank=0" not in one["changes"])
    return _table("base | experts | tokens | GPU | needs", map(row, plans))


def _ways() -> str:
    """Plans of 8B in each way to what is served, on two cards."""
    plans: dict[tuple[str, str], list[Any]] = {}
    for one in result("plan_mixtures")["served"]:
        plans.setdefault((one["way"], one["serve"]), []).append(one)

    def row(way: str, serve: str, on: list[Any]) -> str:
        base = sum(on[0]["plan"]["categories"][name] for name in ("base_weights", "quantization_state")) / GIB
        needs = " | ".join(
            f"{one['plan']['needed_bytes'] / GIB:.2f}" + " (no)" * (not one["plan"]["fits"]) for one in on
        )
        rounding = f"{size / GIB:.2f}" if (size := on[0]["rounding_bytes"]) else ""
        return f"`{way}`, `{serve}` | {base:.2f} | {needs} | {rounding}"

    return _table("GiB | base | RTX 4090 | RTX 4080 | rounding", (row(*key, on) for key, on in plans.items()))


def _own_loss() -> str:
    code = (ROOT / "examples" / "own_loss.py").read_text(encoding="utf-8").split('"""\n\n')[1]
    return f"```python\n{code}```"


_PARTS = {
    "batch": ("LoRA", "batch 4"), "every-weight": ("every weight", "batch 4"), "rank": ("LoRA", "rank 16"),
    "variants": ("", "LoRA"), "targets": ("targets", "mlp"),
}  # fmt: skip
"""By part, what its settings are of, and what they are compared with."""


def _evidence() -> str:
    def row(part: str, name: str, one: Any) -> str:
        of, reference = _PARTS[part]
        over = _around(one.get("over reference"), "+.3f", " to ")
        over += f" from {reference}" * bool(over)
        rate = _around(one.get("rate"), ".2g")
        return f"{of}{', ' * bool(of)}{name} | {_around(one['loss'], '.3f')} | {over} | {rate}"

    found = result("evidence")["findings"]
    rows = (row(part, *each) for part in _PARTS for each in found.get(part, {}).items() if "loss" in each[1])
    return _table(" | loss at its best rate | difference | best rate", rows)


def _facts() -> str:
    found = result("evidence")["findings"]["capacity"]
    losses = {name: {rank: one["loss"] for rank in (1, 2, 4, 8, 32) if (one := found.get(f"{name}, rank {rank}"))}
              for name in ("many facts", "few facts")}  # fmt: skip
    ranks = [*losses["many facts"]]
    return _table(
        f"loss | {' | '.join(f'rank {rank}' for rank in ranks)}",
        (f"{name} | {' | '.join(_around(of.get(rank), '.3f') for rank in ranks)}" for name, of in losses.items()),
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "evidence": _evidence,
    "facts": _facts,
    "first-minutes": _first_minutes,
    "tiny-memory": _tiny_memory,
    "preferences-eval": _preferences_eval,
    "llama7b-plan": _llama7b_plan,
    "data-look": _data_look,
    "forecast-phases": _forecast_phases,
    "forecast-peers": _forecast_peers,
    "forecast-memtracker": _forecast_memtracker,
    "beside-trl": _beside_trl,
    "beside-defaults": _beside_defaults,
    "counted-images": _counted_images,
    "step-over-least": _step_over_least,
    "batching": _batching,
    "kills": _kill_table,
    "long-rows": _long_rows,
    "plans": _plans,
    "mixtures": _mixtures,
    "ways": _ways,
    "served": lambda: _served("built-in"),
    "served-125m": lambda: _served("125M"),
    "own-loss": _own_loss,
}
"""Blocks by their names in the pages."""


# -- writing -----------------------------------------------------------------------------------------------------------

_FIGURE = re.compile(r"\[([^\[\]\n]+)\]\[([a-z][a-z0-9-]*)\]")
_BLOCK = re.compile(r"^<!-- written: ([a-z0-9-]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_SOURCES = re.compile(r"^<!-- sources -->\n.*\Z", re.MULTILINE | re.DOTALL)


def used(text: str) -> tuple[set[str], set[str]]:
    """Names of the figures and of the blocks in a page."""
    return {name for _, name in _FIGURE.findall(text)}, set(_BLOCK.findall(text))


def written(text: str, page: Path) -> str:
    """The text of a page with its figures, blocks and sources. Raises KeyError for an unknown name."""
    text = _BLOCK.sub(lambda block: f"<!-- written: {block[1]} -->\n{BLOCKS[block[1]]()}\n<!-- end -->", text)
    text = _FIGURE.sub(lambda figure: f"[{FIGURES[figure[2]].text()}][{figure[2]}]", text)
    results = Path(os.path.relpath(ROOT / RESULTS, page.parent)).as_posix()
    sources = "".join(f"[{name}]: {results}/{FIGURES[name].file}.json\n" for name in sorted(used(text)[0]))
    return _SOURCES.sub(lambda _: f"<!-- sources -->\n{sources}", text)


def changed() -> dict[Path, str]:
    """The files whose text is not up to date, with what it should be."""
    new = {page: written(page.read_text(encoding="utf-8"), page) for page in pages()} | generated()
    return {path: text for path, text in new.items() if not path.is_file() or not _equal(path, text)}


def _equal(path: Path, text: str) -> bool:
    written = path.read_text(encoding="utf-8")
    # As values: pydantic 2.10 writes the bound 0 of a float as 0.0.
    return json.loads(written) == json.loads(text) if path.suffix == ".json" else written == text


def main() -> None:
    for path, text in changed().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
