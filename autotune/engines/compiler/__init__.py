"""The engine that needs no TPU: the real TPU compiler, and its schedule played as the chip would run it."""
