"""A plain Hugging Face Trainer script that saves and resumes as its documentation shows. The other side of
benchmarks/faults.py; it knows nothing of finetune.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


class Progress(TrainerCallback):
    """Notes where training starts and each step that is done, for the campaign to count what a kill cost."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def _note(self, **line: Any) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(resumed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(step=state.global_step)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path, help="JSON lines with `text`")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--save-steps", type=int, default=3)
    parser.add_argument("--save-total-limit", type=int, default=2)
    options = parser.parse_args(arguments)

    transformers.logging.set_verbosity_error()
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    lora = LoraConfig(r=32, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    rows = [json.loads(line)["text"] for line in options.data.read_text(encoding="utf-8").splitlines()]
    trainer = Trainer(
        model=get_peft_model(model, lora),
        train_dataset=[tokenizer(row) for row in rows],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[Progress(options.output.with_suffix(".progress"))],
        args=TrainingArguments(
            output_dir=str(options.output),
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=options.max_steps,
            learning_rate=3e-3,
            save_steps=options.save_steps,
            save_total_limit=options.save_total_limit,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    last = get_last_checkpoint(str(options.output)) if os.path.isdir(options.output) else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
