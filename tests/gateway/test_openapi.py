"""`/openapi.json` is true: bodies that fit it, and bodies that do not, are answered as described, and never with a
5xx."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from gateway_fakes import TUNED
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from security_harness import CHAT, KEY_A, SESSION, Harness, harness

from gateway.openai.description import openapi

SCHEMA = schemathesis.openapi.from_dict(openapi())
OPERATIONS = {operation.label: operation for operation in (found.ok() for found in SCHEMA.get_all_operations())}
#: So much of an answer is read: some go on for ever.
MOST_BYTES = 1 << 16
QUICK, LONG = 8, 100


@pytest.fixture(scope="module")
async def h(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    async with harness(tmp_path_factory.mktemp("gateway"), max_advisories_per_s=1e6, max_queries_per_s=1e6) as running:
        yield running
        await running.is_whole()


def references(part: Any) -> set[str]:
    """Every `$ref` in a part of the description."""
    if isinstance(part, list):
        return {found for inner in part for found in references(inner)}
    if not isinstance(part, dict):
        return set()
    own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
    return own | {found for inner in part.values() for found in references(inner)}


def test_every_reference_names_a_part_of_the_description() -> None:
    found = references(openapi())
    assert found
    for reference in found:
        part: Any = openapi()
        for step in reference.removeprefix("#/").split("/"):
            assert step in part, reference
            part = part[step]


def conforms(label: str, response: requests.Response) -> None:
    """Raises AssertionError when the description does not have this answer."""
    described = openapi()["paths"][label.split(" ")[1]][label.split(" ")[0].lower()]["responses"]
    status = str(response.status_code)
    assert response.status_code < 500, (label, status, response.text[:500])
    answer = described.get(status) or described.get(f"{status[0]}XX")
    assert answer is not None, (label, status, "is not described")
    if reference := answer.get("$ref"):
        answer = openapi()["components"]["responses"][reference.rpartition("/")[2]]
    kind = response.headers.get("Content-Type", "").split(";")[0]
    assert kind in answer["content"], (label, status, kind)
    if kind == "application/json":
        schema = answer["content"][kind]["schema"] | {"components": openapi()["components"]}
        jsonschema_rs.validator_for(schema).validate(response.json())


def ask(session: requests.Session, port: int, case: Any) -> requests.Response:
    """Send one generated request; read the beginning of its answer."""
    how = case.as_transport_kwargs(f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY_A}"})
    how["headers"] = {**how.get("headers", {}), "Authorization": f"Bearer {KEY_A}"}
    response = session.request(**how, stream=True, timeout=30)
    endless = response.headers.get("Content-Type", "").startswith("text/event-stream")
    response._content = response.raw.read1(MOST_BYTES) if endless else response.raw.read()  # type: ignore[assignment]
    response.close()
    return response


def fuzz(label: str, port: int, examples: int) -> dict[int, int]:
    """Try an operation with what fits its description and with what does not; how often which status came."""
    found: dict[int, int] = {}
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        if mode is GenerationMode.NEGATIVE and not (
            OPERATIONS[label].body or OPERATIONS[label].query or OPERATIONS[label].path_parameters
        ):
            continue  # nothing of it can be wrong

        with requests.Session() as session:

            @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=examples == QUICK,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            def attempt(case: Any) -> None:
                response = ask(session, port, case)
                conforms(label, response)
                found[response.status_code] = found.get(response.status_code, 0) + 1

            try:
                attempt()
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE, "nothing fits"  # else every text is a right one here
    return found


@pytest.mark.parametrize("label", OPERATIONS)
async def test_whatever_is_sent_is_answered_as_described(h: Harness, label: str) -> None:
    h.worker.tokens_by_default = 1
    found = await asyncio.to_thread(fuzz, label, h.port, QUICK)
    assert sum(found.values()) >= 1
    await h.is_whole()


@pytest.mark.slow
@pytest.mark.parametrize("label", OPERATIONS)
async def test_whatever_is_sent_is_answered_as_described_for_longer(h: Harness, label: str) -> None:
    await asyncio.to_thread(fuzz, label, h.port, LONG)
    await h.is_whole()


async def test_what_goes_well_is_answered_as_described(h: Harness) -> None:
    """Generated requests seldom go well: they name no model and no session that exists."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    sent: list[tuple[str, str, str, Any]] = [
        ("POST", "/v1/chat/completions", "", CHAT),
        ("POST", "/v1/chat/completions", "", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
        ("POST", "/v1/chat/completions", "", CHAT | {"tools": [tool], "tool_choice": "required"}),
        ("POST", "/v1/chat/completions", "", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
        ("POST", "/v1/completions", "", {"model": "toy", "prompt": ["a", "b"], "logprobs": 1}),
        ("POST", "/v1/completions", "", {"model": "toy", "prompt": "a", "stream": True}),
        ("POST", "/v1/responses", "", {"model": "toy", "input": "a"}),
        ("POST", "/v1/responses", "", {"model": "toy", "input": "a", "stream": True}),
        ("POST", "/v1/responses", "", {"model": "toy", "input": "a", "background": True}),
        ("POST", "/v1/messages", "", CHAT | {"max_tokens": 2}),
        ("POST", "/v1/messages", "", CHAT | {"max_tokens": 2, "stream": True}),
        ("POST", "/v1/messages/count_tokens", "", CHAT),
        ("POST", "/tokenize", "", {"prompt": "a é", "return_token_strs": True}),
        ("POST", "/tokenize", "", {"model": "toy", "messages": CHAT["messages"], "tools": [tool]}),
        ("POST", "/detokenize", "", {"tokens": [97, 233]}),
        ("GET", "/v1/models", "", None),
        ("GET", "/v1/models/{model}", "/v1/models/toy", None),
        ("POST", "/v1/advisory", "", {"session_id": "a"}),
        ("POST", "/v1/advisory", "", {"advisories": [{"session_id": "a"}, {"session_id": "b"}]}),
        ("POST", "/v1/invalidate", "", {"session_id": "a"}),
        ("POST", "/v1/client_secrets", "", {"session_prefix": "a"}),
        ("GET", "/v1/sessions", "", None),
        ("GET", "/v1/sessions/{session_id}", f"/v1/sessions/{SESSION}", None),
        ("GET", "/v1/sessions/{session_id}/placement", f"/v1/sessions/{SESSION}/placement", None),
        ("PUT", "/v1/workflows/{name}", "/v1/workflows/w", {"agents": ["a"], "edges": [{"from": "a", "to": "a"}]}),
        ("GET", "/v1/workflows/{name}", "/v1/workflows/w", None),
        ("GET", "/v1/workflows", "", None),
        ("DELETE", "/v1/workflows/{name}", "/v1/workflows/w", None),
        ("DELETE", "/v1/sessions/{session_id}", f"/v1/sessions/{SESSION}", None),
        ("GET", "/v1/files", "", None),
        ("GET", "/v1/fine_tuning/jobs", "", None),
        ("GET", "/v1/fine_tuning/jobs/{job_id}", f"/v1/fine_tuning/jobs/{TUNED}", None),
        ("GET", "/v1/fine_tuning/jobs/{job_id}/events", f"/v1/fine_tuning/jobs/{TUNED}/events", None),
        ("GET", "/v1/fine_tuning/jobs/{job_id}/checkpoints", f"/v1/fine_tuning/jobs/{TUNED}/checkpoints", None),
        ("DELETE", "/v1/models/{model}", "/v1/models/m:tuned", None),
        ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel", f"/v1/fine_tuning/jobs/{TUNED}/cancel", None),
        ("GET", "/v1/fleet", "/v1/fleet?metrics=true", None),
        ("GET", "/v1/scale", "", None),
        ("GET", "/health", "", None),
        ("GET", "/ready", "", None),
        ("GET", "/version", "", None),
        ("GET", "/ready", "/ready?all=1", None),
        ("GET", "/metrics", "", None),
    ]

    def go() -> None:
        headers = {"Authorization": f"Bearer {KEY_A}"}
        url = f"http://127.0.0.1:{h.port}/v1/responses"
        wanted = {"model": "toy", "input": "a", "background": True}
        made = requests.post(url, json=wanted, headers=headers, timeout=30).json()
        for method, tail in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            response = requests.request(method, f"{url}/{made['id']}{tail}", headers=headers, timeout=30)
            assert response.status_code == 200, response.text
            conforms(f"{method} /v1/responses/{{response_id}}{tail}", response)
        for method, path, target, body in sent:
            headers = {"Authorization": f"Bearer {KEY_A}"}
            response = requests.request(
                method, f"http://127.0.0.1:{h.port}{target or path}", json=body, headers=headers, timeout=30
            )
            assert response.status_code in (200, 202), (path, response.text)
            conforms(f"{method} {path}", response)
        files = {"file": ("d.jsonl", b'{"text": "a"}'), "purpose": (None, "fine-tune")}
        headers = {"Authorization": f"Bearer {KEY_A}"}
        url = f"http://127.0.0.1:{h.port}/v1/files"
        made = requests.post(url, files=files, headers=headers, timeout=30)
        conforms("POST /v1/files", made)
        for method, tail in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            response = requests.request(method, f"{url}/{made.json()['id']}{tail}", headers=headers, timeout=30)
            assert response.status_code == 200, response.text
            conforms(f"{method} /v1/files/{{file_id}}{tail}", response)

    await asyncio.to_thread(go)


async def test_the_document_is_whole_and_needs_nothing_from_elsewhere(h: Harness) -> None:
    answer = await h.ask("GET", "/openapi.json", key=None)
    assert answer.status == 200 and answer.body.decode()
    text = str(openapi())
    assert "$defs" not in text
    assert "http://" not in text and "https://" not in text.replace("https://chat.example.org", "")


def test_every_route_has_a_tag_and_says_what_its_errors_mean() -> None:
    document = openapi()
    tags = {tag["name"] for tag in document["tags"]}
    operations = [(path, operation) for path, methods in document["paths"].items() for operation in methods.values()]
    assert {tag for _, operation in operations for tag in operation["tags"]} == tags
    assert len({operation["operationId"] for _, operation in operations}) == len(operations)
    for path, operation in operations:
        assert operation["summary"].endswith(".") and {"4XX", "5XX"} < set(operation["responses"]), path
        needs_key = operation.get("security", document["security"]) != []
        assert ("401" in operation["responses"]) is needs_key, path


def test_every_example_fits_its_schema() -> None:
    document = openapi()
    bodies = [
        (path, operation["requestBody"]["content"]["application/json"])
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    ]
    for path, body in bodies:
        checked = jsonschema_rs.validator_for(body["schema"] | {"components": document["components"]})
        assert body["examples"], path
        for name, example in body["examples"].items():
            assert checked.is_valid(example["value"]), (path, name)
    error = jsonschema_rs.validator_for(document["components"]["schemas"]["Error"])
    for status, described in document["components"]["responses"].items():
        assert error.is_valid(described["content"]["application/json"]["example"]), status
