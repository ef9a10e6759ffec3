"""How answers are scored: the metrics of the table, JSON schemas, and the rules of a user."""

import json
from pathlib import Path

import pytest
from messages import refusal

from finetune.errors import ConfigError, DataError, MachineError
from finetune.evaluation import metrics
from finetune.evaluation.metrics import METRICS, find


def score(name: object, answer: str, reference: str = "", row: dict | None = None) -> float:
    if name == "rouge_l":
        pytest.importorskip("rouge_score", reason="needs the package rouge_score")
    return find(str(name)).score(answer, reference, "rows.jsonl:7", row or {})


@pytest.mark.slow
def test_each_metric_of_text_gives_the_values_of_its_definition(subtests: pytest.Subtests) -> None:
    for name, answer, reference, expected in [
        ("exact_match", " Paris\n", "Paris", 1),
        ("exact_match", "paris", "Paris", 0),
        ("f1", "The Eiffel Tower!", "eiffel tower", 1),  # SQuAD: case, punctuation and articles do not count
        ("f1", "in Paris", "Paris, France", 0.5),
        ("f1", "cat cat", "cat", 2 / 3),
        ("f1", "the", "", 1),
        ("f1", "cat", "", 0),
        ("rouge_l", "the cat sat", "the cat on a mat sat", 2 * (3 / 3) * (3 / 6) / (3 / 3 + 3 / 6)),
        ("rouge_l", "Привет, мир", "привет мир", 1),  # rouge_score's own words are of ASCII letters
        ("json", '{"a": [1]}', "", 1),
        ("json", '```json\n{"a": 1}\n```', "", 0),
        ("json", '{"a": NaN}', "", 0),
        ("json_equal", '{"b": [1.0], "a": 2}', '{"a": 2, "b": [1]}', 1),
        ("json_equal", '{"a": true}', '{"a": 1}', 0),
        ("json_equal", '{"a": 1', '{"a": 1}', 0),
        ("json_key:label", '{"label": "x", "more": 1}', '{"label": "x"}', 1),
        ("json_key:place.city", '{"place": {"city": "Rome"}}', '{"place": {"city": "Oslo"}}', 0),
        ("json_key:label", "[1]", '{"other": 1}', 1),
        ("json_key:label", "none", '{"label": "x"}', 0),
    ]:
        with subtests.test(name=name, answer=answer):
            assert score(name, answer, reference) == pytest.approx(expected)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_gives_a_reference_itself_full_score(name: str) -> None:
    text = '{"label": "some text", "number": 3}'
    assert score(f"{name}:label" if METRICS[name].takes else name, text, text) == 1


def test_rouge_l_on_ascii_is_that_of_rouge_score() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="needs the package rouge_score")
    one, other = "It's the 2nd; snake_case CATS, sat!", "the cats_sat on a 2nd mat. it s"
    assert score("rouge_l", one, other) == scorer.RougeScorer(["rougeL"]).score(other, one)["rougeL"].fmeasure


def test_a_json_schema_is_a_rule(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}))
    assert [score(file, text) for text in ('{"n": 1}', '{"n": "1"}', "{}", "n")] == [1, 0, 0, 0]
    file.write_text(json.dumps({"$ref": "https://example.com/schema.json"}))
    with refusal(DataError, "cannot score this row"):  # and nothing is downloaded
        score(file, "{}")
    file.write_text(json.dumps({"type": "no such type"}))
    with refusal(ConfigError, "not a JSON schema"):
        find(str(file))


RULE = """
from dataclasses import dataclass
@dataclass
class Weights:
    length: float = 0.5
def score(answer, reference, row):
    return Weights().length * (len(answer) == row["length"])
def text(answer, reference, row):
    return "0.5"
"""


def test_a_rule_of_a_user_gets_answer_reference_and_row_and_names_the_row_that_it_fails_on(tmp_path: Path) -> None:
    file = tmp_path / "rule.py"
    file.write_text(RULE)
    assert score(f"{file}:score", "abc", row={"length": 3}) == 0.5
    with refusal(DataError, "rows.jsonl:7", "KeyError:", "rule.py:7"):
        score(f"{file}:score", "abc")
    with refusal(DataError, "rows.jsonl:7", "0.5"):
        score(f"{file}:text", "abc")
    with refusal(DataError, "the reference is not valid JSON"):
        score("json_equal", "1", "one")


def test_an_unknown_metric_exits_2_with_the_nearest(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "rule.py").write_text(RULE)
    (tmp_path / "broken.py").write_text("import no_such_package")
    for name, message in [
        ("rouge", "did you mean `rouge_l`"),
        ("json_key", "json_key:KEY"),
        ("f1:x", "f1:x` is not known"),
        (f"{tmp_path}/rule.py", "FILE.py:FUNCTION"),
        (f"{tmp_path}/rule.py:scores", "did you mean `score`"),
        (f"{tmp_path}/none.py:score", "no such file"),
        (f"{tmp_path}/broken.py:score", "ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{tmp_path}/none.json", "No such file"),
    ]:
        with subtests.test(name=name), pytest.raises(ConfigError) as caught:
            find(name)
        assert message in str(caught.value)


def test_a_metric_without_its_package_exits_4_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(metrics.importlib, "import_module", missing)
    with refusal(MachineError, "rouge_score", "pip install rouge_score"):
        find("rouge_l")
