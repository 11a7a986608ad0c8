"""What a device of a node is called: by the node's name where it is the only one, else by node and number, as in `node-0/1`.

Work is placed on devices, KV below HBM belongs to nodes: whoever has a device's name finds its node by it (docs/design/0028).
"""

from __future__ import annotations

#: Of one node.
MOST_DEVICES = 16
_BETWEEN = "/"


def device_name(node: str, device: int, devices: int) -> str:
    """The name of a node's device number `device`, from 0, of `devices`."""
    return node if devices <= 1 and not device else f"{node}{_BETWEEN}{device}"


def node_of(name: str) -> str:
    """The node of a device; of a node itself."""
    return name.partition(_BETWEEN)[0]


def number_of(name: str) -> int:
    """The device's number on its node; 0 of a node. Raises ValueError for what is the name of neither."""
    number = name.partition(_BETWEEN)[2]
    return int(number) if number else 0


def is_of(pin: str, name: str) -> bool:
    """Whether `pin`, the name of a device or of a node, means the device `name`."""
    return pin in (name, node_of(name))
