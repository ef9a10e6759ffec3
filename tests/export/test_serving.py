"""Facts about the commands that are printed for other programs: where those are installed, they answer as we do."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from together import held_port
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.export import server_commands
from finetune.export.gguf import gguf_model, llama_cpp
from finetune.inference.answer_settings import Settings
from finetune.inference.generation import answers
from finetune.model.source import chat_template

MESSAGES = [{"role": "user", "content": "What does textwrap.fill do?"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def expected(tiny_base: Path) -> str:
    """What `finetune generate` answers."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype="auto")
    prompt = chat_template.ids(tokenizer, MESSAGES, prompt=True)
    return next(answers(model, tokenizer, [prompt], Settings(12))).text


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"]).strip()


def test_the_server_of_llama_cpp_answers_as_generate_does(tiny_base: Path, expected: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    tokenizer, file = AutoTokenizer.from_pretrained(tiny_base), tmp_path / "model.gguf"
    gguf_model.write(
        tiny_base, model.config, tokenizer, file, "f16", starts_with_bos=False,
        end_of_turn=chat_template.end_of_turn(tokenizer),
    )  # fmt: skip
    with llama_cpp.serving(file, 128) as server:
        assert content(server.post("/v1/chat/completions", **ASKED)) == expected


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


@pytest.fixture
def transformers_serve(tiny_base: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of the command that is printed for a merged model, running, and the model's folder."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason="transformers[serving] is not installed")
    folder = Path(shutil.copytree(tiny_base, tmp_path / "my" / "merged"))
    program, *arguments = server_commands.commands("merged", folder, "base", {})["transformers"].split()
    assert program == "transformers"
    port = held_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", *arguments, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://localhost:{port}"
    try:
        while True:
            assert server.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield address, folder
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_the_server_of_transformers_answers_as_generate_does(
    transformers_serve: tuple[str, Path], expected: str
) -> None:
    address, folder = transformers_serve
    body = json.dumps({**ASKED, "model": str(folder)}).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        assert content(json.load(answer)) == expected
