"""Read a config: file, then `section.key=value` overrides, then validation; all problems are reported together."""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from finetune import builtin
from finetune.config import explain, gone, other_names, serving, strict_yaml
from finetune.config.explain import Locations
from finetune.config.field_types import Choices, nearest, pick, shown
from finetune.config.rules import contradictions
from finetune.config.sections import Config
from finetune.errors import ConfigError


def load(
    path: str | Path, overrides: Sequence[str] = (), choices: Choices | None = None, *, trained: bool = False
) -> Config:
    """Read and check the config at `path`.

    `overrides` are `section.key=value` strings, the value read as a YAML scalar, flow list or mapping. `choices` are
    the tables that choice fields are checked against. `trained`: a run was started with this config, perhaps by an
    earlier version, which accepted keys that a choice ignores; they changed nothing of what it trained. What that
    version had and this one has not is read as `gone` says.

    Raises ConfigError with all problems, each with file:line or `override`, when there is any.
    """
    path = located(path)
    document = strict_yaml.parse(text_of(path))
    problems = [f"{path}:{problem.line}: {problem.message}" for problem in document.problems]
    locations = Locations(str(path), {key: f"{path}:{line}" for key, line in document.lines.items()})
    config = _checked(document.values, locations, problems, overrides, choices, trained)
    return config if config.output.dir else config.changed({"output.dir": str(Path("runs") / path.stem)})


def located(name: str | Path) -> Path:
    """The file of a config, which comes with the package if its name is `builtin:NAME`. Raises ConfigError."""
    if str(name).startswith("builtin:"):
        return pick(builtin.configs(), str(name), "config")
    return Path(os.path.expanduser(name))


def loaded(config: object) -> Config:
    """Return `config`. Raises ConfigError if it is not a Config."""
    if not isinstance(config, Config):
        raise ConfigError(f"`config` must be one that `finetune.load_config` returned, not {shown(config)}")
    return config


def text_of(path: Path) -> str:
    """The text of a YAML file. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
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
    """The sections of a config of another version, unchecked and completed by defaults; and its keys unknown to this
    version.
    """
    document = strict_yaml.parse(text_of(path))
    if document.problems:
        raise ConfigError(f"{path}:{document.problems[0].line}: {document.problems[0].message}")
    sections = Config().model_dump(mode="json")
    unknown_keys = []
    for name, section in document.values.items():
        values = section if isinstance(section, dict) else {"": section}
        unknown_keys += [f"{name}.{key}".rstrip(".") for key in values if key not in sections.get(name, {})]
        sections[name] = {**sections.get(name, {}), **values}
    return sections, unknown_keys


def gone_from(path: Path) -> list[gone.Gone]:
    """The keys and values that are gone and that a run was started with."""
    return gone.taken_out(strict_yaml.parse(text_of(path)).values)[1]


def from_values(values: Mapping[str, Any], overrides: Sequence[str] = (), choices: Choices | None = None) -> Config:
    """Check a config given as a mapping of sections, as `load` does one in a file."""
    return _checked(dict(values), Locations("config", {}), [], overrides, choices, trained=False)


def _checked(
    values: dict[str, Any], locations: Locations, problems: list[str], overrides: Sequence[str],
    choices: Choices | None, trained: bool,
) -> Config:  # fmt: skip
    """The config of `values` with the `overrides`. Raises ConfigError for `problems` and those of this check."""
    texts = isinstance(overrides, Sequence) and all(isinstance(override, str) for override in overrides)
    if isinstance(overrides, str) or not texts:
        raise ConfigError(f"overrides are a list of texts, such as ['training.seed=3'], not {shown(overrides)}")
    for override in overrides:
        problems += _apply(values, locations, override)
    config, mistakes = _validate(values, locations, choices, trained)
    problems += mistakes
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config


def dump(config: Config, *, defaults: bool = True) -> str:
    """The resolved config as YAML that `load` reads back to an equal value; optionally without keys at a default."""
    values = config.values()
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
    """Quotes text that YAML 1.2 would read as another type; PyYAML knows only 1.1."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if strict_yaml.scalar(text) != text or not text.isprintable() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def _apply(values: dict[str, Any], locations: Locations, override: str) -> list[str]:
    """Set one `section.key=value` in `values`; returns the problems."""
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if equals and len(path) == 1 and (meant := other_names.meant(path[0], text)):
        return [f"override `{override}`: {explain.instead(path[0], meant)}"]
    described = explain.field(path[:2])
    is_mapping = described is not None and typing.get_origin(described.annotation) is dict
    # The keys of a mapping, or of a section in a section, can be set one by one.
    lengths = (2, 3) if is_mapping or explain.section_in(path[:2]) else (2,)
    if not equals or len(path) not in lengths or not all(path):
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
        within = section.get(path[1]) or {}
        if not isinstance(within, Mapping):
            return [f"override `{override}`: `{'.'.join(path[:2])}` is not a mapping in the file"]
        section[path[1]] = section = dict(within)
    section[path[-1]] = document.values["value"]
    locations.known[path] = f"override `{override}`"
    locations.known.setdefault(path[:1], locations.known[path])
    return []


