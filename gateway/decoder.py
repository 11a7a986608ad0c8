"""`python -m gateway.decoder`: decodes, validates and hashes large bodies for a gateway, which starts it (`gateway.decoding`)."""

from __future__ import annotations

from contracts.errors import BodyTooLarge, InvalidRequest, RequestError
from gateway.openai.asked import Asked, ask
from gateway.openai.asked_wire import decode_question, encode_answer
from runtime.child import serve


def answer(payload: bytes) -> bytes:
    """The encoded `Asked`, or what is wrong with the body."""
    kind, body, told = decode_question(payload)
    found: Asked | RequestError
    try:
        found = ask(kind, body, told)
        return encode_answer(found)
    except RequestError as error:
        found = error
    except RecursionError:
        found = InvalidRequest("the body is nested too deeply", code="invalid_json")
    except MemoryError:
        found = BodyTooLarge("the body could not be decoded within this gateway's memory; send fewer values")
    return encode_answer(found)


if __name__ == "__main__":
    serve(answer)
