"""The search spaces of kernels that JAX ships."""
