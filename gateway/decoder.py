"""`python -m gateway.decoder`: decodes, validates and hashes large bodies, and reads large answers. `gateway.decoding`
starts it."""

from __future__ import annotations

import gc

from contracts.errors import BodyTooLarge, InvalidRequest, RequestError
from gateway.asked_wire import decode_question, encode_answer
from gateway.asking import ask
from runtime.child import serve
from runtime.heap import give_back_free_memory, give_back_large_buffers


def answer(payload: bytes) -> bytes:
    """The encoded answer, or the error of the body. Frees all memory afterwards."""
    try:
        return _answer(payload)
    finally:
        gc.collect()  # an exception and its frames form a cycle
        give_back_free_memory()


def _answer(payload: bytes) -> bytes:
    question = decode_question(payload)
    try:
        if len(question) == 2:
            reading, body = question
            reading.whole(body)
            return encode_answer(reading)
        return encode_answer(ask(*question))
    except RequestError as error:
        return encode_answer(error)
    except OverflowError:
        return encode_answer(InvalidRequest("the body has a number that is too large", code="invalid_json"))
    except RecursionError:
        return encode_answer(InvalidRequest("the body is nested too deeply", code="invalid_json"))
    except MemoryError:
        return encode_answer(
            BodyTooLarge("the body could not be decoded within this gateway's memory; send fewer values")
        )


if __name__ == "__main__":
    give_back_large_buffers()
    gc.freeze()  # imported objects stay; exclude them from collections
    serve(answer)
