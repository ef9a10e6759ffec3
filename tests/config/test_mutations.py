"""A thousand damaged configs: each loads, or is refused with one clear error of the right kind, and nothing else.

The shipped configs and a full one are mutated: bytes flipped, values replaced by extremes and by other types, tokens
swapped, lines doubled and moved. What loads goes through the cheap stages of a run as well: the machine's checks, the
tokenizer, the architecture, attention, and the data.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from finetune import settings
from finetune.config import Config, dump, load
from finetune.data import prepare
from finetune.errors import ArtifactError, ConfigError, DataError, MachineError
from finetune.model import bounds, build
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer
from finetune.settings import load_config
from finetune.training.checks import check

MUTATIONS, TO_STAGES = 1_000, 200

# The sections that the stages before the forecast act on.
STAGED = ("model", "quantization", "data", "tracking")

SHIPPED = sorted((Path(settings.__file__).parents[1] / "configs").glob("*.yaml"))

VALUES = [
    # Numbers of all sizes and spellings.
    "9" * 5_000, "-" + "9" * 5_000, "0." + "9" * 5_000, "1e308", "-1e308", "1e400", "1e-308", ".inf", "-.inf", ".nan",
    "-5", "-1", "0", "-0.0", "0.5", "1", "3", "2147483647", "2147483648", "4294967295", "4294967296",
    "9223372036854775808", "18446744073709551616", "0x" + "f" * 2_000, "0o" + "7" * 5_000, "0b1", "1_000", "1:30", "+1",
    "1.", "e5", "08", "1" + "0" * 99, "9" * 90 + "GiB", "1" + "0" * 5_000 + "GiB", "1e5GiB", "0GiB", "0.1B",
    "every-" + "9" * 5_000, "every-0", "every-2",
    # Text that is none, or more than it seems.
    r'"\U00110000"', r'"\UFFFFFFFF"', r'"\ud800"', r'"\ud83d\ude00"', r'"\ude00\ud83d"', r'"\0"', r'"a\0b"',
    r'"\x1b[2J"',     "\u202e", "\u2028", "\ufeff", "\U0010ffff", "\x85", "\x7f", "\x1b", "é", "''", '" "', '"\\n"',
    # Paths.
    "x" * 300, "x" * 5_000, "a/" * 3_000, "/" + "a/" * 3_000, "~/x", "~nobody/x", "LOOP", "LOOP/x", "LOOP.jsonl",
    "LOOP.jinja", "gone.jinja", "/dev/null", "/dev/null/x", "[", "{gone,b}*", "builtin:", "builtin:x", "a/b/c",
    "hub/name",
    # Other types, and what YAML has besides values.
    "null", "~", "[]", "{}", "[1]", "{a: 1}", "[[]]", "[null]", "[a, a]", "[{source: a}, {source: a, weight: 1e308}]",
    "true", "no", "auto", "all", "none", "2020-01-01", "&a x", "*a", "!!int 5", "!!binary aGk=", "!x y", "<<", "? x",
    "|", "> x", "%", "@", "`", "-", "- -", "'unclosed", '"', "[" * 40 + "]" * 40, "{a: " * 40 + "}" * 40, "# x", "---",
    "...",
]  # fmt: skip

SECTION_LINES = [
    "<<: *a",
    "<<: {seed: 1}",
    "? [a]",
    "? {a: b}",
    '"\\ud800": 1',
    '"\\0": 1',
    "? |\n  x",
    "seed: 1",
    "a: &a",
]


def mutated(text: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        lines = text.split(b"\n")
        at = chance.randrange(len(lines))
        match chance.choices(["value", "bytes", "insert", "swap", "copy", "line"], [10, 4, 2, 2, 2, 1])[0]:
            case "value":
                at = chance.choice([number for number, line in enumerate(lines) if b":" in line] or [at])
                lines[at] = lines[at].split(b":")[0] + b": " + chance.choice(VALUES).encode()
            case "bytes":
                damaged = bytearray(text)
                for _ in range(chance.randint(1, 4)):
                    damaged[chance.randrange(len(damaged))] = chance.randrange(256)
                lines = bytes(damaged).split(b"\n")
            case "insert":
                place = chance.randrange(len(text) + 1)
                lines = (text[:place] + chance.choice(VALUES).encode() + text[place:]).split(b"\n")
            case "swap":
                words = text.split(b" ")
                one, other = chance.randrange(len(words)), chance.randrange(len(words))
                words[one], words[other] = words[other], words[one]
                lines = b" ".join(words).split(b"\n")
            case "copy":
                lines.insert(chance.randrange(len(lines) + 1), lines[at])
            case "line":
                lines.insert(at, b"  " * chance.randint(0, 2) + chance.choice(SECTION_LINES).encode())
        text = b"\n".join(lines)
    return text


@pytest.fixture
def originals(rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The configs to damage, with small data; the folder has links that lead in a circle, and the home is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("LOOP", "LOOP.jsonl", "LOOP.jinja"):
        (tmp_path / name).symlink_to(tmp_path / name)
    data = ["data.eval_share=0.3", f"data.train={rows_file}"]
    full = [dump(load_config(path, [*data, "model.weights=random", "output.merge=false"])) for path in SHIPPED]
    return [path.read_bytes() for path in SHIPPED] + [text.encode() for text in full]


def stages(config: Config) -> None:
    """What `train` does before the forecast, on a CPU."""
    cpu = torch.device("cpu")
    check(config, cpu)
    config, _ = bounds.as_known_base_allows(config)
    tokenizer = load_tokenizer(config.model, config.data)
    architecture = load_architecture(config.model)
    bounds.check_tokenizer(tokenizer, architecture, config.model)
    build.choose_attention(config, architecture, cpu.type)
    prepared = prepare.prepare(config.data, tokenizer)
    prepare.check_ids(prepared, tokenizer, bounds.vocabulary(architecture), config.model.name)


@pytest.mark.slow
def test_a_damaged_config_loads_or_is_refused_with_its_problems(originals: list[bytes], tmp_path: Path) -> None:
    file, loaded = tmp_path / "job.yaml", 0
    for seed in range(MUTATIONS):
        chance = random.Random(seed)
        file.write_bytes(mutated(chance.choice(originals), chance))
        try:
            config = load_config(file)
        except ConfigError:
            continue
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        loaded += 1
        file.write_text(dump(config), encoding="utf-8")
        assert load(file) == config, f"seed {seed}: what was saved is not what was loaded"
    assert MUTATIONS / 50 < loaded < MUTATIONS / 2, "mutations that all fail, or none, test nothing"


@pytest.mark.slow
def test_a_mutated_config_that_loads_is_planned_or_refused(originals: list[bytes], tmp_path: Path) -> None:
    ended: set[int] = set()
    for number, text in enumerate(originals[len(SHIPPED) :]):
        (tmp_path / f"{number}.yaml").write_bytes(text)
    keys = [f"{name}.{key}" for name in STAGED for key in Config.model_fields[name].annotation.model_fields]
    for seed in range(TO_STAGES):
        chance = random.Random(seed)
        file = tmp_path / f"{chance.randrange(len(SHIPPED))}.yaml"
        try:
            config = load_config(file, [f"{chance.choice(keys)}={chance.choice(VALUES)}"])
            stages(config)
            ended.add(0)
        except (ConfigError, DataError, MachineError, ArtifactError) as error:
            ended.add(error.exit_code)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert ended == {0, 2, 3, 4, 7}


@pytest.mark.slow
def test_no_value_breaks_any_key(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for value in VALUES:
        with subtests.test(value=value):
            file = tmp_path / "job.yaml"
            lines = [
                [f"{section}:", *(f"  {key}: {value}" for key in field.annotation.model_fields)]
                for section, field in Config.model_fields.items()
            ]
            file.write_text("\n".join(line for section in lines for line in section), encoding="utf-8")
            with pytest.raises(ConfigError) as refused:
                load_config(file)
            assert max(map(len, str(refused.value).splitlines())) < 1_000, "a message repeats no more than one can read"
