"""Facts about containers: equal rows give equal tokens and masks, whichever file or object holds them."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow.parquet
import pytest
from conversations import TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import refusal

from finetune.config import DataSection
from finetune.data import columnar, in_memory, sources
from finetune.data.chat import encode
from finetune.data.examples import RowError
from finetune.data.formats import FORMATS, detect, read
from finetune.data.prepare import prepare
from finetune.errors import DataError

Rows = list[dict[str, Any]]


def as_json_lines(rows: Rows, folder: Path) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / "rows.jsonl")


def as_json(rows: Rows, folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    return str(folder / "rows.json")


def as_csv(rows: Rows, folder: Path) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(folder / "rows.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows({name: json.dumps(value) for name, value in row.items()} for row in rows)
    return str(folder / "rows.csv")


def as_parquet(rows: Rows, folder: Path) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def as_arrow(new: Callable[..., Any]) -> Callable[[Rows, Path], str]:
    def write(rows: Rows, folder: Path) -> str:
        table = pyarrow.Table.from_pylist(rows)
        with new(str(folder / "rows.arrow"), table.schema) as writer:
            writer.write_table(table)
        return str(folder / "rows.arrow")

    return write


def as_stored_json(rows: Rows, folder: Path) -> str:
    """A column of JSON values, as `datasets` stores rows of mixed types."""
    columns = {name: pyarrow.array([json.dumps(row.get(name)) for row in rows], pyarrow.json_()) for name in rows[0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
    return str(folder / "rows.parquet")


CONTAINERS: dict[str, Callable[[Rows, Path], str]] = {
    "JSON": as_json,
    "CSV": as_csv,
    "Parquet": as_parquet,
    "Parquet of JSON": as_stored_json,
    "Arrow file": as_arrow(pyarrow.ipc.new_file),
    "Arrow stream": as_arrow(pyarrow.ipc.new_stream),
    "Dataset": lambda rows, folder: in_memory.given(datasets.Dataset.from_list(rows), "data.train"),
    "IterableDataset": lambda rows, folder: in_memory.given(
        datasets.Dataset.from_list(rows).to_iterable_dataset(), "data.train"
    ),
    "dicts": lambda rows, folder: in_memory.given(rows, "data.train"),
    "pandas": lambda rows, folder: in_memory.given(
        pandas.read_parquet(as_parquet(rows, folder)).to_dict("records"), "data.train"
    ),
}
"""By name, a function that puts rows into a container and returns the source that it is."""

WORDS = st.sampled_from(["one", "two", "Hello there", "so?", "é\n"])
# Keys in the order of their names, as a column has them; each of one type.
ARGUMENTS = st.fixed_dictionaries(
    {"b": st.integers(0, 9)},
    optional={
        "a": WORDS, "c": st.lists(WORDS | st.none(), min_size=1, max_size=2),
        "d": st.fixed_dictionaries({}, optional={"x": st.booleans(), "y": WORDS}),
    },
)  # fmt: skip
CALLS = st.lists(
    st.builds(
        lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
        st.sampled_from(["add", "find"]), ARGUMENTS,
    ),
    min_size=1, max_size=2,
)  # fmt: skip
ASKING = st.fixed_dictionaries({"role": st.just("user"), "content": WORDS}, optional={"name": WORDS})
ANSWERING = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": WORDS},
    optional={"train": st.booleans(), "weight": st.sampled_from([0, 1]), "reasoning_content": WORDS},
)
CALLING = st.builds(lambda calls: {"role": "assistant", "content": "", "tool_calls": calls}, CALLS)
TOOL = st.fixed_dictionaries(
    {"name": WORDS},
    optional={"description": WORDS, "parameters": st.fixed_dictionaries({"type": st.just("object")}, optional={
        "properties": st.fixed_dictionaries({}, optional={"a": st.just({"type": "string"})}),
    })},
)  # fmt: skip


def rows() -> st.SearchStrategy[Rows]:
    turns = st.lists(st.tuples(ASKING, ANSWERING | CALLING), min_size=1, max_size=2)
    messages = turns.map(lambda pairs: [message for pair in pairs for message in pair])
    row = st.fixed_dictionaries({"messages": messages}, optional={"tools": st.lists(TOOL, min_size=1, max_size=2)})
    return st.lists(row, min_size=1, max_size=3)


_ALL: dict[str, Any] = {"b": 1, "a": "one", "c": ["two"], "d": {"x": True, "y": "one"}}
_SAID: dict[str, Any] = {"role": "assistant", "content": "one", "train": True, "weight": 1, "reasoning_content": "so?"}
WHOLE: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "one", "name": "two"},
        {**_SAID, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": _ALL}}]},
    ],
    "tools": [{
        "name": "one", "description": "two",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    }],
}  # fmt: skip


def sorted_like(value: Any, whole: Any) -> Any:
    """A value with the fields of its objects in the order of those of `whole`."""
    if isinstance(value, dict):
        return {key: sorted_like(value[key], whole[key]) for key in whole if key in value}
    if isinstance(value, list):  # of messages, of which the answers have fields of their own
        return [sorted_like(one, whole[isinstance(one, dict) and one.get("role") == "assistant"]) for one in value]
    return value


def in_parts(made: Rows) -> Rows:
    """The rows with each text as a list of parts: a column holds one or the other."""
    parts = lambda text: [{"type": "text", "text": half} for half in (text[:1], text[1:])]  # noqa: E731
    return [
        {**row, "messages": [{**message, "content": parts(message["content"])} for message in row["messages"]]}
        for row in made
    ]


def without_empty(value: Any) -> Any:
    """A value without its empty objects, which Arrow cannot always store."""
    if isinstance(value, dict):
        return {key: without_empty(one) for key, one in value.items() if one != {} or key == "arguments"}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


def encoded(source: str, tokenizer: Any) -> list[Any]:
    found = []
    for row in sources.rows(source):
        content, _ = read(row.fields, detect(row.fields, {}), {})
        try:
            [segment] = encode(content, tokenizer, "assistant", "text").segments
        except RowError as error:  # such as a template that wants a thought
            found.append(str(error))
        else:
            found.append((segment.input_ids, segment.labels))
    return found


@pytest.fixture(scope="module")
def qwen(byte_tokenizer: Any) -> Any:
    return byte_tokenizer((TEMPLATES / "qwen2_5.jinja").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTAINERS)
def test_equal_rows_give_equal_tokens_and_masks_from_every_container(
    name: str, qwen: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=8, suppress_health_check=list(HealthCheck))
    @given(rows(), st.booleans())
    def compare(made: Rows, parts: bool) -> None:
        # The first row has all fields, so that those of the columns are in the order of the rows'.
        made = [{"tools": None, **sorted_like(row, WHOLE)} for row in [WHOLE, *without_empty(made)]]
        made = in_parts(made) if parts else made
        folder = tmp_path_factory.mktemp("rows")
        assert encoded(CONTAINERS[name](made, folder), qwen) == encoded(as_json_lines(made, folder), qwen)

    compare()


def call(arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"messages": [{"role": "user", "content": "Why?"}, answer]}


def arguments_of(source: str) -> list[Any]:
    messages = [read(row.fields, "messages", {})[0].messages for row in sources.rows(source)]  # type: ignore[union-attr]
    return [turns[1]["tool_calls"][0]["function"]["arguments"] for turns in messages]


def test_nulls_that_a_column_fills_in_are_not_arguments_and_those_that_are_written_stay(tmp_path: Path) -> None:
    made = [call({"b": 3}), call({"a": 1, "c": [None, {"x": 1}]}), call({"c": [{"y": "two"}]})]
    for name in ("Parquet", "Arrow file", "Arrow stream", "Dataset", "IterableDataset", "pandas"):
        assert arguments_of(CONTAINERS[name](made, tmp_path)) == [
            {"b": 3}, {"a": 1, "c": [None, {"x": 1}]}, {"c": [{"y": "two"}]}
        ], name  # fmt: skip
    for name in ("JSON", "CSV", "Parquet of JSON", "dicts"):
        assert arguments_of(CONTAINERS[name]([call({"a": None, "b": 3})], tmp_path)) == [{"a": None, "b": 3}], name
    assert arguments_of(as_parquet([call('{"b": 3, "a": null}')], tmp_path)) == [{"b": 3, "a": None}]


def test_cells_that_are_not_valid_json_are_refused_by_the_column(tmp_path: Path) -> None:
    texts = pyarrow.array(['{"a": 1}', '{"a": '], pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"info": texts}), tmp_path / "rows.parquet")
    with refusal(DataError, "rows.parquet[1]", "`info`"):
        list(sources.rows(str(tmp_path / "rows.parquet")))
    said = str([{"role": "user", "content": "Why?"}])  # as Python prints it
    with open(tmp_path / "rows.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["chosen", "rejected"], [said, said]])
    with refusal(DataError, "rows.csv:2", "`chosen`"):
        list(sources.rows(str(tmp_path / "rows.csv")))


class Wrapped(pyarrow.ExtensionType):
    """A type of somebody's own."""

    def __init__(self, storage: pyarrow.DataType) -> None:
        super().__init__(storage, "tests.wrapped")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pyarrow.DataType, _: bytes) -> Wrapped:
        return cls(storage)


