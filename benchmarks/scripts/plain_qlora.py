"""A plain TRL script for one GPU: QLoRA on text rows, as its documentation shows it. One side of gpu_sides.py.

It knows nothing of finetune, and can be read and run alone, on a CPU too:

    python benchmarks/scripts/plain_qlora.py --model data/tiny-llama --data rows.jsonl --output /tmp/plain

The last line it prints is JSON: losses, seconds a step, tokens per second, and peaks in bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Seconds of each optimizer step, with all that lies between it and the one before, and its loss."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        last, self._last = self._last, now()
        self.seconds.append(self._last - last)

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    options = parsed()
    set_seed(42)
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        dtype=torch.bfloat16,
        device_map={"": 0 if torch.cuda.is_available() else "cpu"},
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    train(model, AutoTokenizer.from_pretrained(options.model), options, peft_config=adapter)


def train(model: Any, tokenizer: Any, options: argparse.Namespace, **more: Any) -> None:
    """Train, and print what was measured; `more` goes to the trainer."""
    on_cuda = torch.cuda.is_available()
    clock = Clock()
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        callbacks=[clock],
        args=SFTConfig(
            output_dir=options.output,
            use_cpu=not on_cuda,
            bf16=True,
            per_device_train_batch_size=options.batch_size,
            max_steps=options.max_steps,
            learning_rate=2e-4,
            lr_scheduler_type="constant",
            optim="paged_adamw_8bit" if on_cuda else "adamw_torch",
            max_length=options.max_length,
            gradient_checkpointing=options.checkpointing == "all",
            dataloader_pin_memory=on_cuda,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=42,
        ),
        **more,
    )
    trainer.train()
    report(clock, options)


def report(clock: Clock, options: argparse.Namespace) -> None:
    """Print the losses, the speed of the steps after the first ones, and this process's peaks on a GPU, as JSON."""
    steady = clock.seconds[options.warm_up_steps :]
    found: dict[str, Any] = {
        "losses": clock.losses,
        "step_seconds": [round(seconds, 4) for seconds in clock.seconds],
        "step_seconds_median": round(statistics.median(steady), 4),
        # Every row is at least so long, and cut.
        "tokens_per_second": round(len(steady) * options.batch_size * options.max_length / sum(steady), 1),
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()  # nothing was given back, so what is in use is its peak
        measures = {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total - free,
        }
        found["peak_bytes"] = {"whole run": measures}
    print(json.dumps(found))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSON lines with `text`, each longer than --max-length tokens")
    parser.add_argument("--output", required=True)
    parser.add_argument("--checkpointing", choices=("all", "none"), default="all", help="layers that are recomputed")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--max-steps", type=int, default=12)
    parser.add_argument("--warm-up-steps", type=int, default=3, help="steps left out of the speed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