def _validate(
    values: dict[str, Any], locations: Locations, choices: Choices | None, trained: bool
) -> tuple[Config | None, list[str]]:
    # `model:` with nothing under it is an empty section, as a reader of the file would say.
    values = {name: {} if section is None else section for name, section in values.items()}
    values, used = gone.taken_out(values)
    removed = [] if trained else used
    mistakes = [f"{locations.of(tuple(one.key.split('.')))}: `{one.key}`: {one.message}" for one in removed]
    try:
        config = Config.model_validate(values, context={"choices": choices or {}, "trained": trained})
    except ValidationError as error:
        return None, mistakes + explain.mistakes(error, locations)
    if mistakes:  # what other keys say of a value that stands for a removed one would mislead
        return None, mistakes
    given = config.model.labels
    if config.scorer:  # a head for the labels of its objective, trained in full
        modules = list(dict.fromkeys([*config.adapter.extra_modules, "score"]))
        labels = ["reward"] if config.scorer == "reward model" else config.data.labels
        config = config.changed({"model.labels": labels, "adapter.extra_modules": modules})
    if used:  # the version that started the run has checked what belongs to what is gone
        return config, []
    broken = contradictions(config)
    if not trained and config.scorer and given not in ([], config.model.labels):
        remedy = "name classes in `data.labels`" if config.scorer == "classifier" else "remove it"
        broken.append(("model.labels", f"`training.objective: {config.training.objective}` sets it; {remedy}"))
    if trained:  # rules of serving are for jobs to be trained, and runtimes come to take more or less
        broken = [(key, message) for key, message in broken if not key.startswith("output.")]
        if config.scorer:  # earlier versions had other values, which change nothing
            broken = [(key, message) for key, message in broken if key != "data.loss_on"]
    else:
        broken += _ignored(config.model_dump(), choices or {})
    if not broken and config.output.way != "auto":  # `auto` is decided once the base is known
        config = config.changed(serving.consequences(config.output, config.quantization.kind)[0])
    return config, [f"{locations.of(tuple(key.split('.')))}: `{key}`: {message}" for key, message in broken]


def ignored_keys(config: dict[str, dict[str, Any]], choices: Choices) -> dict[str, str]:
    """The keys (`optimizer.epsilon`) that a choice ignores, each with the key of that choice (`optimizer.kind`)."""
    by_key = {}
    for table, entries in choices.items():
        name, _, key = table.partition(".")
        ignored = getattr(entries.get(str(config[name][key])), "ignores", ())
        by_key.update(dict.fromkeys((one if "." in one else f"{name}.{one}" for one in ignored), table))
    return by_key


def _ignored(values: dict[str, dict[str, Any]], choices: Choices) -> list[tuple[str, str]]:
    """Ignored keys that differ from their defaults, which a run's resolved config writes out."""
    defaults, messages = Config().model_dump(), []
    for key, table in ignored_keys(values, choices).items():
        name, one = key.split(".")
        part, _, choice = table.partition(".")
        if values[name][one] != defaults[name][one]:
            remedy = f"remove it, or choose another {choice}"
            messages.append((key, f"`{table}: {values[part][choice]}` ignores it; {remedy}"))
    return messages


def _nearest_file(path: Path) -> str:
    known = sorted(str(file) for file in path.parent.glob("[!.]*.yaml")) if os.path.isdir(path.parent) else []
    if known:
        return f"; {nearest(str(path), known)}"
    name = f"builtin:{path.stem}"
    return f"; did you mean `{name}`?" if name in builtin.configs() else ""  # documentation names those of a checkout
