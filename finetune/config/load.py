"""Read a config: file, then `section.key=value` overrides, then validation; all problems are reported together."""

from __future__ import annotations

import math
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from finetune.config import not_offered, other_names, strict_yaml
from finetune.config.field_types import Choices, Usual, nearest, shortened, shown
from finetune.config.rules import contradictions
from finetune.config.sections import Config, Section, Source
from finetune.errors import ConfigError


def load(
    path: str | Path, overrides: Sequence[str] = (), choices: Choices | None = None, *, trained: bool = False
) -> Config:
    """Read and check the config at `path`.

    `overrides` are `section.key=value` strings, the value read as a YAML scalar, flow list or mapping. `choices` are
    the tables that choice fields are checked against. `trained`: a run was started with this config, perhaps by an
    earlier version, which accepted keys that a choice ignores; they changed nothing of what it trained.

    Raises ConfigError with all problems, each with file:line or `override`, when there is any.
    """
    path = Path(os.path.expanduser(path))
    document = strict_yaml.parse(text_of(path))
    problems = [f"{path}:{problem.line}: {problem.message}" for problem in document.problems]
    where = {key: f"{path}:{line}" for key, line in document.lines.items()}
    config = _checked(document.values, where, str(path), problems, overrides, choices, trained)
    return config if config.output.dir else config.changed({"output.dir": str(Path("runs") / path.stem)})


def loaded(config: object) -> Config:
    """What a program gave as a config. Raises ConfigError if it is none."""
    if not isinstance(config, Config):
        raise ConfigError(f"`config` must be one that `finetune.load_config` returned, not {shown(config)}")
    return config


def text_of(path: Path) -> str:
    """The text of a YAML file, or what is too much of it. Raises ConfigError for a file that cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read(strict_yaml.MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_nearest_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, not a config{_nearest_file(path / '*')}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} is 0x{error.object[error.start]:02X}"
        raise ConfigError(f"{path}: is not UTF-8 text ({byte}); a config is a YAML file, saved as UTF-8") from None
    except (OSError, ValueError) as error:  # a ValueError for a null character in the path
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def as_written(path: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The sections in a config of another version, with this one's defaults for what they leave out, unchecked.

    Also the keys that this version does not know. Raises ConfigError for a file without readable sections.
    """
    document = strict_yaml.parse(text_of(path))
    if document.problems:
        raise ConfigError(f"{path}:{document.problems[0].line}: {document.problems[0].message}")
    found = Config().model_dump(mode="json")
    unknown_keys = []
    for name, section in document.values.items():
        values = section if isinstance(section, dict) else {"": section}
        unknown_keys += [f"{name}.{key}".rstrip(".") for key in values if key not in found.get(name, {})]
        found[name] = {**found.get(name, {}), **values}
    return found, unknown_keys


def from_values(values: Mapping[str, Any], overrides: Sequence[str] = (), choices: Choices | None = None) -> Config:
    """Check a config given as a mapping of sections, as `load` does one in a file."""
    return _checked(dict(values), {}, "config", [], overrides, choices, trained=False)


