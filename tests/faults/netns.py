"""Nodes in network namespaces of their own, joined by a router whose paths can be cut one way, slowed, and healed.

    node 0 ── ub0 ──┐
    node 1 ── ub0 ──┤ router (a namespace) ── this process
    ...             ┘

A cut is a rule of the router that drops what one node sends to another, without a word to either. This process reaches
every node always. Needs root, `ip`, and for slow links `tc`; nothing of it is visible outside but one interface and one
route.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess

#: Every node's interface, in its own namespace.
INTERFACE = "ub0"
_ROUTER_HOST, _NODE_HOST, _HERE = 1, 2, 250
_numbers = itertools.count()


class NotPermitted(RuntimeError):
    """Namespaces cannot be made here; the message says why."""


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as e:
        raise NotPermitted(f"ip {' '.join(words)}: {e.stderr.strip()}") from e


class Network:
    """`nodes` namespaces and a router. Use as a context manager; raises NotPermitted where that cannot be."""

    def __init__(self, nodes: int) -> None:
        if shutil.which("ip") is None:
            raise NotPermitted("there is no `ip` (package iproute2)")
        number = next(_numbers)
        self._tag = f"ub{os.getpid() % 100_000}-{number}"
        self._net = f"10.{64 + (os.getpid() + number * 7) % 128}"
        self._nodes = nodes
        self._here = f"ub{os.getpid() % 100_000}h{number}"
        self._cuts: set[tuple[int, int]] = set()

    @property
    def host_pattern(self) -> str:
        """`nodes.store_host` of the configuration."""
        return f"{self._net}.{{n}}.{_NODE_HOST}"

    @property
    def here(self) -> str:
        """This process's address, as nodes see it."""
        return f"{self._net}.{_HERE}.{_NODE_HOST}"

    def address(self, node: int) -> str:
        """The node's address."""
        return f"{self._net}.{node}.{_NODE_HOST}"

    def inside(self, node: int) -> list[str]:
        """What a command that runs on the node begins with."""
        return ["ip", "netns", "exec", self._name(node), "env", "UCX_TLS=tcp"]

    def _name(self, node: int) -> str:
        return f"{self._tag}-{node}"

    @property
    def _router(self) -> str:
        return f"{self._tag}-r"

    def __enter__(self) -> Network:
        try:
            _ip("netns", "add", self._router)
            subprocess.run(
                ["ip", "netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1"],
                check=True,
                capture_output=True,
            )
            for node in range(self._nodes):
                _ip("netns", "add", self._name(node))
                _ip(
                    "link",
                    "add",
                    INTERFACE,
                    "netns",
                    self._name(node),
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"n{node}",
                    "netns",
                    self._router,
                )
                self._join(["-n", self._name(node)], INTERFACE, f"n{node}", node)
                _ip("-n", self._name(node), "route", "add", "default", "via", f"{self._net}.{node}.{_ROUTER_HOST}")
            _ip("link", "add", self._here, "type", "veth", "peer", "name", "here", "netns", self._router)
            self._join([], self._here, "here", _HERE)
            _ip("route", "add", f"{self._net}.0.0/16", "via", f"{self._net}.{_HERE}.{_ROUTER_HOST}")
        except BaseException as e:
            self.close()
            if isinstance(e, (subprocess.CalledProcessError, FileNotFoundError)):
                raise NotPermitted(str(e)) from e
            raise
        return self

    def _join(self, where: list[str], interface: str, at_router: str, subnet: int) -> None:
        if where:
            _ip(*where, "link", "set", "lo", "up")
        _ip(*where, "address", "add", f"{self._net}.{subnet}.{_NODE_HOST}/24", "dev", interface)
        _ip(*where, "link", "set", interface, "up")
        _ip("-n", self._router, "address", "add", f"{self._net}.{subnet}.{_ROUTER_HOST}/24", "dev", at_router)
        _ip("-n", self._router, "link", "set", at_router, "up")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Everything of it is gone; interfaces and routes go with their namespace."""
        subprocess.run(["ip", "link", "del", self._here], capture_output=True, check=False)
        for name in (*(self._name(node) for node in range(self._nodes)), self._router):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def cut(self, sender: int, receiver: int) -> None:
        """What `sender` sends to `receiver` is lost from now on."""
        if (sender, receiver) not in self._cuts:
            self._rule("add", sender, receiver)
            self._cuts.add((sender, receiver))

    def heal(self) -> None:
        """All paths are whole, and as fast as they can be."""
        for sender, receiver in self._cuts:
            self._rule("del", sender, receiver)
        self._cuts.clear()
        for node in range(self._nodes):
            subprocess.run(
                ["tc", "-n", self._router, "qdisc", "del", "dev", f"n{node}", "root"], capture_output=True, check=False
            )

    def _rule(self, verb: str, sender: int, receiver: int) -> None:
        _ip("-n", self._router, "rule", verb, "from", self.address(sender), "to", self.address(receiver), "blackhole")

    def slow(self, receiver: int, kbit: int, delay_ms: int = 0) -> None:
        """What comes to `receiver` comes at this rate; or, where the kernel can, late by `delay_ms`. Raises
        NotPermitted."""
        shape = ["tbf", "rate", f"{kbit}kbit", "burst", "32kb", "latency", "400ms"]
        if delay_ms:
            shape = ["netem", "delay", f"{delay_ms}ms"]
        try:
            command = ["tc", "-n", self._router, "qdisc", "replace", "dev", f"n{receiver}", "root", *shape]
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as e:
            raise NotPermitted(f"tc {shape[0]}: {getattr(e, 'stderr', e)}") from e
