"""Facts about formats: what each reads, how one is recognised, and that a wrong field is named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from finetune.data.examples import Chat, Completion, Example, RowError, Text, Tokens
from finetune.data.formats import FORMATS, as_chat, detect, known_fields, likely_columns, mapped, read
from finetune.data.messages import ROLES

ASK = {"role": "user", "content": "Why?"}
TELL = {"role": "assistant", "content": "Because."}
LIE = {"role": "assistant", "content": "No."}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

SONG = Chat([{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "La."}])

ROWS: list[tuple[str, dict[str, Any], Example]] = [
    ("messages", {"messages": [ASK, TELL], "id": 3}, Chat([ASK, TELL])),
    ("prompt_completion", {"prompt": "Why?", "completion": " Because."}, Completion("Why?", " Because.")),
    ("prompt_completion", {"prompt": [ASK], "completion": [TELL]}, Chat([ASK, TELL])),
    ("alpaca", {"instruction": "Add.", "input": "1 and 2", "output": "3"},
     Chat([{"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"}])),
    ("alpaca", {"instruction": "Sing.", "input": "", "output": "La."}, SONG),
    ("alpaca", {"instruction": "Sing.", "output": "La."}, SONG),
    ("alpaca", {"instruction": "Sing.", "input": None, "output": "La."}, SONG),
    ("sharegpt", {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
     Chat([ASK, TELL])),
    ("preference", {"prompt": "Why?", "chosen": " Because.", "rejected": " So."}, Completion("Why?", " Because.")),
    ("preference", {"prompt": "Why?", "chosen": [TELL], "rejected": [LIE]}, Chat([ASK, TELL])),
    ("preference", {"prompt": [ASK], "chosen": [TELL], "rejected": [LIE]}, Chat([ASK, TELL])),
    ("preference", {"prompt": "Why?", "chosen": [ASK, TELL], "rejected": [ASK, LIE]}, Chat([ASK, TELL])),
    ("preference", {"chosen": [ASK, TELL], "rejected": [ASK, LIE]}, Chat([ASK, TELL])),
    ("preference", {"chosen": [ASK, TELL, ASK, TELL], "rejected": [ASK, TELL, ASK, LIE]},
     Chat([ASK, TELL, ASK, TELL], frozenset({1}))),
    ("preference", {"chosen": "Human: Why? Assistant: I know.", "rejected": "Human: Why? Assistant: I do not."},
     Completion("Human: Why? Assistant: I", " know.", one_text=True)),
    ("preference", {"chosen": "Human: Why?\nAssistant: Once.", "rejected": "Human: Why?\nAssistant: On."},
     Completion("Human: Why?\nAssistant:", " Once.", one_text=True)),
    ("tokenized", {"input_ids": [5, 6, 7]}, Tokens([5, 6, 7])),
    ("tokenized", {"input_ids": [5, 6], "labels": [-100, 6], "attention_mask": None}, Tokens([5, 6], [-100, 6])),
    ("tokenized", {"input_ids": [0, 5, 6, 0, 0], "labels": [0, -100, 6, 0, 0], "attention_mask": [0, 1, 1, 0, 0]},
     Tokens([5, 6], [-100, 6])),
    ("text", {"text": "Once."}, Text("Once.")),
]  # fmt: skip


def test_a_row_is_read_in_its_format_and_by_detection(subtests: pytest.Subtests) -> None:
    for name, row, example in ROWS:
        with subtests.test(name=name, row=row):
            assert FORMATS[name].read(row) == example
            assert detect(row, {}) == name
            assert read(row, "auto", {})[0] == example


def test_every_format_is_tried_above() -> None:
    elsewhere = {"pairs", "pairs_with_margin", "unpaired", "labelled", "distilled"}  # tests of their own; not detected
    assert {name for name, _, _ in ROWS} | elsewhere == set(FORMATS), "add a row of the new format to ROWS"


def test_a_row_of_several_formats_is_of_the_first_in_the_table_and_one_of_none_is_reported_with_all() -> None:
    assert detect({"text": "x", "messages": []}, {}) == "messages"
    assert detect({"text": "x", "prompt": "p", "completion": "c"}, {}) == "prompt_completion"
    forms = [f"{name} ({', '.join(form.required)})" for name, form in FORMATS.items() if form.detected]
    for row in ({}, {"prompt": "x"}, {"instruction": "x"}):
        with pytest.raises(RowError) as caught:
            detect(row, {})
        assert [part for part in [*row, *forms] if part not in str(caught.value)] == []


def test_fields_with_familiar_names_are_suggested_as_columns_where_they_single_out_two() -> None:
    for row, columns in [
        ({"question": "x", "answer": "y"}, "{instruction: question, output: answer}` to train them as turns of the chat"
         " template, or `{prompt: question, completion: answer}` as plain text"),
        ({"ticket_id": "7", "customer_message": "x", "agent_reply": "y", "agent_name": "z"},
         "{instruction: customer_message, output: agent_reply}"),
        ({"Question": "x", "Answer, short": "y"}, "{instruction: Question, output: 'Answer, short'}"),
        ({"instruction": "x", "response": "y"}, "{output: response}"),
        ({"dialogue": []}, "{messages: dialogue}"),
        ({"content": "x"}, "{text: content}"),
    ]:  # fmt: skip
        with pytest.raises(RowError, match=re.escape(f"set `data.columns: {columns}")):
            detect(row, {})
    for row in (
        {"customer_message": "x", "customer_question": "y", "agent_reply": "z"},  # which of both?
        {"answer_to_question": "x", "reply": "y"},
        {"customer_id": "x", "agent_reply": "y"},
        {"customers": 3, "agent_reply": "y"},
        {"Frage": "x", "Antwort": "y"},
    ):
        assert likely_columns(row) is None, row


def test_a_row_of_a_chat_export_is_refused_unless_the_config_allows_it() -> None:
    for row, cure in (
        ({"sender": "Ann", "text": "Hi"}, "`data.format: text`"),
        ({"Date": "1.2.", "Sender": "Ann", "Message": "Hi"}, "`data.columns: {text: Message}`"),
        ({"role": "user", "content": "Hi"}, "`data.columns: {text: content}`"),
        ({"from": "human", "value": "Hi"}, "`data.columns: {text: value}`"),
        ({"AuthorID": "1", "Author": "Ann", "Content": "Hi"}, "`data.columns: {text: Content}`"),
    ):
        with pytest.raises(RowError, match=f"one message of a conversation.*{re.escape(cure)}"):
            read(row, "auto", {})
        said = next(name for name in row if name.lower() in ("text", "message", "content", "value"))
        alone = ("text", {}) if said == "text" else ("auto", {"text": said})
        assert read(row, *alone)[0] == Text("Hi")
    assert detect({"author": "Ann", "text": "Once"}, {}) == "text"


def test_a_separator_follows_each_prompt_that_was_written_apart_from_its_completion() -> None:
    for row, expected in [
        ({"prompt": "Why?", "completion": "So."}, Completion("Why?\n", "So.")),
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, Completion("Why?\n", "So.")),
        ({"chosen": "Q: Why? A: So.", "rejected": "Q: Why? A: No."}, Completion("Q: Why? A:", " So.", one_text=True)),
        ({"instruction": "Why?", "output": "Because."}, Chat([ASK, TELL])),
        ({"text": "Once"}, Text("Once")),
    ]:
        assert read(row, "auto", {}, "\n")[0] == expected


def test_texts_that_run_together_have_no_white_space_between_them() -> None:
    assert Completion("Why?", "So.").runs_together
    for prompt, completion in [("Why? ", "So."), ("Why?", " So."), ("Why?\n", "So."), ("", "So."), ("Why?", "")]:
        assert not Completion(prompt, completion).runs_together
    assert not Completion("Wh", "y?", one_text=True).runs_together


def test_a_column_of_another_name_is_not_read_under_its_own_as_well() -> None:
    """Alpaca has an `input` of its own, and rows with `prompt` and `completion` are another format."""
    for asked, answered in (("input", "output"), ("prompt", "completion")):
        turns = {"instruction": asked, "output": answered}
        assert read({asked: "Why?", answered: "Because."}, "auto", turns) == (Chat([ASK, TELL]), [])


def test_the_columns_that_make_turns_of_plain_text() -> None:
    for row, columns, turns in (
        ({"prompt": "x", "completion": "y"}, {}, {"instruction": "prompt", "output": "completion"}),
        ({"q": "x", "a": "y", "tone": "z"}, {"prompt": "q", "completion": "a", "system": "tone"},
         {"instruction": "q", "system": "tone", "output": "a"}),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, {}, {"instruction": "prompt"}),
        ({"prompt": "x", "completion": "y", "input": "z"}, {}, None),  # which Alpaca would add to the question
        ({"prompt": [ASK], "completion": [TELL]}, {}, None),
        ({"chosen": "x y", "rejected": "x z"}, {}, None),
        ({"text": "x"}, {}, None),
    ):  # fmt: skip
        assert as_chat(row, "auto", columns) == turns, row
        if turns:
            example, unused = read(row, "auto", turns)
            assert isinstance(example, Chat)
            assert unused == []


def test_each_role_is_known_by_the_name_that_templates_have_for_it() -> None:
    for role in ROLES:
        message = {"role": role, "content": ""}
        known = {**message, "role": {"developer": "system", "function": "tool"}.get(role, role)}
        assert FORMATS["messages"].read({"messages": [message]}) == Chat([known])
    for name, role in [
        ("system", "system"), ("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"),
        ("model", "assistant"), ("tool", "tool"), ("function", "tool"), ("observation", "tool"),
    ]:  # fmt: skip
        row = {"conversations": [{"from": name, "value": "x"}]}
        assert FORMATS["sharegpt"].read(row) == Chat([{"role": role, "content": "x"}]), name


def test_calls_of_tools_need_no_content_and_their_arguments_may_be_json_text() -> None:
    written = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {"role": "tool", "content": "1", "tool_call_id": "1", "name": "add"}
    call = {"role": "assistant", "content": None, "tool_calls": [written]}
    read = FORMATS["messages"].read({"messages": [ASK, call, tool], "tools": '[{"name": "add"}]'})
    assert read == Chat(
        [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, tool],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )


def test_a_field_that_is_null_is_not_there() -> None:
    """As a table of uneven messages has it."""
    empty = {"tool_calls": None, "tool_call_id": None, "weight": None, "train": None}
    assert FORMATS["messages"].read({"messages": [{**ASK, **empty}, {**TELL, **empty}], "tools": None}) == (
        Chat([ASK, TELL])
    )


def test_a_message_says_whether_it_is_trained() -> None:
    for off in ({"train": False}, {"weight": 0}):
        for on in ({}, {"train": True}, {"weight": 1}, {"weight": 1.0}):
            row = {"messages": [{**ASK, "weight": 0}, {**TELL, **off}, ASK, {**TELL, **on}]}
            assert FORMATS["messages"].read(row) == Chat([ASK, TELL, ASK, TELL], frozenset({1}))
            turns = [{"from": "gpt", "value": "Because.", **each} for each in (off, on)]
            assert FORMATS["sharegpt"].read({"conversations": turns}) == Chat([TELL, TELL], frozenset({0}))
    prompt = [ASK, TELL, ASK]  # whose answers are context
    assert FORMATS["prompt_completion"].read({"prompt": prompt, "completion": [TELL]}).context == {1}


# -- fields of other programs ----------------------------------------------------------------------------------------

BRIEF = {"role": "system", "content": "Be brief."}
DIALOGUE = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
ALPACA = {"instruction": "Why?", "output": "Because."}


def test_the_system_message_of_a_row_opens_the_conversation(subtests: pytest.Subtests) -> None:
    for row in [
        {"messages": [ASK, TELL], "system": "Be brief."},
        {"messages": [BRIEF, ASK, TELL], "system": "Be brief."},
        {"conversations": DIALOGUE, "system": "Be brief."},
        {**ALPACA, "system": "Be brief."},
        {"prompt": [ASK], "completion": [TELL], "system": "Be brief."},
        {"prompt": [ASK], "chosen": [TELL], "rejected": [LIE], "system": "Be brief."},
    ]:
        with subtests.test(row=row):
            example, unused = read(row, "auto", {})
            assert (example, unused) == (Chat([BRIEF, ASK, TELL]), [])
            assert read({**row, "system": ""}, "auto", {})[0].messages[-2:] == [ASK, TELL]


def test_a_system_message_stands_before_context_and_not_beside_another() -> None:
    turns = [ASK, {**TELL, "weight": 0}, ASK, TELL]
    assert FORMATS["messages"].read({"messages": turns, "system": "Be brief."}).context == {2}
    with pytest.raises(RowError, match=r"`system` and `messages\[0\]` are two system messages"):
        FORMATS["messages"].read({"messages": [BRIEF, ASK, TELL], "system": "Be long."})


def test_the_history_of_an_alpaca_row_is_earlier_turns() -> None:
    asked = {"role": "user", "content": "So?\n\nx"}
    preferred = Chat([ASK, TELL, asked, LIE], frozenset({1}))
    for history in ([["Why?", "Because."]], '[["Why?", "Because."]]'):
        row = {"instruction": "So?", "input": "x", "history": history}
        assert FORMATS["alpaca"].read({**row, "output": "No."}) == Chat([ASK, TELL, asked, LIE])
        assert FORMATS["preference"].read({**row, "chosen": "No.", "rejected": "Yes."}) == preferred
        assert FORMATS["preference"].read({**row, "chosen": [LIE], "rejected": [TELL]}) == preferred


def test_calls_of_functions_are_calls_of_tools() -> None:
    """OpenAI's earlier names, and ShareGPT's."""
    function = {"name": "add", "parameters": {}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        ASK,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "1"},
        TELL,
    ]
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "add", "content": "1"}
    tools = [{"type": "function", "function": function}]
    expected = Chat([ASK, called, result, TELL], tools=tools)
    assert FORMATS["messages"].read({"messages": turns, "functions": [function]}) == expected
    values = [
        {"from": "human", "value": "Why?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1", "name": "add"},
        {"from": "gpt", "value": "Because."},
    ]
    row = {"conversations": values, "tools": json.dumps(tools)}
    assert FORMATS["sharegpt"].read(row) == expected


def test_reasoning_content_is_passed_to_the_template() -> None:
    thought = {**TELL, "reasoning_content": "Hm."}
    assert FORMATS["messages"].read({"messages": [ASK, thought]}) == Chat([ASK, thought])
    turns = [DIALOGUE[0], {**DIALOGUE[1], "reasoning_content": "Hm."}]
    assert FORMATS["sharegpt"].read({"conversations": turns}) == Chat([ASK, thought])


PLAIN_ROWS = [{"messages": [ASK, TELL]}, {"conversations": DIALOGUE}, ALPACA, {"prompt": "Why?", "completion": "So."}]


def test_answers_that_are_called_good_or_bad_are_refused_and_a_label_of_another_kind_is_a_column() -> None:
    for row in PLAIN_ROWS:
        for verdict in (True, False, 0, 1.0, "False", "1"):
            for name in ("label", "kto_tag"):
                with pytest.raises(RowError, match=rf"`{name}` labels answers as good or bad \(KTO\)"):
                    read({**row, name: verdict}, "auto", {})
    for label in ("sports", 7, None, ""):
        assert read({**ALPACA, "label": label}, "auto", {})[1] == ([] if label in (None, "") else ["label"])
        assert read({"text": "Once.", "label": 1}, "auto", {}) == (Text("Once."), ["label"])


def test_media_that_are_not_read_are_refused_and_an_empty_field_for_them_is_not() -> None:
    refused = "(only text is trained here|images are shown in conversations alone)"
    for row in [*PLAIN_ROWS, {"text": "x"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]:
        for name in ("image", "images", "videos", "audio"):
            for there in ("cat.png", ["cat.png"], {"bytes": "x"}):
                if name.startswith("image") and row in PLAIN_ROWS and "prompt" not in row:
                    content, unused = read({**row, name: there}, "auto", {})
                    assert (len(content.images), unused) == (1, [])
                else:
                    with pytest.raises(RowError, match=f"`{name}`: {refused}"):
                        read({**row, name: there}, "auto", {})
            for absent in (None, [], ""):
                assert read({**row, name: absent}, "auto", {})[1] == []


def test_a_preferred_answer_beside_a_conversation_is_refused() -> None:
    answers = {"chosen": DIALOGUE[1], "rejected": {"from": "gpt", "value": "No."}}
    with pytest.raises(RowError, match="`rejected` beside `conversations`"):
        read({"conversations": DIALOGUE[:1], **answers}, "auto", {})


def test_fields_that_go_nowhere_are_named_and_mapped_ones_are_not_among_them() -> None:
    assert read({"id": 1, **ALPACA, "source": "web", "lang": None}, "auto", {})[1] == ["id", "source"]
    row = {"question": "Why?", "answer": "So.", "id": 1, "system": "Be brief."}
    columns = {"prompt": "question", "completion": "answer"}
    # Plain text has no place for a system message.
    assert read(row, "auto", columns) == (Completion("Why?", "So."), ["id", "system"])


# -- columns ---------------------------------------------------------------------------------------------------------


def test_columns_give_fields_their_names() -> None:
    fields = mapped({"question": "Why?", "answer": "So.", "id": 3}, {"prompt": "question", "completion": "answer"})
    assert FORMATS[detect(fields, {})].read(fields) == Completion("Why?", "So.")
    with pytest.raises(RowError, match=r"`prompt`.*`qestion`.*did you mean `question`"):
        mapped({"question": "Why?"}, {"prompt": "qestion"})


def test_the_fields_of_a_format_are_those_it_is_known_by_and_the_others_it_reads() -> None:
    assert known_fields("alpaca")[:3] == ["instruction", "output", "input"]
    assert known_fields("tokenized") == ["input_ids", "labels", "attention_mask"]
    assert {"messages", "prompt", "chosen", "labels", "text"} <= set(known_fields("auto"))


def test_a_field_of_the_wrong_type_is_named_with_its_type() -> None:
    for name, row, words in [
        ("messages", {}, ["`messages`", "list"]),
        ("messages", {"messages": None}, ["`messages`", "list"]),
        ("messages", {"messages": []}, ["`messages`", "at least one"]),
        ("messages", {"messages": "Hi"}, ["`messages`", "list"]),
        ("messages", {"messages": [ASK, "Hi"]}, ["`messages[1]`", "not text"]),
        ("messages", {"messages": [ASK, {"content": "x"}]}, ["`messages[1].role`", "None"]),
        ("messages", {"messages": [{"role": "human", "content": "x"}]}, ["`messages[0].role`", "'human'", "user"]),
        ("messages", {"messages": [{"role": ["user"], "content": "x"}]}, ["`messages[0].role`"]),
        ("messages", {"messages": [ASK, TELL, {"role": "user"}]},
         ["`messages[2].content` is missing; the message has only `role`"]),
        ("messages", {"messages": [{"role": "user", "content": 5}]}, ["`messages[0].content`", "not a number"]),
        ("messages", {"messages": [{"role": "user", "content": [1]}]}, ["`messages[0].content`", "not a list"]),
        ("prompt_completion", {"prompt": "x"}, ["`completion` is missing"]),
        ("prompt_completion", {"prompt": True, "completion": "x"}, ["`prompt`", "not a boolean"]),
        ("prompt_completion", {"prompt": [ASK], "completion": "x"}, ["`prompt`", "not a list"]),
        ("prompt_completion", {"prompt": [ASK], "completion": [{}]}, ["`completion[0].role`"]),
        ("alpaca", {"output": "x"}, ["`instruction` is missing"]),
        ("alpaca", {"instruction": "x"}, ["`output` is missing"]),
        ("alpaca", {"instruction": "x", "input": 5, "output": "y"}, ["`input`", "not a number"]),
        ("alpaca", {"instruction": "x", "output": {"a": 1}}, ["`output`", "not an object"]),
        ("messages", {"messages": [{"role": "user", "content": []}]}, ["`messages[0].content`", "not a list"]),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}]},
         ["`messages[0].content[0]`", "'input_audio'", "only text"]),
        ("messages", {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
         ["is missing; the message has only `role`"]),
        ("messages", {"messages": [{**ASK, "tool_calls": [CALL]}]}, ["`messages[0].tool_calls`", "only the assistant"]),
        ("messages", {"messages": [{**TELL, "tool_calls": "add"}]}, ["`messages[0].tool_calls`", "not text"]),
        ("messages", {"messages": [{**TELL, "tool_calls": [{"nom": "add"}]}]}, ["`messages[0].tool_calls[0]`"]),
        ("messages", {"messages": [{**TELL, "tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]}]},
         ["`messages[0].tool_calls[0].function.arguments`", "not valid JSON"]),
        ("messages", {"messages": [{**TELL, "tool_calls": [{"function": {"name": "add", "arguments": [1]}}]}]},
         ["`messages[0].tool_calls[0].function.arguments`", "not a list"]),
        ("messages", {"messages": [TELL], "tools": {"a": 1}}, ["`tools`", "not an object"]),
        ("messages", {"messages": [TELL], "tools": "[1"}, ["`tools`", "not valid JSON"]),
        ("messages", {"messages": [{**TELL, "weight": 0.5}]}, ["`messages[0].weight`", "0.5", "0 (not trained) or 1"]),
        ("messages", {"messages": [{**TELL, "train": "no"}]}, ["`messages[0].train`", "true or false"]),
        ("messages", {"messages": [{**TELL, "train": 1}]}, ["`messages[0].train`", "true or false"]),
        ("messages", {"messages": [{**ASK, "train": True}, TELL]}, ["`messages[0].train`", "only the assistant"]),
        ("sharegpt", {"conversations": []}, ["`conversations`", "at least one"]),
        ("sharegpt", {"conversations": ["x"]}, ["`conversations[0]`", "`from` and `value`"]),
        ("sharegpt", {"conversations": [{"from": "bot", "value": "x"}]}, ["`conversations[0].from`", "'bot'", "gpt"]),
        ("sharegpt", {"conversations": [{"from": "gpt"}]},
         ["`conversations[0].value` is missing; the message has only `from`"]),
        ("preference", {"chosen": "x"}, ["`rejected` is missing"]),
        ("preference", {"chosen": [TELL], "rejected": "x"}, ["`rejected`", "list"]),
        ("preference", {"chosen": "x", "rejected": "y", "prompt": 5}, ["`prompt`", "not a number"]),
        ("tokenized", {}, ["`input_ids` is missing"]),
        ("tokenized", {"input_ids": "5 6"}, ["`input_ids`", "not text"]),
        ("tokenized", {"input_ids": [5, 6.5]}, ["`input_ids[1]`", "whole number"]),
        ("tokenized", {"input_ids": [5, True]}, ["`input_ids[1]`", "not a boolean"]),
        ("tokenized", {"input_ids": [5, 6], "labels": [5]}, ["`labels` has 1", "`input_ids` has 2"]),
        ("tokenized", {"input_ids": [5], "attention_mask": [1, 1]}, ["`attention_mask` has 2"]),
        ("tokenized", {"input_ids": [5], "attention_mask": [2]}, ["`attention_mask`", "0 and 1"]),
        ("tokenized", {"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, ["`attention_mask[1]`"]),
        ("alpaca", {"instruction": "x", "output": "y", "history": "x"}, ["`history`", "not valid JSON"]),
        ("alpaca", {"instruction": "x", "output": "y", "history": [["a"]]}, ["`history[0]`", "a pair of texts"]),
        ("alpaca", {"instruction": "x", "output": "y", "history": [["a", 1]]}, ["`history[0][1].content`"]),
        ("alpaca", {"instruction": "x", "output": "y", "system": 5}, ["`system`", "not a number"]),
        ("messages", {"messages": [{**ASK, "function_call": {"name": "x"}}]}, ["only the assistant calls tools"]),
        ("messages", {"messages": [TELL], "functions": {"a": 1}}, ["`functions`", "not an object"]),
        ("messages", {"messages": [{**TELL, "reasoning_content": 5}]}, ["`messages[0].reasoning_content`"]),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "{x"}]}, ["`conversations[0].value`"]),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "[1]"}]}, ["`conversations[0].value[0]`"]),
        ("text", {"text": 1.5}, ["`text`", "not a number"]),
        ("text", {}, ["`text` is missing"]),
    ]:  # fmt: skip
        with pytest.raises(RowError) as caught:
            FORMATS[name].read(row)
        assert [word for word in words if word not in str(caught.value)] == [], row


def test_a_message_that_only_other_training_can_use_is_refused() -> None:
    for form, field, turn, words in [
        ("messages", "messages", {"role": "user", "content": "q", "images": ["x.png"]}, "[0].images`: only text"),
        ("messages", "messages", {"role": "assistant", "content": "a", "label": False}, "[0].label` labels answers"),
        ("sharegpt", "conversations", {"from": "human", "value": "q", "image": "x.png"}, "[0].image`: only text"),
    ]:
        with pytest.raises(RowError, match=re.escape(field + words)):
            read({field: [turn]}, form, {})


def test_the_call_of_a_function_is_read_in_every_format() -> None:
    for form, field, turn in [
        ("messages", "messages", {"role": "assistant", "content": None, "tool_calls": []}),
        ("sharegpt", "conversations", {"from": "gpt", "value": ""}),
    ]:
        called = {**turn, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
        example, unused = read({field: [called]}, form, {})
        assert isinstance(example, Chat)
        assert example.messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
        assert unused == []


def test_functions_without_a_wrapper_are_wrapped_in_every_layout() -> None:
    bare = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    wrapped = [{"type": "function", "function": bare}]
    anthropic = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
    layouts: list[tuple[str, dict[str, Any]]] = [
        ("messages", {"messages": [ASK, TELL]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}),
        ("alpaca", {"instruction": "Why?", "output": "Because."}),
        ("preference", {"prompt": [ASK], "chosen": [TELL], "rejected": [LIE]}),
    ]
    ways = [[bare], json.dumps([bare]), wrapped, [{"function": bare}], [anthropic], [{"type": "function", **bare}]]
    for form, row in layouts:
        for tools in ways:
            assert read({**row, "tools": tools}, form, {})[0].tools == wrapped  # type: ignore[union-attr]
    for call in (
        {"id": "1", "name": "add", "arguments": {"a": 1}},
        {"id": "1", "name": "add", "parameters": '{"a": 1}'},
    ):
        chat = FORMATS["messages"].read({"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]})
        assert chat.messages[1]["tool_calls"] == [CALL]  # type: ignore[union-attr]


def test_parts_of_other_programs_are_read_or_refused_with_how_to_write_them() -> None:
    for first, second in (("text", "text"), ("input_text", "output_text")):
        said = [{"type": first, "text": "Wh"}, {"type": second, "text": "y?"}]
        assert FORMATS["messages"].read({"messages": [{**ASK, "content": said}, TELL]}) == Chat([ASK, TELL])
    for kind, cure in (
        ("tool_use", "`tool_calls`"),
        ("tool_result", "tool_call_id"),
        ("thinking", "`reasoning_content`"),
    ):
        with pytest.raises(RowError, match=re.escape(cure)):
            FORMATS["messages"].read({"messages": [ASK, {**TELL, "content": [{"type": kind, "name": "add"}]}]})
