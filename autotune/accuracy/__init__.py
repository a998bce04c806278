"""Predictions beside times that others measured on real TPUs.

`tables` says which measurements ship with the project and where each came from, `workloads` rebuilds what was
timed, `run` has every row compiled and predicted in worker processes, `statistics` compares.
"""
