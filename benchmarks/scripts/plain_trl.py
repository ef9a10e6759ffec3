"""A plain TRL script: LoRA on a chat file, as its documentation shows it. The other side of benchmarks/overhead.py, and
of benchmarks/beside_peers.py on a CPU; with --pairs, DPO on a file of pairs, that of benchmarks/beside_dpo.py; with
--images, on rows that have some, that of benchmarks/beside_images.py.

It knows nothing of finetune, and can be read and run alone:

    python benchmarks/scripts/plain_trl.py --model data/tiny-llama --data messages.jsonl --output /tmp/plain
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
import trl
from datasets import Image, List, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSON lines with `messages`, or pairs")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--logging-steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="rows a step, in two micro-batches")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--checkpointing", choices=("all", "none"), default="none", help="layers that are recomputed")
    parser.add_argument("--pairs", choices=("in-step", "precomputed"), help="DPO, and when the reference is computed")
    parser.add_argument(
        "--images", action="store_true", help="rows with `images`; only the language layers are trained"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    bf16 = options.precision == "bf16"

    set_seed(42)
    processor = (AutoProcessor if options.images else AutoTokenizer).from_pretrained(options.model)
    auto = AutoModelForImageTextToText if options.images else AutoModelForCausalLM
    model = auto.from_pretrained(options.model, dtype=torch.bfloat16 if bf16 else torch.float32)
    model.config.use_cache = False
    set_seed(42)
    targets = r".*\.text_model\..*_proj" if options.images else "all-linear"
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    rows = load_dataset("json", data_files=options.data, split="train")
    if options.images:
        rows = rows.cast_column("images", List(Image()))

    if options.pairs:
        trainer_class, config_class = trl.DPOTrainer, trl.DPOConfig
        own = {"precompute_ref_log_probs": options.pairs == "precomputed"}
    else:
        trainer_class, config_class = trl.SFTTrainer, trl.SFTConfig
        own = {"assistant_only_loss": True}
    trainer = trainer_class(
        model=model,
        processing_class=processor,
        train_dataset=rows,
        args=config_class(
            output_dir=str(options.output),
            use_cpu=True,
            bf16=bf16,
            per_device_train_batch_size=options.batch_size // 2,
            gradient_accumulation_steps=2,
            max_steps=options.max_steps,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0,
            optim="adamw_torch_fused",
            max_length=options.max_length,
            gradient_checkpointing=options.checkpointing == "all",
            dataloader_pin_memory=False,
            # The file is shuffled already.
            train_sampling_strategy="sequential",
            logging_steps=options.logging_steps,
            save_strategy="steps",
            save_steps=options.max_steps,
            report_to="none",
            seed=42,
            **own,
        ),
    )
    cpu_before = time.process_time()
    metrics = trainer.train().metrics
    metrics["train_cpu_seconds"] = time.process_time() - cpu_before
    metrics["resident_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the peak so far
    trainer.save_model(str(options.output / "adapter"))

    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (options.output / "loop.json").write_text(json.dumps({**metrics, "losses": losses}))


if __name__ == "__main__":
    main()
