"""Pairs: a chosen and a rejected answer to one prompt, in the layouts in which preference data sets are published.

prompt, chosen, rejected              TRL: text or messages; also without `prompt`, where both begin with it
prompt, chosen, rejected, messages    UltraFeedback (H4): whole conversations; `score_chosen`, `score_rejected`
chosen, rejected                      Anthropic HH: texts, cut after the last `Assistant:` that they share
instruction, chosen_response, rejected_response     Argilla
system, question, chosen, rejected    Intel; also `input`
prompt, answers                       Nectar: each `answer` with its `rank`, the best against the worst
instruction, input, chosen, rejected  LLaMA-Factory (Alpaca)
conversations, chosen, rejected       LLaMA-Factory (ShareGPT): messages with `from` and `value`
messages, chosen, rejected            Axolotl: a message, a list of them, or text
input, preferred_output, non_preferred_output       OpenAI: `input` has `messages`, and `tools`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.data import examples
from finetune.data import fields as row
from finetune.data.counts import REVERSED, TIE
from finetune.data.examples import Completion, Example, Message, RowError, Several, Unusable
from finetune.data.fields import Fields
from finetune.data.messages import any_message, conversation, instruction_messages, read_messages, sharegpt_messages

AnswerContent = str | list[Message]

_TURN = "\n\nAssistant:"
_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))
OPTIONAL = (
    "prompt", "instruction", "input", "history", "question", "conversations", "messages", "answers", "chosen_response",
    "rejected_response", *(name for names in _SCORES for name in names), "system", "tools", "functions",
)  # fmt: skip
"""What `read` takes beside `chosen` and `rejected`."""

_OF_OPENAI = {"preferred_output": "chosen", "non_preferred_output": "rejected"}

FIELDS = frozenset({"rejected", "rejected_response", "non_preferred_output", "answers"})
"""The fields of which a pair, in any layout, has one."""


def unpacked(fields: Fields) -> Fields:
    """A row of OpenAI's preference export as `prompt`, `chosen`, `rejected` and `tools`; another row as it is."""
    if not fields.keys() >= _OF_OPENAI.keys():
        return fields
    asked = row.parsed(fields.get("input"), "input")
    if not isinstance(asked, Mapping) or not isinstance(asked.get("messages"), list):
        raise RowError("`input` must be an object with `messages`, which `preferred_output` answers")
    given = {_OF_OPENAI.get(name, name): value for name, value in fields.items() if name != "input"}
    rest = {name: value for name, value in asked.items() if name != "messages"}
    return {**rest, "prompt": asked["messages"], **given}


def read(fields: Fields) -> Several:
    """The answers of a row as its segments, each after the prompt.

    Raises RowError for a row that is no pair, Unusable for one whose answers are equally good.
    """
    chosen: AnswerContent
    rejected: AnswerContent
    if fields.get("chosen") is None and fields.get("answers") is not None:
        chosen, rejected = _best_and_worst(fields)
    else:
        chosen, rejected = read_answer(fields, "chosen"), read_answer(fields, "rejected")
    for names in _SCORES:
        better, worse = (
            None
            if row.is_nothing(fields.get(name))
            else row.number(fields[name], name, cure="remove the column if it holds none")
            for name in names
        )
        if better is not None and worse is not None and better <= worse:
            raise Unusable(TIE if better == worse else REVERSED)

    if isinstance(chosen, str) and isinstance(rejected, str):
        return Several(dict(zip(("chosen", "rejected"), _texts(fields, chosen, rejected), strict=True)))
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise RowError("`chosen` and `rejected`: one is text and the other messages; write both alike")
    return _conversations(fields, {"chosen": chosen, "rejected": rejected})


def read_with_margin(fields: Fields) -> Several:
    """A pair with the number `margin`, by how much the chosen answer is better. Raises RowError and Unusable."""
    margin = row.number(fields.get("margin"), "margin", cure="rows without one are read by `data.format: pairs`")
    return Several(read(fields).segments, {"margin": margin})


def read_answer(fields: Fields, name: str) -> AnswerContent:
    response = f"{name}_response"
    field = response if fields.get(name) is None and fields.get(response) is not None else name
    value = fields.get(field)
    if isinstance(value, Mapping):
        return [any_message(value, field)]
    if isinstance(value, list) and value:
        return [any_message(message, f"{field}[{index}]") for index, message in enumerate(value)]
    if field in fields and not isinstance(value, str):
        kind = "an empty list" if value == [] else row.kind_of(value)
        raise RowError(f"`{field}` must be text, a message or a list of messages, not {kind}; or remove the row")
    return row.text(fields, field)


