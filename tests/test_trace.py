"""Device times from a profiler's trace, recorded in the trace's own format."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from jax.profiler import ProfileData

from autotune.engines.device import timing
from autotune.engines.device.programs import Program
from autotune.engines.device.trace import NoDeviceEvents, device_times, read_trace

# Times in picoseconds, as a TPU's are. Two runs of one program and one of another; a second core was slower once.
RECORDED = """
planes {
  id: 1 name: "/device:TPU:0"
  lines { id: 1 name: "XLA Modules" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 12345678 }
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 12000500 }
    events { metadata_id: 2 offset_ps: 40000000 duration_ps: 700250 }
  }
  lines { id: 2 name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 3 offset_ps: 1000000 duration_ps: 11000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "jit_autotune_7(1234567890123)" } }
  event_metadata { key: 2 value { id: 2 name: "jit_autotune_12(99)" } }
  event_metadata { key: 3 value { id: 3 name: "fusion.1" } }
}
planes {
  id: 2 name: "/device:TPU:1"
  lines { id: 1 name: "XLA Modules" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 12000000 }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 13000001 }
  }
  event_metadata { key: 1 value { id: 1 name: "jit_autotune_7(1234567890123)" } }
}
planes {
  id: 3 name: "/host:CPU"
  lines { id: 1 name: "python"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 1 }
  }
  event_metadata { key: 1 value { id: 1 name: "jit_autotune_7" } }
}
"""


def test_a_recorded_trace_gives_each_run_with_its_fraction_of_a_microsecond():
    times = device_times(ProfileData.from_text_proto(RECORDED))
    assert set(times) == {"autotune_7", "autotune_12"}
    nanosecond = 1e-6  # jax's reader gives no less
    assert times["autotune_7"] == pytest.approx([12.0005e-3, 13.000001e-3], abs=nanosecond)
    assert times["autotune_12"] == pytest.approx([0.70025e-3], abs=nanosecond)


def test_a_file_is_read_as_jax_leaves_it(tmp_path: Path):
    folder = tmp_path / "plugins" / "profile" / "then"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(RECORDED))
    assert set(device_times(read_trace(tmp_path))) == {"autotune_7", "autotune_12"}
    with pytest.raises(NoDeviceEvents, match="wrote no trace"):
        read_trace(tmp_path / "plugins" / "profile" / "none")


def test_a_trace_without_a_device_falls_back_and_says_so(tmp_path: Path):
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(8)))
    if jax.default_backend() != "tpu":
        with pytest.raises(NoDeviceEvents, match="no program ran on a device"):
            device_times(read_trace(tmp_path))
        assert timing.choose_clock().name == "wall clock"


class Inputs:
    sets = ((),)


def test_a_trace_that_lost_runs_is_taken_again_and_then_refused(monkeypatch):
    """A sample made of another round's runs would still be a number."""
    program = Program("autotune_3", lambda: jax.numpy.zeros(1), Inputs(), (), 0.0, None, (), "digest", calls=2)
    found = [{"autotune_3": [1.0, 3.0, 5.0]}, {"autotune_3": [1.0, 3.0, 5.0, 7.0]}]
    monkeypatch.setattr(timing, "read_trace", lambda folder: None)
    monkeypatch.setattr(timing, "device_times", lambda profile: found.pop(0))
    assert timing.ProfilerClock().rounds([program], 2) == [[2.0, 6.0]]
    found = [{"autotune_3": [1.0, 3.0, 5.0]}] * 2
    with pytest.raises(NoDeviceEvents, match="3 of 4 runs of autotune_3"):
        timing.ProfilerClock().rounds([program], 2)


def test_in_a_race_the_call_before_a_sample_is_no_part_of_it(monkeypatch):
    one, two = (
        Program(f"autotune_{calls}", lambda: jax.numpy.zeros(1), Inputs(), (), 0.0, None, (), "digest", calls=calls)
        for calls in (1, 2)
    )
    times = {"autotune_1": [50.0, 1.0, 50.0, 2.0], "autotune_2": [50.0, 1.0, 3.0, 50.0, 5.0, 7.0]}
    monkeypatch.setattr(timing, "read_trace", lambda folder: None)
    monkeypatch.setattr(timing, "device_times", lambda profile: times)
    assert timing.ProfilerClock().rounds([one, two], 2) == [[1.0, 2.0], [2.0, 6.0]]
