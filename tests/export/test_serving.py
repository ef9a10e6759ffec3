"""Facts about the commands that are printed for other programs: where those are installed, they answer as we do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.export import server_commands
from finetune.export.gguf import gguf_model, llama_cpp
from finetune.generation.answering import answers
from finetune.generation.settings import Settings
from finetune.model.source import chat_template


def test_the_server_of_llama_cpp_answers_as_generate_does(tiny_base: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype="auto")
    tokenizer, file = AutoTokenizer.from_pretrained(tiny_base), tmp_path / "model.gguf"
    messages = [{"role": "user", "content": "What does textwrap.fill do?"}]
    prompt = chat_template.ids(tokenizer, messages, prompt=True)
    expected = next(answers(model, tokenizer, [prompt], Settings(12))).text
    gguf_model.write(tiny_base, model.config, tokenizer, file, "f16", starts_with_bos=False)
    with llama_cpp.serving(file, 128) as server:
        found = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=12)
    assert str(found["choices"][0]["message"]["content"]).strip() == expected


def test_llama_cpp_has_the_flags_of_its_commands() -> None:
    found = importlib.util.find_spec("xllamacpp")
    if found is None:
        pytest.skip("llama.cpp is not installed")
    [library] = Path(str(found.origin)).parent.glob("*.so")
    compiled = library.read_bytes()
    commands = (
        server_commands.commands("gguf", Path("my/gguf"), "base", {"file": "model-f16.gguf"}),
        server_commands.commands("adapter", Path("my/plain-adapter"), "base", {"rank": 16, "gguf": "adapter.gguf"}),
    )
    flags = {word for found in commands for word in found["llama.cpp"].split() if word.startswith("-")}
    assert flags == {"-m", "--jinja", "--alias", "--lora"}
    assert all(b"\0" + flag.encode() + b"\0" in compiled for flag in flags)
