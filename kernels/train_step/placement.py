"""How a model's arrays lie on the mesh as it is computed: XLA places the collectives by what is said here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.train_step.mesh import BATCH, DIMENSIONS, parameter_spec, without


@dataclasses.dataclass(frozen=True)
class Placement:
    """What every family of models is computed with.

    Attributes:
        dtype: Of activations and of the weights where they are multiplied.
        mesh: None where there is one device.
    """

    dtype: str
    mesh: Mesh | None = None

    def constrain(self, x: jax.Array, spec: P) -> jax.Array:
        """`x`, lying as `spec` says."""
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def sharded(self, function: Callable[..., Any], in_specs: tuple[P, ...], out_specs: Any) -> Callable[..., Any]:
        """`function` on each device's own part."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def weight(self, name: str, value: jax.Array) -> jax.Array:
        """A parameter as it is multiplied: in `dtype`, gathered over ``fsdp``; its gradient is scattered over it."""
        value = value.astype(self.dtype)
        if self.mesh is None or len(DIMENSIONS[name]) == 1:
            return value
        spec = parameter_spec(name, value.shape, self.mesh.shape)
        return _gathered(self, spec, value)

    def placed(self, name: str, value: jax.Array) -> tuple[jax.Array, P, Callable[[jax.Array], jax.Array]]:
        """The same for a `shard_map`: the weight in `dtype`, how it comes in, and what gathers it there.

        The gradient is scattered over ``fsdp`` before it is summed over other axes; of a weight that came
        in whole, XLA would sum the whole.
        """
        value = value.astype(self.dtype)
        if self.mesh is None:
            return value, P(), lambda w: w
        spec = parameter_spec(name, value.shape, self.mesh.shape)

        def gather(w: jax.Array) -> jax.Array:
            missing = {*BATCH, "sequence"} - jax.typeof(w).manual_axis_type.varying
            w = jax.lax.pcast(w, tuple(sorted(missing)), to="varying")
            for axis, entry in enumerate(spec):
                if "fsdp" in (entry or ()):
                    w = jax.lax.all_gather(w, "fsdp", axis=axis, tiled=True)
            return w

        return value, spec, gather


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(placement: Placement, spec: P, value: jax.Array) -> jax.Array:
    return placement.constrain(placement.constrain(value, spec), without(spec, "fsdp"))


def _gathered_backward(placement: Placement, spec: P, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (placement.constrain(grad, spec),)


_gathered.defvjp(lambda placement, spec, value: (_gathered(placement, spec, value), None), _gathered_backward)
