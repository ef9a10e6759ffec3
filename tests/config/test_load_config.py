"""Facts about loading a config: every problem at once with its place, overrides, rules, and the way back by `dump`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.choices import CHOICES, load_config
from finetune.config import (
    AdapterSection,
    Config,
    DataSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    Source,
    TrainingSection,
    dump,
    entries,
    load,
    named,
)
from finetune.config.field_types import is_pattern
from finetune.config.other_names import NAMES
from finetune.config.rules import contradictions
from finetune.errors import ConfigError
from finetune.model.structure.quantization import QUANTIZATIONS
from finetune.training.optimizers import OPTIMIZERS

KEYS = [
    (name, key, field)
    for name, section in Config.model_fields.items()
    for key, field in section.annotation.model_fields.items()
]

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def refused(path: Path, *overrides: str) -> list[str]:
    """The lines of the refusal, with the folder taken off the file's name."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


# -- what a file means -----------------------------------------------------------------------------------------------

# A file, overrides, a key, and its value.
READ: list[tuple[str, list[str], str, Any]] = [
    ("", [], "output.dir", "runs/my_job"),
    ("output:\n  dir: elsewhere\n", [], "output.dir", "elsewhere"),
    ("model:\ntraining:\n  seed: 1\n", [], "model.name", ModelSection().name),
    ("model:\n  name: no\n", [], "model.name", "no"),
    ("training:\n  learning_rate: 2e-5\n", [], "training.learning_rate", 0.00002),
    ("training:\n  epochs: 3\n", [], "training.epochs", 3.0),
    ("\ufefftraining:\r\n  seed: 7\r\n", [], "training.seed", 7),
    ("data:\n  train:\n    - a.jsonl\n    - {source: b/, weight: 2}\n", [], "data.train",
     ["a.jsonl", Source(source="b/", weight=2)]),
    # an override wins over the file, and the last over the first
    ("training:\n  seed: 1\n  max_steps: 5\n", ["training.seed=2", "training.seed=3"], "training.seed", 3),
    ("training:\n  seed: 1\n  max_steps: 5\n", ["training.seed=2"], "training.max_steps", 5),
    ("training:\n", ["training.seed=3"], "training.seed", 3),
    ("", ["adapter.targets=[q_proj,v_proj]"], "adapter.targets", ["q_proj", "v_proj"]),
    ("", ["adapter.targets=all-linear"], "adapter.targets", "all-linear"),
    ("", ["adapter.targets=q_proj"], "adapter.targets", ["q_proj"]),
    ("", ["tracking.to=tensorboard"], "tracking.to", ["tensorboard"]),
    ("", ["training.learning_rate=2e-5"], "training.learning_rate", 2e-5),
    ("", ["model.revision=a=b"], "model.revision", "a=b"),
    ("", ["model.revision=null"], "model.revision", None),
    ("", ["model.revision="], "model.revision", None),
    ("", ["model.name=C:\\models"], "model.name", "C:\\models"),
    ("", ["memory.limit=24GiB"], "memory.limit", 24 * 2**30),
    ("", [" training.seed =3"], "training.seed", 3),
    ("data:\n  columns: {prompt: a, completion: b}\n", ["data.columns.prompt=c"], "data.columns",
     {"prompt": "c", "completion": "b"}),
    ("", ["data.columns.prompt=c"], "data.columns", {"prompt": "c"}),
]  # fmt: skip


def test_a_value_is_read_from_file_and_overrides(write: Write, subtests: pytest.Subtests) -> None:
    for text, overrides, key, value in READ:
        with subtests.test(text=text, overrides=overrides):
            assert load_config(write(text, "my_job.yaml"), overrides).value(key) == value


def test_an_empty_file_is_all_defaults_but_for_its_run_directory_and_cannot_be_changed(write: Write) -> None:
    config = load_config(write(""))
    assert config.model_copy(update={"output": OutputSection()}) == Config()
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 3  # type: ignore[misc]


def test_sources_are_one_name_or_several() -> None:
    assert named(["a.jsonl", Source(source="b/", weight=2)]) == "a.jsonl, b/ (weight 2)"
    assert entries(["c.jsonl"]) == entries("c.jsonl") == [Source(source="c.jsonl", weight=1)]


# -- what is refused, and how ----------------------------------------------------------------------------------------


