"""Measuring on the devices of several processes: process 0 leads the search, the others run what it says, in step."""

from __future__ import annotations

from autotune.engines.device.pod.follower import follow
from autotune.engines.device.pod.leader import Pod, lead
from autotune.engines.device.pod.place import Place

__all__ = ["Place", "Pod", "follow", "lead"]
