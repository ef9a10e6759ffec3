"""`finetune doctor MODEL` for every architecture of transformers with a causal language model.

Each has transformers' own default config, and a process of its own. A result is written as soon as it is there, and a
second call goes on with those that are missing (about 20 s of a core each); `--again` tries those once more of which a
check failed, and names try these.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

_INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}  # fmt: skip
# Values without which a default config has no model, as published models of the architecture have them.
_GIVEN: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 500000.0, "clip_qkv": 8}},
    "bert-generation": {"is_decoder": True},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 5, "<image>": 6, "<|visual token 000000|>": 7}},
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron": {"num_key_value_heads": 8},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "qwen4_exp": {"text_config": {"model_type": "qwen4_exp_text", **_INDEXER}},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "vocab_size": 4096},
}
_LIMIT_SECONDS = 240.0  # of a machine that does other things as well


def main() -> None:
    parser = harness.parser(__doc__, "architectures.json")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="a `model_type` of transformers, such as llama")
    parser.add_argument("--again", action="store_true", help="try those once more of which a check failed")
    asked = parser.parse_args()
    architectures = harness.saved(asked.output, "architectures")

    def wanted(name: str) -> bool:
        if asked.types:
            return name in asked.types
        statuses = {check["status"] for check in architectures.get(name, {"checks": {}})["checks"].values()}
        return not statuses or (asked.again and "error" in statuses)

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name in filter(wanted, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        architectures[name] = _tried(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
        known = {each: architectures[each] for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if each in architectures}
        harness.save(asked.output, {"architectures": known}, threads=1)
        checks = architectures[name]["checks"]
        wrong = {check: one for check, one in checks.items() if one["status"] == "error"}
        print(f"{name}: {len(checks)} checks, {architectures[name]['seconds']:.0f} s", *wrong.items(), flush=True)


def _tried(name: str, classes: str | tuple[str, ...]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    from finetune.extras.doctor import model_check

    row: dict[str, Any] = {"class": classes if isinstance(classes, str) else classes[0]}
    row |= {"seconds": 0.0, "source_revision": harness.environment(threads=1)["source_revision"]}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = _GIVEN.get(name, {})
            values = CONFIG_MAPPING[name](**given).to_dict() | {"architectures": [row["class"]], **given}
        except Exception as error:  # some configs have no valid defaults
            what = f"transformers' default config is not valid: {error}"
            return {**row, "checks": {"structure": {"status": "error", "what": what}}}
        (Path(folder) / "config.json").write_text(json.dumps(values))
        found = model_check.examine(folder, limit_seconds=_LIMIT_SECONDS)
    checks = {
        one.about: {"status": one.status, "what": harness.without_paths(one.what.replace(folder, name))}
        for one in found.findings
        if one.status != "skipped"
    }
    return {**row, "seconds": round(time.perf_counter() - started, 1), "checks": checks}


if __name__ == "__main__":
    main()