def test_all_problems_of_a_file_are_reported_at_once_with_their_lines(write: Write) -> None:
    path = write("""\
        model:
          nmae: x
          weights: trained
        adaptor:
          rank: 4
        adapter:
          rank: 0
          rank: 8
          dropout: 1.5
        training:
          seed: seven
          batch_size: 16.5
        quantization:
          kind: nf5
        data: !!python/name:os.system
        memory:
          limit: 24GB
        tracking:
          to: [tensorbord]
        """)
    lines = refused(path)
    expected = {
        "job.yaml:2": "`model.nmae`; did you mean `name`?",
        "job.yaml:3": "'pretrained' or 'random', not 'trained'",
        "job.yaml:4": "unknown section `adaptor`; did you mean `adapter`?",
        "job.yaml:7": "`adapter.rank`: expected a number greater than 0, not 0",
        "job.yaml:8": "`adapter.rank` is given twice, first on line 7",
        "job.yaml:9": "`adapter.dropout`",
        "job.yaml:11": "`training.seed`: expected a whole number, not 'seven'",
        "job.yaml:12": "`training.batch_size`: expected a whole number, not 16.5",
        "job.yaml:14": "did you mean `nf4`?",
        "job.yaml:15": "tag",
        "job.yaml:17": "`24GB` is not a size",
        "job.yaml:19": "did you mean `tensorboard`?",
    }
    found = {": ".join(line.split(": ")[:1]): line for line in lines}
    assert found.keys() == expected.keys()
    for place, text in expected.items():
        assert text in found[place]
    assert len(lines) == len(expected)


# A file, overrides, where its one line begins, and what is in it.
REFUSED: list[tuple[str, list[str], str, str]] = [
    *(
        (text, overrides, place, f"another tool's key; write `{ours}`")
        for theirs, ours in (("load_in_4bit", "quantization.kind: nf4"), ("Lora-R", "adapter.rank"))
        for text, overrides, place in (
            (f"# one\n{theirs}: 1\n", [], f"job.yaml:2: `{theirs}`"),
            (f"adapter:\n  {theirs}: 1\n", [], f"job.yaml:2: `adapter.{theirs}`"),
            ("", [f"{theirs}=1"], f"override `{theirs}=1`: `{theirs}`"),
        )
    ),
    # values of a wrong type
    *(
        ("", [f"{key}={value}"], f"override `{key}={value}`: `{key}`: ", expected)
        for key, value, expected in (
            ("model.name", "5", "expected text, not 5"),
            ("model.trust_remote_code", "no", "expected true or false, not 'no'"),
            ("model.trust_remote_code", "1", "expected true or false, not 1"),
            ("adapter.rank", "1.5", "expected a whole number, not 1.5"),
            ("adapter.rank", "true", "expected a whole number, not True"),
            ("adapter.rank", "'8'", "expected a whole number, not '8'"),
            ("adapter.alpha", "high", "expected a number, not 'high'"),
            ("adapter.extra_modules", "5", "expected a list, not 5"),
            ("training.max_steps", "0", "expected a number greater than 0, not 0"),
            ("training.learning_rate", "-1", "expected 'auto' or a number greater than 0, not -1"),
            ("training.learning_rate", ".nan", "expected"),
            ("training.precision", "bf17", "'bf16', 'fp16' or 'fp32', not 'bf17'"),
            ("optimizer.beta1", "1", "expected a number less than 1, not 1"),
            ("output.keep", "1", "expected a number greater than or equal to 2, not 1"),
            ("data.eval_share", "1", "expected a number less than 1, not 1"),
        )
    ),
    ("adapter:\n  targets: 5\n", [], "job.yaml:2", "list"),
    ("adapter:\n  targets:\n    - q_proj\n    - 1\n", [], "job.yaml:4: ", "expected text, not 1"),
    ("training: 5\n", [], "job.yaml:1: `training` is a section", ""),
    # sources
    *(
        (f"data:\n  train:\n    - a.jsonl\n    - {item}\n", [], "job.yaml:4: ", message)
        for item, message in (
            ("{source: b/, weight: 0}", "`data.train.1.weight`: expected a number greater than 0, not 0"),
            ("{source: b/, weight: twice}", "`data.train.1.weight`: expected a number, not 'twice'"),
            ("{source: b/, wieght: 2}", "unknown key `data.train.1.wieght`; did you mean `weight`?"),
            ("{source: b/, weight: 1e308}", "`data.train.1.weight`: expected a number less than or equal to 1000"),
            ("{weight: 2}", "`data.train.1.source` is missing"),
            ("5", "`data.train.1`: expected text or a `source` with its `weight`, not 5"),
            ("''", "`data.train.1`: expected a name or a `source` with its `weight`, not ''"),
        )
    ),
    ("data:\n  train: []\n", [], "job.yaml:2: `data.train`: expected ", ""),
    ("data:\n  train: ''\n", [], "job.yaml:2: `data.train`: expected ", ""),
    ("data:\n  train: [a.jsonl, b.jsonl]\n  eval: [{source: b.jsonl, weight: 2}, c.jsonl]\n", [],
     "job.yaml:3: `data.eval`: `b.jsonl` is training data", ""),
    # overrides
    ("data: {columns: question}", ["data.columns.prompt=a"],
     "override `data.columns.prompt=a`: `data.columns` is not a mapping in the file", ""),
    ("model: {rope_scaling: 2}", ["model.rope_scaling.factor=2"],
     "override `model.rope_scaling.factor=2`: `model.rope_scaling` is not a mapping in the file", ""),
    *(("", [malformed], "", f"override `{malformed}`")
      for malformed in ("sead=3", "training.seed", "training..seed=3", "a.b.c=1", ".seed=1", "=", "")),
    *(("", [f"model.name={value}"], f"override `model.name={value}`: ", "")
      for value in ("[1", "*x", "!!python/name:os.system", "a: b", "'x")),
    ("", ["trainning.seed=3"], "override `trainning.seed=3`: ", "did you mean `training`?"),
    # the line of a broken rule is that of its key
    ("quantization:\n  kind: nf4\nadapter:\n  kind: none\n", [], "job.yaml:4: `adapter.kind`: ", ""),
]  # fmt: skip


