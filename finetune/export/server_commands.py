"""Commands that serve an export with other programs; this program has no server."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from finetune.config.serving import VLLM_RANKS


def commands(name: str, folder: Path, base: str, record: dict[str, Any], *, scores: bool = False) -> dict[str, str]:
    """Command lines by program for the export `name` in `folder`; `record` is its export.json.

    For a model that `scores` sequences, the command prints the scores of one text.
    """
    called = folder.absolute().parent.name
    if scores:
        scored = f'pipeline("text-classification", {str(folder)!r}, function_to_apply="none", top_k=None)("A text.")'
        return {"transformers": _line("python", "-c", f"from transformers import pipeline; print({scored})")}
    if name == "adapter":
        return _of_adapter(called, folder, base, record)
    if name == "gguf":
        return {"llama.cpp": _line("llama-server", "-m", folder / record["file"], "--jinja", "--alias", called)}
    if name == "ollama":
        named = re.sub("[^A-Za-z0-9_.-]+", "-", called).strip("-.")[:80] or "finetuned"  # allowed in a name
        made = _line("ollama", "create", named, "-f", folder / "Modelfile")
        return {"Ollama": f"{made} && {_line('ollama', 'run', named)}"}
    return {
        "vLLM": _line("vllm", "serve", folder, "--served-model-name", called),
        "SGLang": _line("python", "-m", "sglang.launch_server", "--model-path", folder, "--served-model-name", called),
        "transformers": _line("transformers", "serve", folder),
    }


def prompts(name: str, kind: str | None, separator: str) -> str | None:
    """How to prompt the export `name` after training on examples of `kind`; None for turns of the chat template."""
    if kind in (None, "chat"):
        return None
    text = f"trained on plain text to be {'completed' if kind == 'completion' else 'continued'}"
    if kind == "completion" and separator:
        text += f", with {json.dumps(separator, ensure_ascii=False)} after each prompt"
    if name == "ollama":
        return f"{text}, which the Modelfile makes of a prompt"
    return f"{text}: ask `/v1/completions`, since `/v1/chat/completions` adds a chat template, which was not trained"


def _of_adapter(called: str, folder: Path, base: str, record: dict[str, Any]) -> dict[str, str]:
    held = (record.get("held_base") or {}).get("file", "")
    in_gguf = held.lower().endswith(".gguf")
    base = str(folder / held) if held and not in_gguf else base
    allowed = next((rank for rank in VLLM_RANKS if rank >= record["rank"]), None)
    overrides = record.get("base_overrides") or {}
    text, rope = json.dumps(overrides), overrides.get("rope_parameters", {})
    lines = dict[str, str]()
    if allowed and not in_gguf:  # vLLM serves another base than a GGUF file
        lines["vLLM"] = _line(
            "vllm", "serve", base, "--enable-lora", "--max-lora-rank", allowed, "--lora-modules", f"{called}={folder}",
            *(["--hf-overrides", text] if rope else []),
        )  # fmt: skip
    if not held and not record.get("expert_rank"):  # only for a base in 16 bit
        lines["SGLang"] = _line(
            "python", "-m", "sglang.launch_server", "--model-path", base, "--lora-paths", f"{called}={folder}",
            "--max-loras-per-batch", 1, *(["--json-model-override-args", text] if rope else []),
        )  # fmt: skip
    # The base's file was written with the adapter, and contains the scaling.
    written = in_gguf and not Path(held).is_absolute()
    scaled = written or rope.get("rope_type") != "llama3"  # llama.cpp has no option for Llama 3's scaling
    if record["gguf"] and scaled and (in_gguf or not held):
        scaling = ["--rope-scaling", rope["rope_type"], "--rope-scale", f"{rope['factor']:g}"] if rope else []
        lines["llama.cpp"] = _line(
            "llama-server", "-m", folder / held if in_gguf else "BASE.gguf", "--lora", folder / record["gguf"],
            "--jinja", "--alias", called, *([] if written else scaling),
        )  # fmt: skip
    return lines


def _line(*words: object) -> str:
    return shlex.join(map(str, words))
