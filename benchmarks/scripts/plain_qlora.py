"""A plain TRL script for one GPU: QLoRA on text rows, as its documentation shows it. The other side of `gpu_check.py`.

It knows nothing of finetune, and can be read and run alone, on a CPU too:

    python benchmarks/scripts/plain_qlora.py --model data/tiny-llama --data rows.jsonl --output /tmp/plain

The last line it prints is JSON: losses, seconds a step, tokens per second, and the allocator's peaks in bytes.
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
    """Seconds of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self._started)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peaks() -> dict[str, int]:
    """The allocator's peaks since the start, nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    return {"allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def main() -> None:
    options = _options()
    on_cuda = torch.cuda.is_available()
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    started = now()
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        dtype=torch.bfloat16,
        device_map={"": 0 if on_cuda else "cpu"},
    )
    loaded = {"seconds": round(now() - started, 2), "peak_bytes": peaks()}
    clock = Clock()
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
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
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            dataloader_pin_memory=on_cuda,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=42,
        ),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    median = statistics.median(clock.seconds[options.warm_up_steps :])
    found = {
        "losses": losses,
        "step_seconds": [round(seconds, 4) for seconds in clock.seconds],
        "step_seconds_median": round(median, 4),
        # Every row is at least so long, and cut.
        "tokens_per_second": round(options.batch_size * options.max_length / median, 1),
        "load": loaded,
        "peak_bytes": peaks(),
    }
    print(json.dumps(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSON lines with `text`, each longer than --max-length tokens")
    parser.add_argument("--output", required=True)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--max-steps", type=int, default=12)
    parser.add_argument("--warm-up-steps", type=int, default=3, help="steps left out of the speed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
