"""Where the schedulers of a configuration are, and which values stop the start."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import load_config

#: What addresses beyond loopback need.
CERTIFICATES = {"tls": {"directory": "/certs"}}


def scheduler(**said: Any) -> Config:
    return load_config(None, CERTIFICATES | {"scheduler": said})


def test_one_is_the_default_several_are_at_consecutive_ports_or_where_they_are_said_to_be() -> None:
    assert load_config().scheduler_addresses == ("127.0.0.1:8081",)
    assert scheduler(host="h", port=7000, count=3).scheduler_addresses == ("h:7000", "h:7001", "h:7002")
    config = scheduler(addresses=["a:1", "[::1]:2"], listen_host="0.0.0.0")
    assert config.scheduler_addresses == ("a:1", "[::1]:2")
    assert [config.scheduler_listen(n) for n in range(2)] == ["0.0.0.0:1", "0.0.0.0:2"]
    assert scheduler(addresses=["a:1", "[::1]:2"]).scheduler_listen(1) == "[::1]:2"


def test_addresses_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPBEAT__TLS__DIRECTORY", "/certs")
    monkeypatch.setenv("UPBEAT__SCHEDULER__ADDRESSES", '["scheduler:8081", "scheduler-1:8081"]')
    assert load_config().scheduler_addresses == ("scheduler:8081", "scheduler-1:8081")


@pytest.mark.parametrize(
    ("wrong", "key", "remedy"),
    [
        ({"count": 0}, "scheduler.count = 0", "greater"),
        ({"count": 30}, "scheduler.port with scheduler.count = 8100", "nodes.base_port"),
        ({"port": 65535, "count": 3}, "scheduler.count = 3", "lower it"),
        ({"port": 8079, "count": 3}, "gateway.port = 8080", "change it"),
        ({"addresses": ["nonsense"]}, "scheduler.addresses", "give host:port"),
        ({"addresses": ["a:0"]}, "scheduler.addresses = 'a:0'", "give a port"),
        ({"addresses": ["a:1", "a:1"]}, "scheduler.addresses = 'a:1' twice", "once"),
        ({"addresses": ["a:1", "b:1"], "count": 3}, "scheduler.count = 3", "remove one"),
        ({"addresses": ["127.0.0.1:1", "b:1"]}, "scheduler.addresses = 'b'", "tls.directory"),
        ({"host": "b"}, "scheduler.host = 'b'", "tls.directory"),
        ({"listen_host": "0.0.0.0"}, "scheduler.listen_host = '0.0.0.0'", "tls.directory"),
    ],
)
def test_a_wrong_value_stops_the_start_naming_key_value_and_remedy(
    wrong: dict[str, Any], key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as e:
        load_config(None, {"scheduler": wrong})
    assert key in str(e.value) and remedy in str(e.value)


def test_a_process_that_is_not_in_the_configuration_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"--number 1: the configuration has 1 schedulers; give a smaller number"):
        load_config().scheduler_listen(1)
