"""One module per kernel: its parameters, their candidates and constraints, and its registration."""