def test_what_is_wrong_is_one_line_with_its_place(write: Write, subtests: pytest.Subtests) -> None:
    for text, overrides, begins, words in REFUSED:
        with subtests.test(text=text, overrides=overrides):
            found = refused(write(text), *overrides)
            assert found[0].startswith(begins)
            assert words in found[0]
            assert len(found) == 1 or "is not a mapping" in begins


def test_keys_of_another_tool_in_its_section_have_their_lines(write: Write) -> None:
    lines = refused(write("peft:\n  r: 8\n  zzz: 1\n  lora_alpha: 16\n"))
    assert [line.split(" ")[0] for line in lines] == ["job.yaml:2:", "job.yaml:4:"]


def test_what_is_to_be_written_for_another_tools_key_is_a_key(write: Write) -> None:
    for meant in NAMES.values():
        for key, value in re.findall(r"`(\w+\.\w+)(?:: ([^`]+))?`", meant):
            section, _, name = key.partition(".")
            assert name in type(getattr(Config(), section)).model_fields, meant
            if value:
                unquantized = ["quantization.kind=none"] if value == "pissa" else []
                load_config(write(""), [*unquantized, f"{key}={value}"])


def test_every_name_of_a_table_is_allowed_and_no_other(write: Write, subtests: pytest.Subtests) -> None:
    for table in CHOICES:
        with subtests.test(table=table):
            path = write("")
            served = ["output.serve=q4_0"] if table in ("output.runtime", "output.way") else []
            for name in CHOICES[table]:
                load_config(path, [f"{table}=[{name}]" if table == "tracking.to" else f"{table}={name}", *served])
            [line] = refused(path, f"{table}=[zzzz]" if table == "tracking.to" else f"{table}=zzzz")
            assert f"`{table}" in line
            assert "choose from " + ", ".join(CHOICES[table]) in line


def test_infinity_is_refused_as_a_value(write: Write, subtests: pytest.Subtests) -> None:
    for key in [
        f"{name}.{key}"
        for name, key, field in KEYS
        if field.annotation is float
        and not any(hasattr(bound, "lt") for bound in field.metadata)
        # An infinite `max_grad_norm` clips nothing, which is a meaning.
        and key != "max_grad_norm"
    ]:
        with subtests.test(key=key):
            [line] = refused(write(""), f"{key}=.inf")
            assert f"`{key}`" in line


