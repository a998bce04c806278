"""Whether the TPU compiler can be had on this machine, and what it needs to run without a TPU."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys

DUMP_FOLDER = "llo"  # relative to the worker's own directory
_DUMP_FLAGS = (
    f"--xla_jf_dump_to={DUMP_FOLDER} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
)
# Tried with libtpu 0.0.42.1 and 0.0.50.1.


def many_cpus(count: int) -> dict[str, str]:
    """What makes jax take the CPU for `count` devices; other devices do not heed it."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return {"XLA_FLAGS": flags.strip()} if count > 1 else {}


def validation_environment(cpu_devices: int = 1) -> dict[str, str]:
    """What must be set before a worker loads jax, whatever it does.

    Args:
        cpu_devices: How many devices the CPU is to pass for.
    """
    return {
        **many_cpus(cpu_devices),
        "JAX_PLATFORMS": "cpu",
        # With a single thread, Pallas' interpreter waits for itself for ever on large arrays.
        "NPROC": str(max(2, os.cpu_count() or 2)),
    }


def worker_environment(cpu_devices: int = 1, *, listings: bool = True) -> dict[str, str]:
    """What must be set before a worker loads jax and libtpu: a device is never opened, only the compiler.

    Args:
        cpu_devices: As of `validation_environment`.
        listings: Whether the compiler is to list the schedules of what it compiles, which takes it twice as long.
    """
    flags = " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), _DUMP_FLAGS if listings else ""])
    return {
        **validation_environment(cpu_devices),
        "TPU_SKIP_MDS_QUERY": "1",  # do not ask a cloud metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several workers, no lock file
        "TPU_STDERR_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached compile would leave no schedule
        "LIBTPU_INIT_ARGS": flags.strip(),
    }


def why_unsupported() -> str | None:
    """Why the TPU compiler cannot be here, in one line, without loading it; None where it should load."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        return f"libtpu exists for Linux on x86-64 only; this is {platform.system()} on {machine}"
    if "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None:
        return 'libtpu is not installed; pip install "jax[tpu]" brings it'
    return None
