"""Imports all of `storelink` and `contracts`, and prints how many modules that are."""

from __future__ import annotations

import importlib
import pkgutil

import contracts
import storelink

names = [
    found.name
    for package in (contracts, storelink)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
for name in names:
    importlib.import_module(name)
print(len(names))