def test_a_long_value_is_not_repeated_in_full(write: Write) -> None:
    [line] = refused(write(f"training:\n  seed: {'x' * 500}\n"))
    assert len(line) < 200


def test_a_file_that_is_not_utf_8_says_so(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes("model:\n  name: café\n".encode("latin-1"))
    [line] = refused(path)
    assert line.startswith("job.yaml")
    assert "utf-8" in line.lower()


def test_a_missing_file_names_the_nearest(write: Write, tmp_path: Path) -> None:
    write("", "llama7b.yaml")
    write("", "other.yaml")
    [line] = refused(tmp_path / "llama_7b.yaml")
    assert line.startswith("llama_7b.yaml: no such file")
    assert "did you mean `llama7b.yaml`?" in line


def test_a_missing_file_in_a_missing_folder_has_no_suggestion(tmp_path: Path) -> None:
    assert refused(tmp_path / "no" / "job.yaml") == ["job.yaml: no such file"]


def test_a_folder_is_refused_as_a_config(tmp_path: Path) -> None:
    [line] = refused(tmp_path)
    assert "is a folder, not a config" in line


def test_problems_of_overrides_and_of_the_file_are_reported_together(write: Write) -> None:
    lines = refused(write("training:\n  seed: x\n"), "model.nmae=1", "bad", "adapter.rank=0")
    assert len(lines) == 4
    assert {line.split(": ")[0] for line in lines} == {
        "job.yaml:2",
        "override `model.nmae=1`",
        "override `bad`",
        "override `adapter.rank=0`",
    }


# -- rules that join fields ------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"

NVME = ["distributed.offload=nvme", "distributed.nvme_path=/tmp"]

# A key or section | what breaks its rule | words of the message | what it names as a remedy.
RULES = """
data.eval | data.train=a.jsonl data.eval=a.jsonl | `data.eval: auto` | data.eval=auto
tracking.to | tracking.to=[wandb,wandb] | one of each | tracking.to=[wandb]
adapter.kind | adapter.kind=none | `quantization.kind: none` | quantization.kind=none
adapter.kind | adapter.kind=none | `adapter.kind: lora` | adapter.kind=lora
adapter.kind | adapter.kind=none quantization.kind=none adapter.dora=true | `kind: lora` | adapter.kind=lora
adapter.kind | adapter.kind=none quantization.kind=none adapter.rslora=true | remove | adapter.rslora=false
adapter.init | adapter.init=pissa | `quantization.kind: none` | quantization.kind=none
adapter.init | adapter.init=pissa | `adapter.init: loftq` | adapter.init=loftq
adapter.init | adapter.init=loftq quantization.kind=int8 | `quantization.kind: nf4` | quantization.kind=nf4
adapter.init | adapter.init=loftq model.weights=random | `adapter.init: default` | model.weights=pretrained
adapter.dora | adapter.dora=true quantization.kind=mxfp4 | `dora: false` | adapter.dora=false
output.merge | output.merge=true model.weights=random | `output.merge: false` | output.merge=false
adapter.dtype | training.precision=fp16 adapter.dtype=bfloat16 | `adapter.dtype: float32` | adapter.dtype=float32
training.early_stopping | training.early_stopping=2 training.eval_every=5 data.eval=none | `data.eval` | data.eval=auto
model | model.trust_remote_code=true | 40-digit commit | model.revision=COMMIT
training.batch_size | training.batch_size=10 training.micro_batch=4 | divides it is 2 | training.micro_batch=2
training.batch_size | training.batch_size=10 training.micro_batch=4 | divides it is 2 | training.micro_batch_tokens=4096
training.micro_batch | training.micro_batch=auto training.micro_batch_tokens=4096 | `auto` | training.micro_batch=4
training.early_stopping | training.early_stopping=2 | needs `eval_every` | training.eval_every=10
memory.offload | memory.offload=checkpoints memory.checkpointing=none | `checkpointing: all` | memory.checkpointing=all
memory.offload | memory.offload=checkpoints memory.checkpointing=0 | `checkpointing: all` | memory.offload=none
kernels.compile | kernels.compile=layers memory.offload=checkpoints | cannot be compiled | memory.offload=none
quantization.kind | SHARDED quantization.kind=int8 | sharded | quantization.kind=nf4
adapter.init | SHARDED adapter.init=loftq | whole | adapter.init=default
adapter.dora | SHARDED adapter.dora=true | whole | adapter.dora=false
training.precision | SHARDED training.precision=fp16 | sharded | distributed.kind=ddp
kernels.fused | SHARDED kernels.fused=on | whole | kernels.fused=auto
kernels.compile | SHARDED kernels.compile=layers | sharded | kernels.compile=none
distributed.stage | distributed.kind=fsdp distributed.stage=optimizer | `fsdp` cuts | distributed.stage=gradients
distributed.offload | distributed.kind=fsdp NVME | disk | distributed.kind=deepspeed
distributed.offload | distributed.kind=deepspeed NVME distributed.stage=gradients | disk | distributed.stage=weights
distributed.nvme_path | distributed.kind=deepspeed distributed.offload=nvme | needs it | distributed.nvme_path=/tmp
distributed.nvme_path | distributed.kind=deepspeed distributed.nvme_path=/tmp | kept there | distributed.nvme_path=null
adapter.dtype | distributed.kind=deepspeed adapter.dtype=bfloat16 | no checkpoint has | adapter.dtype=float32
distributed.context | distributed.kind=deepspeed distributed.context=2 | split | distributed.kind=fsdp
kernels.compile | kernels.compile=layers distributed.context=2 | not compiled | kernels.compile=none
"""


def test_a_broken_rule_names_its_key_and_a_remedy_that_works(write: Write, subtests: pytest.Subtests) -> None:
    path = write("")
    for line in RULES.strip().splitlines():
        for sharded in ("fsdp", "deepspeed") if "SHARDED" in line else ("",):
            written = line.replace("SHARDED", f"distributed.kind={sharded}").replace("COMMIT", COMMIT)
            key, broken, words, remedy = written.replace("NVME", " ".join(NVME)).split(" | ")
            with subtests.test(rule=written):
                [said] = refused(path, *broken.split())
                assert f"`{key}`: " in said
                assert words in said
                load_config(path, [*broken.split(), *remedy.split()])


def test_a_key_that_the_quantization_ignores_is_refused_unless_it_has_its_default(write: Write) -> None:
    path = write("quantization:\n  double: false\n")
    for kind in QUANTIZATIONS:
        override = f"quantization.kind={kind}"
        if kind in ("nf4", "fp4", "auto"):
            load_config(path, [override])
        else:
            [told] = refused(path, override)
            assert told.startswith(f"job.yaml:2: `quantization.double`: `quantization.kind: {kind}` ignores it")
            load_config(path, [override, "quantization.double=true"])


def test_a_key_that_the_optimizer_ignores_is_refused_unless_it_has_its_default(write: Write) -> None:
    path = write("optimizer:\n  beta1: 0.9\n  epsilon: 1e-6\n")
    for kind, optimizer in OPTIMIZERS.items():
        override = f"optimizer.kind={kind}"
        if "epsilon" in optimizer.ignores:
            [message] = refused(path, override)
            assert message.startswith("job.yaml:3: `optimizer.epsilon`: ")
            assert kind in message
            load_config(path, [override, "optimizer.epsilon=1e-8"])
        else:
            load_config(path, [override])
    assert {key for optimizer in OPTIMIZERS.values() for key in optimizer.ignores} == {"beta1", "beta2", "epsilon"}


def test_exactly_the_keys_without_effect_on_an_optimizer_are_listed_as_ignored(subtests: pytest.Subtests) -> None:
    for kind in OPTIMIZERS:
        with subtests.test(kind=kind):
            others = {"beta1": 0.5, "beta2": 0.6, "epsilon": 0.7}
            default = OPTIMIZERS[kind].build(OptimizerSection())
            ignored = [
                key for key in others if OPTIMIZERS[kind].build(OptimizerSection(**{key: others[key]})) == default
            ]
            assert tuple(ignored) == OPTIMIZERS[kind].ignores


def test_all_broken_rules_between_sections_are_reported_at_once(write: Write) -> None:
    lines = refused(
        write(
            """\
            adapter: {init: pissa, dtype: bfloat16}
            training: {precision: fp16, early_stopping: 1, eval_every: 1}
            """
        ),
        "data.eval=none",
    )
    assert [line.split("`")[1] for line in lines] == ["adapter.init", "adapter.dtype", "training.early_stopping"]


def test_all_broken_rules_within_a_section_are_reported_at_once(write: Write) -> None:
    text = "\n".join(refused(write("training:\n  batch_size: 10\n  micro_batch: 4\n  early_stopping: 3\n")))
    assert "`micro_batch` 4" in text
    assert "`eval_every`" in text


@settings(max_examples=60)
@given(st.integers(1, 500), st.integers(1, 500))
def test_the_named_micro_batch_divides_the_batch(batch_size: int, micro_batch: int) -> None:
    def broken(rows: int) -> list[tuple[str, str]]:
        return contradictions(Config(training=TrainingSection(batch_size=batch_size, micro_batch=rows)))

    if found := broken(micro_batch):
        named = int(found[0][1].rpartition(" ")[2])
        assert named < micro_batch
        assert not broken(named)
    assert bool(found) is bool(batch_size % micro_batch)


def test_remote_code_needs_a_pinned_commit(subtests: pytest.Subtests) -> None:
    for revision in [None, "main", "abc1234", COMMIT.upper(), COMMIT + "0", COMMIT + "\n"]:
        with subtests.test(revision=revision), pytest.raises(ValueError, match="40-digit"):
            ModelSection(trust_remote_code=True, revision=revision)


# -- and back --------------------------------------------------------------------------------------------------------

_LOOKS_LIKE_SOMETHING_ELSE = [
    "2e-4", "1e5", "0o17", "0x1f", "017", "09", "1234567e89", "no", "true", "null", "~", "", " ", " a ", "a\nb\n",
    ".inf", "1:30", "2024-01-31", "1_000", "#x", "a: b", "- a", "[a]", "{a}", "'", '"', "!x", "&a", "*a", "@a", "%a",
    "a #b", "\t", "é", "🙂", "a\x85b", "a\u2028b", "\x7f", "...", "---", "<<", "=", "\ufeffx",
]  # fmt: skip


def test_text_that_looks_like_something_else_comes_back_as_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = Config(adapter=AdapterSection(extra_modules=_LOOKS_LIKE_SOMETHING_ELSE), output=OutputSection(dir="x"))
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config
    for text in ("2e-4", "no", "null", "", " a ", "a\nb\n", "#x", "\ufeffx"):
        path.write_text(dump(Config(model=ModelSection(revision=text))), encoding="utf-8")
        assert load(path).model.revision == text


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
_NAMES = _TEXT.filter(lambda text: text and not text.startswith("~"))  # that is somebody's home
_SOURCES = _NAMES | st.lists(
    _NAMES | st.builds(Source, source=_NAMES, weight=st.floats(1e-9, 1000)), min_size=1, max_size=3
)
_TARGET = _TEXT.filter(lambda text: not is_pattern(text))
_CONFIGS = st.builds(
    Config,
    model=st.builds(
        ModelSection, name=_NAMES, revision=st.none() | _TEXT, weights=st.sampled_from(["pretrained", "random"])
    ),
    adapter=st.builds(
        AdapterSection,
        rank=st.integers(1, 10**6),
        alpha=st.floats(1e-30, 1e9),
        dropout=st.floats(0, 1, exclude_max=True),
        targets=st.just("all-linear") | st.lists(_TARGET, min_size=1, max_size=3),
        dora=st.booleans(),
        extra_modules=st.lists(_TEXT, max_size=2),
    ),
    data=st.builds(DataSection, train=_SOURCES, eval_share=st.floats(1e-9, 0.999)),
    training=st.builds(
        TrainingSection,
        batch_size=st.just(24),
        micro_batch=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
        learning_rate=st.floats(1e-300, 10),
        max_steps=st.none() | st.integers(1, 2**31 - 1),
        seed=st.integers(0, 2**32 - 1),
    ),
    memory=st.builds(
        MemorySection,
        checkpointing=st.sampled_from(["none", "all", "every-7", 0, 12, {"keep-both": 3, "all": 4}]),
        limit=st.none() | st.integers(1, 2**50),
    ),
    output=st.builds(OutputSection, dir=_NAMES),
)


@pytest.mark.slow
@settings(max_examples=50)
@given(config=_CONFIGS)
def test_a_dumped_config_loads_to_an_equal_one(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


def test_a_dumped_config_names_every_key(write: Write) -> None:
    text = dump(load_config(write("")))
    for _, key, _ in KEYS:
        assert f"  {key}:" in text
