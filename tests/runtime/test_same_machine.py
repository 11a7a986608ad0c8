"""The Unix socket between processes of one user: no other user reads through it, or answers in their place."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from runtime import same_machine


@pytest.fixture
def server():
    made = same_machine.listening()
    assert made is not None
    with made[0] as listening:
        yield listening, made[1]


def test_a_process_of_this_user_is_let_in(server):
    listening, name = server
    with same_machine.connected(name, 5.0) as connection:
        other, _ = listening.accept()
        with other:
            assert same_machine.is_own(other)
            other.sendall(b"x")
            assert connection.recv(1) == b"x"


@contextlib.contextmanager
def another_user():
    """The kernel notes the effective user of whoever connects or listens."""
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_known_for_what_it_is(server):
    listening, name = server
    with socket.socket(socket.AF_UNIX) as other_user:
        with another_user():
            other_user.connect("\0" + name)
        other, _ = listening.accept()
        with other:
            assert not same_machine.is_own(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_nothing_is_asked_of_another_users_socket():
    with another_user():
        listening, name = same_machine.listening()
    with listening:
        assert same_machine.connected(name, 5.0) is None
        other, _ = listening.accept()
        with other:
            assert other.recv(1) == b"", "it learned nothing"


@pytest.mark.parametrize("name", ["", "nobody", "x" * 500, "é"])
def test_a_name_that_nobody_has_is_no_connection(name):
    assert same_machine.connected(name, 5.0) is None


def test_it_is_gone_with_its_socket(server):
    listening, name = server
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    assert same_machine.connected(name, 5.0) is None
