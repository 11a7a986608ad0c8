"""Granules that a child process shows too: the same memory, by handles that go over a Unix socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.worker.owners import KV
from tests.worker.virtual_memory import HostVirtualMemory
from worker.core.granules import GranuleMisuse
from worker.memory.cuda_memory import CudaWindow, cuda_memory
from worker.memory.device_memory import DeviceMemory, host_memory
from worker.memory.exports import Exported, HostWindow, receive, send
from worker.memory.tensors import tensor_at

G = 16 << 10
#: Adds one to every byte of what it is sent, and says so; in a process of its own.
CHILD = """
import socket, sys
import numpy as np
from worker.memory.exports import HostWindow, receive
from worker.memory.tensors import bytes_at

us = socket.socket(fileno=int(sys.argv[1]))
exported = receive(us)
window = HostWindow(exported)
exported.close()
bytes_at(window.address, window.bytes)[:] += 1
us.sendall(b"done")
us.recv(1)
window.close()
"""


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    made = host_memory(16 * G, G)
    yield made
    made.validate()
    made.close()


def test_a_child_process_shows_and_writes_the_same_granules_and_no_others(memory: DeviceMemory) -> None:
    span = memory.reserve(8 * G, KV)
    span.map(0, memory.take(8, KV))
    shown = tensor_at(span.address, torch.uint8, [8, G])
    shown.copy_(torch.arange(8).view(8, 1).expand(8, G))
    granules = dict(span.mapped())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        exported = memory.export([granules[5], granules[2]])
        send(ours, exported)
        exported.close()
        assert ours.recv(4) == b"done"
        assert shown[:, 0].tolist() == [0, 1, 3, 3, 4, 6, 6, 7], "granules 2 and 5 have one more"
        assert (shown == shown[:, :1]).all()
        shown[2] = 50
        ours.sendall(b"x")
        assert child.wait(30) == 0
    assert (shown[2] == 50).all()


def test_what_the_worker_drops_stays_with_a_child_that_does_not_see_the_next_owners_bytes_through_cuda_s_handles() -> (
    None
):
    memory = cuda_memory(HostVirtualMemory(), 4 * G, G, torch.device("cpu"))
    span = memory.reserve(4 * G, KV)
    span.map(0, memory.take(1, KV))
    tensor_at(span.address, torch.uint8, [G])[:] = 4
    exported = memory.export([granule for _, granule in span.mapped()])
    other = HostVirtualMemory()
    window = CudaWindow(other, exported)
    exported.close()
    there = tensor_at(window.address, torch.uint8, [G])
    assert (there == 4).all()
    there[:10] = 6
    assert (tensor_at(span.address, torch.uint8, [10]) == 6).all()
    memory.give(span.unmap(0, 1))
    span.map(0, memory.take(1, KV))
    tensor_at(span.address, torch.uint8, [G])[:] = 8
    assert (there[10:] == 4).all()
    window.close()
    assert not other.mapped and not other.sizes and not other.ranges
    memory.close()


def test_hundreds_of_handles_come_whole_and_a_sender_that_ends_early_is_noticed() -> None:
    memory = cuda_memory(HostVirtualMemory(), 450 * 4096, 4096, torch.device("cpu"))
    exported = memory.export(memory.take(450, KV))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, exported)
        got = receive(theirs)
        assert len(got.files) == 450 and got.places == exported.places
        assert [os.fstat(file).st_ino for file in got.files] == [os.fstat(file).st_ino for file in exported.files]
        got.close()
        send(ours, Exported(4096, exported.files[:1], ()))
        assert len(receive(theirs).files) == 1
        ours.sendall(b"only half of a head")
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="ended before"):
            receive(theirs)
    exported.close()
    memory.close()


def test_a_granule_without_an_owner_is_not_exported(memory: DeviceMemory) -> None:
    [granule] = memory.take(1, KV)
    memory.give([granule])
    with pytest.raises(GranuleMisuse, match="nobody's"):
        memory.export([granule])


def test_a_window_over_granules_that_were_never_shown_is_zero(memory: DeviceMemory) -> None:
    exported = memory.export(memory.take(2, KV))
    window = HostWindow(exported)
    exported.close()
    assert not tensor_at(window.address, torch.uint8, [2 * G]).any()
    window.close()
