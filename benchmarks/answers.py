"""Answers on the CPU: 64 prompts in a batch beside one by one, and the memory of each KV cache beside its forecast.

Two models answer 64 prompts of uneven length greedily: the built-in base, and random weights of 34M parameters. The
answers must be the same, and a batch at least four times as fast. Then models of four architectures answer with each KV
cache that they can have; the live bytes of the complete cache, and of all tensors at the peak, are measured by
measured_step.py, in a process for each, and forecast by `finetune plan --inference`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import harness

sys.path.insert(0, str(harness.ROOT))

PROMPTS, TOKENS, SPEED_UP = 64, 32, 4.0
ROWS, CONTEXT, OFF = 4, 512, 0.03

ARCHITECTURES = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 3},
    "mixture": {
        "model_type": "qwen3_moe", "head_dim": 48, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}  # fmt: skip


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(name: str) -> dict[str, Any]:
    """Seconds and answers of one model, one by one and in batches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from finetune.generation.answering import answers
    from finetune.generation.settings import Settings
    from finetune.model.source.locate import BUILTIN_BASE, locate

    torch.set_num_threads(2)
    place = locate(BUILTIN_BASE)
    tokenizer = AutoTokenizer.from_pretrained(place)
    if name == "builtin":
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1536, num_hidden_layers=10,
            num_attention_heads=8, num_key_value_heads=4,
        ))  # fmt: skip
    text = "\n\n".join(harness.documents()["eval"])
    prompts = [tokenizer(text[at * 90 : at * 90 + 20 + at * 37 % 160])["input_ids"] for at in range(PROMPTS)]
    found: dict[int, Any] = {}
    seconds = {}
    for size in (1, 16, 64):
        settings = Settings(TOKENS, batch_size=size)
        list(answers(model, tokenizer, prompts[:2], settings))  # what is made once
        started = time.perf_counter()
        found[size] = list(answers(model, tokenizer, prompts, settings))
        seconds[size] = time.perf_counter() - started
    same = sum(found[1][at] == found[16][at] == found[64][at] for at in range(PROMPTS))
    return {
        "model": name, "parameters": model.num_parameters(), "threads": torch.get_num_threads(), "prompts": PROMPTS,
        "same_answers": same,
        "longest_prompt": max(map(len, prompts)), "shortest_prompt": min(map(len, prompts)),
        "tokens": sum(one.tokens for one in found[1]),
        "seconds": {f"batch {size}": round(value, 2) for size, value in seconds.items()},
        "times_as_fast": {f"batch {size}": round(seconds[1] / seconds[size], 2) for size in (16, 64)},
    }  # fmt: skip


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(name: str, cache: str) -> dict[str, Any]:
    """Bytes of one model and KV cache, measured and forecast; empty where the model cannot have it."""
    import forecast_cpu
    import measured_step
    import torch

    from finetune.config import MemorySection
    from finetune.errors import ConfigError
    from finetune.forecast import answer_memory, devices
    from finetune.runtime import libraries

    torch.set_num_threads(1)
    libraries.quiet()
    torch.manual_seed(0)
    values = forecast_cpu.config_json(hidden=256, layers=8, heads=(4, 2), vocabulary=4096, **ARCHITECTURES[name])
    config, architecture = measured_step.config_of({}), measured_step.architecture_of(values)
    try:
        measured = measured_step.measure_answers(config, architecture, rows=ROWS, context=CONTEXT, cache=cache)
    except ConfigError:
        return {}
    device = devices.find("cpu", MemorySection())
    found = answer_memory.Inference(config, architecture, device, ROWS, CONTEXT, cache).forecast()
    peak = max(phase["allocated_bytes"] for phase in found.phases.values())
    return {
        "model": name, "cache": cache,
        "cache_bytes": measured["cache_bytes"], "forecast_cache_bytes": found.cache_bytes,
        "cache_off": round(found.cache_bytes / measured["cache_bytes"] - 1, 5), "peak_bytes": measured["peak_bytes"],
        "forecast_peak_bytes": peak, "peak_off": round(peak / measured["peak_bytes"] - 1, 5),
    }  # fmt: skip


def _asked(what: str, *names: str) -> dict[str, Any]:
    """`what(*names)`, in a process of its own."""
    done = harness.succeeded(harness.python(__file__, what, *names))
    found: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] in (["speed"], ["memory"]):  # one measurement, in a process of its own
        what, *names = sys.argv[1:]
        print(json.dumps({"speed": speed, "memory": memory}[what](*names)))
        return
    options = harness.parser(__doc__, "answers.json").parse_args()
    from finetune.generation.caches import CACHES

    speeds = [_asked("speed", name) for name in ("builtin", "random")]
    sizes = [row for name in ARCHITECTURES for cache in CACHES if (row := _asked("memory", name, cache))]
    found = {"rows": ROWS, "context": CONTEXT, "speed": speeds, "memory": sizes}
    harness.save(options.output, found)
    print(harness.table(
        ["model", "batch 64", "same answers"],
        [[row["model"], f"{row['times_as_fast']['batch 64']} x", row["same_answers"]] for row in speeds],
    ))  # fmt: skip
    print(harness.table(
        ["model", "cache", "measured", "forecast", "off", "peak off"],
        [
            [row["model"], row["cache"], harness.mib(row["cache_bytes"]), harness.mib(row["forecast_cache_bytes"]),
             f"{row['cache_off']:+.2%}", f"{row['peak_off']:+.2%}"] for row in sizes
        ],
    ))  # fmt: skip
    wrong = [row["model"] for row in speeds if row["times_as_fast"]["batch 64"] < SPEED_UP]
    wrong += [row["model"] for row in speeds if row["same_answers"] < PROMPTS]
    wrong += [f"{row['model']} {row['cache']}" for row in sizes if abs(row["cache_off"]) > OFF]
    if wrong:
        sys.exit(f"beyond the bounds: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
