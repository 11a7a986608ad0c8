"""`upbeat keys`: makes API keys, and the configuration lines with their hashes. Calls no server."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Annotated

import typer

from cli.options import Json
from cli.printing import print_json
from contracts.api_keys import KEY_BYTES, hashed, new_key
from contracts.errors import ConfigError
from runtime.gateway_config import ApiKey

_Tenant = Annotated[str, typer.Option(help="The key's tenant.")]


def commands() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(name="keys", help="API keys: new, hash.", add_completion=False, rich_markup_mode=None)

    @group.command()
    def new(tenant: _Tenant = "default", as_json: Json = False) -> None:
        """Print a new key, which is not stored, and its line for the configuration."""
        key = new_key(secrets.token_bytes(KEY_BYTES))
        _show(key, tenant, as_json)

    @group.command("hash")
    def hash_key(tenant: _Tenant = "default", as_json: Json = False) -> None:
        """Read a key from standard input and print its line for the configuration."""
        _show(sys.stdin.readline().strip(), tenant, as_json, given=True)

    return group


def _show(key: str, tenant: str, as_json: bool, *, given: bool = False) -> None:
    try:
        entry = ApiKey(key=hashed(key), tenant=tenant)
    except ValueError as e:
        wrong = f"--tenant {tenant!r}: give 1 to 64 of A-Z a-z 0-9 . _ -" if "tenant" in str(e) else str(e)
        raise ConfigError(wrong) from None
    line = {"key": entry.key, "tenant": entry.tenant}
    if as_json:
        print_json(line if given else {"api_key": key, "configuration": line})
        return
    if not given:
        print(f"{key}\n\nIt is not shown again. For the configuration, under gateway.api_keys:\n")
    print(f"    - {json.dumps(line)}")
