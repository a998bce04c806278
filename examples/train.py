"""Trains a small language model, byte by byte, by Flax layers on the tuned kernels with their presets.

    python examples/train.py [--steps 50] [--workdir train-run] [--text FILE ...]

The text is this repository's README and docs, some 50 kB, unless another is given. A second run goes on where the first
one stopped, as if there had been one. On a TPU the kernels run, each with the preset for its shapes; elsewhere XLA
compiles their plain-JAX references. Either way it uses one device; `train_sharded.py` uses a mesh of them.

What the model asks of the tuner, and what it would take on a chip that is not here:

    python examples/train.py --steps 0 --target v5e
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp  # Flax brings it along
from flax import nnx

from autotune import presets
from autotune.chips import Chip, get_chip
from autotune.errors import AutotuneError, UsageError
from kernels.cross_entropy import cross_entropy
from kernels.flax_layers import attention_fn
from kernels.flax_layers.nnx import GatedMLP, RMSNorm
from kernels.requests import Request, requested

ROOT = Path(__file__).resolve().parents[1]
PRESETS = Path(__file__).resolve().with_name("presets")  # tuned for this model, on a v5e and a v6e
TEXT = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
VOCAB = 256  # bytes
REPORT_EVERY = 10
SAVE_EVERY = 100


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    width: int = 128
    layers: int = 3
    heads: int = 2
    kv_heads: int = 1
    mlp: int = 384
    batch: int = 16
    length: int = 128


class Block(nnx.Module):
    """Attention and MLP, each after a norm that adds what came before it to the residual stream."""

    def __init__(self, sizes: Sizes, dtype: Any, rngs: nnx.Rngs) -> None:
        options = {"dtype": dtype, "rngs": rngs}
        self.attention_norm = RMSNorm(sizes.width, **options)
        self.attention = nnx.MultiHeadAttention(
            sizes.heads,
            sizes.width,
            num_kv_heads=sizes.kv_heads,
            use_bias=False,
            attention_fn=attention_fn(causal=True),
            decode=False,
            **options,
        )
        self.mlp_norm = RMSNorm(sizes.width, **options)
        self.mlp = GatedMLP(sizes.width, sizes.mlp, **options)

    def __call__(self, change: jax.Array, stream: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What is yet to be added to the residual stream, and that stream, ``[batch, length, width]``, to the next."""
        normed, stream = self.attention_norm(change, residual=stream)
        normed, stream = self.mlp_norm(self.attention(normed), residual=stream)
        return self.mlp(normed), stream


class LanguageModel(nnx.Module):
    """A decoder-only transformer; the embedding is its output layer as well."""

    def __init__(self, sizes: Sizes, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, sizes.width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(sizes.length, sizes.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, dtype, rngs) for _ in range(sizes.layers)])
        self.final_norm = RMSNorm(sizes.width, dtype=dtype, rngs=rngs)

    def mean_loss(self, tokens: jax.Array) -> jax.Array:
        """The mean cross-entropy (nats) of the bytes of ``[batch, length + 1]`` but the first, given those before."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        change, stream = (
            self.embed(inputs),
            jnp.broadcast_to(self.positions(jnp.arange(inputs.shape[1])), (*inputs.shape, self.embed.features)),
        )
        for block in self.blocks:
            change, stream = block(change, stream)
        hidden, _ = self.final_norm(change, residual=stream)
        table = self.embed.embedding[...].astype(hidden.dtype)
        return cross_entropy(hidden, table, labels, tied=True).mean()


def training(sizes: Sizes, dtype: Any) -> tuple[Any, Callable[..., Any]]:
    """The state before the first step, and the step: ``(state, tokens) -> (state, loss)``."""
    graph, parameters = nnx.split(LanguageModel(sizes, dtype, nnx.Rngs(0)))
    parameters = nnx.to_pure_dict(parameters)
    optimizer = optax.adamw(optax.linear_schedule(0.0, 2e-3, 20), b2=0.95, weight_decay=0.1)

    def step(state: dict[str, Any], tokens: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def mean_loss(parameters: Any) -> jax.Array:
            return nnx.merge(graph, nnx.State(parameters)).mean_loss(tokens)

        loss, gradients = jax.value_and_grad(mean_loss)(state["parameters"])
        updates, moments = optimizer.update(gradients, state["optimizer"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], updates), "optimizer": moments}, loss

    return {"parameters": parameters, "optimizer": optimizer.init(parameters)}, step


def batch_of(text: np.ndarray, sizes: Sizes, step: int) -> np.ndarray:
    """Pieces of the text, ``[batch, length + 1]`` int32, that depend on the step alone: so a second run goes on."""
    starts = np.random.default_rng(step).integers(0, len(text) - sizes.length, sizes.batch)
    return np.stack([text[start : start + sizes.length + 1] for start in starts]).astype(np.int32)


def read_text(files: list[Path], sizes: Sizes) -> np.ndarray:
    """The files' bytes, one after the other."""
    if missing := [str(file) for file in files if not file.is_file()]:
        raise UsageError(f"no such text: {', '.join(missing)}; give --text FILE")
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    if len(text) <= sizes.length:
        raise UsageError(f"a text of {len(text)} bytes: give --text with more than {sizes.length}")
    return text


