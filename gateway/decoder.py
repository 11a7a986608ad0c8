"""`python -m gateway.decoder`: decodes, validates and hashes large bodies for a gateway, which starts it (`gateway.decoding`)."""

from __future__ import annotations

import gc

from contracts.errors import BodyTooLarge, InvalidRequest, RequestError
from gateway.openai.asked import ask
from gateway.openai.asked_wire import decode_question, encode_answer
from runtime.child import serve
from runtime.heap import give_back_free_memory, give_back_large_buffers


def answer(payload: bytes) -> bytes:
    """The encoded `Asked`, or what is wrong with the body. Keeps no memory of it."""
    try:
        return _answer(payload)
    finally:
        gc.collect()  # an error and the frames that it came through hold each other
        give_back_free_memory()


def _answer(payload: bytes) -> bytes:
    kind, body, told = decode_question(payload)
    try:
        return encode_answer(ask(kind, body, told))
    except RequestError as error:
        return encode_answer(error)
    except RecursionError:
        return encode_answer(InvalidRequest("the body is nested too deeply", code="invalid_json"))
    except MemoryError:
        return encode_answer(BodyTooLarge("the body could not be decoded within this gateway's memory; send fewer values"))


if __name__ == "__main__":
    give_back_large_buffers()
    gc.freeze()  # what was imported stays, and need not be looked at again
    serve(answer)
