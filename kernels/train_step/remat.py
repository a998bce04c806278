"""Which named activations the forward pass keeps for the backward one, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.outcome import Config

# In the order of the block. `block_input` is that of a whole group of layers: it is kept whatever else is.
NAMES = ("block_input", "qkv", "attention", "out_proj", "gate_up", "mlp_out")
CHOSEN = NAMES[1:]
SAVE, RECOMPUTE, OFFLOAD = "save", "recompute", "offload"


def choices(**of: str) -> dict[str, str]:
    """The parameters ``remat_*`` that keep what is given and compute all else again."""
    return {"remat_block_input": SAVE, **{f"remat_{name}": of.get(name, RECOMPUTE) for name in CHOSEN}} | (
        {"remat_block_input": of["block_input"]} if "block_input" in of else {}
    )


# The usual policies, from the most that is computed again to the least.
POLICIES: dict[str, dict[str, str]] = {
    "full_offloaded": choices(block_input=OFFLOAD),
    "full": choices(),
    "save_qkv": choices(qkv=SAVE),
    "save_attention": choices(qkv=SAVE, attention=SAVE),
    "attention_offloaded": choices(qkv=OFFLOAD, attention=OFFLOAD),
    "save_dots_except_mlp": choices(qkv=SAVE, attention=SAVE, out_proj=SAVE),
    "minimal_offloaded": choices(**dict.fromkeys(CHOSEN, OFFLOAD)),
    "minimal": choices(**dict.fromkeys(CHOSEN, SAVE)),
}


def names_with(config: Config, choice: str) -> tuple[str, ...]:
    """The activations of which `config` chooses `choice`, in the order of the block."""
    return tuple(name for name in NAMES if config.get(f"remat_{name}") == choice)


def policy(config: Config) -> Callable[..., Any]:
    """What `jax.checkpoint` takes: these names are saved, those offloaded to the host, all else is computed again."""
    import jax

    saved, offloaded = names_with(config, SAVE), names_with(config, OFFLOAD)
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
