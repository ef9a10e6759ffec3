"""The job of plain_qlora.py by LLaMA-Factory, from one of its configs (written for 0.9.5): one side of gpu_sides.py.

    python benchmarks/scripts/llama_factory_qlora.py --model FOLDER --data rows.jsonl --output /tmp/factory

Its losses are divided by one token a row too many: labels are counted before they are shifted.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from llamafactory.train.tuner import run_exp
from plain_qlora import Clock, parsed, report


def main() -> None:
    options = parsed()
    output, on_cuda, clock = Path(options.output), torch.cuda.is_available(), Clock()
    output.mkdir(parents=True, exist_ok=True)
    data = {"rows": {"file_name": str(Path(options.data).resolve()), "columns": {"prompt": "text"}}}
    (output / "dataset_info.json").write_text(json.dumps(data))
    config = {
        "model_name_or_path": options.model,
        "quantization_bit": 4,
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_target": "all",
        "dataset_dir": str(output),
        "dataset": "rows",
        "template": "empty",
        "packing": False,
        "cutoff_len": options.max_length,
        "output_dir": str(output),
        "use_cpu": not on_cuda,
        "bf16": True,
        "per_device_train_batch_size": options.batch_size,
        "max_steps": options.max_steps,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "optim": "paged_adamw_8bit" if on_cuda else "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 42,
    }
    run_exp(config, callbacks=[clock])
    report(clock, options)


if __name__ == "__main__":
    main()
