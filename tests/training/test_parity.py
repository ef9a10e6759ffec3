"""The recipe trains as a plain TRL script does: the same losses, step by step."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from jobs import write_rows
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import finetune
from finetune.data.batching import RowOrder
from finetune.extras.python_docs import rows as python_docs

STEPS, BATCH, MICRO, SEED = 5, 8, 4, 42
CONVERSATIONS = python_docs.conversations("train")[::40]


def plain_trl_losses(base: Path, output: Path) -> list[float]:
    """A user's own script. The rows come in the order our sampler deals them, the one thing that is ours."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    lengths = [0] * len(CONVERSATIONS)
    order = list(RowOrder(lengths, BATCH, SEED, group_by_length=False))[: STEPS * BATCH]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(output), per_device_train_batch_size=MICRO, gradient_accumulation_steps=BATCH // MICRO,
            max_steps=STEPS, learning_rate=1e-3, lr_scheduler_type="cosine",
            warmup_steps=0,  # theirs begins at a rate of 0, and ours at its first fraction
            optim="adamw_torch_fused", max_length=256, assistant_only_loss=True, bf16=False, use_cpu=True, seed=SEED,
            train_sampling_strategy="sequential", logging_steps=1, report_to="none", save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([CONVERSATIONS[index] for index in order]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.filterwarnings("ignore")  # the script is a user's own
def test_losses_equal_those_of_a_plain_trl_script(quick, shallow_base: Path, tmp_path: Path) -> None:
    config = quick(
        f"data.train={write_rows(tmp_path / 'rows.jsonl', CONVERSATIONS)}", "data.eval=none", "quantization.kind=none",
        "optimizer.kind=adamw_torch_fused", "training.learning_rate=1e-3", "training.warmup=0",
        "training.eval_every=null", "training.group_by_length=false", f"training.max_steps={STEPS}",
        f"training.batch_size={BATCH}", f"training.micro_batch={MICRO}",
    )  # fmt: skip
    ours = [line["loss"] for line in finetune.train(config).run.metrics()]
    theirs = plain_trl_losses(shallow_base, tmp_path / "plain")
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert ours[-1] < ours[0]
