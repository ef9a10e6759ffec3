"""Writes into README and docs/ what is generated or recorded: references, tables of results, printed output.

    python benchmarks/write_docs.py      (a part of `make docs`)

Generated text stands between `<!-- written: NAME -->` and `<!-- end -->`, where NAME is a key of BLOCKS. Results stand
on docs/benchmarks.md alone. To change one, record it anew; a test asserts that this script changes nothing.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune import choices
from finetune.runtime import patches

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
GIB, MIB = 2**30, 2**20


def generated() -> dict[Path, str]:
    """The files of docs/ that are made from code as a whole, with their text."""
    docs = ROOT / "docs"
    return {
        docs / "config.md": choices.reference(),
        docs / "config.schema.json": json.dumps(choices.schema(), indent=2) + "\n",
        docs / "patches.md": patches_page(),
        docs / "architectures.md": architectures_page(),
    }


def patches_page() -> str:
    """The registry of patches as Markdown."""
    libraries: dict[str, list[str]] = {}
    for entry in patches.entries().values():
        library = entry.read_at.partition(", ")[0]
        libraries.setdefault(library, []).append(f"- `{entry.target.replace(':', '.')}`: {entry.why}")
    parts = [
        "# Patches\n\nEvery attribute of a library that finetune replaces, and why, by the version that was read. "
        "`finetune/runtime/patches.py` says until when ([how to upgrade](upgrading.md))."
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
    """What `finetune doctor` says of every architecture as Markdown: those that are alike in one row."""
    tried = result("architectures")["architectures"]
    alike: dict[str, list[str]] = defaultdict(list)
    refusals: dict[str, list[str]] = defaultdict(list)
    failures: dict[str, list[str]] = defaultdict(list)
    for name, entry in tried.items():
        statuses = {check: one["status"] for check, one in entry["checks"].items()}
        if statuses["structure"] == "refused":
            refusals[_reason(name, entry["checks"]["structure"]["what"])].append(name)
            continue
        said = [[statuses.get(check, "skipped") for check in checks] for checks in _COLUMNS.values()]
        signs = [next(sign for status, sign in _SIGNS.items() if status in each) for each in said]
        alike[" | ".join(signs)].append(name)
        for check in (check for checks in _COLUMNS.values() for check in checks if statuses.get(check) == "error"):
            failures[f"{check}: {_reason(name, entry['checks'][check]['what'])}"].append(name)
    exact = sum(len(names) for signs, names in alike.items() if signs.startswith("yes | yes"))
    version = result("architectures")["environment"]["packages"]["transformers"]
    rows = sorted(alike.items(), key=lambda one: -len(one[1]))
    return "\n".join(
        [
            "# Architectures",
            "",
            "```",
            "finetune doctor Qwen/Qwen3-8B     # what works with this base: reads its config.json alone",
            "```",
            "",
            f"Of the {len(tried)} architectures of transformers {version} with a causal language model, {exact} train "
            f"and merge exactly; {sum(map(len, refusals.values()))} are refused before data and weights. Each was "
            "tried as a small copy with random weights on a CPU (`python benchmarks/architectures.py`): loaded in 16 "
            "bit and NF4, traced, trained for three steps, merged, exported, and answered from with each KV cache. "
            "`refused`: a command says why; `fails`: a defect here or in a library, listed below.",
            "",
            _table(
                f"architectures | {' | '.join(_COLUMNS)}",
                (f"{', '.join(f'`{name}`' for name in names)} | {signs}" for signs, names in rows),
            ),
            "",
            "## What is refused as a whole",
            "",
            *(f"- {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in refusals.items()),
            "",
            "## What fails",
            "",
            *(f"- {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in failures.items()),
            "",
        ]
    )


def _reason(name: str, text: str) -> str:
    """A message on one short line, without the names of one model and without signs that Markdown reads."""
    text = re.sub(r"^[a-z.]+: | of type \S+(?= (is|by|has))|; use [^;]*$", "", " ".join(text.replace("`", "").split()))
    text = re.sub(r"\b\w+(ForCausalLM|LMHeadModel|ModelWithLMHead)\b", "the model", text.replace(name, "it"))
    text = re.sub(r", as the loss does here: .*|: [{'\"(].*| \(\w+Error: .*", "", text)
    return re.sub(r"([<>|\\*_])", r"\\\1", text)[:160]


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

Value = str | Callable[[Any], Any]
"""Of a file of results: the path of a number in it, or a function that computes one."""

FIGURES: dict[str, list[tuple[str, str, str, list[Value]]]] = {
    "forecast": [
        ("settings trained, architectures", "forecast_cpu", "{}, {}", ["summary/compared", "summary/architectures"]),
        ("median error of a peak", "forecast_cpu", "{:.2%}", ["summary/median_absolute_error"]),
        ("largest, second largest error of a peak", "forecast_cpu", "{:.1%}, {:.2%}",
         [lambda found: _errors(found)[0], lambda found: _errors(found)[1]]),
        ("30 drawn from them, with transformers 5.24: median, largest error", "forecast_sample", "{:.2%}, {:.2%}",
         ["summary/median_absolute_error", lambda found: _errors(found)[0]]),
        ("seconds of a forecast, imports included: Llama-2-7B, 70B", "forecast_speed", "{:.1f}, {:.1f}",
         [lambda found: _seconds(found, "7b-hf"), lambda found: _seconds(found, "70b-hf")]),
        ("CPU seconds over `import torch`: help, data, doctor, a CPU's plan, a card's again, init", "start_up", "{}",
         [lambda found: ", ".join(f"{one['ratio']:.2f}" for one in found["commands"].values())]),
    ],
    "speed": [
        ("loop, whole process of 60 steps, with the settings of a plain script", "overhead", "{:.2f}, {:.2f}",
         ["allocators/kept/ratios/loop_seconds/median", "allocators/kept/ratios/process_seconds/median"]),
        ("log-probabilities of a frozen head in tiles, forward and backward, 2,048 and 32,000 words", "log_probs",
         "{:.2f}, {:.2f}", ["cases/2,048 words, frozen, ahead/ratio", "cases/32,000 words, frozen, ahead/ratio"]),
        ("an epoch of DPO on 1,280 pairs, beside DPOTrainer", "beside_dpo", "{:.2f}",
         ["beside/trl/ratios/process_seconds/median"]),
        ("480 rows with an image each, small Idefics 3", "beside_images", "{:.2f}",
         ["beside/trl/ratios/process_seconds/median"]),
        ("a halved sweep, a full one, beside lone runs", "sweeps", "{:.2f}, {:.2f}",
         ["jobs/2M/beside/halved/lone/seconds", "jobs/2M/beside/full/lone/seconds"]),
        ("reading, rendering, tokenizing and masking a million conversations", "preparation", "{:.2f}",
         [lambda found: 1 / found["ratio"]["median"]]),
        ("MiB for that: finetune, TRL", "preparation", "{:,.0f}, {:,.0f}",
         [lambda found: found["peak_resident_bytes"]["finetune"] / MIB,
          lambda found: found["peak_resident_bytes"]["trl"] / MIB]),
    ],
    "faults": [
        ("ranks killed, runs, largest difference of a weight", "faults_ranks", "{}, {}, {:.1e}",
         [lambda _: sum(_of_ranks("kills")), lambda _: sum(_of_ranks("runs")),
          lambda _: max(_of_ranks("largest_difference_of_a_weight"))]),
        ("merges killed: at random moments, at each change of a file", "merge", "{}, {}",
         ["kills_at_random/kills", "kills_at_each_change_of_a_file/kills"]),
        ("faults put into the code, found, accepted", "mutations", "{:,}, {:,}, {}",
         [lambda found: _of_mutants(found, "mutants"),
          lambda found: _of_mutants(found, "killed") + _of_mutants(found, "timed_out"),
          lambda found: sum(len(area["accepted"]) for area in found["areas"].values())]),
    ],
    "served": [
        ("largest KL divergence of an adapter on what is served: read back, in llama.cpp", "served", "{:.1g}, {:.4f}",
         [lambda found: max(cell["kl"] for cell in _adapters(found)),
          lambda found: max(cell["llama_cpp"]["kl"] for cell in _adapters(found) if "llama_cpp" in cell)]),
        ("families as GGUF in llama.cpp; greedy answers, as in transformers", "gguf_in_llama_cpp", "{}; {}, {}",
         [lambda found: len(found["models"]), lambda found: len(_gguf(found)),
          lambda found: sum(each["answer_tokens_alike"] == each["answer_tokens"] for each in _gguf(found))]),
        ("error of the forecast of a KV cache, of the peak of answers", "answers", "{:.3%}, {:.2%}",
         [lambda found: max(abs(row["cache_off"]) for row in found["memory"]),
          lambda found: max(abs(row["peak_off"]) for row in found["memory"])]),
        ("logits of the built-in base off: int8 here, in bitsandbytes' layers, NF4", "int8_cpu",
         "{:.1%}, {:.1%}, {:.1%}",
         ["logits/int8", "logits/int8, inputs in 8 bit", "logits/nf4"]),
    ],
}  # fmt: skip
"""Rows of the tables of figures: what was measured, the file, the format, and the values."""


def _errors(found: Any) -> list[float]:
    """The errors of peaks, the largest first."""
    return sorted((abs(row["relative_errors"]["peak"]) for row in found["settings"].values()), reverse=True)


def _seconds(found: Any, job: str) -> float:
    return found["jobs"][f"meta-llama/Llama-2-{job}"]["median_seconds"]


def _of_ranks(key: str) -> list[float]:
    """One figure of the jobs with copies, FSDP and DeepSpeed."""
    return [result(f"faults_ranks{sharing}")["found"][key] for sharing in ("", "_fsdp", "_deepspeed")]


def _of_mutants(found: Any, key: str) -> int:
    return sum(area[key] for area in found["areas"].values())


def _adapters(found: Any) -> list[Any]:
    """What was measured of adapters on what is served, by any base, seed and kind."""
    seeds = [seed for base in found["bases"].values() for seed in base["seeds"].values()]
    return [cell for seed in seeds for cell in seed.get("adapter", {}).values()]


def _gguf(found: Any) -> list[Any]:
    return [model[kind] for model in found["models"].values() for kind in found["bounds"]]


def _figures(section: str) -> str:
    def row(what: str, file: str, form: str, values: list[Value]) -> str:
        found = result(file)
        numbers = (value(found) if callable(value) else _at(found, value) for value in values)
        return f"{what} | {form.format(*numbers)} | [{file}](../{RESULTS}/{file}.json)"

    return _table("measured | figure | recorded in", (row(*each) for each in FIGURES[section]))


def _at(found: Any, path: str) -> Any:
    """The number at `path`; a key may itself have a slash."""
    if path in found:
        return found[path]
    first = next(key for key in found if path.startswith(f"{key}/"))
    return _at(found[first], path.removeprefix(f"{first}/"))


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


def _installing() -> str:
    def cell(one: Any) -> str:
        return f"{one['seconds']:.0f} ({one['cpu_seconds']:.0f})"

    found = result("installing")["first_step"]
    rows = (f"{tool} | {' | '.join(map(cell, found[tool].values()))}" for tool in ("uv", "pip"))
    return _table(f"by | {' | '.join(found['uv'])}", rows)


def _first_minutes() -> str:
    """Twelve lines from a table of questions to an answer."""
    return _excerpt(
        "first_minutes",
        [
            "$ head", "question,answer", "What is", "$ finetune init", "wrote", "$ finetune train", "memory  ",
            "step 0", "...", "step 60:", "$ finetune generate runs/facts --prompt", "It is Fredville.",
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


_FINE = ("q5_k_m", "q6_k", "q8_0", "fp8")
"""Forms of five bits and more, of which one figure says enough."""


def _served() -> str:
    kept = result("served")["bases"]["built-in"]["kept"]

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
        return f"{of}{', ' * bool(of)}{name} | {reference} | {_around(one['over reference'], '+.3f', ' to ')}"

    found = result("evidence")["findings"]
    rows = (row(part, *each) for part in _PARTS for each in found.get(part, {}).items() if "over reference" in each[1])
    return _table("setting | beside | difference of the loss", rows)


BLOCKS: dict[str, Callable[[], str]] = {
    **{f"figures-{section}": functools.partial(_figures, section) for section in FIGURES},
    "first-minutes": _first_minutes,
    "installing": _installing,
    "llama7b-plan": _llama7b_plan,
    "data-look": _data_look,
    "own-loss": _own_loss,
    "forecast-phases": _forecast_phases,
    "forecast-peers": _forecast_peers,
    "beside-trl": _beside_trl,
    "beside-defaults": _beside_defaults,
    "batching": _batching,
    "kills": _kill_table,
    "long-rows": _long_rows,
    "served": _served,
    "evidence": _evidence,
}
"""Blocks by their names in the pages."""


# -- writing -----------------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"^<!-- written: ([a-z0-9-]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def written(text: str) -> str:
    """The text of a page with its blocks. Raises KeyError for an unknown name."""
    return _BLOCK.sub(lambda block: f"<!-- written: {block[1]} -->\n{BLOCKS[block[1]]()}\n<!-- end -->", text)


def changed() -> dict[Path, str]:
    """The files whose text is not up to date, with what it should be."""
    new = {page: written(page.read_text(encoding="utf-8")) for page in pages()} | generated()
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
