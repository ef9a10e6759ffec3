"""Build `tiny-llama`: a tokenizer and a two-million-parameter Llama, pre-trained on Python's own docstrings.

    python data/build_tiny_llama.py --output data/tiny-llama

It is the base model of this repository's examples and tests: small enough to commit and to fine-tune on a
laptop, yet of the same architecture as a real base model, with something learnt for fine-tuning to build on.
It reads the training documents of build_python_docs.py only. It never sees a question, an answer in chat form or a
held-out text, so what fine-tuning on `builtin:python_docs` gains is gained there.

The same machine, Python and library versions give the same weights. `training.json`, beside the weights,
records the versions, the settings and the loss on the held-out documents.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DOCUMENT_BOUNDARY = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PADDING = "<|pad|>"

VOCABULARY_SIZE = 2048
CONTEXT_TOKENS = 1024
MAX_WEIGHT_BYTES = 4_000_000

# ChatML. The generation markers enclose what the model itself has to write: the reply and its end of turn.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
            {{- message['content'] + '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class TrainingSettings:
    """How the model is trained; the defaults took about a quarter of an hour on two cores."""

    steps: int = 1800
    batch_sequences: int = 8
    sequence_tokens: int = 384
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 60
    weight_decay: float = 0.1
    adam_betas: tuple[float, float] = (0.9, 0.98)
    max_gradient_norm: float = 1.0
    seed: int = 0
    threads: int = 2
    """Part of the settings because the order of floating-point sums, and so the weights, depend on it."""


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode any text, and give it the chat template."""
    tokenizer = Tokenizer(models.BPE())
    # Each line break is a token of its own. So the tokens of a chat prompt, which ends in one, stay the same
    # whatever reply follows, even a reply that starts with white space.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[DOCUMENT_BOUNDARY, TURN_START, TURN_END, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=DOCUMENT_BOUNDARY,
        eos_token=TURN_END,
        pad_token=PADDING,
        additional_special_tokens=[TURN_START],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A randomly initialised Llama. Every linear layer's input width is a multiple of 64.

    That is the block size of 4-bit quantisation, so no block straddles two rows of a weight.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[Tensor]:
    """Token ids of each text, followed by the document boundary."""
    boundary = tokenizer.convert_tokens_to_ids(DOCUMENT_BOUNDARY)
    encodings = tokenizer.backend_tokenizer.encode_batch(texts)
    return [torch.tensor([*encoding.ids, boundary]) for encoding in encodings]


def training_batches(documents: list[Tensor], settings: TrainingSettings) -> Iterator[Tensor]:
    """Endless batches of shape (sequences, tokens + 1), cut from the documents in a new order every epoch.

    Each sequence has one token more than the model reads, so that every position has a next token.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    window = settings.sequence_tokens + 1
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        stream = torch.cat([documents[index] for index in order])
        windows = stream[: len(stream) // window * window].view(-1, window)
        windows = windows[torch.randperm(len(windows), generator=generator)]
        full_batches = len(windows) // settings.batch_sequences
        yield from windows[: full_batches * settings.batch_sequences].chunk(full_batches)


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Linear warm-up to the peak, then a half cosine down to the final rate."""
    if step < settings.warmup_steps:
        return settings.peak_learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    share_of_peak = 0.5 * (1 + math.cos(math.pi * progress))
    return share_of_peak * settings.peak_learning_rate + (1 - share_of_peak) * settings.final_learning_rate