def _checked(
    values: dict[str, Any], where: dict[tuple[str, ...], str], file: str, problems: list[str],
    overrides: Sequence[str], choices: Choices | None, trained: bool,
) -> Config:  # fmt: skip
    """The config of `values` with the `overrides`. Raises ConfigError for `problems` and all that are found here."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list, such as [{shown(overrides)}]")
    for override in overrides:
        problems += _apply(values, where, override)
    config, found = _validate(values, where, file, choices, trained)
    problems += found
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config


def dump(config: Config, *, defaults: bool = True) -> str:
    """The resolved config as YAML that `load` reads back to an equal value, if wanted without keys at their default."""
    values = config.model_dump(mode="json")
    if not defaults:
        usual = Config().model_dump(mode="json")
        changed = {
            name: {key: value for key, value in section.items() if value != usual[name][key]}
            for name, section in values.items()
        }
        values = {name: section for name, section in changed.items() if section}
    return written(values)


def written(sections: Mapping[str, Any]) -> str:
    """Sections and their keys as the YAML of a config; only what is given."""
    return yaml.dump(dict(sections), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def inline(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf
    )
    return text.removesuffix("\n").removesuffix("\n...")


def explained(text: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """The lines of a config, each key with its reason, by `section.key`, as a comment beside it."""
    section = ""
    for line in text.splitlines():
        key = line.strip().partition(":")[0]
        section = key if line and not line.startswith(" ") else section
        reason = reasons.get(f"{section}.{key}")
        yield f"{line}  # {reason}" if reason and line.startswith(" ") else line


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 takes for something else; PyYAML itself knows only 1.1."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if strict_yaml.scalar(text) != text or not text.isprintable() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def _apply(values: dict[str, Any], where: dict[tuple[str, ...], str], override: str) -> list[str]:
    """Set one `section.key=value` in `values`; returns the problems."""
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if equals and len(path) == 1 and (meant := other_names.meant(path[0], text)):
        return [f"override `{override}`: {_instead(path[0], meant)}"]
    if not equals or len(path) not in ((2, 3) if _is_mapping(path) else (2,)) or not all(path):
        return [f"override `{override}`: write it as section.key=value, such as training.max_steps=20"]
    document = strict_yaml.parse(f"value: {text}")
    if document.problems:
        return [f"override `{override}`: {document.problems[0].message}"]
    if values.get(path[0]) is None:
        values[path[0]] = {}
    section = values[path[0]]
    if not isinstance(section, dict):
        return [f"override `{override}`: `{path[0]}` is not a section in the file"]
    if len(path) == 3:
        section[path[1]] = section = dict(section.get(path[1]) or {})
    section[path[-1]] = document.values["value"]
    where[path] = f"override `{override}`"
    where.setdefault(path[:1], where[path])
    return []


def _is_mapping(path: tuple[str, ...]) -> bool:
    """Whether `section.key` takes names with values, each of which can be set by itself."""
    field = _field(path[:2])
    return field is not None and (typing.get_origin(field.annotation) is dict or _section_in(path[:2]) is not None)


def _field(path: tuple[str, ...]) -> FieldInfo | None:
    """The field of `section.key`, if there is one."""
    section: Any = Config.model_fields[path[0]].annotation if path[0] in Config.model_fields else None
    return section.model_fields.get(path[1]) if section and len(path) == 2 else None


def _section_in(path: tuple[str, ...]) -> type[Section] | None:
    """The section that stands as the value of `section.key`, if one can."""
    field = _field(path)
    parts = typing.get_args(field.annotation) if field else ()
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


def _validate(
    values: dict[str, Any], where: dict[tuple[str, ...], str], file: str, choices: Choices | None, trained: bool
) -> tuple[Config | None, list[str]]:
    # `model:` with nothing under it is an empty section, as a reader of the file would say.
    values = {name: {} if section is None else section for name, section in values.items()}
    try:
        config = Config.model_validate(values, context={"choices": choices or {}, "trained": trained})
    except ValidationError as error:
        return None, [_explain(item, where, file) for item in _merged(error.errors())]
    broken = [*contradictions(config), *([] if trained else _ignored(config, choices or {}))]
    return config, [f"{_place(tuple(key.split('.')), where, file)}: `{key}`: {message}" for key, message in broken]


def ignored_keys(config: dict[str, dict[str, Any]], choices: Choices) -> dict[str, str]:
    """The keys (`optimizer.epsilon`) that the choice beside them ignores, each with that choice (`optimizer.kind`)."""
    found = {}
    for table, entries in choices.items():
        name, _, key = table.partition(".")
        ignored = getattr(entries.get(str(config[name][key])), "ignores", ())
        found.update(dict.fromkeys((f"{name}.{one}" for one in ignored), table))
    return found


def _ignored(config: Config, choices: Choices) -> list[tuple[str, str]]:
    """Ignored keys that differ from their defaults, which a run's resolved config writes out."""
    values, defaults = config.model_dump(), Config().model_dump()
    found = []
    for key, table in ignored_keys(values, choices).items():
        name, one = key.split(".")
        choice = table.partition(".")[2]
        if values[name][one] != defaults[name][one]:
            remedy = f"remove it, or choose another {choice}"
            found.append((key, f"`{table}: {values[name][choice]}` ignores it; {remedy}"))
    return found


def _merged(errors: list[Any]) -> list[Any]:
    """One item a place: a union reports each branch that failed, and a person made one mistake.

    Where a branch got further in (an item of a list), the branches that stopped before it say nothing useful.
    """
    by_path: dict[tuple[str, ...], list[Any]] = {}
    for item in errors:
        by_path.setdefault(_config_path(item["loc"]), []).append(item)
    deepest = [
        path for path in by_path if not any(len(other) > len(path) and other[: len(path)] == path for other in by_path)
    ]
    return [{**by_path[path][0], "branches": by_path[path]} for path in deepest]


