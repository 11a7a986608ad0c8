"""Which transport a node uses: the one that `kv.transport` names."""

from __future__ import annotations

from kvstore.tiers.arena import Arena
from kvstore.tiers.transport import LeasedRanges, Transport
from kvstore.tiers.transport_auto import AutoTransport
from kvstore.tiers.transport_nixl import NixlTransport
from kvstore.tiers.transport_socket import SocketTransport
from runtime.places import NodePlaces
from storelink import credentials


async def start_transport(choice: str, arena: Arena, leased: LeasedRanges, agent: str, places: NodePlaces) -> Transport:
    """Start the transport of that name. agent: unique to this process. Raises RuntimeError where it does not work."""
    if choice == "auto" and credentials.own() is not None:
        choice = "socket"  # NIXL's wire is not encrypted, and whoever has its key reads the whole arena
    by_nixl = NixlTransport(arena, leased, agent)
    by_socket = SocketTransport(arena, leased, places.socket_listen, places.socket_address)
    made: dict[str, Transport] = {"nixl": by_nixl, "socket": by_socket, "auto": AutoTransport(by_nixl, by_socket)}
    transport = made[choice]
    try:
        await transport.start()
    except Exception as e:
        raise RuntimeError(
            f"kv.transport = {choice!r} does not work here: {e}; set kv.transport to auto, nixl or socket"
        ) from e
    return transport
