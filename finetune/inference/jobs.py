"""`finetune generate`, and the models of a run that it and `finetune eval` use."""

from __future__ import annotations

from typing import Any

from finetune.config import Config
from finetune.data import examples, fingerprint
from finetune.export.merge import load_merged
from finetune.inference.generation import answer, prompt_ids
from finetune.lifecycle.failures import blaming_base
from finetune.model import adapter, bounds, build, identity
from finetune.model.base import load_architecture
from finetune.model.tokenizer import load_tokenizer
from finetune.report.terminal import note_beside_output
from finetune.runtime import libraries
from finetune.runtime.device import this_device
from finetune.settings import config_of
from finetune.storage.rundir import RunDirectory


def generate(
    run: RunDirectory,
    prompt: str,
    *,
    which: str = "adapter",
    max_new_tokens: int = 256,
    trust_remote_code: bool = False,
) -> str:
    """Answer `prompt` with the run's `base`, `adapter` or `merged` model.

    A run trained on conversations answers it as a user message; one trained on completions or plain text continues it.
    `trust_remote_code` allows Python code shipped with the run's base. Raises ArtifactError if such code is needed and
    not allowed.
    """
    config = config_of(run, trust_remote_code=trust_remote_code)
    model, tokenizer = model_of(run, config, which)
    kinds = [kind for event in run.events() if (kind := str(event.get("learns"))) in examples.ASKED]
    if not kinds:
        note_beside_output(f"{run.path} does not record the format of its rows; the prompt is sent as a conversation")
    example = examples.ASKED[kinds[-1] if kinds else "chat"](prompt)
    with blaming_base(config.model):
        return answer(model, tokenizer, prompt_ids(example, tokenizer, config.data.control_tokens), max_new_tokens)


def model_of(run: RunDirectory, config: Config, which: str) -> tuple[Any, Any]:
    """The run's base, base with adapter (quantized as in training), or merged model; and the tokenizer.

    Raises ArtifactError if the tokenizer or the base is not the one that the weights were trained with.
    """
    libraries.quiet()
    device = this_device()
    tokenizer = load_tokenizer(config.model, run.chat_template)
    if which == "merged" or (which == "adapter" and config.adapter.kind == "none"):
        fingerprint.check(tokenizer, run.merged)
        return load_merged(run, config.model, device), tokenizer
    if which == "adapter":
        adapter.check_files(run.adapter, config.adapter)
        fingerprint.check(tokenizer, run.adapter)
    architecture = load_architecture(config.model)
    bounds.check_tokenizer(tokenizer, architecture, config.model)
    attention, _ = build.choose_attention(config, architecture, device.type)
    base = build.blueprint(config, architecture, attention).load(device)
    trained = run.adapter if config.adapter.kind == "lora" else run.merged
    if trained.exists():
        now = identity.of_base(config.model, note_beside_output)
        fingerprint.check_base(config.model, now, trained, note_beside_output)
    if which == "base":
        return base, tokenizer
    return adapter.load_adapter(base, run.adapter, config.adapter), tokenizer
