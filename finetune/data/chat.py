"""From an example to tokens and labels. A label of -100 is not trained (`IGNORE`).

The rule for a conversation: each assistant turn is trained with its end-of-turn, once; nothing else is. Where the
template marks assistant turns (`{% generation %}`) the marks are used. Elsewhere the mask is found by rendering the
conversation up to each turn and accepted only where the shorter rendering is a token prefix of the longer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from finetune.data.formats import Chat, Completion, Example, Message, RowError

IGNORE = -100

LossOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class Encoded:
    """Token ids and labels of one row, of the same length."""

    input_ids: list[int]
    labels: list[int]

    @property
    def trained(self) -> int:
        """Number of tokens that are predicted and trained; the first has no predecessor and never is."""
        return sum(label != IGNORE for label in self.labels[1:])

    def cut(self, length: int) -> Encoded:
        """The first `length` tokens."""
        return Encoded(self.input_ids[:length], self.labels[:length])


def encode(example: Example, tokenizer: Any, loss_on: LossOn = "assistant") -> Encoded:
    """Tokens and labels of `example`. Raises RowError where no trustworthy mask can be found."""
    if isinstance(example, Chat):
        return _chat(example, tokenizer, loss_on)
    if isinstance(example, Completion):
        return _completion(example, tokenizer, loss_on)
    ids = _with_end(tokenizer(example.text)["input_ids"], tokenizer)
    return Encoded(ids, list(ids))


def _completion(example: Completion, tokenizer: Any, loss_on: LossOn) -> Encoded:
    # Prompt and completion are tokenized apart, as generation will see the prompt: no token spans the boundary.
    prompt = tokenizer(example.prompt)["input_ids"]
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]
    completion = _with_end(tokenizer(example.completion, add_special_tokens=False)["input_ids"], tokenizer)
    ids = prompt + completion
    return Encoded(ids, list(ids) if loss_on == "all" else [IGNORE] * len(prompt) + completion)


def _with_end(ids: list[int], tokenizer: Any) -> list[int]:
    return list(ids) if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _chat(example: Chat, tokenizer: Any, loss_on: LossOn) -> Encoded:
    messages = example.messages
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns and loss_on != "all":
        raise RowError("the conversation has no assistant turn, so there is nothing to train")
    if loss_on == "all":
        ids = _render(messages, tokenizer)
        return Encoded(ids, list(ids))
    if marks_generation(tokenizer):
        ids, trained = _marked(messages, turns, tokenizer)
    else:
        ids, trained = _incremental(messages, turns, tokenizer)
    if loss_on == "last":
        trained = _last_run(trained)
    elif example.trained_from:
        trained = _without_runs(trained, sum(turn < example.trained_from for turn in turns))
    return Encoded(ids, [token if keep else IGNORE for token, keep in zip(ids, trained, strict=True)])


def marks_generation(tokenizer: Any) -> bool:
    """Whether the chat template marks the assistant's tokens itself."""
    return "generation" in (tokenizer.chat_template or "") and "endgeneration" in tokenizer.chat_template


def _render(messages: list[Message], tokenizer: Any, prompt: bool = False) -> list[int]:
    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)
    except Exception as error:  # a template may raise anything of its own; the row is what it objects to
        raise RowError(f"the chat template refuses it: {error}") from None
    return list(rendered["input_ids"])


def _marked(messages: list[Message], turns: list[int], tokenizer: Any) -> tuple[list[int], list[bool]]:
    try:
        rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    except Exception as error:
        raise RowError(f"the chat template refuses it: {error}") from None
    ids, trained = list(rendered["input_ids"]), [bool(bit) for bit in rendered["assistant_masks"]]
    starts = sum(now and not before for before, now in zip([False, *trained], trained, strict=False))
    if starts != len(turns):
        # transformers maps the marks to tokens by character offsets, which some tokenizers trim: a turn that starts
        # with a space is then lost, with all that follow. The renderings themselves do not lie.
        return _incremental(messages, turns, tokenizer)
    return ids, trained


def _incremental(messages: list[Message], turns: list[int], tokenizer: Any) -> tuple[list[int], list[bool]]:
    ids = _render(messages, tokenizer)
    trained = [False] * len(ids)
    for turn in turns:
        if turn == 0:
            raise RowError(
                "messages[0]: where the assistant opens, the mask needs a template with {% generation %} marks; "
                "put a user or system message first, or set `data.loss_on: all`"
            )
        before = _render(messages[:turn], tokenizer, prompt=True)
        after = _render(messages[: turn + 1], tokenizer)
        if ids[: len(after)] != after or after[: len(before)] != before:
            raise RowError(
                f"messages[{turn}]: the chat template renders the conversation differently up to this turn, so its "
                "tokens cannot be told apart; use a template with {% generation %} marks, or `data.loss_on: all`"
            )
        # Templates put a line break after the end of turn; generation stops before it, so it is not learnt.
        end = len(after)
        if tokenizer.eos_token_id in after[len(before) :]:
            while after[end - 1] != tokenizer.eos_token_id:
                end -= 1
        trained[len(before) : end] = [True] * (end - len(before))
    return ids, trained


def _without_runs(trained: list[bool], count: int) -> list[bool]:
    """`trained` without its first `count` unbroken runs, which are the turns of the prompt."""
    kept, run = [], 0
    for before, now in zip([False, *trained], trained, strict=False):
        run += now and not before
        kept.append(now and run > count)
    return kept


def _last_run(trained: list[bool]) -> list[bool]:
    """Only the last unbroken run of trained tokens, which is the last assistant turn."""
    end = max((index for index, keep in enumerate(trained) if keep), default=-1)
    start = end
    while start > 0 and trained[start - 1]:
        start -= 1
    return [start <= index <= end for index in range(len(trained))] if end >= 0 else trained