def explained(request: Request, chip: Chip) -> str:
    """Which preset an instance of a kernel takes on such a chip."""
    explanation = presets.explain(request.kernel, request.problem, device_kind=chip.device_kind)
    match = explanation.match
    if match.how == "exact":
        how = f"its preset, in {match.place}"
    elif match.preset is not None:
        how = f"the nearest preset, in {match.place}"
    else:
        how = "the kernel's own config, untuned"
    lines = [f"{request.kernel} {request.problem}", how, *(f"it {words}" for words in match.stale.values())]
    if match.how != "exact":
        lines.append(f"tune it: {explanation.command}")
    return "\n    ".join(lines)


def say_presets(sizes: Sizes, target: str | None) -> None:
    """Prints what each kernel of the step takes on the attached TPU, or on another target."""
    device = jax.devices()[0]
    if device.platform != "tpu":
        print(f"{device.device_kind}: every kernel runs its plain-JAX reference, compiled by XLA; no preset is taken")
    kind = target or (device.device_kind if device.platform == "tpu" else None)
    if kind is None:
        return
    chip = get_chip(kind)
    state, step = training(sizes, jnp.bfloat16)
    with requested() as asked:
        jax.eval_shape(step, state, jax.ShapeDtypeStruct((sizes.batch, sizes.length + 1), jnp.int32))
    print(f"kernels and presets on {chip.name}:")
    for request in asked:
        print(f"  {explained(request, chip)}")


def train(options: argparse.Namespace) -> None:
    sizes = Sizes()
    text = read_text(options.text or TEXT, sizes)
    about = {**dataclasses.asdict(sizes), "text": hashlib.sha256(text.tobytes()).hexdigest()}
    say_presets(sizes, options.target)
    if not options.steps:
        return
    state, step = training(sizes, jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float32)
    jitted = jax.jit(step, donate_argnums=0)
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    # A checkpoint appears under its name when all of it is written: a run that is killed leaves the one before.
    with ocp.CheckpointManager(options.workdir.resolve(), options=keep) as checkpoints:
        first = checkpoints.latest_step() or 0
        if first:
            known = checkpoints.restore(first, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
            if known != about:
                raise UsageError(f"{options.workdir}: was begun with another text or model; give another --workdir")
            wanted = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
            state = checkpoints.restore(first, args=ocp.args.Composite(state=wanted)).state
            print(f"goes on after step {first} of {options.workdir}")
        last, began, losses = first + options.steps, time.perf_counter(), []
        for number in range(first + 1, last + 1):
            state, loss = jitted(state, batch_of(text, sizes, number))
            losses.append(loss)
            if number % REPORT_EVERY == 0 or number == last:
                print(f"step {number}: loss {np.mean(jax.device_get(losses)):.4f}", flush=True)
                losses = []
            if number % SAVE_EVERY == 0 or number == last:
                saved = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
                checkpoints.save(number, args=saved)
                checkpoints.wait_until_finished()  # The next step takes the state's memory.
    print(f"{options.steps} steps in {time.perf_counter() - began:.1f} s; kept in {options.workdir}")


def count(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError(text)
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=50, help="so many more (default: 50)")
    parser.add_argument(
        "--workdir", type=Path, default=Path("train-run"), help="of checkpoints: resumed where it has any"
    )
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="default: the README and docs here")
    parser.add_argument("--target", help="say which presets it would take on this chip, as in v5e")
    options = parser.parse_args()
    try:
        with presets.using(PRESETS) if PRESETS.is_dir() else contextlib.nullcontext():
            train(options)
    except AutotuneError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
