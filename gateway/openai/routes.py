"""Describes every route of the API: summary, tag, body, examples and errors. For the API's description."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter

from gateway.anthropic.requests import IGNORED as MESSAGE_IGNORED
from gateway.anthropic.requests import REFUSED as MESSAGE_REFUSED
from gateway.anthropic.requests import CountRequest, MessageRequest
from gateway.core.spellings import ROOTS
from gateway.core.uploads import PURPOSE
from gateway.finetune.requests import JobRequest
from gateway.openai.bodies import ADVISORY, BATCH, CLIENT_SECRET, INVALIDATION, WORKFLOW, Schema
from gateway.openai.parameters import HARMLESS, REFUSED
from gateway.openai.requests import ChatRequest, CompletionRequest
from gateway.openai.token_requests import Detokenize, TokenizeMessages, TokenizePrompt
from gateway.responses.requests import EXTRAS, ResponseRequest
from gateway.responses.requests import IGNORED as RESPONSE_IGNORED
from gateway.responses.requests import REFUSED as RESPONSE_REFUSED

GENERATE, TOKENS, HINTS, SESSIONS, WORKFLOWS, SERVER = "Generate", "Tokens", "Hints", "Sessions", "Workflows", "Server"
FINE_TUNING = "Fine-tuning"
#: In the order of the documentation.
TAGS: Final = {
    GENERATE: "Chats, completions and responses in OpenAI's formats, messages in Anthropic's.",
    TOKENS: "The model's tokenizer and chat template, as vLLM's servers offer them.",
    HINTS: "Say that a session is about to send a request, so that its cache is loaded before. A hint is called an "
    "*advisory* in names.",
    SESSIONS: "Where conversations are cached, and how to erase them. For server keys.",
    WORKFLOWS: "Call graphs of agents, from which Upbeat derives hints. For server keys.",
    FINE_TUNING: "Train adapters of served models beside serving. OpenAI's format. For server keys.",
    SERVER: "Health, load and version.",
}


@dataclass(frozen=True, slots=True)
class Route:
    """One route. examples: valid bodies by title. errors: statuses beside those of every route. open: needs no key.
    form: the body is a form (multipart/form-data), without examples."""

    method: str
    path: str
    tag: str
    summary: str
    body: Schema | None = None
    examples: tuple[tuple[str, Any], ...] = ()
    errors: tuple[int, ...] = ()
    open: bool = False
    more: str = ""
    form: bool = False


_TEXT_ERRORS = (400, 404, 408, 413, 415, 429, 503)
_BODY_ERRORS = (400, 413, 415)
_USER = {"role": "user", "content": "My cat is called Biscuit. What is my cat called?"}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": _CITY}
_TOOL = {"type": "function", "function": _FUNCTION}
_ANTHROPIC_TOOL = {"name": "get_weather", "description": "The weather in a city.", "input_schema": _CITY}
_TOOL_EXAMPLE = {
    "messages": [{"role": "user", "content": "Is it raining in Rome?"}],
    "tools": [_TOOL],
    "tool_choice": "required",
}
_SESSION = {"session_id": "conversation-1"}
_ANSWER_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_JSON_EXAMPLE = {"response_format": {"type": "json_schema", "json_schema": {"name": "cat", "schema": _ANSWER_SCHEMA}}}


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _open(*required: str) -> Schema:
    """A body for an engine with HTTP of its own: these fields, and whatever the engine's route takes."""
    return {
        "type": "object",
        "required": ["model", *required],
        "properties": {"model": {"type": "string", "minLength": 1, "maxLength": 512}},
        "additionalProperties": True,
    }


_UPLOAD: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSONL: `messages` or `text` a line"},
        "purpose": {"enum": [PURPOSE]},
    },
}
_TUNING = {"training_file": "file-0123456789abcdef0123456789abcdef", "suffix": "support"}
_TUNED = {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}}
_OF_ENGINES = (
    "For models whose engine is vLLM; a request for another model is a 400. Every field of vLLM's route passes, except "
    "for those that the gateway answers for (docs/api.md)."
)
#: Other fields of requests for text.
_OTHER_FIELDS = (
    "A model whose engine is vLLM takes every field that vLLM's route takes. Other models: "
    f"Accepted and ignored: {_list(HARMLESS)}. Hints of other systems: {_list(ROOTS)}. "
    f"Refused by name unless idle: {_list(set(REFUSED) - set(ChatRequest.model_fields))}; "
    f"and by completions {_list(set(REFUSED) & set(ChatRequest.model_fields))}."
)


