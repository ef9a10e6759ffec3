"""A folder for `ollama create`: the GGUF file and a Modelfile with the chat template in Ollama's language.

Ollama renders with Go templates and knows the Jinja template of a GGUF file only if it is one of a list; any other
model gets a default, without an error. So the template is translated: what stands before each message, by its role and
place, is taken from the chat template's own output, written as a Go template, and compared with it on conversations of
several shapes. A template that has no such form is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.data.examples import Chat, Completion, learnt
from finetune.errors import ArtifactError, ConfigError
from finetune.export import server_commands
from finetune.export.conversion import Conversion, Exporter, ExportRequest
from finetune.export.gguf import gguf_export
from finetune.model.source import chat_template

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]

_TURNS = ["user", "assistant", "user", "assistant", "user"]
_SHAPES = [[*system, *_TURNS[:turns]] for system in ([], ["system"]) for turns in (1, 3, 5)]


@dataclass(frozen=True)
class Turns:
    """The text before each message of a conversation, and `end`, which follows the last and opens the answer.

    `system` and `after_system` are None for a template that takes no system message.
    """

    first: str
    assistant: str
    user: str
    end: str
    system: str | None = None
    after_system: str | None = None

    def text(self, messages: Messages) -> str:
        """The conversation as Ollama renders the Go template, computed in Python."""
        rendered = ""
        for index, message in enumerate(messages):
            if message["role"] == "user":
                follows_system = index == 1 and messages[0]["role"] == "system"
                before = self.first if index == 0 else self.after_system if follows_system else self.user
            else:
                before = self.system if message["role"] == "system" else self.assistant
            rendered += f"{before}{message['content']}"
        return rendered + self.end

    def go(self) -> str:
        """The Go template: https://pkg.go.dev/text/template, with Ollama's variables."""
        first, assistant, user, end = map(_literal, (self.first, self.assistant, self.user, self.end))
        system, before_user = "", f"{{{{ if eq $i 0 }}}}{first}{{{{ else }}}}{user}{{{{ end }}}}"
        if self.system is not None and self.after_system is not None:
            system = f'{{{{ if eq .Role "system" }}}}{_literal(self.system)}{{{{ .Content }}}}{{{{ end }}}}'
            before_user = (
                f"{{{{ if eq $i 0 }}}}{first}{{{{ else if and $.System (eq $i 1) }}}}{_literal(self.after_system)}"
                f"{{{{ else }}}}{user}{{{{ end }}}}"
            )
        turns = (
            f'{system}{{{{ if eq .Role "user" }}}}{before_user}{{{{ .Content }}}}{{{{ end }}}}'
            f'{{{{ if eq .Role "assistant" }}}}{assistant}{{{{ .Content }}}}{{{{ end }}}}'
        )
        return f"{{{{ range $i, $m := .Messages }}}}{turns}{{{{ end }}}}{end}"


def check(job: ExportRequest) -> None:
    """Raise ConfigError if the model has no GGUF form, or Ollama cannot express its chat template or a stop token."""
    modelfile(gguf_export.file_name(job.kind), _template(job)[0], _stops(job))
    gguf_export.check(job)


def make(job: Conversion, folder: Path) -> dict[str, Any]:
    """Write the GGUF file and the Modelfile to `folder`. Returns the facts of export.json."""
    template, differences = _template(job)
    facts = gguf_export.make(job, folder)
    note = server_commands.prompts("ollama", learnt(job.run.events()), job.config.data.separator)
    (folder / "Modelfile").write_text(modelfile(facts["file"], template, _stops(job), note), encoding="utf-8")
    return {
        **facts,
        "known_differences": [*facts["known_differences"], *differences],
        "not_proven": [*facts["not_proven"], "Ollama was not run; a reading of its template in Python was compared"],
    }


