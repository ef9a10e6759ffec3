"""Single answers, each labelled desirable or not, in the layouts in which such data sets are published; and pairs.

prompt, completion, label             TRL: text or messages
conversations, kto_tag                LLaMA-Factory (ShareGPT), the last message being the answer; also `label`
messages, label                       the same in OpenAI's format; also `kto_tag`
instruction, input, output, kto_tag   LLaMA-Factory (Alpaca)
instruction, completion, label        Axolotl; also `question`
chosen, rejected                      a pair in any layout of `pairs`: one answer that is desirable, and one that is not
"""

from __future__ import annotations

from finetune.data import fields as row
from finetune.data import pairs
from finetune.data.counts import EQUAL
from finetune.data.encoded import ANSWER, DESIRABLE
from finetune.data.examples import Completion, Content, Example, Message, RowError, Several, Unusable
from finetune.data.fields import Fields
from finetune.data.messages import conversation, read_messages, sharegpt_messages

_LABELS = ("label", "kto_tag")
_OF_PAIRS = ("chosen", "chosen_response", "answers")
OPTIONAL = (*_LABELS, "output", *(name for name in pairs.OPTIONAL if name != "prompt"))
"""What `read` takes beside `prompt` and `completion`."""


def read(fields: Fields) -> Several:
    """The answer of a row after its prompt, with its label; or both answers of a pair.

    Raises RowError for a row that is neither, Unusable for a pair from which nothing can be learnt.
    """
    if any(fields.get(name) is not None for name in _OF_PAIRS):
        pair = pairs.read(fields)
        chosen, rejected = pair.segments.values()
        if chosen == rejected:
            raise Unusable(EQUAL)
        return pair
    answer = _answer(fields)
    name = next((name for name in _LABELS if fields.get(name) is not None), _LABELS[0])
    label = fields.get(name)
    if not isinstance(label, bool):
        has = "it is missing" if label is None else f"not {row.kind_of(label)}"
        raise RowError(
            f"`{name}` must be true for a desirable answer and false for another, a boolean of JSON or Parquet; {has}"
        )
    return Several({ANSWER: answer}, {DESIRABLE: float(label)})


def rows_of(content: Content) -> dict[str, Content]:
    """Split a pair into two rows of one answer, by name; any other row stays as it is."""
    if not isinstance(content, Several) or ANSWER in content.segments:
        return {"": content}
    return {
        name: Several({ANSWER: example}, {DESIRABLE: float(name == "chosen")})
        for name, example in content.segments.items()
    }


def _answer(fields: Fields) -> Example:
    name = next((name for name in ("completion", "output") if fields.get(name) is not None), None)
    if name is None and fields.get("conversations") is not None:
        turns = sharegpt_messages(fields)
        return _ending(turns, len(turns) - 1, fields, "conversations")
    if name is None and fields.get("messages") is not None:
        turns = read_messages(fields, "messages")
        return _ending(turns, len(turns) - 1, fields, "messages")
    name = name or "completion"
    answer = pairs.read_answer(fields, name)
    if isinstance(answer, str) and isinstance(fields.get("prompt"), str):
        return Completion(row.text(fields, "prompt"), answer)
    asked = pairs.read_prompt(fields) or pairs.read_context(fields)
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return _ending([*asked, *turns], len(asked), fields, name)


def _ending(turns: list[Message], prompt: int, fields: Fields, where: str) -> Example:
    """The conversation whose answer are the messages after the first `prompt` ones."""
    if not prompt:
        raise RowError(f"`{where}` has an answer, and there is no `prompt`: which question it answers")
    if (last := turns[-1]["role"]) != "assistant":
        raise RowError(f"`{where}` must end with the assistant's answer, not with a message of {last}")
    return conversation(turns, fields, range(prompt), where=where)
