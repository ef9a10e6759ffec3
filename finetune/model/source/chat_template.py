"""Chat templates: named ones, a file, or the tokenizer's own; and rendering.

transformers renders in jinja2's ImmutableSandboxedEnvironment: no attributes that start with an underscore, no changes
to its inputs, ranges of at most 100,000. The sandbox limits neither time nor memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from finetune.config.field_types import Help, unknown
from finetune.errors import ArtifactError, ConfigError

T = TypeVar("T")

SUFFIX = ".jinja"

_FOLDER = Path(__file__).parent / "templates"
# Variables that rendering sets itself, and functions that transformers gives to every template.
_SET_BY_CALLS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_CALLED: list[dict[str, Any]] = [_PROBE[0], {"role": "assistant", "content": "", "tool_calls": [_CALL]}]
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "c"}

TEMPLATES: dict[str, Help] = {
    "auto": Help("the tokenizer's own, or `plain` if it has none"),
    "plain": Help("roles in plain text, and EOS as end of turn: no new token to learn"),
    "chatml": Help("`<|im_start|>role … <|im_end|>` (ChatML)"),
    "llama2": Help("`[INST] … [/INST]` with `<<SYS>>` in the first user message (Llama 2 chat)"),
    "llama3": Help("`<|start_header_id|>role<|end_header_id|> … <|eot_id|>` (Llama 3)"),
    "mistral": Help("`[INST] … [/INST]`, the system text before the first user message (Mistral 7B v0.1, v0.2)"),
    "gemma": Help("`<start_of_turn>role … <end_of_turn>`, without a system role (Gemma 1, 2)"),
    "phi3": Help("`<|role|> … <|end|>` (Phi 3)"),
}


def named(name: str) -> str:
    """The text of a built-in template."""
    return (_FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8")


def is_plain(tokenizer: Any) -> bool:
    """Whether conversations get `plain`, as those of a base without a chat template do unless the config names one."""
    return bool(tokenizer.chat_template == named("plain"))


def choose(choice: str, own: Any) -> Any:
    """The template for `choice` (a key of TEMPLATES, or a .jinja file); `own` is the tokenizer's, or None."""
    if choice == "auto":
        return named("plain") if own in (None, "", {}, []) else own
    if not choice.endswith(SUFFIX):
        return named(choice)
    try:
        return Path(choice).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"`data.chat_template`: {choice}: no such file; use a file that exists, or one of {', '.join(TEMPLATES)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`data.chat_template`: {choice}: cannot be read: {error}") from None


def with_defaults(chosen: Any, arguments: Mapping[str, Any]) -> Any:
    """The template (or templates by name) with `arguments` as defaults of its variables, which a caller can override.

    Raises ConfigError for an argument that the template has no variable for.
    """
    if isinstance(chosen, dict):
        return {name: with_defaults(one, arguments) for name, one in chosen.items()}
    values = {name: json.dumps(value, ensure_ascii=False) for name, value in arguments.items()}
    lines = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value} %}}{{%- endif %}}\n"
        for name, value in values.items()
    )
    if not lines or chosen.startswith(lines):  # the template of a trained run has them already
        return chosen
    known = _variables(chosen)
    for name in arguments:
        if name not in known:
            near = unknown(name, known) if known else "it has no argument"
            raise ConfigError(f"`data.template_arguments`: the chat template has no variable `{name}`: {near}")
    return lines + chosen


def check(chosen: Any) -> None:
    """Raise ArtifactError for a template (or one of several by name) that is not text or cannot be parsed."""
    for one in chosen.values() if isinstance(chosen, dict) else [chosen]:
        if not isinstance(one, str):
            raise ArtifactError(
                f"`chat_template` in the tokenizer's files must be text, or texts by name, not {type(one).__name__}; "
                "mend it, or set `data.chat_template`"
            )
        _variables(one)


def without_generation_marks(template: str) -> str:
    """A chat template without the `{% generation %}` blocks that transformers adds to Jinja, with the same output.

    They become blocks that are always taken, since they may trim the white space around them.
    """
    opened = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", template)
    return re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", opened)


def _variables(chosen: str) -> list[str]:
    """The variables of a template that its caller may set, other than those that each call sets."""
    from jinja2 import Environment, meta

    with _explained():
        plain = without_generation_marks(chosen)
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(plain)
        used = meta.find_undeclared_variables(parsed)
    return sorted(name for name in used if name not in _SET_BY_CALLS and not name.endswith("_token"))


def text(
    tokenizer: Any, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
    prompt: bool = False, marks: bool = False,
) -> tuple[str, list[tuple[int, int]]]:  # fmt: skip
    """The text of a conversation; with `prompt`, including the opening of the assistant's turn.

    With `marks`, also the character spans that the template marks as the assistant's (`{% generation %}`). Raises
    ArtifactError for a template that is invalid or violates the sandbox, and whatever the template itself raises.
    """
    read = [{key: value for key, value in message.items() if value is not None} for message in messages]
    if _reads_parts_alone(tokenizer):
        for message in read:
            if isinstance(content := message.get("content"), str):
                message["content"] = [{"type": "text", "text": content}]
    return _rendered(tokenizer, read, tools, prompt, marks)


