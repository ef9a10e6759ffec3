"""What is found of a row in its rendering, with templates of a line each: what a template leaves out is named."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from conversations import assistant, user
from messages import refusal

from finetune.data import outline
from finetune.data.examples import Chat, Message, RowError
from finetune.errors import ArtifactError
from finetune.model.source import chat_template

Make = Callable[..., Any]

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "<call {{ c.id }}>{{ c.function.name }}({{ c.function.arguments | tojson }})</call>"
    "{% endfor %}"
)
RESULT = "{{ m.name }}{{ m.tool_call_id }}"
TURN = f"{{{{ m.reasoning_content }}}}~{{{{ m.content }}}}{CALLS}{RESULT}"
PROMPT = "[assistant]"


@pytest.fixture
def tokenizer_of(word_tokenizer: Make) -> Make:
    """A tokenizer whose template writes each message `m` as `turn`, with its role before and a full stop behind it."""

    def make(turn: str = TURN, *, prompt: str = PROMPT, tools: str = TOOLS, start: str = "[{{ m.role }}]") -> Any:
        ask = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
        return word_tokenizer(f"{tools}{{% for m in messages %}}{start}{turn}.\n{{% endfor %}}{ask}")

    return make


def check(tokenizer: Any, messages: list[Message], tools: Any = None, *, marks: bool = False) -> outline.Found:
    text, _ = chat_template.text(tokenizer, messages, tools=tools, marks=marks)
    return outline.check(Chat(messages, tools=tools), text, tokenizer, marks=marks)


def found(tokenizer: Any, messages: list[Message]) -> list[tuple[str, int, bool]] | None:
    """The places of the leaves: the text there, the index of the message, and whether it has been written before."""
    text, _ = chat_template.text(tokenizer, messages)
    places = outline.check(Chat(messages), text, tokenizer).places
    return places and [(text[place.start : place.end], place.message, place.again) for place in places]


def call(arguments: dict[str, Any], name: str = "f", number: str = "id") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], **more: Any) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


def result(content: str, **more: str) -> Message:
    return {"role": "tool", "content": content, **more}


def lost(name: str) -> Any:
    return pytest.raises(RowError, match=rf"^the chat template does not render `{name}`, so it would be lost; ")


def refuse(name: str, tokenizer: Any, messages: list[Message], tools: Any = None) -> None:
    """Check that the row is refused for the lack of this part, or accepted if `name` is empty."""
    with lost(name) if name else nullcontext():
        check(tokenizer, messages, tools)


# -- places ------------------------------------------------------------------------------------------------------------

TEXT = "\n\"ü\" 'x'\n"


def test_a_text_is_found_as_templates_write_it(tokenizer_of: Make) -> None:
    for written, form in (
        ("{{ m.content }}", TEXT.strip()),
        ("{{ m.content | trim }}", TEXT.strip()),
        ("{{ m.content | replace('\n', ' \n\n') }}", TEXT.strip()),
        ("{{ m.content | tojson }}", "\\n\\\"ü\\\" 'x'\\n"),
        ("{{ m.content | trim | tojson }}", "\\\"ü\\\" 'x'"),
        ("{{ m.content | tojson(ensure_ascii=True) }}", "\\n\\\"\\u00fc\\\" 'x'\\n"),
        ("{{ m.content | trim | tojson(ensure_ascii=True) }}", "\\\"\\u00fc\\\" 'x'"),
        ("{{ [m.content] }}", "\\n\"ü\" \\'x\\'\\n"),
        ("{{ [m.content | trim] }}", "\"ü\" \\'x\\'"),
    ):
        expected = [(form, 0, False), ("b", 1, False)]
        assert found(tokenizer_of(written), [user(TEXT), assistant("b")]) == expected, written


def test_keys_and_numbers_are_found_and_not_constants(tokenizer_of: Make) -> None:
    arguments = {"a": [7, -1e-7], "b": {"c": None}, "d": 12345678901234567890, "e": True}
    for turn in (CALLS, CALLS.replace("| tojson", "")):
        assert found(tokenizer_of(turn), [calling(call(arguments))]) == [
            ("id", 0, True), ("f", 0, False), ("", 0, False), ("7", 0, False), ("-1e-07", 0, False), ("", 0, False),
            ("", 0, False), ("", 0, False), ("12345678901234567890", 0, False), ("", 0, False),
        ]  # fmt: skip


def test_a_key_is_where_the_template_has_written_it(tokenizer_of: Make) -> None:
    tokenizer, messages = tokenizer_of(CALLS), [calling(call({"key": "value"}))]
    text, _ = chat_template.text(tokenizer, messages)
    places = outline.check(Chat(messages), text, tokenizer).places
    assert places
    key, value = text.index('key"') + 3, text.index("value")
    assert [(place.start, place.end) for place in places[2:]] == [(key, key), (value, value + 5)]
    # A value without a placeholder is left as it is.
    for arguments in ({"when": datetime.date(2024, 5, 1)}, {"when": " "}, {" ": 1}):
        assert found(tokenizer_of("{{ m.tool_calls[0].function }}"), [calling(call(arguments))])


def test_what_is_written_twice_and_ids_are_there_again(tokenizer_of: Make) -> None:
    tokenizer = tokenizer_of("{{ m.content }}|{{ m.content }}" + CALLS + RESULT)
    messages = [user("a"), calling(call({})), result("b", name="f", tool_call_id="id")]
    assert found(tokenizer, messages) == [
        ("a", 0, False), ("a", 0, True), ("id", 1, True), ("f", 1, False), ("b", 2, False), ("b", 2, True),
        ("f", 1, True), ("id", 1, True),
    ]  # fmt: skip


def test_thoughts_within_tags_are_found_apart_from_the_answer(tokenizer_of: Make) -> None:
    messages = [user("q</think>r"), assistant("x<think>why</think>one")]
    assert found(tokenizer_of("{{ m.content }}"), messages) == [
        ("q</think>r", 0, False), ("x", 1, False), ("why", 1, False), ("one", 1, False)
    ]  # fmt: skip


def test_the_text_of_each_part_of_a_content_is_found(tokenizer_of: Make) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    tokenizer = tokenizer_of("{% for part in m.content %}{{ part.text or part.type }}{% endfor %}")
    assert found(tokenizer, [{"role": "user", "content": parts}]) == [("a", 0, False), ("b", 0, False)]
    with lost(r"messages\[0\]\.content\[2\]"):
        check(tokenizer_of("{{ m.content[0].text }}"), [{"role": "user", "content": parts}])


def test_what_a_template_makes_of_a_text_may_only_change_white_space_around_it(word_tokenizer: Make) -> None:
    for template, is_found in (
        ("{{ ' ' if own }}:{{ text }}.", True),
        ("{{ '\n' if not own }}{{ text }}.", True),
        ("{{ text }}{{ ' \n' if own }}.", True),
        ("{{ text }}{{ ' \n' if not own }}{{ text }}.", True),
        ("{{ 'y' if own }}{{ text }}", False),
        ("{{ 'y' if not own }}{{ text }}", False),
        ("{{ text }}{{ 'y' if own }}", False),
        ("{{ text }}{{ 'y' if not own }}", False),
        ("{{ text }}{{ 'y' if own }}{{ text }}", False),
        ("{{ text }}{{ 'y' if not own }}{{ text }}", False),
    ):
        tokenizer = word_tokenizer("{%- set text = messages[0].content -%}{%- set own = text == 'x' -%}" + template)
        expected = [("x", 0, False), ("x", 0, True)][: template.count("{{ text }}")] if is_found else None
        assert found(tokenizer, [user("x")]) == expected, template


def test_nothing_but_the_text_is_all_there_is(word_tokenizer: Make, tokenizer_of: Make) -> None:
    assert found(tokenizer_of("0qz00001zq 837000001 {{ m.content }}"), [user("a")]) == [("a", 0, False)], "no leaf"
    tokenizer = word_tokenizer("{{ messages[0].content }}")
    assert found(tokenizer, [user("a")]) == [("a", 0, False)]
    assert outline.check(Chat([user("a")]), "a\n", tokenizer).places
    assert outline.check(Chat([user("a")]), "aa", tokenizer).places is None


def test_a_row_with_more_leaves_than_there_are_placeholders_is_not_searched(
    tokenizer_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outline, "_MOST_LEAVES", 2)
    tokenizer = tokenizer_of()
    assert found(tokenizer, [user("a"), user("b")])
    messages = [user("a"), user("b"), user("c")]
    assert check(tokenizer, messages) == outline.Found(None, None, frozenset())


def test_so_many_shapes_are_kept(tokenizer_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "_KEPT", 2)
    tokenizer = tokenizer_of()
    kept = []
    for count in (1, 2, 2, 3):
        check(tokenizer, [user("a")] * count)
        kept.append(len(outline._outlines(tokenizer)))
    assert kept == [1, 2, 2, 1]


# -- rows searched for their texts -------------------------------------------------------------------------------------

REFUSES_MARKS = "{% if '0qz' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
ARGUMENT = r"messages\[1\]\.tool_calls\[0\]\.function\.arguments\.k"


@pytest.mark.parametrize(
    ("name", "turn", "messages"),
    [
        ("", "{{ m.content }}", [user("a"), user("b")]),
        (r"messages\[1\]\.content", "{{ messages[0].content }}", [user("a"), user("b")]),
        (r"messages\[0\]\.content", "{{ 'a' if loop.last }}", [user("a"), user("a")]),  # twice in the row
        ("", "{{ m.content | replace(' ', '\n') }}", [user("a a")]),
        ("", "{{ m.content | tojson }}", [user("a"), user('"\n')]),
        (ARGUMENT, "{{ m.content }}f", [user("a"), calling(call({"k": ""}))]),
        ("", "{{ m.content }}{{ m.tool_calls }}", [user("a"), calling(call({" ": 1}))]),
        ("", "{{ m.content }}f", [user("a"), calling(call({}))]),  # without its id
        ("", "{{ m.content }}", [user("a"), assistant("b") | {"reasoning_content": "c"}, user("d")]),
    ],
)
def test_a_row_of_a_template_that_refuses_placeholders_is_searched_for_its_texts(
    tokenizer_of: Make, name: str, turn: str, messages: list[Message]
) -> None:
    tokenizer = tokenizer_of(turn, tools=REFUSES_MARKS, start="")
    if name:
        with lost(name):
            check(tokenizer, messages)
    else:
        assert check(tokenizer, messages) == outline.Found(None, None, frozenset())


def test_a_row_whose_texts_the_template_reads_is_searched_for_them(tokenizer_of: Make) -> None:
    found = check(tokenizer_of("{{ m.content }}{{ '+' if m.content == 'b' }}"), [user("a"), user("b")])
    assert found.outline is not None
    assert found.places is None
    with lost(r"messages\[1\]\.content"):
        check(tokenizer_of("{{ m.content if m.content != 'b' }}"), [user("a"), user("b")])


def test_a_template_that_breaks_out_of_its_sandbox_is_refused_where_placeholders_show_it(
    tokenizer_of: Make,
) -> None:
    tokenizer = tokenizer_of("{{ m.content }}{{ m.content.__class__.mro() if '0qz' in m.content }}")
    with refusal(ArtifactError, "violates its sandbox"):
        check(tokenizer, [user("a")])


# -- what is lost ------------------------------------------------------------------------------------------------------

F, G = call({"k": "v", "n": 1}), call({"k": "v"}, "g", "other")
OF_F = r"messages\[0\]\.tool_calls\[0\]"
ARGUMENTS = rf"{OF_F}\.function\.arguments"


def written(turn: str, calls: str = "m.tool_calls", arguments: str = "c.function.arguments") -> str:
    """A turn with other calls, or arguments."""
    return turn.replace("m.tool_calls or []", f"({calls})").replace("c.function.arguments", arguments)


@pytest.mark.parametrize(
    ("name", "turn", "messages"),
    [
        (r"messages\[0\]\.content", "", [user("a"), user("b")]),
        (r"messages\[1\]\.content", "{{ messages[0].content }}", [user("a"), user("b")]),
        (r"messages\[0\]\.tool_calls", "", [calling(F, G)]),
        (r"messages\[0\]\.tool_calls", "{{ m.content }}", [calling(F, G, content="x")]),
        (r"messages\[0\]\.content", CALLS, [calling(F, G, content="x")]),
        (OF_F, written(CALLS, "m.tool_calls[1:]"), [calling(F, G)]),
        (r"messages\[0\]\.tool_calls\[1\]", written(CALLS, "m.tool_calls[:1]"), [calling(F, G)]),
        (ARGUMENTS, written(CALLS, arguments="{}"), [calling(F)]),
        (rf"{ARGUMENTS}\.k", written(CALLS, arguments="{'n': c.function.arguments.n}"), [calling(F)]),
        (rf"{ARGUMENTS}\.n", written(CALLS, arguments="{'k': c.function.arguments.k}"), [calling(F)]),
        (ARGUMENTS, written(CALLS, arguments="c.function.arguments.values() | list"), [calling(F)]),
        (ARGUMENTS, written(CALLS, arguments="c.function.arguments | list"), [calling(F)]),
        (rf"{OF_F}\.function\.name", CALLS.replace("c.function.name", "''"), [calling(F)]),
        ("", CALLS.replace("c.id", "''"), [calling(F)]),
        # A call without arguments may be lost though its result repeats the name.
        (r"messages\[0\]\.tool_calls\[1\]", written(CALLS, "(m.tool_calls or [])[:1]") + RESULT,
         [calling(call({}), call({}, "g", "other")), result("", name="f"), result("", name="g")]),
        (r"messages\[0\]\.tool_calls\[1\]", written(CALLS, "(m.tool_calls or [])[:1]") + RESULT,
         [calling(call({}), call({}, "g", "other")), result("", name="g")]),
        ("", CALLS + RESULT, [calling(call({}), call({}, "g")), result("", name="f"), result("", name="g")]),
        ("", "{{ m.content }}" + CALLS, [calling(call({})), user("a"), calling(call({}))]),
        # Results are found by the id or the name of their call.
        ("", "{% if m.tool_call_id == messages[0].tool_calls[0].id %}{{ m.content }}{% endif %}" + CALLS,
         [calling(F), result("r", tool_call_id="id")]),
        ("", "{% if m.name == messages[0].tool_calls[0].function.name %}{{ m.content }}{% endif %}" + CALLS,
         [calling(F), result("r", name="f")]),
        ("", "{% if m.tool_call_id | length in (0, 9) %}{{ m.content }}{% endif %}" + CALLS,
         [calling(call({}, "f", "abcdefghi")), result("r", tool_call_id="abcdefghi")]),
        # A question has no thought that could be left out.
        (r"messages\[0\]\.content", "{{ m.content.split('</think>')[-1] }}", [user("a</think>b"), assistant("c")]),
        ("", "{{ m.content.split('</think>')[-1] }}", [assistant("<think>a</think>b"), assistant("c")]),
        (r"messages\[0\]\.content", "{{ m.content.split('</think>')[0] }}", [assistant("a</think>b"), user("c")]),
    ],
)  # fmt: skip
def test_a_part_of_a_message_that_the_template_leaves_out_is_named(
    tokenizer_of: Make, name: str, turn: str, messages: list[Message]
) -> None:
    refuse(name, tokenizer_of(turn), messages)


@pytest.mark.parametrize(
    ("name", "given", "arguments"),
    [
        ("a", {"a": True}, "dict.fromkeys(it, 1)"),
        ("a", {"a": False}, "dict.fromkeys(it, 1)"),
        ("a", {"a": None}, "dict.fromkeys(it, '')"),
        ("b", {"a": True, "b": None}, "{keys[0]: it[keys[0]], keys[1]: 1}"),
        ("b", {"a": None, "b": True}, "{keys[0]: it[keys[0]], keys[1]: 1}"),
        (r"a\[1\]", {"a": [7, None]}, "dict.fromkeys(it, it.values() | first | reject('none') | list)"),
        (r"a\[0\]", {"a": [True, 7]}, "dict.fromkeys(it, it.values() | first | select('integer') | list)"),
        (r"a\[0\]", {"a": [True] * 99, "b": True}, "{keys[0]: it[keys[0]][:0], keys[1]: it[keys[1]]}"),
        (r"a\[98\]\.b", {"a": [{"b": True}] * 99}, "{keys[0]: it[keys[0]][:98] + [dict.fromkeys(it[keys[0]][98], 1)]}"),
        ("", {"a": [None, False], "b": {"c": True}, "d": None}, "it"),
    ],
)
def test_a_constant_that_the_template_leaves_out_is_named(
    tokenizer_of: Make, name: str, given: dict[str, Any], arguments: str
) -> None:
    keyed = "{% for c in m.tool_calls %}{% set it = c.function.arguments %}{% set keys = it | list %}"
    turn = keyed + "{{ c.function.name }}" + f"{{{{ {arguments} | tojson }}}}" + "{% endfor %}"
    refuse(name and rf"{ARGUMENTS}\.{name}", tokenizer_of(turn), [calling(call(given))])


def test_many_constants_alike_cost_few_renderings(tokenizer_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered, calls = outline._rendered, []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return rendered(*arguments, **named)

    monkeypatch.setattr(outline, "_rendered", counted)
    check(tokenizer_of(), [calling(call({"flags": [True, False, None] * 500}))])
    assert len(calls) < 20


PLACE = {
    "type": "object", "title": "Place", "description": "where", "enum": ["Graz", "Linz"], "required": ["street"],
    "properties": {"street": {"type": "string", "description": "inner"}},
}  # fmt: skip
PARAMETERS = {
    "type": "object", "description": "all of it",
    "properties": {"place": PLACE, "days": {"type": "integer", "minimum": 1}}, "required": ["place", {"not": "a name"}],
}  # fmt: skip
WEATHER, OTHER, ODD = (
    {"type": "function", "function": function}
    for function in (
        {"name": "weather", "description": "a forecast", "parameters": PARAMETERS},
        {"name": "other", "description": " "},
        {"name": "odd", "parameters": {"type": "object", "required": ["none"], "items": True}},
    )
)
OF_WEATHER = r"tools\[0\]\.function"


PROPERTIES = "tools[0].function.parameters.properties"


def changed(function: str = "", parameters: str = "", place: str = "") -> str:
    """The tools, with changes of the first one's function, of its parameters, or of the first of these."""
    if place:
        parameters = f"properties=dict([[each[0][0], dict(each[0][1], {place})], each[1]])"
    if parameters:
        function = f"parameters=dict(own.parameters, {parameters})"
    return (
        f"{{%- set own = tools[0].function -%}}{{%- set each = {PROPERTIES}.items() | list -%}}"
        f"{{{{ [dict(tools[0], function=dict(own, {function}))] + tools[1:] }}}}"
    )


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("tools", ""),
        (r"tools\[0\]", "{{ tools[1:] }}"),
        (r"tools\[1\]", "{{ tools[0] }}{{ tools[2] }}"),
        ("", "{{ tools | tojson }}"),
        (rf"{OF_WEATHER}\.name", changed("name=none")),
        (rf"{OF_WEATHER}\.description", changed("description=none")),
        (rf"{OF_WEATHER}\.parameters", changed("parameters=none")),
        (rf"{OF_WEATHER}\.parameters\.properties\.days", changed("", "properties=dict([each[0]])")),
        (rf"{OF_WEATHER}\.parameters\.properties\.place\.description", changed(place="description=none")),
        # The small print
        ("", changed("", "description=none")),
        ("", changed(place="title=none, enum=[]")),
        ("", changed(place="properties=dict.fromkeys(each[0][1].properties, {})")),
        # Templates compare types and numbers, and look for a parameter's name among those that are required.
        ("", f"{{% if {PROPERTIES}.values() | map(attribute='type') | list == ['object', 'integer'] %}}{{{{ tools }}}}"
             "{% endif %}"),
        ("", f"{{% if ({PROPERTIES}.values() | list)[1].minimum == 1 %}}{{{{ tools }}}}{{% endif %}}"),
        ("", f"{{% if ({PROPERTIES}.values() | list)[0].enum %}}{{{{ tools }}}}{{% endif %}}"),
        ("", "{% if tools[1].function.description == ' ' %}{{ tools }}{% endif %}"),
        ("", "{{ tools[1:] }}{{ tools[0].function.name }}{{ tools[0].function.description }}"
             f"{{% for name, one in {PROPERTIES}.items() %}}{{{{ name }}}}"
             "{% if name in tools[0].function.parameters.required %}{{ one }}{% endif %}{% endfor %}"),
    ],
)  # fmt: skip
def test_a_part_of_a_tool_that_the_template_leaves_out_is_named(tokenizer_of: Make, name: str, template: str) -> None:
    refuse(name, tokenizer_of(tools=template), [user("a")], [WEATHER, OTHER, ODD])


