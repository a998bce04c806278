"""Pallas TPU kernels, usable by themselves: ``from kernels.attention import attention``.

One folder per kernel: ``problem`` (shapes and options), ``pallas`` (the kernel, parameterized by a
config), ``reference`` (plain JAX), ``cost`` (roofline and analytic estimate). `kernels.flax_layers` has layers on them,
`kernels.requests` what a program asks of them.
"""