def _rendered(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, prompt: bool = False,
    marks: bool = False,
) -> tuple[str, list[tuple[int, int]]]:  # fmt: skip
    from transformers.utils import chat_template_utils

    with _explained():
        # `apply_chat_template` would return marks by token only, for one conversation at a time.
        [rendered], marked = chat_template_utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **tokenizer.special_tokens_map,
        )
    return rendered, marked[0] if marks else []


def ids(tokenizer: Any, messages: list[dict[str, Any]], *, prompt: bool = False) -> list[int]:
    """The token ids of `text`. Raises as it does."""
    return tokenizer(text(tokenizer, messages, prompt=prompt)[0], add_special_tokens=False)["input_ids"]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """In the block, raise ArtifactError for a template that is invalid or violates the sandbox."""
    from jinja2.exceptions import SecurityError, TemplateSyntaxError

    try:
        yield
    except RecursionError:
        why = "is nested too deeply"
    except SecurityError as error:
        why = f"violates its sandbox: {error}"
    except TemplateSyntaxError as error:
        why = f"is not valid: line {error.lineno}: {error.message}"
    else:
        return
    raise ArtifactError(f"the chat template {why}; set `data.chat_template` to one that you trust") from None


def kept_by_tokenizer(compute: Callable[[Any], T]) -> Callable[[Any], T]:
    """A function of a tokenizer that is computed once for each one with its chat template and number of tokens."""
    kept = functools.lru_cache(maxsize=8)(lambda tokenizer, template, size: compute(tokenizer))
    return functools.wraps(compute)(lambda tokenizer: kept(tokenizer, str(tokenizer.chat_template), len(tokenizer)))


@kept_by_tokenizer
def _reads_parts_alone(tokenizer: Any) -> bool:
    """Whether the template writes the parts of a message, and leaves out a text that is not a list of them.

    Those of Idefics 3 and SmolVLM take it for a list of characters, without an error.
    """
    question = str(_PROBE[0]["content"])

    def written(content: Any) -> bool:
        marked = f"<{question}>"
        try:
            return marked in _rendered(tokenizer, [{"role": "user", "content": content(marked)}])[0]
        except ArtifactError:
            raise
        except Exception:  # a template may raise anything
            return False

    return not written(lambda text: text) and written(lambda text: [{"type": "text", "text": text}])


@kept_by_tokenizer
def end_of_turn(tokenizer: Any) -> int | None:
    """The token that closes an assistant turn, found by rendering one; EOS if the template fails to render it.

    None if no special token closes a turn, so that a model could not learn to stop.
    """
    return _ending(tokenizer)[0]


@kept_by_tokenizer
def unwritten_ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The end of a last answer, and that of a last tool call, where these are the tokens with which the user's next
    message and the tool's begin (GLM); else none.
    """
    end = _ending(tokenizer)[1]
    try:
        return end, end and (_beginning(tokenizer, [*_CALLED, _RESULT]) or end)
    except ArtifactError:
        raise
    except Exception:  # a template may raise anything, and render no tools
        return end, end


def _beginning(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """The special token that the last of `messages` begins with; none if it has another or changes those before."""
    before, whole = ids(tokenizer, messages[:-1]), ids(tokenizer, messages)
    token = whole[len(before) : len(before) + 1]
    return token if whole[: len(before)] == before and special_ids(tokenizer).issuperset(token) else []


def _ending(tokenizer: Any) -> tuple[int | None, list[int]]:
    """The result of `end_of_turn`, and the end of a last answer as in `unwritten_ends`."""
    try:
        prompt, whole = ids(tokenizer, _PROBE[:1], prompt=True), ids(tokenizer, _PROBE)
        after = _beginning(tokenizer, [*_PROBE, _PROBE[0]])
    except ArtifactError:
        raise
    except Exception:  # a template may raise anything, for example because it requires a system message
        return int(tokenizer.eos_token_id), []
    special = special_ids(tokenizer)
    ending = None
    # A template may also close the conversation (Phi 3); the first special token after the answer's text counts.
    for token in reversed(whole[len(prompt) :]):
        if token in special:
            ending = int(token)
        elif tokenizer.decode([token]).strip():
            break
    answered = tokenizer.decode(whole[len(prompt) :]).endswith(_PROBE[1]["content"])
    return (after[0], after) if answered and after else (ending, [])


def stop_ids(tokenizer: Any) -> list[int]:
    """Token ids that end an answer: EOS, and the end of a turn, and that of a tool call if it is not written."""
    return sorted({tokenizer.eos_token_id, end_of_turn(tokenizer), *unwritten_ends(tokenizer)[1]} - {None})


def write_generation_config(settings: Any, tokenizer: Any, folder: Path) -> None:
    """Write generation_config.json from a base's `settings`; generation stops at the end of a turn as in training."""
    ends = settings.eos_token_id
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    settings.eos_token_id = list(dict.fromkeys([*known, *stop_ids(tokenizer)]))
    # `save_pretrained` refuses changed settings that contradict each other, as some that are published do.
    settings.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


@kept_by_tokenizer
def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens except the unknown token, which ordinary text may contain."""
    added = (token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    return frozenset({*added, *tokenizer.all_special_ids} - {tokenizer.unk_token_id})