def test_nothing_is_lost_of_a_row_that_is_rendered(tokenizer_of: Make) -> None:
    refuses = "{% if tools and '0qz' in tools[0] | string %}{{ raise_exception('no') }}{% endif %}"
    for tokenizer, messages, tools in (
        (tokenizer_of(), [user("a"), calling(F)], None),
        (tokenizer_of(), [user("a"), calling(F)], [WEATHER]),
        (tokenizer_of(tools=refuses), [user("a")], [WEATHER]),  # refused with placeholders
    ):
        seen = check(tokenizer, messages, tools)
        assert seen.places
        assert seen.outline is not None
        assert (seen.outline.lost, seen.outline.lost_tools, seen.outline.lost_constant) == (frozenset(), "", "")


# -- thoughts ----------------------------------------------------------------------------------------------------------

FIELD, INLINE = "{{ m.reasoning_content }}", "{{ m.content }}"
ANSWER = "{{ m.content.split('</think>')[-1] }}"


def thinking(content: str, thought: str, name: str = "reasoning_content") -> Message:
    return assistant(content) | {name: thought}


def test_thoughts_that_led_to_earlier_answers_may_be_left_out_but_not_the_last(tokenizer_of: Make) -> None:
    tokenizer = tokenizer_of("{{ m.content }}{{ m.reasoning_content if loop.last }}")
    messages = [user("a"), thinking("b", "c"), user("d"), thinking("e", "f"), thinking("g", "h")]
    assert check(tokenizer, messages).without_thought == {1, 3}
    with lost(r"messages\[0\]\.content"):
        check(tokenizer_of(FIELD), [user("a"), thinking("b", "c")])
    with lost(r"messages\[0\]\.reasoning_content"):
        check(tokenizer_of(INLINE), [thinking("b", "c")])
    with lost(r"messages\[1\]\.thinking"):
        check(tokenizer_of("{{ m.content }}"), [user("a"), thinking("b", "c", "thinking")])
    # One thought, under two names
    assert not check(tokenizer_of(FIELD + INLINE), [thinking("b", "c") | {"thinking": "c"}]).without_thought
    with lost(r"messages\[0\]\.thinking"):
        check(tokenizer_of(FIELD + INLINE), [thinking("b", "c") | {"thinking": "d"}])


