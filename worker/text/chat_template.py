"""Renders a conversation to text with the model's chat template, in a sandbox, as transformers does.

A model without a template gets a plain one: a line `role: content` per message, and `assistant:` for the answer. For a
template without tools, a system message describes them, and calls and results become plain text
(`worker.core.tool_calls`).
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.errors import ConfigError, InvalidRequest
from runtime.model_config import read_json
from worker.core.tool_calls import Dialect, dialect_of, generic_notice, spelled_calls, spelled_result

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt else '' }}"
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Candidates for a separator that no message contains: Unicode's private use area.
_PRIVATE_USE = range(0xE000, 0xF900)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; rendered as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template with the model's special tokens as variables."""

    def __init__(
        self, source: str, variables: dict[str, str], where: str = "chat_template", tool_source: str | None = None
    ) -> None:
        """tool_source: the template for requests with tools, if different. Raises ConfigError naming `where` for an
        invalid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form)
        )
        try:
            self._template = environment.from_string(source)
            with_tools = source if tool_source is None else tool_source
            self._tool_template = environment.from_string(with_tools)
            knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(with_tools))
        except jinja2.TemplateError as e:
            raise ConfigError(f"{where} is not a template that can be rendered: {e}") from e
        #: How tools are presented to the model, and how it spells a call.
        self.dialect: Dialect = dialect_of(with_tools, knows_tools)
        self._variables = variables

    def render(
        self,
        messages: list[dict[str, Any]],
        reserved: list[str],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[str]:
        """The conversation's text, in parts to be encoded one by one. Text of messages, tools and variables is split
        inside each `reserved` string, so that no part contains one. variables: further template variables; reserved
        names win. add_generation_prompt: the text ends with the beginning of an answer. continue_final_message: the
        text ends with the last message, to be continued. Raises InvalidRequest naming `messages`."""
        variables = variables or {}
        plain = [_as_text(message, i) for i, message in enumerate(messages)]
        if self.dialect.told == "system":
            plain, tools = _told_in_words(plain, tools), None
        said = [value for item in (*plain, *(tools or ()), variables) for value in _strings(item)]
        unused = (chr(c) for c in _PRIVATE_USE if not any(chr(c) in value for value in said))
        if any(text in value for text in reserved for value in said):
            mark = next(unused)
            plain = [_broken_up(message, reserved, mark) for message in plain]
            tools = tools and [_broken_up(tool, reserved, mark) for tool in tools]
            variables = _broken_up(variables, reserved, mark)
        else:
            mark = ""
        if continue_final_message:
            # The space shows whether the template strips content.
            end = next(unused)
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}{end} "}
        template = self._tool_template if tools else self._template
        try:
            ours = {"messages": plain, "tools": tools or None, "documents": None, **self._variables}
            text = template.render({**variables, **ours, "add_generation_prompt": add_generation_prompt})
        except Exception as e:  # a template is a program and may raise anything because of the messages
            what = "messages and chat_template_kwargs" if variables else "messages"
            raise InvalidRequest(f"{what} do not fit this model's chat template: {e}", param="messages") from e
        if continue_final_message:
            before, found, after = text.rpartition(end)
            if not found:
                raise InvalidRequest(
                    "this model's chat template leaves the final message out, so it cannot be continued",
                    param="messages",
                )
            text = before if after.startswith(" ") else before.rstrip()
        return [part for part in text.split(mark) if part] if mark else [text]

    def keeps_texts(self) -> bool:
        """Whether the prompt contains all text of users and the assistant, except surrounding space and reasoning.
        Tested on a sample conversation, with and without a system message, as some templates allow none."""
        for roles in (
            ("system", "user", "assistant", "user", "assistant", "user"),
            ("user", "assistant", "user", "assistant", "user"),
        ):
            said = [f"text {i} {role}:  two\n\n\nlines <i>&amp; {{}} 一" for i, role in enumerate(roles)]
            messages = [{"role": role, "content": f"\n{text}\n"} for role, text in zip(roles, said, strict=True)]
            try:
                rendered = "".join(self.render(messages, []))
            except InvalidRequest:
                continue
            return all(text in rendered for text in said)
        return False


def load_template(directory: Path) -> ChatTemplate:
    """The template of the model in `directory`: chat_template.jinja, else from tokenizer_config.json, else the plain
    one."""
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    variables = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    file = directory / "chat_template.jinja"
    if file.exists():
        return ChatTemplate(file.read_text(encoding="utf-8"), variables, str(file))
    source, tool_source = settings.get("chat_template"), None
    if isinstance(source, list):
        tool_source = next((t.get("template") for t in source if t.get("name") == "tool_use"), None)
        source = next((t.get("template") for t in source if t.get("name") == "default"), None)
    if not isinstance(source, str | None) or not isinstance(tool_source, str | None):
        raise ConfigError(f"{path}: chat_template must be a string, or a list with one named default")
    return ChatTemplate(source or PLAIN_TEMPLATE, variables, f"{path}: chat_template", tool_source)


def _as_text(message: dict[str, Any], index: int) -> dict[str, Any]:
    """The message with its content as one string: text parts joined by line breaks, "" for no content. Arguments of
    calls become objects if they are JSON objects, as templates expect."""
    content = message.get("content")
    if isinstance(content, list):
        for at, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                name = f"messages[{index}].content[{at}]"
                raise InvalidRequest(f"{name} must be a text part; this model reads text only", param=name)
        content = "\n".join(part["text"] for part in content)
    message = {**message, "content": "" if content is None else content}
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_objects(call) for call in message["tool_calls"]]
    return message


def _with_objects(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    return {
        **call,
        "function": {**function, "arguments": arguments if isinstance(arguments, dict) else function["arguments"]},
    }


def _told_in_words(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The conversation for a template without tools: a system message describes them, calls and results become text."""
    told: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            message = {"role": "assistant", "content": spelled_calls(message)}
        elif message["role"] == "tool":
            message = {"role": "user", "content": spelled_result(message)}
            # several results become one message, as templates expect roles to alternate
            if told and told[-1].get("role") == "user":
                told[-1] = {**told[-1], "content": told[-1]["content"] + "\n" + message["content"]}
                continue
        told.append(message)
    if not tools:
        return told
    notice = generic_notice(tools)
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": told[0]["content"] + "\n\n" + notice}, *told[1:]]
    return [{"role": "system", "content": notice}, *told]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in _strings(item)]


def _broken_up(value: Any, reserved: list[str], mark: str) -> Any:
    """`value` with `mark` inserted after the first character of every reserved string."""
    if isinstance(value, str):
        for text in reserved:
            value = value.replace(text, text[:1] + mark + text[1:])
        return value
    if isinstance(value, dict):
        return {_broken_up(key, reserved, mark): _broken_up(item, reserved, mark) for key, item in value.items()}
    return [_broken_up(item, reserved, mark) for item in value] if isinstance(value, list) else value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