def next_token_loss(model: LlamaForCausalLM, sequences: Tensor) -> Tensor:
    """Mean negative log-likelihood, in nats, of every token but the first of each sequence."""
    logits = model(input_ids=sequences[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())


def train(model: LlamaForCausalLM, documents: list[Tensor], settings: TrainingSettings) -> None:
    """Train the model in place."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        betas=settings.adam_betas,
    )
    model.train()
    started = time.perf_counter()
    for step, batch in zip(range(settings.steps), training_batches(documents, settings), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        loss = next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == settings.steps - 1:
            elapsed = time.perf_counter() - started
            print(f"step {step:5d}  loss {loss.item():.3f} nats/token  {elapsed:6.0f} s", flush=True)


@torch.no_grad()
def redraw_unseen_embeddings(model: LlamaForCausalLM, documents: list[Tensor], seed: int) -> None:
    """Give every token that the documents lack, such as those of the chat template, a new random embedding.

    Training moves all of them the same way, far from every context, until one cannot be told from another. A
    LoRA adapter leaves the tied embeddings frozen and so could hardly learn to end a turn. The new ones have
    the mean and the spread of the trained embeddings.
    """
    embeddings = model.get_input_embeddings().weight
    seen = torch.bincount(torch.cat(documents), minlength=VOCABULARY_SIZE) > 0
    trained = embeddings[seen].float()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(int((~seen).sum()), embeddings.shape[1], generator=generator)
    embeddings[~seen] = (trained.mean(0) + trained.std(0) * noise).to(embeddings.dtype)


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, documents: list[Tensor]) -> float:
    """Mean loss in nats per token, each document read by itself after a document boundary."""
    model.eval()
    total_nats, total_tokens = 0.0, 0
    for document in documents:
        boundary = document[-1:]
        sequence = torch.cat([boundary, document])[: CONTEXT_TOKENS + 1]
        tokens = len(sequence) - 1
        total_nats += next_token_loss(model, sequence[None]).item() * tokens
        total_tokens += tokens
    return total_nats / total_tokens


def unigram_loss(train_documents: list[Tensor], held_out_documents: list[Tensor]) -> float:
    """The same measure for a model that knows nothing but how often each token occurs (add-one smoothing)."""
    counts = torch.bincount(torch.cat(train_documents), minlength=VOCABULARY_SIZE).double() + 1
    nats_of_token = -(counts / counts.sum()).log()
    scored = torch.cat([document[:CONTEXT_TOKENS] for document in held_out_documents])
    return nats_of_token[scored].mean().item()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model and the tokenizer as a directory that `from_pretrained` reads."""
    # A base model ends a document, a fine-tuned one its turn; either should end the generation.
    boundary = tokenizer.convert_tokens_to_ids(DOCUMENT_BOUNDARY)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, boundary],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def measure(output: Path, train_documents: list[Tensor], held_out_documents: list[Tensor]) -> dict[str, Any]:
    """Figures of the saved model. The weights are read back, so the loss includes their rounding."""
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    return {
        "held_out_loss_nats_per_token": round(held_out_loss(model, held_out_documents), 4),
        "held_out_unigram_loss_nats_per_token": round(unigram_loss(train_documents, held_out_documents), 4),
        "held_out_documents": len(held_out_documents),
        "held_out_tokens": sum(min(len(document), CONTEXT_TOKENS) for document in held_out_documents),
        "training_documents": len(train_documents),
        "training_tokens_per_epoch": sum(map(len, train_documents)),
        "parameters": model.num_parameters(),
        "weight_bytes": (output / "model.safetensors").stat().st_size,
    }


def parse_arguments() -> tuple[Path, TrainingSettings]:
    defaults = TrainingSettings()
    parser = argparse.ArgumentParser(description="Build the tiny-llama tokenizer and base model.")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="random seed (%(default)s)")
    parser.add_argument("--threads", type=int, default=defaults.threads, help="CPU threads (%(default)s)")
    arguments = parser.parse_args()
    settings = TrainingSettings(steps=arguments.steps, seed=arguments.seed, threads=arguments.threads)
    return arguments.output, settings


def main() -> None:
    output, settings = parse_arguments()
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)

    script = Path(__file__).with_name("build_python_docs.py")
    documents = json.loads(subprocess.check_output([sys.executable, script, "--documents"]))
    train_texts = documents["train"]
    tokenizer = build_tokenizer(train_texts)
    train_documents = encode_documents(tokenizer, train_texts)
    held_out_documents = encode_documents(tokenizer, documents["eval"])

    model = build_model(tokenizer)
    started = time.perf_counter()
    train(model, train_documents, settings)
    training_seconds = time.perf_counter() - started
    model.to(torch.bfloat16)
    redraw_unseen_embeddings(model, train_documents, settings.seed)
    save(model, tokenizer, output)

    record = {
        "command": shlex.join(["python", *sys.argv]),
        **measure(output, train_documents, held_out_documents),
        "tokens_seen": settings.steps * settings.batch_sequences * settings.sequence_tokens,
        "training_seconds": round(training_seconds),
        "settings": asdict(settings),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    if record["weight_bytes"] > MAX_WEIGHT_BYTES:
        raise SystemExit(f"model.safetensors is larger than {MAX_WEIGHT_BYTES} bytes")


if __name__ == "__main__":
    main()
