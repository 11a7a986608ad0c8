"""A backend that answers at once: a worker over gRPC that a real scheduler knows as a node, and an OpenAI server over
HTTP.

The request chooses how its answer arrives. `max_tokens` of `STREAMED`: a token per step, otherwise in one piece.
`top_k` of `HELD`: never; of `TOGETHER`: in steps with all requests that say so, once all are there. All steps of a
streamed answer are ready at once: over gRPC waiting steps are joined, as in a worker, and over HTTP they are written as
fast as the socket accepts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from contracts import frames
from contracts.identity import SCHEDULER, node
from contracts.request import Accepted, GenerateRequest, Output
from contracts.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime import rpc
from runtime.config_file import load_config
from runtime.own_certificate import use_certificate

MODEL = "bench"
WHOLE, STREAMED = 16, 17
HELD, TOGETHER = 1, 2
WORD = " token"
#: The shape of an 8B model: 32 layers, 8 KV heads of 128, bfloat16.
SHAPE = common_pb2.KvShape(
    fingerprint=b"f" * 32, layers=32, kv_heads=8, head_dim=128, chunk_tokens=64, dtype="bfloat16"
)
_REPORT_S = 0.5


class _Out:
    """Sends frames like a worker: one write at a time; steps that wait meanwhile are joined."""

    def __init__(self, context: Any) -> None:
        self._context, self._waiting, self._writes = context, list[frames.StepFrame](), False

    async def put(self, *steps: frames.StepFrame) -> None:
        """Write `steps`; returns at once if another call is writing, which then sends them."""
        self._waiting += steps
        if self._writes:
            return
        self._writes = True
        while together := self._waiting[: frames.MOST_STEPS]:
            del self._waiting[: len(together)]
            for payload in frames.encode_steps(together):
                await self._context.write(worker_pb2.Frame(payload=payload))
        self._writes = False


class Worker(worker_pb2_grpc.WorkerServicer):
    """The worker and its reports. together: number of requests in a batch of `TOGETHER`."""

    def __init__(self, node: str, address: str, together: int) -> None:
        self.node, self.address, self._together = node, address, together
        self._finished: list[str] = []
        self._live: set[str] = set()

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        out = _Out(context)
        batch: list[str] = []
        tasks: dict[str, asyncio.Task[None]] = {}
        commands = frames.Commands()
        while (frame := await context.read()) is not grpc.aio.EOF:
            first, streamed = frames.StepFrame(), list[str]()
            for command in commands.take(frame.payload):
                if isinstance(command, str):
                    self._ended(command)
                if not isinstance(command, GenerateRequest):
                    continue
                rid, sampling = command.request_id, command.sampling
                self._live.add(rid)
                first.accepted.append(Accepted(rid, 20))
                if sampling.top_k == TOGETHER:
                    batch.append(rid)
                    if len(batch) == self._together:
                        members, batch = batch, []
                        tasks["together"] = asyncio.create_task(self._steps(members, sampling.max_tokens or 1, out))
                elif sampling.top_k != HELD and sampling.max_tokens == STREAMED:
                    streamed.append(rid)
                elif sampling.top_k != HELD:
                    first.outputs.append(Output(rid, WORD * WHOLE, [1] * WHOLE, finish_reason="length"))
                    self._ended(rid)
            if first:
                await out.put(first)
            if streamed:
                await out.put(*(self._step(streamed, last=number == STREAMED) for number in range(1, STREAMED + 1)))
        for task in tasks.values():
            task.cancel()

    async def _steps(self, members: list[str], steps: int, out: _Out) -> None:
        for number in range(1, steps + 1):
            await out.put(self._step(members, last=number == steps))

    def _step(self, members: list[str], *, last: bool) -> frames.StepFrame:
        """A frame with a token for each of `members`."""
        if last:
            for rid in members:
                self._ended(rid)
        return frames.StepFrame(
            outputs=[Output(rid, WORD, [1], finish_reason="length" if last else None) for rid in members]
        )

    def _ended(self, request_id: str) -> None:
        if request_id in self._live:
            self._live.discard(request_id)
            self._finished.append(request_id)

    async def reports(self) -> AsyncIterator[scheduler_pb2.WorkerReport]:
        """Report to the scheduler like a worker."""
        model = scheduler_pb2.ModelInfo(name=MODEL, shape=SHAPE, max_tokens=1 << 20)
        hello = scheduler_pb2.WorkerHello(node=self.node, address=self.address, models=[model], instance="1")
        yield scheduler_pb2.WorkerReport(hello=hello)
        number = 0
        while True:
            number += 1
            finished, self._finished = self._finished, []
            load = scheduler_pb2.WorkerLoad(
                running=len(self._live), outstanding_s=0.0, request_s=0.001, hbm_pages_total=100_000,
                hbm_pages_free=90_000,
                prefill_token_s=1e-6, number=number, in_flight=list(self._live), finished=finished,
            )  # fmt: skip
            yield scheduler_pb2.WorkerReport(load=load)
            await asyncio.sleep(_REPORT_S)

    async def store(self) -> AsyncIterator[scheduler_pb2.StoreReport]:
        """Report to the scheduler like a store that holds nothing."""
        yield scheduler_pb2.StoreReport(
            hello=scheduler_pb2.StoreHello(node=self.node, address="127.0.0.1:1", instance="1")
        )
        yield scheduler_pb2.StoreReport(held=scheduler_pb2.HeldSessions(full=True))
        await asyncio.Event().wait()


def _body(kind: str, **choice: Any) -> dict[str, Any]:
    made = {"index": 0, "finish_reason": None, **choice}
    return {"id": "chatcmpl-0", "object": kind, "created": 1_700_000_000, "model": MODEL, "choices": [made]}


def _whole() -> bytes:
    message = {"role": "assistant", "content": WORD * WHOLE}
    usage = {"prompt_tokens": 20, "completion_tokens": WHOLE, "total_tokens": 20 + WHOLE}
    text = json.dumps(_body("chat.completion", message=message, finish_reason="length") | {"usage": usage}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)


def _events() -> list[bytes]:
    deltas = [{"role": "assistant", "content": ""}, *[{"content": WORD}] * STREAMED]
    made = [json.dumps(_body("chat.completion.chunk", delta=delta)) for delta in deltas]
    made += [json.dumps(_body("chat.completion.chunk", delta={}, finish_reason="length")), "[DONE]"]
    events = [f"data: {text}\n\n".encode() for text in made]
    return [b"%x\r\n%s\r\n" % (len(e), e) for e in events] + [b"0\r\n\r\n"]


class Http(asyncio.Protocol):
    """Minimal HTTP/1.1 with keep-alive: reads the body by its length and looks for `stream`."""

    WHOLE, EVENTS = _whole(), _events()
    HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    def __init__(self) -> None:
        self._data = bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            body = bytes(self._data[end + 4 : end + 4 + length])
            del self._data[: end + 4 + length]
            if b'"stream":true' in body[-400:].replace(b" ", b"") or b'"stream":true' in body[:400].replace(b" ", b""):
                self._transport.write(self.HEAD)
                for event in self.EVENTS:
                    self._transport.write(event)
            else:
                self._transport.write(self.WHOLE)


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


async def serve(given: argparse.Namespace) -> None:
    """Serve until killed."""
    use_certificate(load_config(given.config), node("node-0"))
    address = f"127.0.0.1:{given.grpc_port}"
    worker = Worker("node-0", address, given.together)
    server, _ = rpc.server(address, ["upbeat.v1.Worker"])
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    await server.start()
    await asyncio.get_running_loop().create_server(Http, "127.0.0.1", given.http_port)
    async with rpc.channel(given.scheduler, SCHEDULER) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        await asyncio.gather(
            _drain(stub.WorkerReports(worker.reports(), wait_for_ready=True)),
            _drain(stub.StoreReports(worker.store(), wait_for_ready=True)),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--scheduler", required=True, help="host:port")
    parser.add_argument("--together", type=int, required=True)
    parser.add_argument("--config", type=Path, required=True)
    uvloop.run(serve(parser.parse_args()))
