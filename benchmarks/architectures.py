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


def main() -> None:
    parser = harness.parser(__doc__, "architectures.json")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="a `model_type` of transformers, such as llama")
    parser.add_argument("--again", action="store_true", help="try those once more of which a check failed")
    asked = parser.parse_args()
    architectures = harness.saved(asked.output, "architectures")

    def wanted(name: str) -> bool:
        if asked.types:
            return name in asked.types
        return name not in architectures or (asked.again and "error" in str(architectures[name]["checks"]))

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

    from finetune.doctor import model_check

    kind = classes if isinstance(classes, str) else classes[0]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        values = CONFIG_MAPPING[name]().to_dict() | {"architectures": [kind]}
        (Path(folder) / "config.json").write_text(json.dumps(values))
        found = model_check.examine(folder)
        seconds = round(time.perf_counter() - started, 1)
    checks = {
        one.about: {"status": one.status, "what": harness.without_paths(one.what.replace(folder, name))}
        for one in found.findings
    }
    return {"class": kind, "seconds": seconds, "checks": checks}


if __name__ == "__main__":
    main()
