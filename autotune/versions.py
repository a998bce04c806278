"""Which compiler made a time: the installed versions of what decides it."""

from __future__ import annotations

import importlib.metadata

DECIDING = ("jax", "jaxlib", "libtpu")


def installed() -> dict[str, str]:
    """Package to version; what is not installed is left out."""
    found = {}
    for package in DECIDING:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