@pytest.mark.parametrize(
    ("turn", "lost", "remedy"),
    [
        (INLINE, thinking("b", "c"), "write {} in the content, as <think>…</think> before the answer, or set "),
        (ANSWER + FIELD, assistant("<think>c</think>b"), "write {} in `reasoning_content`, or set "),
        (ANSWER, assistant("<think>c</think>b"), "set "),
        (ANSWER, thinking("b", "c"), "set "),
        (INLINE + FIELD, None, "write {} in the content, as <think>…</think> before the answer, or set "),
        (f"{REFUSES_MARKS.replace('messages[0]', 'm')}{INLINE}", None, "set "),
    ],
)
def test_what_to_do_about_a_lost_thought_is_what_the_template_would_render(
    tokenizer_of: Make, turn: str, lost: Message | None, remedy: str
) -> None:
    tokenizer = tokenizer_of(turn)
    template = "`data.chat_template` to a template that renders thoughts, or "
    if lost:
        field = "the thought in `messages[0].content`" if "<think>" in str(lost) else "`messages[0].reasoning_content`"
        with pytest.raises(RowError) as caught:
            check(tokenizer, [lost])
        assert str(caught.value) == (
            f"the chat template does not render {field}, so it would be lost; {remedy.format('it')}{template}remove it"
        )
    assert outline.thought_remedy(tokenizer, is_missing=True) == (
        remedy.format("one, even if it is empty,") + template + "to a copy of this one whose prompt opens none"
    )


