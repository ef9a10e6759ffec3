"""The job of plain_qlora.py by Unsloth, as its documentation shows it (written for 2026.10). A side of gpu_sides.py.

    python benchmarks/scripts/unsloth_qlora.py --model FOLDER --data rows.jsonl --output /tmp/unsloth

Layers are recomputed in its own way ("unsloth"), with their inputs kept on the host.
"""

from __future__ import annotations

import torch

from unsloth import FastLanguageModel  # isort: skip -- before the libraries that it changes

from plain_qlora import parsed, train

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    options = parsed()
    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model, max_seq_length=options.max_length, dtype=torch.bfloat16, load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=32,
        lora_dropout=0,
        target_modules=LINEAR,
        use_gradient_checkpointing="unsloth",
        random_state=42,
    )
    train(model, tokenizer, options)


if __name__ == "__main__":
    main()
