"""Runs a GGUF file in llama.cpp, by the server in the `xllamacpp` wheel, where that is installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.data.examples import Chat
from finetune.errors import ArtifactError
from finetune.export.conversion import Conversion

# Positions of the held-out rows at which the most likely next token is compared. A wrong file agrees at few; a right
# one differs only where two tokens are nearly tied.
_POSITIONS = 64
_AGREEMENT = 0.9

NEARLY = 0.2
"""With inputs in 8 bit, llama.cpp may rank another token first that is less likely by so many nats: 0.11 was seen on
the built-in base in Q4_K_M, at a KL divergence of 0.004 (2026-11); KL 0.005 between tokens of 25% allows 0.28."""

# Positions at which the probabilities of the whole vocabulary are compared, as JSON of the server: 5 seconds each for a
# vocabulary of 200,000 (one core, 2026). Those below e^-80 are not: in float32 llama.cpp cannot name them.
_WHOLE_POSITIONS = 16
_LEAST = -80.0

# llama.cpp rounds the weights of a product, its inputs to the type of the weights, and keys and values to float16:
# errors that are independent of each other.
ROUNDINGS = math.sqrt(3)


class Server:
    """llama.cpp's server on a port of this machine; `post` is its HTTP interface."""

    def __init__(self, address: str) -> None:
        self._address = address

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except OSError as error:  # of the connection, or HTTP: such as a chat template that it cannot render
            why = str(error)
            if isinstance(error, urllib.error.HTTPError):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    why = str(json.load(error)["error"]["message"])
            raise ArtifactError(f"llama.cpp fails at {path}: {why}. Nothing was published") from None

    def tokens(self, text: str, *, opening: bool = False) -> list[int]:
        """The tokens of a text that may contain special ones; `opening`: with the BOS that starts a prompt."""
        ids = self.post("/tokenize", content=text, add_special=opening, parse_special=True)["tokens"]
        return [int(token) for token in ids]

    def log_probs(self, prompt: list[int], count: int = 1) -> dict[int, float]:
        """The `count` most likely next tokens and their log-probabilities; empty before a part of a character."""
        answer = self.post("/completion", prompt=prompt, n_predict=1, n_probs=count, temperature=0.0)
        [first] = answer.get("completion_probabilities", [{"top_logprobs": []}])
        return {one["id"]: one["logprob"] for one in first["top_logprobs"]}

    def next_token(self, prompt: list[int]) -> int:
        """The most likely next token, even if it ends an answer or is a part of a character."""
        answer = self.post("/completion", prompt=prompt, n_predict=1, temperature=0.0, return_tokens=True)
        [token] = answer["tokens"]
        return int(token)


def installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


@contextlib.contextmanager
def serving(file: Path, context: int, lora: Path | None = None) -> Iterator[Server]:
    """Serve `file` with room for `context` tokens, with the LoRA adapter `lora` if given. Raises ArtifactError."""
    library: Any = importlib.import_module("xllamacpp")
    settings = library.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.port = context, 1, 0
    settings.verbosity, settings.warmup, settings.use_jinja = -1, False, True
    # With a cache of the sliding window only, a short prompt reads what an earlier prompt left there (build 11549).
    settings.swa_full = True
    settings.cpuparams.n_threads = torch.get_num_threads()
    if lora:
        adapter = library.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = str(lora), 1.0
        settings.lora_adapters = [adapter]
    try:
        server = library.Server(settings)
    except (RuntimeError, ValueError) as error:
        raise ArtifactError(f"llama.cpp cannot load {file.name}: {error}. Nothing was published") from None
    yield Server(server.listening_address)
    del server


FLOOR = (
    "llama.cpp also rounds the inputs of products to 8 bit: on a CPU that alone is a KL divergence of about 0.001 from "
    "the same weights (Q4_K_M, a small model)"
)

ComparedLogits = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[list[int]]]


