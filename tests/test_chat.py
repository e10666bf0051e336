"""Chat templates against what transformers renders (chat.json), and templates that are broken or hostile."""

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

import npglm.chat
from npglm.chat import chat_template, render_chat, think_kwargs
from npglm.checkpoint import read_gguf
from npglm.errors import NpglmError

GOLDEN = Path(__file__).parent / "golden"
GLM = (GOLDEN / "chat_template.jinja").read_text(encoding="utf-8")
CASES = json.loads((GOLDEN / "chat.json").read_text(encoding="utf-8"))["cases"]
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("case", CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_text_equals_transformers(case):
    text = render_chat(GLM, case["messages"], case["tools"], case["add_generation_prompt"], **case["kwargs"])
    assert text == case["text"]


def test_there_are_nine_golden_conversations():
    assert len(CASES) == 9


def test_without_generation_prompt():
    assert render_chat(GLM, HI, add_generation_prompt=False) == "[gMASK]<sop><|user|>\nHi"


def test_thinking_switch():
    assert think_kwargs(None) == {}
    assert think_kwargs(True) == {"enable_thinking": True}
    assert render_chat(GLM, HI, **think_kwargs(True)) == "[gMASK]<sop><|user|>\nHi<|assistant|>"
    assert render_chat(GLM, HI, **think_kwargs(False)) == "[gMASK]<sop><|user|>\nHi/nothink<|assistant|>\n<think></think>"


def test_other_switches_reach_the_template():
    template = (
        "{{ reasoning_effort is defined and reasoning_effort }} {{ clear_thinking is defined }} {{ tools }} {{ documents }}"
    )
    assert render_chat(template, HI, reasoning_effort="high") == "high False None None"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_any_of_its_names(key):
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    assert render_chat(template, [{"role": "assistant", "content": "a", key: "why"}]) == "why|why"


def test_keys_that_are_none_are_as_if_missing():
    message = {"role": "assistant", "content": "a", "tool_calls": None, "reasoning_content": None}
    assert render_chat("{{ messages[0].keys() | list }}", [message]) == "['role', 'content']"


def test_the_callers_messages_are_not_changed():
    messages = [{"role": "assistant", "content": "a", "reasoning": "why"}]
    render_chat(GLM, messages)
    assert messages == [{"role": "assistant", "content": "a", "reasoning": "why"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'b': '<é>&', 'a': [1, 2.5, none, true]} | tojson }}", '{"b": "<é>&", "a": [1, 2.5, null, true]}'),
        ("{{ 'é' | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        (
            "{% for i in 'abcde' %}{% if i == 'b' %}{% continue %}{% elif i == 'd' %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "ac",
        ),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),  # trim_blocks, lstrip_blocks
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ strftime_now('%Y')[:2] }}", datetime.now().strftime("%Y")[:2]),
        ("{{ '-' * 3 }}{{ 2 * 3.5 }}{{ 7 * 6 }}", "---7.042"),
        ("{{ nothing }}{{ nothing is defined }}", "False"),
    ],
)
def test_functions_that_templates_use(template, text):
    assert render_chat(template, HI) == text


def test_template_of_a_checkpoint():
    assert chat_template({"tokenizer.chat_template": GLM}) == GLM
    values = read_gguf(GOLDEN / "small.Q2_K.gguf").metadata
    with pytest.raises(
        NpglmError, match=r"^small: no chat template \(key tokenizer.chat_template is missing\); only raw prompts"
    ):
        chat_template(values, "small")
    for damaged in (7, "", ["a"]):
        with pytest.raises(NpglmError, match=r"^small: key tokenizer.chat_template is .*expected a text$"):
            chat_template({"tokenizer.chat_template": damaged}, "small")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% if %}", "chat template: line 2: Expected an expression"),
        ("{% for m in messages %}", "chat template: line 1: Unexpected end of template"),
        ("\n\n{{ raise_exception('roles must\n  alternate') }}", "chat template: line 3: roles must alternate"),
        ("{{ raise_exception('') }}", "chat template: line 1: TemplateError"),
        ("{{ messages | nope }}", "chat template: line 1: No filter named 'nope'"),
        ("{{ nothing.at.all }}", "chat template: line 1: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "chat template: line 1: division by zero"),
        ("\n{% for i in range(10 ** 9) %}x{% endfor %}", "chat template: line 2: ** is not allowed"),
        ("\n{% for i in range(1000000000) %}x{% endfor %}", "chat template: line 2: Range too big"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "chat template: line 1: ** is not allowed"),
        ("{{ 'abc' * 1000000000000 }}", "chat template: line 1: a product of more than 100000 items"),
        ("{{ (1000000000000 * [1]) | length }}", "chat template: line 1: a product of more than 100000 items"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template: line 1: maximum recursion depth"),
        ("{{ messages.__class__.__mro__ }}", "chat template: line 1: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "chat template: line 1: access to attribute 'append'"),
        ("{{ raise_exception.__globals__.json }}", "chat template: line 1: access to attribute '__globals__'"),
        ("{% include 'x' %}", "chat template: line 1: no loader for this environment"),
        ("{{ render_chat | tojson }}", "chat template: line 1: Object of type Undefined is not JSON serializable"),
    ],
)
def test_broken_and_hostile_templates(template, message):
    start = time.perf_counter()
    with pytest.raises(NpglmError) as error:
        render_chat(template, HI)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert time.perf_counter() - start < 5


def test_an_interrupt_is_not_an_error_of_the_template(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(npglm.chat._Sandbox, "call_binop", interrupt)
    with pytest.raises(KeyboardInterrupt):
        render_chat("{{ 2 * messages | length }}", HI)


@pytest.mark.parametrize("messages", [None, "Hi", ["Hi"], [None], 3, [{"role": {1, 2}}]])
def test_messages_that_are_not_messages(messages):
    with pytest.raises(NpglmError, match=r"^chat: messages and tools must be lists of JSON objects: .+"):
        render_chat(GLM, messages)
