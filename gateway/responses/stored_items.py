"""Single items of stored responses. SQLite takes lists apart, because it does not hold Python's lock meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from gateway.responses.ids import item_id, number_of, response_of

#: A response of a tenant that has not expired: `tenant`, `id`, and when its session was used at the earliest.
ALIVE = (
    "tenant = ? AND id = ? AND EXISTS (SELECT 1 FROM sessions s WHERE s.tenant = responses.tenant "
    "AND s.session = responses.session AND s.used_s >= ?)"
)
#: Responses that are looked at in one part of `StoredItems.named`.
LOOKED = 64


class TooLong(Exception):
    """What a request names of stored responses is longer than it may be."""


class StoredItems:
    """See the module. opened: the database. keep_s: as of `store.Store`."""

    def __init__(self, opened: Callable[[], sqlite3.Connection], keep_s: float) -> None:
        self._opened, self._keep_s = opened, keep_s

    def page(
        self, tenant: str, response_id: str, now_s: float, after: str | None, limit: int, *, latest_first: bool
    ) -> tuple[list[tuple[str, bytes]], bool] | None:
        """Items of the response's input after the one with this id, each with its id and as JSON, and whether there are
        more; None: no such response. Raises KeyError: `after` is none of them."""
        order, onward = ("DESC", "<=") if latest_first else ("ASC", ">=")
        # The list is parsed once: the item called `after` is read with those that follow it, to see whether it is one.
        beside = 0 if after is None else 1
        where = ""
        if after is not None:
            number = number_of(after, of_input=True)
            where = f"WHERE key {onward} {number}" if number is not None else "WHERE FALSE"
        rows = f"{where} ORDER BY key {order} LIMIT {limit + 1 + beside}"
        items = self._items(tenant, response_id, now_s, "input", rows)
        if items is None:
            return None
        if after is not None and (not items or items[0][0] != after):
            raise KeyError(after)
        return items[beside : limit + beside], len(items) > limit + beside

    def named(self, tenant: str, ids: Sequence[str], now_s: float, most_bytes: int) -> Iterator[dict[str, bytes]]:
        """Stored items as JSON by id, those that there are: a part at a time, each from a few responses. Raises TooLong
        when their responses, or all that `ids` name, are longer."""
        by_response: dict[str, set[str]] = {}
        for one in ids:
            if (response_id := response_of(one)) is not None:
                by_response.setdefault(response_id, set()).add(one)
        lengths: dict[str, int] = {}
        read, responses = 0, iter(by_response.items())
        while some := list(islice(responses, LOOKED)):
            found: dict[str, bytes] = {}
            for response_id, wanted in some:
                length = self._length(tenant, response_id)
                read += length
                if read > most_bytes:
                    raise TooLong
                places = {number_of(one, of_input=True) is not None for one in wanted} if length else ()
                for column in ("input" if of_input else "output" for of_input in places):
                    items = self._items(tenant, response_id, now_s, column) or ()
                    found |= {name: item for name, item in items if name in wanted}
            lengths |= {name: len(item) for name, item in found.items()}
            yield found
        if sum(lengths.get(one, 0) for one in ids) > most_bytes:
            raise TooLong

    def _length(self, tenant: str, response_id: str) -> int:
        """Bytes of a response's input and output; 0: no such response."""
        row = self._opened().execute(
            "SELECT length(input) + length(output) FROM responses WHERE tenant = ? AND id = ?", (tenant, response_id)
        ).fetchone()  # fmt: skip
        return int(row[0]) if row is not None else 0

    def _items(
        self, tenant: str, response_id: str, now_s: float, column: str, which: str = ""
    ) -> list[tuple[str, bytes]] | None:
        """Ids and JSON of items of "input" or "output"; None: no such response."""
        given = (tenant, response_id, now_s - self._keep_s)
        where = f"WHERE {ALIVE}"
        db = self._opened()
        if db.execute(f"SELECT 1 FROM responses {where}", given).fetchone() is None:
            return None
        text = f"(SELECT CAST({column} AS TEXT) FROM responses {where})"
        rows = db.execute(
            "SELECT key, json_extract(value, '$.type'), json_extract(value, '$.id'), value "
            f"FROM json_each({text}) {which}",
            given,
        ).fetchall()
        made = []
        for number, kind, known, item in rows:
            if column == "output":
                made.append((known, item.encode()))
            else:
                name = item_id(response_id, kind, number, of_input=True)
                made.append((name, b'{"id":"' + name.encode() + b'",' + item.encode()[1:]))
        return made