def _best_and_worst(fields: Fields) -> tuple[str, str]:
    """The texts of the first and the last of ranked answers."""
    answers = row.objects(fields, "answers") or []
    ranks: list[float] = []
    for index, each in enumerate(answers):
        if not isinstance(each.get("answer"), str):
            raise RowError(f"`answers[{index}]` must have `answer`, a text, and `rank`, a number")
        ranks.append(row.number(each.get("rank"), f"answers[{index}].rank"))
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    if not order or ranks[order[0]] == ranks[order[-1]]:
        raise Unusable(TIE)
    return row.text(answers[order[0]], "answer"), row.text(answers[order[-1]], "answer")


def _texts(fields: Fields, *answers: str) -> list[Example]:
    if isinstance(fields.get("prompt"), str):
        prompt = row.text(fields, "prompt")
        return [Completion(prompt, answer) for answer in answers]
    if asked := _question(read_prompt(fields) or read_context(fields)):
        turns = [[*asked, {"role": "assistant", "content": answer}] for answer in answers]
        return [conversation(each, fields, range(len(asked))) for each in turns]
    turn = answers[0][: examples.in_common(*answers)].rfind(_TURN)
    end = examples.whole_words_in_common(*answers) if turn < 0 else turn + len(_TURN)
    if not end:
        raise RowError("`chosen` and `rejected` begin differently and there is no `prompt`: add what they answer")
    return [Completion(answer[:end], answer[end:], one_text=True) for answer in answers]


def _conversations(fields: Fields, answers: Mapping[str, list[Message]]) -> Several:
    """Two conversations, which may both repeat the prompt; they are trained from where they differ."""
    chosen, rejected = answers.values()
    for name, messages in answers.items():
        if (last := messages[-1]["role"]) != "assistant":
            raise RowError(
                f"`{name}` must end with the assistant's answer, not with a message of {last}; remove what follows it"
            )
    prompt = read_prompt(fields)
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = _question(prompt or read_context(fields))
        if not prompt:
            raise RowError("`chosen` and `rejected` are answers, and there is no `prompt`: add what they answer")
        context = len(prompt)
    else:
        common = min(examples.in_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        if not common:
            raise RowError(
                "`chosen` and `rejected` begin with different prompts; a pair answers one: make them equal, or remove "
                "the row"
            )

        def said(message: Message) -> tuple[str, Any]:
            content = message["content"]  # with images, a list of parts
            return message["role"], content.strip() if isinstance(content, str) else content

        # Some data sets repeat the prompt at the start of both conversations.
        if all(said(message) in map(said, chosen[:common]) for message in prompt):
            prompt = []
        elif prompt[-1]["role"] == "user":
            raise RowError(
                "the prompt is not that with which `chosen` and `rejected` begin; remove it, or leave only the answers "
                "in them"
            )
        context = len(prompt) + common
    return Several({
        name: conversation([*prompt, *messages], fields, range(context), where=name)
        for name, messages in answers.items()
    })  # fmt: skip


def _question(messages: list[Message]) -> list[Message]:
    """The messages before two answers. Raises RowError if they end with an answer."""
    if messages and messages[-1]["role"] == "assistant":
        raise RowError(
            "the messages before `chosen` and `rejected` end with an answer of the assistant, which both would follow; "
            "remove it"
        )
    return messages


def read_prompt(fields: Fields) -> list[Message]:
    """The messages before the answers, if a field is there for them alone."""
    if fields.get("conversations") is not None:
        return sharegpt_messages(fields)
    if isinstance(fields.get("prompt"), list):
        return read_messages(fields, "prompt")
    if fields.get("instruction") is not None:
        return instruction_messages(fields)
    name: Any = next((name for name in ("prompt", "question", "input") if fields.get(name) is not None), None)
    return [{"role": "user", "content": row.text(fields, name)}] if name else []


def read_context(fields: Fields) -> list[Message]:
    """The messages before the answers in a field that elsewhere holds the whole conversation."""
    return [] if fields.get("messages") is None else read_messages(fields, "messages")