def logits(
    file: Path, job: Conversion, trained: list[torch.Tensor], base: list[torch.Tensor], lora: Path | None = None
) -> ComparedLogits:
    """Centred logits of `file` in llama.cpp, with the adapter `lora` if given, and those of `trained` and `base`, at
    some positions of the rows; and the label that follows each position, except the last of a row.
    """
    prompts = _prompts(job.rows, _WHOLE_POSITIONS)
    by_row: dict[int, tuple[list[torch.Tensor], ...]] = {}
    following: dict[int, list[int]] = {}
    with serving(file, max(map(len, job.rows)) + 8, lora) as server:
        for row, length in prompts:
            expected = trained[row][length - 1].log_softmax(-1)
            said = server.log_probs(job.rows[row][:length], len(expected))
            if not said:
                continue
            written = expected.clone()
            written[torch.tensor(list(said))] = torch.tensor(list(said.values()))
            written = torch.where(written < _LEAST, expected, written)
            for part, one in zip(by_row.setdefault(row, ([], [], [])), (written, expected), strict=False):
                part.append(one - one.mean())
            by_row[row][2].append(base[row][length - 1])
            following.setdefault(row, []).extend(job.answers[row][length : length + 1])
    if not by_row:
        raise ArtifactError(f"llama.cpp names no probabilities, given {file.name}. Nothing was published")
    first, second, third = ([torch.stack(parts[part]) for parts in by_row.values()] for part in range(3))
    return first, second, third, list(following.values())


def _prompts(rows: list[list[int]], count: int) -> list[tuple[int, int]]:
    """Row and length of up to `count` prompts, spread evenly."""
    prompts = [(row, length) for row, ids in enumerate(rows) for length in range(1, len(ids) + 1)]
    return prompts[:: -(-len(prompts) // count)]


def compare(
    file: Path, job: Conversion, expected: list[torch.Tensor], *, tokenizes_alike: bool = True, same_top: bool = True,
    lora: Path | None = None, nearly: float = 0.0,
) -> tuple[dict[str, Any] | None, list[str]]:  # fmt: skip
    """Run `file` in llama.cpp, with the adapter `lora` if given, and compare it with the `expected` logits; returns
    figures, and what was not proven.

    Raises ArtifactError if it is not the same model or tokenizer; texts are only counted unless `tokenizes_alike`, and
    most likely tokens unless `same_top`, which may be less likely by `nearly` nats.
    """
    if not installed():
        return None, ["llama.cpp was not run (`pip install xllamacpp` has it checked next time)"]
    texts = [job.tokenizer.decode(row) for row in job.rows]
    prompts = _prompts(job.rows, _POSITIONS)
    with serving(file, max(map(len, job.rows)) + 8, lora) as server:
        same_tokens = sum(
            server.tokens(text) == job.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
        )
        same_prompt = True
        if job.prompt:  # empty if the chat template cannot render it
            if isinstance(job.example, Chat):
                prompt = str(server.post("/apply-template", messages=job.example.messages)["prompt"])
            else:
                prompt = str(job.example.prompt if hasattr(job.example, "prompt") else job.example.text)
            same_prompt = server.tokens(prompt, opening=True) == job.prompt
        less_likely = []  # by how many nats its next token is less likely than ours
        for row, length in prompts:
            logits = expected[row][length - 1]
            less_likely.append(float(logits.max() - logits[server.next_token(job.rows[row][:length])]))
    wrong = []
    alike = sum(nats <= nearly for nats in less_likely)
    if same_top and alike < _AGREEMENT * len(prompts):
        wrong.append(f"has another most likely next token at {len(prompts) - alike} of {len(prompts)} positions")
    if tokenizes_alike and same_tokens < len(texts):
        wrong.append(f"splits {len(texts) - same_tokens} of {len(texts)} held-out rows into other tokens")
    if tokenizes_alike and not same_prompt:
        wrong.append("makes other tokens of a prompt than the chat template")
    if wrong:
        raise ArtifactError(f"llama.cpp, given {file.name}, {', and '.join(wrong)}. Nothing was published")
    facts = {
        "positions": len(prompts), "agreement": less_likely.count(0.0) / len(prompts), "texts": len(texts),
        "tokenized_alike": same_tokens, "prompt_alike": same_prompt,
    }  # fmt: skip
    return facts, []
