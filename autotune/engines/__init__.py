"""Engines give each config an `Outcome`: by compiling it for a target, or on a device."""