def test_structs_within_other_types_have_no_nulls_either_and_maps_keep_theirs() -> None:
    kind = pyarrow.struct({"a": pyarrow.string(), "map": pyarrow.map_(pyarrow.string(), pyarrow.int64())})
    structs = pyarrow.array([{"a": None, "map": {"x": None}}, {"a": "two", "map": None}], kind)
    for wrapped in (
        pyarrow.DictionaryArray.from_arrays([0, 1], structs),
        pyarrow.RunEndEncodedArray.from_arrays([1, 2], structs),
        pyarrow.ExtensionArray.from_storage(Wrapped(structs.type), structs),
    ):
        read = columnar.rows(pyarrow.table({"x": wrapped}), "rows")
        assert read == [{"x": {"map": {"x": None}}}, {"x": {"a": "two"}}]


def test_a_map_is_an_object_and_a_table_without_columns_has_its_rows(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.string()}))
    table = pyarrow.table({"text": ["one"], "map": pyarrow.array([[("x", {"a": 1}), ("y", None)]], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    [row] = sources.rows(str(tmp_path / "rows.parquet"))
    assert row.fields["map"] == {"x": {"a": 1}, "y": None}
    # A damaged file may have such a table.
    assert columnar.rows(pyarrow.table({"text": ["one", "two"]}).select([]), "rows") == [{}, {}]


def test_arguments_in_the_order_of_a_column_are_counted(qwen: Any, tmp_path: Path) -> None:
    made = [call({"b": 3, "a": 1}), call({"b": 4})]
    for source, count in ((as_parquet(made, tmp_path), 1), (as_json_lines(made, tmp_path), 0)):
        counts = prepare(DataSection(train=source, eval="none", max_length=4096), qwen).train_counts
        assert (counts.rows, counts.traits.schema_ordered) == (2, count)


# -- numbers ----------------------------------------------------------------------------------------------------------

PAIR = {"prompt": "Why? ", "chosen": "So.", "rejected": "No."}
IDS = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
NUMERIC: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "margin": ("pairs_with_margin", lambda n: {**PAIR, "margin": n}),
    "score": ("pairs", lambda n: {**PAIR, "score_chosen": n, "score_rejected": 1}),
    "rank": ("pairs", lambda n: {
        "prompt": "Why?", "answers": [{"answer": "So.", "rank": n}, {"answer": "No.", "rank": 7}]
    }),
    "class": ("labelled", lambda n: {"text": "So.", "label": n}),
    "input_ids": ("tokenized", lambda n: {"input_ids": [5, n]}),
    "labels": ("tokenized", lambda n: {"input_ids": [5, 6], "labels": [-100, n]}),
    "attention_mask": ("tokenized", lambda n: {"input_ids": [5, 6], "attention_mask": [1, n]}),
    "teacher_ids": ("distilled", lambda n: {
        **IDS, "teacher_ids": [[], [n], [7]], "teacher_logprobs": [[], [-1.0], [-1.0]]
    }),
    "teacher_logprobs": ("distilled", lambda n: {
        **IDS, "teacher_ids": [[], [6], [7]], "teacher_logprobs": [[], [n], [-1.0]]
    }),
    "prompt_logprobs": ("distilled", lambda n: {
        **IDS,
        "prompt_logprobs": [None, {str(n) if type(n) is int else "6": {"logprob": -1.0}}, {"7": {"logprob": n}}],
    }),
    "weight": ("messages", lambda n: {"messages": [
        {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "weight": n}
    ]}),
}  # fmt: skip
"""By field, the format and the row with a number there."""

INFINITE = float("inf")
NUMBERS = [
    10**400, -(10**400), 2**31, 2**63, -(2**64), INFINITE, -INFINITE, float("nan"), 1e300, -1e300, -1, True, False,
    "1e999", "nan", "9" * 5000, "3", "-" * 3 + "5", "", None, [], {}, 0, 6, 300, 2**40, -0.0, 0.5, 5e-324,
]  # fmt: skip


@pytest.mark.parametrize("name", NUMERIC)
def test_any_number_in_a_row_is_read_or_refused(name: str, qwen: Any) -> None:
    form, of = NUMERIC[name]
    for number in NUMBERS:
        source = in_memory.given([of(number)], "data.train")
        section = DataSection(train=source, eval="none", format=form, labels=["3", "5"] if name == "class" else [])
        with contextlib.suppress(DataError):  # any other error fails
            prepare(section, qwen)


@pytest.mark.parametrize("name", ["margin", "score", "rank", "teacher_logprobs", "prompt_logprobs"])
def test_numbers_that_no_float_holds_are_refused_with_their_line(name: str, qwen: Any, tmp_path: Path) -> None:
    form, of = NUMERIC[name]
    file = tmp_path / "rows.jsonl"
    for number in ("-1e999", "1e999", "NaN", "1" + "0" * 400):
        file.write_text(json.dumps(of("@")).replace('"@"', number) + "\n", encoding="utf-8")
        with refusal(DataError, "rows.jsonl:1"):
            prepare(DataSection(train=str(file), eval="none", format=form), qwen)


def test_an_order_of_classes_takes_no_name_for_a_number() -> None:
    from finetune.data.labelled import in_order

    assert in_order(["10", "9", "-1"]) == ["-1", "9", "10"]
    assert in_order(["9" * 5000, "--5", "1"]) == sorted(["9" * 5000, "--5", "1"])


def test_a_teacher_of_many_tokens_at_one_place_takes_no_memory_at_the_others(qwen: Any) -> None:
    """20,000 tokens with as many entries as one of them has would be 30 GiB."""
    count, many = 20_000, 200_000
    ids = [5] * count
    entries: list[list[int]] = [[5] for _ in ids]
    entries[7] = list(range(many))
    log_probs = [[-20.0] * len(each) for each in entries]
    content = FORMATS["distilled"].read({"input_ids": ids, "teacher_ids": entries, "teacher_logprobs": log_probs})
    from finetune.data import teachers

    kept = teachers.kept(content, 32)
    assert kept.teacher.ids.shape == (count, 32)  # type: ignore[union-attr]
