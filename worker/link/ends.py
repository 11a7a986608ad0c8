"""The worker's end of the link to its store: forwards messages to the engine's inbox and the loader."""

from __future__ import annotations

from collections.abc import Callable

from contracts.kv import KvShape
from storelink.ends import End
from worker.core.events import StoreDown, StoreUp
from worker.link.loads import FromStore


def end_of(shape: KvShape, to_engine: Callable[[object], None], to_loader: Callable[[object], None]) -> End:
    """The end for one model. to_engine: called with StoreUp, StoreDown and FromStore. to_loader: see `End.move`."""
    return End(
        shape,
        attached=lambda here: to_engine(StoreUp() if here else StoreDown()),
        hear=lambda message: to_engine(FromStore(message)),
        move=to_loader,
    )
