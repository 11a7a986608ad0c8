"""Which Host headers and which pages are served, with and without keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError
from gateway.core.hosts import Hosts
from runtime.config_file import load_config

OURS = [
    "localhost",
    "LocalHost:8080",
    "localhost.",
    "localhost.:8080",
    "localhost:",
    "127.0.0.1",
    "127.0.0.1:9000",
    "127.8.8.8",
    "[::1]",
    "[::1]:8080",
    "[0:0:0:0:0:0:0:1]:8080",
    "[::ffff:127.0.0.1]:8080",
]
FOREIGN = [
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "evil.example.localhost",
    "notlocalhost",
    "localhost..",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:8080",
    "0.0.0.0:8080",
    "[::]:8080",
    "10.0.0.7",
    "127.1",
    "2130706433",
    "0x7f000001",
    "::1",
    "[::1",
    "[::1%25lo]:8080",
    "user@localhost",
    "localhost@evil.example",
    "localhost:8080:evil",
    "localhost:x",
    "localhost/",
    "localhost, evil.example",
    " localhost",
    "localhost\n",
    "lócalhost",
    "",
]


@pytest.mark.parametrize("host", OURS)
def test_loopback_is_served_by_any_of_its_names_and_at_any_port(host: str) -> None:
    assert Hosts("127.0.0.1", (), (), has_keys=False).knows(host)


@pytest.mark.parametrize("host", FOREIGN)
def test_any_other_name_is_foreign(host: str) -> None:
    assert not Hosts("127.0.0.1", (), (), has_keys=False).knows(host)


def test_what_is_configured_is_served_too_and_a_star_stands_for_names_below() -> None:
    hosts = Hosts("10.0.0.7", ["Chat.Example.org", "*.apps.example", "[fd00::7]"], (), has_keys=True)
    served = [
        "10.0.0.7:80",
        "chat.example.org.",
        "CHAT.example.ORG:443",
        "a.apps.example",
        "b.a.apps.example",
        "[fd00:0::7]:8080",
    ]
    assert all(map(hosts.knows, served))
    assert not any(
        map(
            hosts.knows, ["example.org", "a.chat.example.org", "apps.example", "xapps.example", "10.0.0.8", "[fd00::8]"]
        )
    )


def test_listening_everywhere_names_nobody() -> None:
    assert not Hosts("0.0.0.0", (), (), has_keys=True).knows("0.0.0.0") and not Hosts(
        "::", (), (), has_keys=True
    ).knows("[::]")


def test_names_are_looked_at_without_keys_and_where_some_are_listed() -> None:
    assert [
        (hosts.checks_names, hosts.checks_pages)
        for hosts in (Hosts("h", names, (), has_keys=keys) for keys in (False, True) for names in ((), ("a",)))
    ] == [(True, True), (True, True), (False, False), (True, False)]


@pytest.mark.parametrize(
    ("origin", "site", "trusted"),
    [
        (None, None, True),
        (None, "none", True),
        (None, "same-origin", True),
        (None, "same-site", True),
        (None, "cross-site", False),
        ("http://localhost:3000", "same-site", True),
        ("http://127.0.0.1:3000", "cross-site", True),
        ("http://[::1]:3000", None, True),
        ("https://chat.example.org", "cross-site", True),
        ("https://evil.example", "cross-site", False),
        ("https://evil.example", None, False),
        ("https://evil.example", "same-origin", False),
        ("http://localhost.evil.example", None, False),
        ("http://localhost@evil.example", None, False),
        ("null", None, False),
        ("null", "same-origin", False),
        ("file://", None, False),
        ("chrome-extension://abcdef", None, False),
        ("", None, False),
    ],
)
def test_without_keys_only_pages_of_this_machine_and_of_configured_origins_are_trusted(
    origin: str | None, site: str | None, trusted: bool
) -> None:
    assert Hosts("127.0.0.1", (), ["https://chat.example.org"], has_keys=False).trusts(origin, site) is trusted


def test_all_pages_are_trusted_where_the_operator_says_so() -> None:
    assert Hosts("127.0.0.1", (), ["*"], has_keys=False).trusts("https://evil.example", "cross-site")


@given(st.text(alphabet="localhost127.0:[]@/\\%.evil \t", max_size=24))
def test_what_is_served_is_a_loopback_name_and_nothing_but_a_port_and_a_dot(host: str) -> None:
    if Hosts("127.0.0.1", (), (), has_keys=False).knows(host):
        name = host.lower().rpartition(":")[0] if ":" in host and not host.endswith("]") else host.lower()
        assert name.removesuffix(".") == "localhost" or name.startswith(("127.", "[")), host


@pytest.mark.parametrize(
    "host", ["chat.example.org:8080", "http://chat.example.org", "*", "a*.example.org", "", "a b", "fd00::7"]
)
def test_a_host_that_is_none_stops_the_start(host: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.hosts.*chat\.example\.org"):
        load_config(None, {"gateway": {"hosts": [host]}})
