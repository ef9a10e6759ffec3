"""What the README shows of Llama-2-7B on a 24 GB card: the plan as printed, and the fit. Forecasts alone.

    python benchmarks/plan_llama7b.py

Writes docs/llama7b_plan.txt and benchmarks/results/plan_llama7b.json. No GPU, no weights.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import harness

CONFIG, CARD = "configs/llama7b_qlora.yaml", "RTX 4090"


def main() -> None:
    harness.parser(__doc__).parse_args()
    plan = _finetune("plan")
    (harness.ROOT / "docs/llama7b_plan.txt").write_text(plan, encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
        fitted = json.loads(_finetune("fit", "--json", "--output", str(Path(scratch) / "fitted.yaml")))
    del fitted["config"]
    result = {"config": CONFIG, "card": CARD, "plan": json.loads(_finetune("plan", "--json")), "fit": fitted}
    harness.save(harness.RESULTS / "plan_llama7b.json", result)
    print(plan, json.dumps(fitted["chosen"]), fitted["predicted_speed_up"], fitted["limits"])


def _finetune(command: str, *arguments: str) -> str:
    return harness.finetune(command, CONFIG, "--gpu", CARD, *arguments)


if __name__ == "__main__":
    main()
