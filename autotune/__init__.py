"""An automated tuner for JAX kernels on TPUs, with or without the TPU.

Importing this package loads neither jax, optuna nor pandas.
"""

__version__ = "0.1.0"
