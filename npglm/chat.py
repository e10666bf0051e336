"""A conversation to the text of a prompt, by the chat template inside a GGUF.

The environment is the one that transformers 5.24.0 renders templates in (utils/chat_template_utils.py), as templates are
written for it: jinja2's immutable sandbox, trim_blocks, lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, its
own `tojson`, and a `{% generation %}` block that renders its content. A template comes with a downloaded file and is not
trusted: the sandbox hides Python's internals, `range` stops at 100000 and products are bounded. Its running time is not.
"""

import json
import traceback
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from npglm.errors import NpglmError

MAX_PRODUCT = 100_000  # of a string or list with a number: items; range has the same limit in jinja2
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the names it goes by; templates read the first


def chat_template(metadata: dict, source: str = "the checkpoint") -> str:
    """The template in a GGUF's metadata; NpglmError if there is none. source: what the error calls the file."""
    template = metadata.get("tokenizer.chat_template")
    if template is None:
        raise NpglmError(f"{source}: no chat template (key tokenizer.chat_template is missing); only raw prompts can be run")
    if not isinstance(template, str) or not template:
        raise NpglmError(f"{source}: key tokenizer.chat_template is {template!r:.40}, expected a text")
    return template


def think_kwargs(think: bool | None) -> dict:
    """--think, --no-think or neither (None: whatever the template does by itself) as arguments for `render_chat`."""
    return {} if think is None else {"enable_thinking": think}


def render_chat(
    template: str, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = True, **kwargs
) -> str:
    """The prompt, to be encoded with special tokens parsed.

    messages: {"role", "content", ...}, as transformers and the OpenAI API have them, of JSON's types; keys that are None are
    left out, and the reasoning of an earlier answer may go by any of REASONING_KEYS. tools: JSON schemas.
    add_generation_prompt: end with the opening of the assistant's turn. kwargs: the template's own switches (enable_thinking,
    reasoning_effort, ...).

    Any failure in the template is one NpglmError with the template's line where it is known.
    """
    try:
        # Through JSON: the template gets fresh plain values only, no methods of the caller's objects.
        given = json.loads(json.dumps({"messages": messages, "tools": tools, **kwargs}))
        chat = [_message(message) for message in given.pop("messages")]
    except (TypeError, ValueError) as e:
        raise NpglmError(f"chat: messages and tools must be lists of JSON objects: {_one_line(e)}") from None
    given.setdefault("documents", None)  # transformers always passes it
    try:
        compiled = _environment().from_string(template)
        return compiled.render(messages=chat, add_generation_prompt=add_generation_prompt, **given)
    except Exception as e:  # noqa: BLE001 - whatever it raises, the template is at fault
        line = e.lineno if isinstance(e, TemplateSyntaxError) else _line_of(e)
        where = f"line {line}: " if line else ""
        raise NpglmError(f"chat template: {where}{_one_line(e)}") from None


def _message(message: dict) -> dict:
    if not isinstance(message, dict):
        raise TypeError(f"found {message!r:.40}")
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's own words for training; here it is only a scope."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    # jinja2 folds constants while it compiles, so that `9**9**9` would hang before the first character.
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context, operator, left, right):
        if operator == "**":
            raise SecurityError("** is not allowed in a chat template")
        for sequence, times in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and isinstance(times, int) and len(sequence) * times > MAX_PRODUCT:
                raise SecurityError(f"a product of more than {MAX_PRODUCT} items is not allowed in a chat template")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Sandbox:
    def raise_exception(message):
        raise TemplateError(message)

    # jinja2's own filter escapes <, > and & for HTML.
    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _line_of(error: Exception) -> int | None:
    """The innermost line of the template in the traceback; jinja2 files its frames under "<template>"."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
