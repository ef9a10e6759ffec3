"""Generation: answers in batches or streamed, sampled or greedy (greedy answers of two models can be compared).

transformers' `generate` does the work. Its continuous batching (`generate_batch`, 5.24) is not used: it drops the
repetition penalty and has neither stop strings nor a choice of KV cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers import LogitsProcessorList, TextStreamer

from finetune.data import chat, formats
from finetune.data.examples import media_in
from finetune.data.media import NOTHING, TEXT_ALONE, Media, Shown
from finetune.errors import ArtifactError, ConfigError, DataError, NumbersError
from finetune.generation import caches
from finetune.generation.settings import Settings
from finetune.model import bounds, probes
from finetune.model.source import chat_template
from finetune.model.structure import experts
from finetune.runtime import libraries
from finetune.runtime.out_of_memory import is_out_of_memory
from finetune.runtime.randomness import RandomState

# Batches that are sorted together: enough that the rows of one differ little in length, while answers come early.
_SORTED_TOGETHER = 16

# Relative change of a row's logits in a batch up to which it is rounding. RWKV's is 1.1, that of a bf16 Llama on a CPU
# none (2026-11); a card takes other kernels for other shapes, which round otherwise.
_MOVES = 0.1


class PromptTooLong(ConfigError):
    """A prompt that leaves no position for an answer."""


@dataclass(frozen=True)
class Answer:
    """An answer without special tokens or stop text. `tokens` counts its new tokens, the one that ended it included.

    `ended` is false where `max_new_tokens` or the model's positions cut it off.
    """

    text: str
    tokens: int
    ended: bool


class Positions:
    """Notes, once for prompts and once for answers, that they exceed the positions that a base was made for.

    A base with a table of positions refuses them (`PromptTooLong`); one that computes positions (rotary embeddings)
    goes on, and its text may make no sense there.
    """

    def __init__(self, model: Any, note: Callable[[str], None]) -> None:
        self._count, self._note = bounds.positions(model.config), note
        self._noted: set[str] = set()

    def prompt(self, tokens: int) -> None:
        """Called before a prompt of `tokens` tokens is answered."""
        self._say("prompt", f"a prompt has {tokens:,} tokens", tokens)

    def answer(self, prompt_tokens: int, tokens: int, before: Callable[[], object] = lambda: None) -> None:
        """Called with the lengths of a prompt and its answer; `before` is called before a note."""
        if "prompt" not in self._noted:
            self._say("answer", f"an answer reaches token {prompt_tokens + tokens:,}", prompt_tokens + tokens, before)

    def _say(self, what: str, how_long: str, tokens: int, before: Callable[[], object] = lambda: None) -> None:
        if self._count and tokens > self._count and what not in self._noted:
            self._noted.add(what)
            before()
            self._note(
                f"{how_long}, beyond the {self._count:,} positions that the base was made for: what it writes there "
                "may make no sense"
            )


def prompt_ids(
    example: formats.Example, tokenizer: Any, control_tokens: chat.ControlTokens, media: Media = TEXT_ALONE
) -> list[int]:
    """Token ids of a prompt, rendered as in training (`control_tokens` is `data.control_tokens`); never empty.

    Of the base's `media`, tokens of images that the prompt does not show are refused.
    """
    try:
        ids = chat.prompt_ids(example, tokenizer, control_tokens)
    except formats.RowError as error:
        raise ArtifactError(f"the chat template cannot render the prompt: {error}") from None
    try:
        media.check_tokens(ids, media_in(example))
    except formats.RowError as error:
        raise DataError(f"the prompt cannot be answered: {error}") from None
    return ids or [tokenizer.eos_token_id]  # an empty prompt, and a tokenizer without BOS


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], settings: Settings,
    cache_bytes: Callable[[int], None] = lambda size: None, shown: Shown = NOTHING,
) -> Iterator[Answer]:  # fmt: skip
    """The answers to `prompts` (token ids, as `prompt_ids` makes them), which show the images `shown`, in their order.

    They are generated in batches of like length, padded on the left; greedy answers are those that each prompt gets
    alone, up to rounding. A model whose rows are not independent gets one prompt at a time. A batch that runs out of
    memory is halved. `cache_bytes` is called with the size of each batch's KV cache once it is complete.
    Prompts that leave no position for an answer are refused (PromptTooLong) before anything is generated.
    """
    generation = _Generation(model, tokenizer, settings, cache_bytes, shown)
    return generation.answers(prompts, [generation.room(prompt) for prompt in prompts])


def stream(
    model: Any, tokenizer: Any, prompt: list[int], settings: Settings, say: Callable[[str], None],
    shown: Shown = NOTHING,
) -> Answer:  # fmt: skip
    """The answer to one prompt, passed to `say` in pieces as soon as they are certain."""
    generation = _Generation(model, tokenizer, settings, lambda size: None, shown)
    streamer = _Streamer(tokenizer, say, settings.stop)
    [answer] = generation.generate({0: prompt}, generation.room(prompt), settings.seed, streamer)
    return answer


class _Streamer(TextStreamer):
    """Passes the text to `say` word by word, on the thread that generates, so that an interrupt ends both."""

    def __init__(self, tokenizer: Any, say: Callable[[str], None], stop: Sequence[str] = ()) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say, self._stop = say, stop
        self._text, self._said = "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._text = (self._text + text).lstrip()
        whole = _before_stop(self._text, self._stop)
        if len(whole) == len(self._text) and not stream_end:
            whole = whole[: len(whole) - max((_begun(whole, stop) for stop in self._stop), default=0)]
        # Hold back white space until a word follows, since answers are stripped.
        whole = whole.rstrip()
        if len(whole) > self._said:
            self._say(whole[self._said :])
            self._said = len(whole)


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first of the texts in `stop`."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def _begun(text: str, stop: str) -> int:
    """The number of characters at the end of `text` that may begin `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class _Generation:
    def __init__(
        self, model: Any, tokenizer: Any, settings: Settings, cache_bytes: Callable[[int], None], shown: Shown
    ) -> None:
        self._model, self._tokenizer, self._settings, self._cache_bytes = model, tokenizer, settings, cache_bytes
        self._shown = shown
        self._positions = bounds.table_size(model)
        self._stop_ids = chat_template.stop_ids(tokenizer)
        caches.make(settings.cache, model.config, 1)
        self._cached = caches.keeps(model)
        if not self._cached and settings.cache != "dynamic":
            raise ConfigError("this model has no keys and values to keep, and so no other KV cache; choose dynamic")

    def room(self, prompt: list[int]) -> int:
        """The largest number of tokens for the answer to `prompt`."""
        size = bounds.vocabulary(self._model.config)
        # A tokenizer may have more added tokens than the base has embeddings; on a GPU, such an id ends the process.
        if size is not None and (foreign := next((token for token in prompt if token >= size), None)) is not None:
            name = self._tokenizer.convert_ids_to_tokens(foreign)
            raise ConfigError(
                f"the prompt has the token {foreign} ({name!r}), which is not among the {size} that the base has "
                "embeddings for; leave it out"
            )
        wanted = self._settings.max_new_tokens
        if self._positions is None:
            return wanted
        if len(prompt) >= self._positions:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, but the base only {self._positions} positions; shorten it"
            )
        return min(wanted, self._positions - len(prompt))

    def answers(self, prompts: Sequence[list[int]], rooms: list[int]) -> Iterator[Answer]:
        size = self._settings.batch_size if len(prompts) > 1 else 1
        if size > 1 and not self._takes_batches():
            size = 1
        for start in range(0, len(prompts), size * _SORTED_TOGETHER):
            window = range(start, min(start + size * _SORTED_TOGETHER, len(prompts)))
            answered: dict[int, Answer] = {}
            # A batch ends at one length, so rows whose answers may be less long have batches of their own.
            by_length = sorted(window, key=lambda at: (rooms[at], len(prompts[at])))
            for room, group in groupby(by_length, rooms.__getitem__):
                same_room = list(group)
                # From the longest to the shortest, so that memory runs out at once or never.
                for end in range(len(same_room), 0, -size):
                    batch = same_room[max(0, end - size) : end]
                    rows = {at: prompts[at] for at in batch}
                    made = self._halving(rows, room, self._settings.seed + min(batch))
                    answered.update(zip(batch, made, strict=True))
            yield from (answered[at] for at in window)

    def _takes_batches(self) -> bool:
        """Whether a row's logits are the same behind padding, which a recurrent model may read, and beside another."""
        tokens = min(probes.TOKENS, (self._positions or math.inf) // 2 - 1)
        [row], [other] = (one.tolist() for one in probes.rows(2, int(tokens), self._model))
        made = []
        for rows in ([row], [row, other + other]):
            with _evaluating(self._model):
                output = self._model.generate(
                    **self._padded(rows), min_new_tokens=2, max_new_tokens=2, do_sample=False, use_cache=self._cached,
                    output_logits=True, return_dict_in_generate=True, pad_token_id=self._tokenizer.pad_token_id,
                    eos_token_id=self._stop_ids,
                    # The first token is the same whatever the model says, as rounding may decide between two.
                    logits_processor=LogitsProcessorList([lambda _, scores: torch.zeros_like(scores)]),
                )  # fmt: skip
            made.append(output.logits[1][0].float())  # (vocabulary), of prefill and decoding
        alone, beside = made
        return float((alone - beside).norm()) <= _MOVES * float((alone - alone.mean()).norm())

    def _halving(self, rows: dict[int, list[int]], room: int, seed: int) -> list[Answer]:
        try:
            return self.generate(rows, room, seed)
        except (MemoryError, RuntimeError) as error:
            if len(rows) == 1 or not is_out_of_memory(error):
                raise
        libraries.return_freed_memory()
        half, each = len(rows) // 2, list(rows.items())
        return [*self._halving(dict(each[:half]), room, seed), *self._halving(dict(each[half:]), room, seed)]

    def generate(
        self, rows: dict[int, list[int]], room: int, seed: int, streamer: _Streamer | None = None
    ) -> list[Answer]:
        """The answers of one batch, of at most `room` tokens each, to prompts by their number."""
        settings, before = self._settings, RandomState()
        inputs = self._padded(list(rows.values()))
        inputs |= self._shown.arguments(inputs["input_ids"], rows)
        with _evaluating(self._model):
            try:
                cache: dict[str, Any] = {}  # `generate` makes the default one, as some models keep other states
                if settings.cache != "dynamic":
                    length = inputs["input_ids"].shape[1] + room
                    cache["cache"] = caches.make(settings.cache, self._model.config, length)
                torch.manual_seed(seed)
                output = self._model.generate(
                    **inputs,
                    **settings.sampling,
                    **cache,
                    # Compiled, the default for a static cache on a GPU, an answer would take minutes to begin.
                    disable_compile=True,
                    max_new_tokens=room,
                    use_cache=self._cached,
                    pad_token_id=self._tokenizer.pad_token_id,
                    eos_token_id=self._stop_ids,
                    stop_strings=list(settings.stop) or None,
                    tokenizer=self._tokenizer if settings.stop else None,
                    logits_processor=LogitsProcessorList([_refuse_nan]),
                    return_dict_in_generate=True,
                    streamer=streamer,
                )
            finally:
                before.restore()
        self._cache_bytes(caches.size_bytes(output.cache))
        return [self._answer(row[inputs["input_ids"].shape[1] :], room) for row in output.sequences.tolist()]

    def _padded(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        """`generate`'s inputs (rows, tokens), padded on the left."""
        length, device = max(map(len, rows)), self._model.device
        ids = [[self._tokenizer.pad_token_id] * (length - len(row)) + row for row in rows]
        mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
        return {
            "input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)
        }  # fmt: skip

    def _answer(self, ids: list[int], room: int) -> Answer:
        """From a row's new tokens, with padding behind those of an answer that ended before others."""
        end = next((at for at, token in enumerate(ids, 1) if token in self._stop_ids), None)
        whole = self._tokenizer.decode(ids[:end], skip_special_tokens=True)
        text = _before_stop(whole, self._settings.stop)
        tokens = len(ids[:end])
        if end is None or len(text) < len(whole):  # else the last token ends the answer, and may equal the pad token
            while tokens and ids[tokens - 1] == self._tokenizer.pad_token_id:
                tokens -= 1
        return Answer(text.strip(), tokens, end is not None or len(text) < len(whole) or tokens < room)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """In the block, `model` is in eval mode, without gradients, and attends by the kernels of training.

    A mixture of experts has no balancing loss there, whose mask would be that of the tokens in the KV cache as well.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), libraries.without_cudnn_attention(), experts.without_balancing(model):
            yield
    finally:
        model.train(was_training)


def _refuse_nan(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if logits.isnan().any():
        raise NumbersError("the model's logits are NaN: its weights are damaged")
    return logits
