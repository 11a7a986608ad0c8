"""Decides which request fields work, which are ignored, and which are refused.

Fields of the schema work. `gateway.core.spellings` reads other systems' hints. Fields of `HARMLESS` are ignored because
they do not change the text (labels, other stacks' routing). Fields of `REFUSED` exist in other APIs but not here (or
not on this route); only values without effect pass. Unknown fields are refused unless they are null.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from contracts.errors import InvalidRequest
from gateway.core.spellings import ROOTS

HARMLESS = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_retention",
        "verbosity",
        "agent_hints",
        "cache_control",
        "kv_transfer_params",
        "request_id",
        "provider",
        "options",
        "return_token_ids",
        "guided_decoding_backend",
        "keep_alive",
        "transforms",
        "stream_reasoning",
        "mm_processor_kwargs",
    }
)

#: Field -> the values without effect (besides null).
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": (),
    "include_reasoning": (True, False),
    "guided_grammar": ("",),
    "guided_whitespace_pattern": ("",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "thinking": (False, {"type": "disabled"}),
    "reasoning": (False, {"enabled": False}, {"effort": "none"}),
    "think": (False,),
    "enable_thinking": (False,),
    "separate_reasoning": (True, False),
    "models": ([],),
    "route": (),
    "plugins": ([],),
    "vllm_xargs": ({},),
    "logits_processors": ([],),
    "add_special_tokens": (False,),
}
#: A plain prompt gets special tokens around it; a chat's template writes them.
REFUSED_OF_COMPLETIONS = {**REFUSED, "add_special_tokens": (True,)}
#: The remedy for a refused field, where it is not to leave it out.
INSTEAD = {
    "guided_grammar": "use guided_json, guided_regex or guided_choice instead",
    "models": "name the one that is to answer in model; this server falls back to no other",
    "route": "the one in model answers; this server falls back to no other",
    "plugins": "it has none; leave them out",
    "conversation": "name the response that it goes on from in previous_response_id",
    "prompt": "send its text in instructions and input",
    "messages": "send the conversation in input",
    "max_tokens": "use max_output_tokens instead",
    "max_completion_tokens": "use max_output_tokens instead",
    "response_format": "use text.format instead",
    "container": "this server runs no tools; leave it out",
    "mcp_servers": "this server runs no tools; give them as tools and run them yourself",
    "add_special_tokens": "leave it out; POST /tokenize counts with and without them, and prompt may be token ids",
}
_SHOWN = 80

Schema = TypeVar("Schema", bound=BaseModel)


def validate(
    schema: type[Schema],
    data: Any,
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
    ignored: Collection[str] = HARMLESS | ROOTS,
) -> Schema:
    """`data` validated as `schema`. refused: other fields and the only values that pass. ignored: fields with any
    value. Raises InvalidRequest naming the first wrong field."""
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    known = {}
    for name, value in data.items():
        if name in schema.model_fields:
            known[name] = value
        elif name in refused:
            _refuse_unless_idle(name, value, refused[name])
        elif name not in ignored and value is not None:
            shown = _shown(name)
            raise InvalidRequest(
                f"unrecognized request argument supplied: {shown}", param=shown, code="unknown_parameter"
            )
    try:
        return schema.model_validate(known)
    except ValidationError as e:
        raise _named(e) from None


def _refuse_unless_idle(name: str, value: Any, idle: tuple[Any, ...]) -> None:
    if value is None or any(type(value) is type(v) and value == v for v in idle):
        return
    wanted = f" other than {', '.join(repr(v) for v in idle)}" if idle else ""
    instead = INSTEAD.get(name, "leave it out")
    raise InvalidRequest(
        f"{name}{wanted} is not supported by this server; {instead}", param=name, code="unsupported_parameter"
    )


def _named(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    context: Mapping[str, Any] = first.get("ctx") or {}
    where = field_path(first["loc"]) + str(context.get("at", ""))
    kind = first["type"]
    if kind == "missing":
        return InvalidRequest(f"{where} is required", param=where, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return InvalidRequest(f"unrecognized request argument supplied: {where}", param=where, code="unknown_parameter")
    if kind == "unsupported_parameter":
        return InvalidRequest(f"{where}: {first['msg']}", param=where, code=kind)
    given = "" if context.get("at") else f"; got {_shown(reprlib.repr(first['input']))}"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return InvalidRequest(
        f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}{given}", param=where or None, code=code
    )


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("["):  # of a dict's key, or of one kind of a union
            path += f".{_shown(part)}" if path else _shown(part)
    return path


def _shown(text: str) -> str:
    clean = text.encode("ascii", "backslashreplace").decode()
    clean = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in clean)
    return clean if len(clean) <= _SHOWN else clean[: _SHOWN - 1] + "…"
