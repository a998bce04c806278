"""Which named activations the forward pass keeps for the backward one, and where. Loads no jax.

A config says it by a parameter ``remat_NAME`` for each of them. The input of a block (of a transformer: of a group of
layers) is kept whatever else is, on the device or the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autotune.outcome import Config

SAVE, RECOMPUTE, OFFLOAD = "save", "recompute", "offload"
BLOCK_INPUT = "block_input"
STATISTICS = "statistics"  # means and variances of a batch: next to nothing to keep, and a sum over devices to make

# What is chosen, in the order of the block: of a transformer, of a resnet (whose ``conv3`` has the shortcut's with it).
CHOSEN = ("qkv", "attention", "out_proj", "gate_up", "mlp_out")
RESNET_CHOSEN = ("conv1", "conv2", "conv3", "normed")


def choices(chosen: Sequence[str], **of: str) -> dict[str, str]:
    """The parameters ``remat_*`` that keep what is given and compute all else of `chosen` again."""
    names = {BLOCK_INPUT: of.get(BLOCK_INPUT, SAVE), **{name: of.get(name, RECOMPUTE) for name in chosen}}
    return {f"remat_{name}": choice for name, choice in names.items()}


# The usual policies, from the most that is computed again to the least.
POLICIES: dict[str, dict[str, str]] = {
    "full_offloaded": choices(CHOSEN, block_input=OFFLOAD),
    "full": choices(CHOSEN),
    "save_qkv": choices(CHOSEN, qkv=SAVE),
    "save_attention": choices(CHOSEN, qkv=SAVE, attention=SAVE),
    "attention_offloaded": choices(CHOSEN, qkv=OFFLOAD, attention=OFFLOAD),
    "save_dots_except_mlp": choices(CHOSEN, qkv=SAVE, attention=SAVE, out_proj=SAVE),
    "minimal_offloaded": choices(CHOSEN, **dict.fromkeys(CHOSEN, OFFLOAD)),
    "minimal": choices(CHOSEN, **dict.fromkeys(CHOSEN, SAVE)),
}
RESNET_POLICIES: dict[str, dict[str, str]] = {
    "full": choices(RESNET_CHOSEN),
    "save_narrow": choices(RESNET_CHOSEN, conv1=SAVE, conv2=SAVE),
    "save_convs": choices(RESNET_CHOSEN, conv1=SAVE, conv2=SAVE, conv3=SAVE),
    "minimal": choices(RESNET_CHOSEN, **dict.fromkeys(RESNET_CHOSEN, SAVE)),
}


def names_with(config: Config, choice: str) -> tuple[str, ...]:
    """The activations of which `config` chooses `choice`, in its order."""
    named = {name.removeprefix("remat_"): value for name, value in config.items() if name.startswith("remat_")}
    return tuple(name for name, value in named.items() if value == choice)


def policy(config: Config) -> Callable[..., Any]:
    """What `jax.checkpoint` takes: these names are saved, those offloaded to the host, all else is computed again."""
    import jax

    saved, offloaded = (STATISTICS, *names_with(config, SAVE)), names_with(config, OFFLOAD)
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def checkpointed(function: Callable[..., Any], config: Config, *, prevent_cse: bool = True) -> Callable[..., Any]:
    """`function` under `jax.checkpoint`, by what `config` says; as it is where that says nothing of activations."""
    import jax

    if not any(name.startswith("remat_") for name in config):
        return function
    return jax.checkpoint(function, policy=policy(config), prevent_cse=prevent_cse)