def test_calls_after_the_first_have_a_remedy_of_their_own() -> None:
    assert "each call in a message of its own" in outline.refusal("messages[1].tool_calls[1]")
    assert "each call" not in outline.refusal("messages[1].tool_calls[0].function.arguments.a")


# -- prompts and marks -------------------------------------------------------------------------------------------------

LATE = "{{ '<think>' if loop.last and m.role == 'assistant' }}{{ m.content }}"
MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)
A, B = user("a"), assistant("b")


@pytest.mark.parametrize(
    ("turn", "parts", "messages", "marks", "headers", "beyond"),
    [
        (INLINE, {}, [A, B], False, {}, {1: ""}),
        (INLINE, {}, [A], False, {}, {}),
        (INLINE, {"prompt": "[assistant]<think>"}, [A, B], False, {}, {1: "<think>"}),
        (INLINE, {"prompt": "[assistant]<think>"}, [A, B, A, B], False, {}, {3: "<think>"}),
        (INLINE, {"prompt": "{{ raise_exception('no') }}"}, [A, B], False, {}, {1: ""}),
        # What follows the last answer may change how it is written.
        (LATE, {"prompt": "[assistant]<think>"}, [A, B, A], False, {}, {1: ""}),
        (LATE, {"prompt": "[assistant]<think>"}, [B, A], False, {}, {0: ""}),
        (LATE, {"prompt": "[assistant]<think>"}, [A, B, A, B], False, {}, {3: ""}),
        (LATE + "{{ raise_exception('no') if loop.last and m.role == 'assistant' }}",
         {}, [A, B, A], False, {}, {1: ""}),
        # Each turn that the template marks
        (MARKED, {}, [A, B, A, B], True, {1: "", 3: ""}, {1: "", 3: ""}),
        (MARKED, {}, [A, B, A, B], False, {}, {3: ""}),
        (MARKED, {"prompt": "[assistant]<think>"}, [A, B, A, B], True, {1: "", 3: ""}, {1: "<think>", 3: "<think>"}),
        (MARKED.replace("{{ m.content }}", "{{ '<think>' if loop.last }}{{ m.content }}", 1),
         {"prompt": "[assistant]<think>"}, [A, B, A, B], True, {1: "", 3: "<think>"}, {1: "<think>", 3: ""}),
        (MARKED.replace("{{ m.content }}", "{{ '<think>' if loop.last }}{{ m.content }}", 1),
         {"prompt": "[assistant]<think>"}, [A, B, A, B, A], True, {1: "", 3: ""}, {1: "<think>", 3: ""}),
        (MARKED.replace("{{ m.content }}", "<think>{{ m.content }}", 1),
         {"prompt": "[assistant]<think>"}, [A, B, A, B], True, {1: "<think>", 3: "<think>"}, {1: "", 3: ""}),
        # One of the answers has two marks, or none, or one of no text beside its own.
        (MARKED + "{% generation %}x{% endgeneration %}", {}, [A, B], True, {}, {1: ""}),
        (MARKED + "{% generation %}{% endgeneration %}", {}, [A, B], True, {1: ""}, {1: ""}),
        # A mark that ends within the prompt
        ("{% if m.role == 'assistant' %}{% generation %}[assistant]{% endgeneration %}: {% endif %}{{ m.content }}",
         {"start": "", "prompt": "[assistant]: "}, [A, B], True, {1: "[assistant]"}, {1: ""}),
    ],
)  # fmt: skip
def test_what_the_prompt_writes_of_a_turn_and_beyond_it(
    tokenizer_of: Make, turn: str, parts: dict[str, str], messages: list[Message], marks: bool,
    headers: dict[int, str], beyond: dict[int, str],
) -> None:  # fmt: skip
    found = check(tokenizer_of(turn, **parts), messages, marks=marks).outline
    assert found is not None
    assert (found.headers, found.beyond, found.lost) == (headers, beyond, frozenset())