def _explain(item: Any, where: dict[tuple[str, ...], str], file: str) -> str:
    path = _config_path(item["loc"])
    place = _place(path, where, file)
    key = shortened(".".join(path))
    if item["type"] == "extra_forbidden":
        if meant := other_names.meant(path[-1], item["input"]):
            return f"{place}: {_instead(key, meant)}"
        section, _, name = path[-1].partition(".")
        if len(path) == 1 and section in Config.model_fields and name in _known_keys((section,)):
            return (
                f"{place}: `{key}` is a key of a section; write `{section}:` and `{name}` on an indented line below it"
            )
        remedy = nearest(path[-1], _known_keys(path[:-1]))
        inside = item["input"] if len(path) == 1 and isinstance(item["input"], dict) else {}
        # Other tools have sections that we have not; what stands in them may have a place here.
        moved = {name: meant for name in map(str, inside) if (meant := other_names.meant(name, inside.get(name)))}
        if moved and "did you mean" not in remedy:
            lines = [
                f"{_place((*path, name), where, file)}: {_instead(f'{key}.{name}', moved[name])}" for name in moved
            ]
            return "\n".join(lines)
        return f"{place}: unknown {'section' if len(path) == 1 else 'key'} `{key}`; {remedy}"
    given = item["input"] if isinstance(item["input"], str) else shown(item["input"])
    here = other_names.name_here(given)
    if item["type"] == "value_error" and here in str(item["ctx"]["error"]).partition("choose from ")[2].split(", "):
        return f"{place}: `{key}`: `{given}` is another tool's word; write `{here}`"
    renamed = item["type"] == "literal_error" and repr(here) in item["ctx"]["expected"]
    if not renamed and (cure := not_offered.cure(".".join(path[:2]), given)):
        return f"{place}: `{key}`: {cure}"
    if item["type"] == "value_error":
        return f"{place}: `{key}`: {item['ctx']['error']}"
    if item["type"] == "missing":
        return f"{place}: `{key}` is missing"
    if item["type"] == "model_type":
        return f"{place}: `{key}` is a section; write {_in_section(path, item['input'])}"
    expected = " or ".join(dict.fromkeys(_expected(branch) for branch in item["branches"]))
    remedy = f"; write `{here}`" if repr(here) in expected else _usual(path)
    return f"{place}: `{key}`: expected {expected}, not {shown(item['input'])}{remedy}"


def _in_section(path: tuple[str, ...], value: Any) -> str:
    """What to write instead of a value that stands where a section does, such as Axolotl's `adapter: qlora`."""
    if not isinstance(value, str):
        return "its keys on indented lines below it"
    keys = _known_keys(path)
    if (line := re.fullmatch(r"(\w+)\s*[:=]\s*(\S.*)", value)) and line[1] in keys:
        return f"`{line[1]}: {shortened(line[2], 60)}`, with a space after the colon, on an indented line below it"
    main = next(iter(keys))
    if meant := other_names.meant(value):
        return meant
    if cure := not_offered.cure(f"{path[-1]}.{main}", value):
        return f"`{path[-1]}.{main}`; {cure}"
    return f"`{path[-1]}.{main}: {other_names.name_here(shortened(value, 60))}`"


def _usual(path: tuple[str, ...]) -> str:
    """The usual range of a number, for a config key that has one."""
    marks = field.metadata if (field := _field(path)) else ()
    return next((f"; {mark.range} is usual" for mark in marks if isinstance(mark, Usual)), "")


def _instead(key: str, meant: str) -> str:
    return f"`{key}` is another tool's key; {'' if meant.startswith('leave') else 'write '}{meant}"


def _expected(item: Any) -> str:
    """What one failed branch wanted, to follow the word "expected"."""
    wanted = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping such as {name: value}",
        "string_too_short": "a name",
        "too_short": "a list that is not empty",
        "model_type": "a `source` with its `weight`",
        "finite_number": "a finite number",
        "literal_error": item.get("ctx", {}).get("expected", ""),
    }
    words = str(item["msg"]).removeprefix("Input should be ")
    return wanted.get(item["type"], f"a number {words}" if words.startswith(("greater", "less")) else words)


def _config_path(location: tuple[Any, ...]) -> tuple[str, ...]:
    """The key path of a pydantic location, without the names of union branches and validators it adds."""
    path: list[str] = []
    for before, part in zip((None, *location), location, strict=False):
        in_section = path and path[0] in Config.model_fields
        inner = in_section and len(path) == 2 and _section_in((path[0], path[1]))
        names_key = not path or (in_section and len(path) == 1) or inner or before == Source.__name__
        if names_key or isinstance(part, int):
            path.append(str(part))
    return tuple(path)


def _place(path: tuple[str, ...], where: dict[tuple[str, ...], str], file: str) -> str:
    for length in range(len(path), 0, -1):
        if path[:length] in where:
            return where[path[:length]]
    return file


def _known_keys(path: tuple[str, ...]) -> list[str]:
    if len(path) > 1:
        return list((_section_in(path) or Source).model_fields)  # Source stands in a list
    model: type[Section] = Config
    for part in path:
        model = model.model_fields[part].annotation  # type: ignore[assignment]
    return list(model.model_fields)


def _nearest_file(path: Path) -> str:
    if not os.path.isdir(path.parent):
        return ""
    known = sorted(str(found) for found in path.parent.glob("[!.]*.yaml"))
    return f"; {nearest(str(path), known)}" if known else ""
