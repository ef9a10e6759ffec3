"""Facts about loading a config: every problem at once with its place, overrides, rules, and the way back by `dump`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from finetune.settings import CHOICES, load_config
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


def test_an_empty_file_is_all_defaults_but_for_its_run_directory(write: Write) -> None:
    config = load_config(write("", "my_job.yaml"))
    assert config.output.dir == "runs/my_job"
    assert config.model_copy(update={"output": OutputSection()}) == Config()


def test_a_run_directory_in_the_file_is_kept(write: Write) -> None:
    assert load_config(write("output:\n  dir: elsewhere\n")).output.dir == "elsewhere"


def test_a_section_with_nothing_under_it_is_all_defaults(write: Write) -> None:
    assert load_config(write("model:\ntraining:\n  seed: 1\n")).model == ModelSection()


def test_scientific_notation_is_a_number_and_no_is_a_name(write: Write) -> None:
    config = load_config(write("model:\n  name: no\ntraining:\n  learning_rate: 2e-5\n  epochs: 3\n"))
    assert config.model.name == "no"
    assert config.training.learning_rate == 0.00002
    assert config.training.epochs == 3.0


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbftraining:\r\n  seed: 7\r\n")
    assert load_config(path).training.seed == 7


def test_a_config_cannot_be_changed(write: Write) -> None:
    config = load_config(write(""))
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 3  # type: ignore[misc]


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


def test_a_misspelt_key_is_reported_with_its_line_and_the_nearest_key(write: Write, subtests: pytest.Subtests) -> None:
    for section, key in [(section, key) for section, key, _ in KEYS]:
        with subtests.test(section=section, key=key):
            [line] = refused(write(f"# one\n{section}:\n  {key}x: 1\n"))
            assert line.startswith(f"job.yaml:3: unknown key `{section}.{key}x`")
            assert f"did you mean `{key}`?" in line


def test_a_misspelt_section_is_reported_with_the_nearest_one(write: Write, subtests: pytest.Subtests) -> None:
    for section in Config.model_fields:
        with subtests.test(section=section):
            [line] = refused(write(f"{section}s:\n  x: 1\n"))
            assert line.startswith(f"job.yaml:1: unknown section `{section}s`")
            assert f"did you mean `{section}`?" in line


def test_a_key_of_another_tool_is_answered_with_what_to_write(write: Write, subtests: pytest.Subtests) -> None:
    for key, expected in [
        ("lr", "training.learning_rate"),
        ("base_model", "model.name"),
        ("load_in_4bit", "quantization.kind: nf4"),
        ("Lora-R", "adapter.rank"),
    ]:
        with subtests.test(key=key):
            [line] = refused(write(f"# one\n{key}: 1\n"))
            assert line.startswith(f"job.yaml:2: `{key}` is another tool's key; write `{expected}`")
            [line] = refused(write(f"adapter:\n  {key}: 1\n"))
            assert line.startswith(f"job.yaml:2: `adapter.{key}` is another tool's key; write `{expected}`")
            [line] = refused(write(""), f"{key}=1")
            assert f"override `{key}=1`: `{key}` is another tool's key; write `{expected}`" in line
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


def test_a_value_of_the_wrong_type_says_what_is_expected(write: Write, subtests: pytest.Subtests) -> None:
    for override, expected in [
        ("model.name=5", "expected text, not 5"), ("model.trust_remote_code=no", "expected true or false, not 'no'"),
        ("model.trust_remote_code=1", "expected true or false, not 1"),
        ("adapter.rank=1.5", "expected a whole number, not 1.5"),
        ("adapter.rank=true", "expected a whole number, not True"),
        ("adapter.rank='8'", "expected a whole number, not '8'"),
        ("adapter.alpha=high", "expected a number, not 'high'"), ("adapter.extra_modules=5", "expected a list, not 5"),
        ("training.max_steps=0", "expected a number greater than 0, not 0"),
        ("training.learning_rate=-1", "expected 'auto' or a number greater than 0, not -1"),
        ("training.learning_rate=.nan", "expected"),
        ("training.precision=bf17", "'bf16', 'fp16' or 'fp32', not 'bf17'"),
        ("optimizer.beta1=1", "expected a number less than 1, not 1"),
        ("output.keep=1", "expected a number greater than or equal to 2, not 1"),
        ("data.eval_share=1", "expected a number less than 1, not 1"),
    ]:  # fmt: skip
        with subtests.test(override=override):
            [line] = refused(write(""), override)
            assert line.startswith(f"override `{override}`: `{override.split('=')[0]}`: ")
            assert expected in line


def test_the_message_on_targets_of_a_wrong_kind_says_that_a_list_is_possible(write: Write) -> None:
    [line] = refused(write("adapter:\n  targets: 5\n"))
    assert "all-linear" in line
    assert "list" in line


def test_one_wrong_item_of_a_list_is_one_problem(write: Write) -> None:
    [line] = refused(write("adapter:\n  targets:\n    - q_proj\n    - 1\n"))
    assert line.startswith("job.yaml:4: ")
    assert "expected text, not 1" in line


def test_sources_are_one_name_or_a_list_of_names_some_with_a_weight(write: Write) -> None:
    config = load_config(write("data:\n  train:\n    - a.jsonl\n    - {source: b/, weight: 2}\n  eval: [c.jsonl]\n"))
    assert config.data.train == ["a.jsonl", Source(source="b/", weight=2)]
    assert named(config.data.train) == "a.jsonl, b/ (weight 2)"
    assert entries(config.data.eval) == entries("c.jsonl") == [Source(source="c.jsonl", weight=1)]


def test_a_wrong_source_of_several_is_reported_with_its_line_and_key(write: Write, subtests: pytest.Subtests) -> None:
    for item, message in [
        ("{source: b/, weight: 0}", "`data.train.1.weight`: expected a number greater than 0, not 0"),
        ("{source: b/, weight: twice}", "`data.train.1.weight`: expected a number, not 'twice'"),
        ("{source: b/, wieght: 2}", "unknown key `data.train.1.wieght`; did you mean `weight`?"),
        (
            "{source: b/, weight: 1e308}",
            "`data.train.1.weight`: expected a number less than or equal to 1000, not 1e+308",
        ),
        ("{weight: 2}", "`data.train.1.source` is missing"),
        ("5", "`data.train.1`: expected text or a `source` with its `weight`, not 5"),
        ("''", "`data.train.1`: expected a name or a `source` with its `weight`, not ''"),
    ]:
        with subtests.test(item=item):
            [line] = refused(write(f"data:\n  train:\n    - a.jsonl\n    - {item}\n"))
            assert line.startswith(f"job.yaml:4: {message}")


def test_no_source_at_all_is_refused(write: Write, subtests: pytest.Subtests) -> None:
    for sources in ["[]", "''"]:
        with subtests.test(sources=sources):
            [line] = refused(write(f"data:\n  train: {sources}\n"))
            assert line.startswith("job.yaml:2: `data.train`: expected ")


def test_held_out_sources_that_are_also_trained_are_named(write: Write) -> None:
    [line] = refused(write("data:\n  train: [a.jsonl, b.jsonl]\n  eval: [{source: b.jsonl, weight: 2}, c.jsonl]\n"))
    assert line.startswith("job.yaml:3: `data.eval`: `b.jsonl` is training data")


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


def test_a_value_in_place_of_a_section_is_explained(write: Write) -> None:
    [line] = refused(write("training: 5\n"))
    assert line.startswith("job.yaml:1: `training` is a section")


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


# -- overrides -------------------------------------------------------------------------------------------------------


def test_an_override_wins_over_the_file_and_the_last_over_the_first(write: Write) -> None:
    path = write("training:\n  seed: 1\n  max_steps: 5\n")
    config = load_config(path, ["training.seed=2", "training.seed=3", "optimizer.kind=sgd"])
    assert (config.training.seed, config.training.max_steps, config.optimizer.kind) == (3, 5, "sgd")


def test_the_value_of_an_override_is_read_as_in_the_file(write: Write, subtests: pytest.Subtests) -> None:
    for override, value in [
        ("adapter.targets=[q_proj,v_proj]", ["q_proj", "v_proj"]), ("adapter.targets=all-linear", "all-linear"),
        ("adapter.targets=q_proj", ["q_proj"]), ("adapter.extra_modules=lm_head", ["lm_head"]),
        ("tracking.to=tensorboard", ["tensorboard"]), ("training.learning_rate=2e-5", 2e-5),
        ("model.revision=a=b", "a=b"), ("model.revision=null", None), ("model.revision=", None),
        ("model.name=C:\\models", "C:\\models"), ("memory.limit=24GiB", 24 * 2**30), (" training.seed =3", 3),
    ]:  # fmt: skip
        with subtests.test(override=override):
            section, key = override.split("=")[0].strip().split(".")
            assert getattr(getattr(load_config(write(""), [override]), section), key) == value


def test_an_override_names_one_column_of_several(write: Write) -> None:
    path = write("data:\n  columns: {prompt: a, completion: b}\n")
    assert load_config(path, ["data.columns.prompt=c"]).data.columns == {"prompt": "c", "completion": "b"}
    assert load_config(write(""), ["data.columns.prompt=c"]).data.columns == {"prompt": "c"}


def test_an_override_of_one_entry_of_a_value_that_is_no_mapping_is_refused(
    write: Write, subtests: pytest.Subtests
) -> None:
    for text, override in [
        ("data: {columns: question}", "data.columns.prompt=question"),
        ("model: {rope_scaling: 2}", "model.rope_scaling.factor=2"),
    ]:
        with subtests.test(override=override):
            key = override.rpartition(".")[0]
            assert refused(write(text), override)[0] == f"override `{override}`: `{key}` is not a mapping in the file"


def test_a_malformed_override_is_answered_with_the_form(write: Write, subtests: pytest.Subtests) -> None:
    for override in ["sead=3", "training.seed", "training..seed=3", "a.b.c=1", ".seed=1", "=", ""]:
        with subtests.test(override=override):
            [line] = refused(write(""), override)
            assert f"override `{override}`" in line
            assert "section.key=value" in line


def test_an_override_with_an_invalid_value_is_named(write: Write, subtests: pytest.Subtests) -> None:
    for value in ["[1", "*x", "!!python/name:os.system", "a: b", "'x"]:
        with subtests.test(value=value):
            [line] = refused(write(""), f"model.name={value}")
            assert line.startswith(f"override `model.name={value}`: ")


def test_problems_of_overrides_and_of_the_file_are_reported_together(write: Write) -> None:
    lines = refused(write("training:\n  seed: x\n"), "model.nmae=1", "bad", "adapter.rank=0")
    assert len(lines) == 4
    assert {line.split(": ")[0] for line in lines} == {
        "job.yaml:2",
        "override `model.nmae=1`",
        "override `bad`",
        "override `adapter.rank=0`",
    }


def test_an_unknown_section_in_an_override_is_located_there(write: Write) -> None:
    [line] = refused(write(""), "trainning.seed=3")
    assert line.startswith("override `trainning.seed=3`: ")
    assert "did you mean `training`?" in line


def test_an_override_fills_a_section_that_stands_empty_in_the_file(write: Write) -> None:
    assert load_config(write("training:\n"), ["training.seed=3"]).training.seed == 3


# -- rules that join fields ------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"

NVME = ["distributed.offload=nvme", "distributed.nvme_path=/tmp"]

# Name of the rule's section or key; what breaks it; words of the message that say the remedy; the remedy, applied.
RULES: list[tuple[str, list[str], tuple[str, ...], list[str]]] = [
    ("data.eval", ["data.train=a.jsonl", "data.eval=a.jsonl"], ("`data.eval: auto`",), ["data.eval=auto"]),
    ("tracking.to", ["tracking.to=[wandb, wandb]"], ("one of each",), ["tracking.to=[wandb]"]),
    ("adapter.kind", ["adapter.kind=none"], ("`quantization.kind: none`",), ["quantization.kind=none"]),
    ("adapter.kind", ["adapter.kind=none"], ("`adapter.kind: lora`",), ["adapter.kind=lora"]),
    (
        "adapter.kind",
        ["adapter.kind=none", "quantization.kind=none", "adapter.dora=true"],
        ("`kind: lora`",),
        ["adapter.kind=lora"],
    ),
    (
        "adapter.kind",
        ["adapter.kind=none", "quantization.kind=none", "adapter.rslora=true"],
        ("remove",),
        ["adapter.rslora=false"],
    ),
    ("adapter.init", ["adapter.init=pissa"], ("`quantization.kind: none`",), ["quantization.kind=none"]),
    ("adapter.init", ["adapter.init=pissa"], ("`adapter.init: loftq`",), ["adapter.init=loftq"]),
    (
        "adapter.init",
        ["adapter.init=loftq", "quantization.kind=int8"],
        ("`quantization.kind: nf4`",),
        ["quantization.kind=nf4"],
    ),
    (
        "adapter.init",
        ["adapter.init=loftq", "model.weights=random"],
        ("`model.weights: pretrained`", "`weights: pretrained`", "`adapter.init: default`"),
        ["model.weights=pretrained"],
    ),
    (
        "adapter.dora",
        ["adapter.dora=true", "quantization.kind=mxfp4"],
        ("`dora: false`", "`quantization.kind: none`"),
        ["adapter.dora=false"],
    ),
    ("output.merge", ["output.merge=true", "model.weights=random"], ("`output.merge: false`",), ["output.merge=false"]),
    (
        "adapter.dtype",
        ["training.precision=fp16", "adapter.dtype=bfloat16"],
        ("`adapter.dtype: float32`",),
        ["adapter.dtype=float32"],
    ),
    (
        "training.early_stopping",
        ["training.early_stopping=2", "training.eval_every=5", "data.eval=none"],
        ("set `data.eval`",),
        ["data.eval=auto"],
    ),
    ("model", ["model.trust_remote_code=true"], ("40-digit commit",), [f"model.revision={COMMIT}"]),
    (
        "training.batch_size",
        ["training.batch_size=10", "training.micro_batch=4"],
        ("nearest micro-batch that divides it is 2",),
        ["training.micro_batch=2"],
    ),
    (
        "training.batch_size",
        ["training.batch_size=10", "training.micro_batch=4"],
        ("nearest micro-batch that divides it is 2",),
        ["training.micro_batch_tokens=4096"],
    ),
    (
        "training.micro_batch",
        ["training.micro_batch=auto", "training.micro_batch_tokens=4096"],
        ("`auto` chooses rows",),
        ["training.micro_batch=4"],
    ),
    ("training.early_stopping", ["training.early_stopping=2"], ("needs `eval_every`",), ["training.eval_every=10"]),
    (
        "memory.offload",
        ["memory.offload=checkpoints", "memory.checkpointing=none"],
        ("`checkpointing: all`", "`offload: none`"),
        ["memory.checkpointing=all"],
    ),
    (
        "memory.offload",
        ["memory.offload=checkpoints", "memory.checkpointing=0"],
        ("`checkpointing: all`", "`offload: none`"),
        ["memory.offload=none"],
    ),
    (
        "kernels.compile",
        ["kernels.compile=layers", "memory.offload=checkpoints", "memory.checkpointing=all"],
        ("cannot be compiled", "`memory.offload: none`"),
        ["memory.offload=none"],
    ),
    *(
        (key, [f"distributed.kind={kind}", f"{key}={broken}", *more], ["whole", "sharded"], [remedy])
        for kind in ("fsdp", "deepspeed")
        for key, broken, remedy, *more in (
            ("quantization.kind", "int8", "quantization.kind=nf4"),
            ("adapter.init", "loftq", "adapter.init=default"),
            ("adapter.dora", "true", "adapter.dora=false"),
            ("training.precision", "fp16", "distributed.kind=ddp"),
            ("kernels.fused", "on", "kernels.fused=auto"),
            ("kernels.compile", "layers", "kernels.compile=none"),
        )
    ),
    (
        "distributed.stage",
        ["distributed.kind=fsdp", "distributed.stage=optimizer"],
        ["`fsdp` cuts gradients as well"],
        ["distributed.stage=gradients"],
    ),
    *(
        (key, ["distributed.kind=deepspeed", *broken], [word], [remedy])
        for key, broken, word, remedy in (
            ("distributed.offload", [*NVME, "distributed.kind=fsdp"], "disk", "distributed.kind=deepspeed"),
            ("distributed.offload", [*NVME, "distributed.stage=gradients"], "disk", "distributed.stage=weights"),
            ("distributed.nvme_path", ["distributed.offload=nvme"], "needs it", "distributed.nvme_path=/tmp"),
            ("distributed.nvme_path", ["distributed.nvme_path=/tmp"], "kept there", "distributed.nvme_path=null"),
        )
    ),
    (
        "adapter.dtype",
        ["distributed.kind=deepspeed", "adapter.dtype=bfloat16"],
        ["no checkpoint has"],
        ["adapter.dtype=float32"],
    ),
    (
        "distributed.context",
        ["distributed.kind=deepspeed", "distributed.context=2"],
        ("split", "`context: 1`"),
        ["distributed.kind=fsdp"],
    ),
    (
        "kernels.compile",
        ["kernels.compile=layers", "distributed.context=2"],
        ("not compiled", "`distributed.context: 1`"),
        ["kernels.compile=none"],
    ),
]


def test_a_broken_rule_names_its_key_and_a_remedy_that_works(write: Write, subtests: pytest.Subtests) -> None:
    for key, broken, words, remedy in RULES:
        with subtests.test(key=key, broken=broken):
            path = write("")
            [line] = refused(path, *broken)
            assert f"`{key}`: " in line
            load_config(path, [*broken, *remedy])
            assert any(word in line for word in words), f"{line!r} says nothing of {' or '.join(words)}"


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


def test_the_line_of_a_broken_rule_is_the_line_of_its_key(write: Write) -> None:
    [line] = refused(write("quantization:\n  kind: nf4\nadapter:\n  kind: none\n"))
    assert line.startswith("job.yaml:4: `adapter.kind`: ")


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


@pytest.mark.slow
def test_text_that_looks_like_something_else_comes_back_as_text(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for text in _LOOKS_LIKE_SOMETHING_ELSE:
        with subtests.test(text=text):
            config = Config(
                model=ModelSection(revision=text),
                adapter=AdapterSection(extra_modules=[text]),
                output=OutputSection(dir="x"),
            )
            path = tmp_path / "config.yaml"
            path.write_text(dump(config), encoding="utf-8")
            assert load(path) == config


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
@settings(max_examples=100)
@given(config=_CONFIGS)
def test_a_dumped_config_loads_to_an_equal_one(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


def test_a_dumped_config_names_every_key(write: Write) -> None:
    text = dump(load_config(write("")))
    for _, key, _ in KEYS:
        assert f"  {key}:" in text
