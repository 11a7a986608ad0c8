"""`upbeat keys`: new API keys, and what the configuration holds instead of them. Asks no server: keys live in the configuration."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from contracts.api_keys import KEY_BYTES, hashed, new_key
from contracts.errors import ConfigError
from runtime.gateway_config import ApiKey

_Tenant = Annotated[str, typer.Option(help="Whose key it is.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def commands(print_json: Callable[[Any], None]) -> typer.Typer:
    """The group of commands; `print_json`: how the program prints."""
    group = typer.Typer(name="keys", help="API keys: new, hash.", add_completion=False, rich_markup_mode=None)

    @group.command()
    def new(tenant: _Tenant = "default", as_json: _Json = False) -> None:
        """Print a new key, which is kept nowhere, and the line that lets the gateway know it."""
        key = new_key(secrets.token_bytes(KEY_BYTES))
        _tell(key, tenant, as_json, print_json)

    @group.command("hash")
    def hash_key(tenant: _Tenant = "default", as_json: _Json = False) -> None:
        """Read a key from standard input and print the line that lets the gateway know it."""
        _tell(sys.stdin.readline().strip(), tenant, as_json, print_json, given=True)

    return group


def _tell(key: str, tenant: str, as_json: bool, print_json: Callable[[Any], None], *, given: bool = False) -> None:
    try:
        entry = ApiKey(key=hashed(key), tenant=tenant)
    except ValueError as e:
        wrong = f"--tenant {tenant!r}: give 1 to 64 of A-Z a-z 0-9 . _ -" if "tenant" in str(e) else str(e)
        raise ConfigError(wrong) from None
    said = {"key": entry.key, "tenant": entry.tenant}
    if as_json:
        print_json(said if given else {"api_key": key, "configuration": said})
        return
    if not given:
        print(f"{key}\n\nIt is not shown again. For the configuration, under gateway.api_keys:\n")
    print(f"    - {json.dumps(said)}")
