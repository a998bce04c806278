"""Single ops of a large program: what they move, what they take, and Pallas kernels compiled apart from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from autotune.chips import get_chip
from autotune.engines.compiler.schedule.core import HBM_EFFICIENCY
from autotune.engines.compiler.support import why_unsupported, worker_environment
from autotune.engines.compiler.timeline import OpTimes, parse
from autotune.engines.compiler.timeline.ops import OpTime
from autotune.engines.compiler.timeline.traffic import traffic_bytes
from tests.conftest import ROOT

V5E = get_chip("v5e")
needs_compiler = pytest.mark.skipif(why_unsupported() is not None, reason="no TPU compiler here")
MIB = 2**20
BIG = "f32[4096,64]{1,0:T(8,128)}"  # of 128 lanes, in memory: 2 MiB
IN_VMEM = "f32[4096,64]{1,0:T(8,128)S(1)}"
ROWS = "f32[8,64]{1,0:T(8,128)}"  # 4 KiB

INSIDE = f"""
%sliced (a: f32[4096,64], i: s32[]) -> f32[8,64] {{
  %a = {BIG} parameter(0)
  %i = s32[]{{:T(128)}} parameter(1)
  %flat = {BIG} bitcast(%a)
  %zero = s32[]{{:T(128)}} constant(0)
  ROOT %part = {ROWS} dynamic-slice(%flat, %i, %zero), dynamic_slice_sizes={{8,64}}
}}

%updated (b: f32[4096,64], u: f32[8,64], j: s32[]) -> f32[4096,64] {{
  %b = {BIG} parameter(0)
  %u = {ROWS} parameter(1)
  %j = s32[]{{:T(128)}} parameter(2)
  %none = s32[]{{:T(128)}} constant(0)
  ROOT %whole = {BIG} dynamic-update-slice(%b, %u, %j, %none)
}}

%outer (c: f32[4096,64], k: s32[]) -> (f32[8,64], f32[4096,64]) {{
  %c = {BIG} parameter(0)
  %k = s32[]{{:T(128)}} parameter(1)
  %inner = {ROWS} fusion(%c, %k), kind=kLoop, calls=%sliced
  %again = {BIG} broadcast(%inner), dimensions={{}}
  ROOT %both = ({ROWS}, {BIG}) tuple(%inner, %again)
}}
"""


def program(body: str):
    return parse(
        f"HloModule m, is_scheduled=true, x={{}}\n{INSIDE}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def line(text: str):
    """A program of two large arrays, in HBM and in VMEM, a number, and the line."""
    module = program(
        f"  %big = {BIG} parameter(0)\n  %near = {IN_VMEM} parameter(1)\n  %n = s32[]{{:T(128)}} parameter(2)\n"
        f"  %rows = {ROWS} parameter(3)\n  ROOT %it = {text}"
    )
    return module, module.entry["it"]


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        (f"{BIG} add(%big, %near)", 2 * 2 * MIB),  # what lies in VMEM costs nothing
        (f"{BIG} multiply(%big, %big)", 2 * 2 * MIB),  # read once
        (f"{IN_VMEM} copy(%big)", 2 * MIB),
        (f"{ROWS} fusion(%big, %n), kind=kLoop, calls=%sliced", 4096 + 4096 + 4),
        (f"{BIG} fusion(%big, %rows, %n), kind=kLoop, calls=%updated", 4096 + 4096 + 4),  # in place
        (f"{BIG} dynamic-update-slice(%big, %rows, %n, %n)", 4096 + 4096 + 4),
        (f"({ROWS}, {BIG}) fusion(%big, %n), kind=kLoop, calls=%outer", 4096 + 4096 + 2 * MIB + 4),
        ("f32[4096,128]{1,0:T(8,128)} pad(%big, %n), padding=0_0x0_64", 2 * 2 * MIB + 4),
        ("bf16[1000]{0:T(1024)(128)(2,1)} convert(%near)", 2048),
    ],
)
def test_what_an_op_moves(text, moved):
    module, one = line(text)
    assert traffic_bytes(module, module.entry, one) == moved


def cycles(count: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


def test_an_ops_time_is_xlas_estimate_or_its_traffic_whichever_is_more():
    def times(text: str, target: str = "v5e") -> OpTime:
        module, one = line(text)
        return OpTimes(module, get_chip(target), lambda call, operands: None)(one)

    moving = 4 * MIB / (819e3 * HBM_EFFICIENCY)  # µs: v5e's 819 GB/s
    product = f"{BIG} fusion(%big, %n), kind=kOutput, calls=%outer, {cycles(15_000)}"
    assert times(product).time_us == pytest.approx(10.0)  # at 1.5 GHz
    assert times(product, "v6e").time_us == pytest.approx(0.83 * 15_000 / 1.75e3)  # where XLA counts too many
    assert times(product, "v5p").time_us == pytest.approx(15_000 / 1.75e3)
    assert times(f"{BIG} negate(%big), {cycles(15_000)}").time_us == pytest.approx(moving)
    assert times(f"{BIG} negate(%big), {cycles(30_000)}").time_us == pytest.approx(10.0)  # half of what XLA counts
    unknown = times(f"{BIG} negate(%big), {cycles(2**63 - 1)}")  # how XLA says that it has no estimate
    assert (unknown.time_us, unknown.estimate) == (pytest.approx(moving), "its bytes")
    alone = times(f"{BIG} negate(%big)")
    assert (alone.time_us, alone.estimate) == (pytest.approx(moving), "its bytes")


def test_a_pallas_call_is_asked_for_with_what_it_is_given():
    module, one = line(f'{BIG} custom-call(%big, %near), custom_call_target="tpu_custom_call"')
    asked = []

    def kernel_time(call, operands):
        asked.append((call.name, [array.space for array in operands]))
        return OpTime(7.0, 7.0, 1.0)

    times = OpTimes(module, V5E, kernel_time)
    assert times(one).time_us == times(one).time_us == 7.0
    assert asked == [("it", [0, 1])]


APART = """
import json, os, sys, tempfile
os.chdir(tempfile.mkdtemp())
import jax, jax.numpy as jnp
from autotune.chips import get_chip
from autotune.engines.compiler.apart import kernel_time
from autotune.engines.compiler.timeline import parse
from autotune.engines.compiler.toolchain import compile_program, target_device
from autotune.kernel import get_kernel

