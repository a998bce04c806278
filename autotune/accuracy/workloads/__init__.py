"""What was timed, rebuilt: each function takes a table's row and the chip, and gives a program to compile."""

from autotune.accuracy.workloads._program import Program

__all__ = ["Program"]
