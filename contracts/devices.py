"""Names of devices: the node's name if it has one device, else node and number, as in `node-0/1`.

Work is placed on devices, but KV below HBM belongs to nodes; a device's name contains its node's (docs/design/0028).
"""

from __future__ import annotations

#: Devices of one node.
MOST_DEVICES = 16
_BETWEEN = "/"


def device_name(node: str, device: int, devices: int) -> str:
    """The name of a node's device number `device`, from 0, of `devices`."""
    return node if devices <= 1 and not device else f"{node}{_BETWEEN}{device}"


def node_of(name: str) -> str:
    """The node of a device; a node's name is returned unchanged."""
    return name.partition(_BETWEEN)[0]


def number_of(name: str) -> int:
    """The device's number on its node; 0 for a node's name. Raises ValueError for other names."""
    number = name.partition(_BETWEEN)[2]
    return int(number) if number else 0


def is_of(pin: str, name: str) -> bool:
    """Whether `pin`, a device's or node's name, includes the device `name`."""
    return pin in (name, node_of(name))