def modelfile(file: str, template: str, stops: list[str], note: str | None = None) -> str:
    """The Modelfile, with a `note` as its first line. Raises ConfigError for a stop token that it cannot express."""
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""', *(f"PARAMETER stop {_value(stop)}" for stop in stops)]
    return "\n".join([*([f"# The model was {note}."] if note else []), *lines]) + "\n"


def _value(text: str) -> str:
    """A text as a value of a Modelfile.

    Ollama's parser (parser/parser.go, 2026) knows no escapes: a value that begins with one quote or three ends with
    the first line that ends in as many, and what cannot be printed is dropped.
    """
    if all(letter.isprintable() or letter in "\t\r\n" for letter in text):
        for quotes in ('"', '"""'):
            ends = [end for end, letter in enumerate(text) if letter in "\r\n"]
            starts = [(quotes + text[:end]).strip() for end in ends]
            ended = any(len(start) >= 2 * len(quotes) and start.endswith(quotes) for start in starts)
            if not ended and (quotes != '"' or not f'{text}"'.startswith('""')):
                return quotes + text + quotes
    raise ConfigError(
        f"the stop token {text!r} has no form in a Modelfile; export `gguf` for llama.cpp's server, which reads the "
        "token itself"
    )


def _stops(job: ExportRequest) -> list[str]:
    return [job.tokenizer.convert_ids_to_tokens(token) for token in chat_template.stop_ids(job.tokenizer)]


def _template(job: ExportRequest) -> tuple[str, list[str]]:
    """The Go template, and its differences from the chat template."""
    if not isinstance(job.example, Chat):
        separator = job.config.data.separator if isinstance(job.example, Completion) else ""
        return "{{ .Prompt }}" + _literal(separator), []
    template = turns(lambda messages: chat_template.text(job.tokenizer, messages, prompt=True)[0])
    missing = "the chat template takes no system message; Ollama leaves one out"
    bos = job.tokenizer.bos_token
    if bos and job.starts_with_bos:  # Ollama adds it itself, because the GGUF file says so
        system = template.system and template.system.removeprefix(bos)
        template = replace(template, first=template.first.removeprefix(bos), system=system)
    return template.go(), [missing] * (template.system is None)


def turns(render: Render) -> Turns:
    """The parts of a chat template, from its output. Raises ConfigError if they do not reproduce it."""
    try:
        first, assistant, user, end = _between(render, _TURNS[:3])
    except ArtifactError:
        raise
    except Exception as error:  # a template may raise anything
        raise _refused(str(error)) from None
    parts = Turns(first, assistant, user, end)
    try:
        system, after, _ = _between(render, ["system", "user"])
        parts = Turns(first, assistant, user, end, system, after)
        shapes = _SHAPES
    except ArtifactError:
        raise
    except Exception:
        shapes = [shape for shape in _SHAPES if shape[0] != "system"]
    for shape in shapes:
        messages = [{"role": role, "content": f"{role} says {number}.\n\nMore."} for number, role in enumerate(shape)]
        if parts.text(messages) != render(messages):
            raise _refused(f"what stands before a message depends on more than its place ({', '.join(shape)})")
    return parts


def _between(render: Render, roles: list[str]) -> list[str]:
    """The texts before, between and after the contents of messages with these roles."""
    contents = [f"QX{number}XQ" for number in range(len(roles))]
    rest = render([{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)])
    texts = []
    for content in contents:
        before, _, rest = rest.partition(content)
        texts.append(before)
    return [*texts, rest]


def _literal(text: str) -> str:
    """A text as an action of a Go template, which keeps its braces and white space.

    Characters that Go does not print, such as a no-break space, are escaped: Ollama drops them from a Modelfile.
    """
    quoted = json.dumps(text, ensure_ascii=False)
    quoted = "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in quoted)
    return f"{{{{ {quoted} }}}}" if text else ""


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"the chat template has no form in Ollama's language: {why}; export `gguf` for llama.cpp's server, which reads "
        "the template itself"
    )


EXPORTER = Exporter(check, make, gguf_export.forms)