kernel, chip = get_kernel("attention"), get_chip("v5e")
problem = kernel.parse_problem(sys.argv[1])
attention = kernel.bind(problem, json.loads(sys.argv[2]))
sharding = jax.sharding.SingleDeviceSharding(target_device(chip))
specs = [jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding) for spec in kernel.arguments(problem)]
program = compile_program(jax.jit(lambda q, k, v: jnp.tanh(attention(q * 2, k, v))), specs)
module = parse(program.compiled.as_text())
listed = sorted(os.listdir(program.dumps))
(call,) = [one for one in module.entry if one.target == "tpu_custom_call"]
time = kernel_time(call, [module.entry[name].arrays[0] for name in call.operands], chip)
print(json.dumps([listed, time.time_us]))
"""

ALONE = """
import json, sys
from autotune.engines._jobs import compile_config
from autotune.kernel import get_kernel
problem = get_kernel("attention").parse_problem(sys.argv[1]).to_dict()
print(json.dumps(compile_config("attention", problem, "v5e", json.loads(sys.argv[2]))))
"""


@needs_compiler
def test_a_kernel_compiled_apart_takes_what_it_takes_alone_and_nothing_else_is_listed(tmp_path):
    problem, config = "q_len=1024,kv_len=1024,heads=4,kv_heads=4,batch=1", {"block_q": 512, "block_kv": 1024}

    def child(code: str, listings: bool) -> list:
        run = subprocess.run(
            [sys.executable, "-c", code, problem, json.dumps(config)],
            env={**os.environ, **worker_environment(listings=listings), "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        return json.loads(run.stdout.splitlines()[-1])

    listed, time_us = child(APART, listings=False)
    assert listed == []
    alone = child(ALONE, listings=True)
    assert alone["source"] == "schedule"
    assert time_us == pytest.approx(1e3 * alone["time_ms"], rel=0.03)