def routes(model: str) -> list[Route]:
    """All routes. model: the model in the examples."""
    named: dict[str, Any] = {"model": model}
    chat = named | {"messages": [_USER], "max_tokens": 32}
    return [
        Route(
            "post", "/v1/chat/completions", GENERATE, "Answer a chat, streamed or not. OpenAI's format.",
            ChatRequest.model_json_schema(),
            (
                ("A turn", chat),
                ("Streamed", chat | {"stream": True, "stream_options": {"include_usage": True}}),
                ("JSON by a schema", chat | _JSON_EXAMPLE),
                ("A tool", named | _TOOL_EXAMPLE | {"max_tokens": 64}),
            ),
            _TEXT_ERRORS, more=_OTHER_FIELDS,
        ),
        Route(
            "post", "/v1/completions", GENERATE, "Complete a prompt, streamed or not. OpenAI's format.",
            CompletionRequest.model_json_schema(),
            (("A prompt", named | {"prompt": "Once upon a time", "max_tokens": 16}),), _TEXT_ERRORS,
            more=_OTHER_FIELDS,
        ),
        Route("get", "/v1/models", GENERATE, "List the registered models."),
        Route("get", "/v1/models/{model}", GENERATE, "One model.", errors=(404,)),
        Route(
            "delete", "/v1/models/{model}", FINE_TUNING, "Stop serving a model that a fine-tuning job made.",
            errors=(403, 404, 503),
        ),
        Route(
            "get", "/v1/models/{model}/placement", SERVER,
            "When a model's weights came to each device and left it lately, and why.", errors=(403, 404, 503),
        ),
        Route(
            "post", "/v1/responses", GENERATE,
            "Answer a turn: streamed, whole, or in the background. The format of OpenAI's Responses API.",
            ResponseRequest.model_json_schema(),
            (
                ("A turn", named | {"input": "What is my cat called?", "instructions": "Be brief."}),
                ("A tool", named | {"input": "Is it raining in Rome?", "tools": [{"type": "function", **_FUNCTION}]}),
            ),
            _TEXT_ERRORS,
            more=f"Fields of chats that work here too: {_list(EXTRAS)}. Ignored: {_list(RESPONSE_IGNORED)}. "
            f"Refused by name unless idle: {_list(RESPONSE_REFUSED)}, and all tools but functions.",
        ),
        Route("get", "/v1/responses/{response_id}", GENERATE, "A stored response.", errors=(404, 503)),
        Route(
            "get", "/v1/responses/{response_id}/input_items", GENERATE, "The items of a stored response's input.",
            errors=(400, 404, 503),
        ),
        Route("delete", "/v1/responses/{response_id}", GENERATE, "Delete a stored response.", errors=(404, 503)),
        Route(
            "post", "/v1/responses/{response_id}/cancel", GENERATE, "Stop a response in the background.",
            errors=(400, 404, 503),
        ),
        Route(
            "post", "/v1/messages", GENERATE, "Answer a turn, streamed or not. Anthropic's format.",
            MessageRequest.model_json_schema(),
            (
                ("A turn", chat),
                ("A tool", named | {"max_tokens": 64, "messages": [_USER], "tools": [_ANTHROPIC_TOOL]}),
            ),
            _TEXT_ERRORS,
            more="The key may be in the header `X-Api-Key`. Errors have Anthropic's form. Fields of chats that work "
            f"here too: {_list(EXTRAS)}. Ignored: {_list(MESSAGE_IGNORED)}. Refused by name unless idle: "
            f"{_list(MESSAGE_REFUSED)}, and tools of Anthropic's own.",
        ),
        Route(
            "post", "/v1/messages/count_tokens", TOKENS, "The number of tokens of a prompt. Anthropic's format.",
            CountRequest.model_json_schema(), (("A chat", named | {"messages": [_USER]}),), _TEXT_ERRORS,
        ),
        Route(
            "post", "/v1/embeddings", GENERATE, "Embeddings. OpenAI's format.", _open("input"),
            (("Two texts", named | {"input": ["a cat", "a dog"]}),), _TEXT_ERRORS, more=_OF_ENGINES,
        ),
        Route(
            "post", "/tokenize", TOKENS,
            "The token ids of a prompt, or of a chat as the model's template renders it. vLLM's format.",
            TypeAdapter(TokenizePrompt | TokenizeMessages).json_schema(),
            (
                ("A prompt", named | {"prompt": "Once upon a time", "return_token_strs": True}),
                ("A chat", named | {"messages": [_USER]}),
            ),
            _TEXT_ERRORS,
            more="`model` may be left out. A prompt that cannot fit the model's context, however it is tokenized, is a "
            "400; one that is found too long only by tokenizing is counted.",
        ),
        Route(
            "post", "/detokenize", TOKENS, "The text of token ids, special tokens spelled. vLLM's format.",
            Detokenize.model_json_schema(), (("Ids", named | {"tokens": [1, 2, 3]}),), _TEXT_ERRORS,
        ),
        Route(
            "post", "/v1/advisory", HINTS, "Hint: sessions are about to send a request.",
            {"oneOf": [ADVISORY, BATCH]},
            (("One", _SESSION | {"expected_arrival": 2.0}), ("Several", {"advisories": [_SESSION]})),
            (400, 413, 429),
            more="The answer is the same whether or not the session exists.",
        ),
        Route(
            "post", "/v1/invalidate", HINTS, "Withdraw a hint.", INVALIDATION,
            (("A session", _SESSION),), (400, 413, 429),
        ),
        Route(
            "post", "/v1/client_secrets", HINTS,
            "Create a short-lived browser token for one session or a prefix, for hints only.", CLIENT_SECRET,
            (("A session", _SESSION | {"expires_after": {"anchor": "created_at", "seconds": 600}}),),
            (*_BODY_ERRORS, 403),
            more="For server keys.",
        ),
        Route("get", "/v1/sessions", SESSIONS, "List this tenant's sessions.", errors=(400, 403)),
        Route(
            "get", "/v1/sessions/{session_id}", SESSIONS, "Where a session's cache is, by node and tier.",
            errors=(400, 403, 404, 503),
        ),
        Route(
            "get", "/v1/sessions/{session_id}/placement", SESSIONS,
            "Why a session's last turns and hints were placed where they were.", errors=(400, 403, 404, 503),
        ),
        Route(
            "get", "/v1/sessions/{session_id}/events", SESSIONS,
            "Where a session's cache is, at each change (server-sent events).", errors=(400, 403, 429),
        ),
        Route(
            "delete", "/v1/sessions/{session_id}", SESSIONS, "Erase a session from every tier.",
            errors=(400, 403, 404, 503),
        ),
        Route("get", "/v1/workflows", WORKFLOWS, "List this tenant's agent workflows.", errors=(403, 503)),
        Route(
            "get", "/v1/workflows/{name}", WORKFLOWS, "A workflow's call graph, as declared and as learned.",
            errors=(400, 403, 404),
        ),
        Route(
            "put", "/v1/workflows/{name}", WORKFLOWS, "Declare a workflow's call graph.", WORKFLOW,
            (("Two agents",
              {"agents": ["plan", "write"], "edges": [{"from": "plan", "to": "write", "probability": 0.9}]}),),
            (*_BODY_ERRORS, 403),
        ),
        Route(
            "delete", "/v1/workflows/{name}", WORKFLOWS, "Delete a workflow and what was learned of it.",
            errors=(400, 403, 404),
        ),
        Route(
            "post", "/v1/files", FINE_TUNING, "Upload a file of training data.", _UPLOAD,
            errors=(*_BODY_ERRORS, 403, 408, 503), form=True,
            more="`expires_after` and other purposes are refused.",
        ),
        Route("get", "/v1/files", FINE_TUNING, "List this tenant's files.", errors=(400, 403)),
        Route("get", "/v1/files/{file_id}", FINE_TUNING, "One file.", errors=(403, 404)),
        Route("get", "/v1/files/{file_id}/content", FINE_TUNING, "A file's content.", errors=(403, 404)),
        Route("delete", "/v1/files/{file_id}", FINE_TUNING, "Delete a file.", errors=(403, 404)),
        Route(
            "post", "/v1/fine_tuning/jobs", FINE_TUNING, "Check the data and start a fine-tuning job.",
            JobRequest.model_json_schema(),
            (("A job", named | _TUNING), ("Settings of one's own", named | _TUNING | _TUNED | {"seed": 7})),
            (*_BODY_ERRORS, 403, 404, 429, 503),
        ),
        Route("get", "/v1/fine_tuning/jobs", FINE_TUNING, "List this tenant's jobs.", errors=(400, 403, 503)),
        Route("get", "/v1/fine_tuning/jobs/{job_id}", FINE_TUNING, "One job.", errors=(403, 404, 503)),
        Route(
            "post", "/v1/fine_tuning/jobs/{job_id}/cancel", FINE_TUNING, "Cancel a job.", errors=(400, 403, 404, 503),
        ),
        Route(
            "get", "/v1/fine_tuning/jobs/{job_id}/events", FINE_TUNING, "A job's latest events.",
            errors=(400, 403, 404, 503),
        ),
        Route(
            "get", "/v1/fine_tuning/jobs/{job_id}/checkpoints", FINE_TUNING, "A job's latest checkpoints.",
            errors=(400, 403, 404, 503),
        ),
        Route(
            "get", "/v1/fleet", SERVER, "The nodes and their load; with `?metrics=true` also their samples.",
            errors=(400, 403),
        ),
        Route(
            "get", "/v1/scale", SERVER,
            "How many nodes the fleet should have, for autoscalers (KEDA reads `desired_nodes`), and why.",
            errors=(403, 503),
        ),
        Route("get", "/health", SERVER, "The process lives.", open=True),
        Route(
            "get", "/ready", SERVER,
            "Each registered model has a node that serves it or can wake it; with `?all=1`, every node serves.",
            errors=(400,), open=True,
        ),
        Route("get", "/version", SERVER, "Which release this is.", open=True),
        Route("get", "/metrics", SERVER, "Prometheus metrics.", open=True),
    ]  # fmt: skip
