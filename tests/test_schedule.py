"""The schedule player: scalar semantics, control flow and transfers, on listings written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.engines.compiler.schedule.bundles import Instruction, parse_bundles
from autotune.engines.compiler.schedule.core import Core
from autotune.engines.compiler.schedule.memory import Memory, TransferTiming
from autotune.engines.compiler.schedule.program import Program
from autotune.engines.compiler.schedule.scalar import HELPERS, Unknown, UnresolvedError, expression

CORE = Core(delay_slots=1, cycles_per_push=16)
INT32 = st.integers(-(2**31), 2**31 - 1)
SHIFT = st.integers(0, 31)

# One bundle starts a read of 1000 granules, a loop of `trips` passes takes 3 cycles each, then it waits.
LOOP = """
     0   :  {{ %s10_s0 = smov 0 /* trip */ }} /* Start region 1 */
   0x1   :  {{ %20 = dma.hbm_to_vmem [thread:$0]  %s9_s1, /*size_in_granules=*/1000, %s8_s2, [#allocation3] }}
   0x2 LB: > {{ %s11_s0 = sphi %s10_s0, %s12_s0  ;;  %v3_v0 = vadd.f32 %v1_v1, %v2_v2 }} /* Start region 2 */
   0x3   : > {{ %s12_s0 = sadd.s32 1, %s11_s0  ;;  %p13_p0 = scmp.ge.s32.totalorder %s12_s0, {trips} }}
   0x4   : > {{ %21 = sbr.rel (!%p13_p0) target = $region2 }}
   0x5   : > {{}} /* End region 2 */
   0x6   :  {{ %22 = dma.done.wait [#allocation3], 1000 }}
   0x7   :  {{ %23 = vsyncadd [#allocation3], 4294966296 }} /* exit bundle */
"""


def play(text: str, core: Core = CORE, index: int = 0) -> float:
    memory = Memory(
        TransferTiming(granule_bytes=32, pipe=0.5, write=2.0, row=3.0, read_latency=100.0, write_latency=50.0)
    )
    end, _, _ = Program(parse_bundles(text), core).play(memory, index, 0.0, lambda op, start: start)
    return end


def evaluate(opcode: str, *values: int):
    names = tuple(f"s{index}" for index in range(len(values)))
    code = expression(Instruction("s9", opcode, names))
    return eval(code, {**HELPERS, **dict(zip(names, values, strict=True))})


@given(INT32, INT32)
def test_arithmetic_is_that_of_32_bit_registers(a, b):
    ua, ub = np.uint32(a % 2**32), np.uint32(b % 2**32)
    with np.errstate(over="ignore"):
        expected = {
            "smul.u32": int((ua * ub).astype(np.int32)),
            "sand.u32": a & b,
            "sor.u32": a | b,
            "sxor.u32": a ^ b,
            "smin.s32": min(a, b),
            "smax.s32": max(a, b),
            "smin.u32": int(min(ua, ub).astype(np.int32)),
            "smax.u32": int(max(ua, ub).astype(np.int32)),
        }
    assert {opcode: evaluate(opcode, a, b) for opcode in expected} == expected


@given(INT32, SHIFT)
def test_shifts_are_those_of_32_bit_registers(a, shift):
    unsigned = np.uint32(a % 2**32)
    assert evaluate("sshll.u32", a, shift) == int((unsigned << np.uint32(shift)).astype(np.int32))
    assert evaluate("sshra.s32", a, shift) == a >> shift
    assert evaluate("sshrl.u32", a, shift) % 2**32 == int(unsigned >> np.uint32(shift))


@given(INT32, INT32)
def test_comparisons_know_signed_from_unsigned(a, b):
    ua, ub = a % 2**32, b % 2**32
    assert evaluate("scmp.lt.s32.totalorder", a, b) == (a < b)
    assert evaluate("scmp.lt.u32.totalorder", a, b) == (ua < ub)
    assert evaluate("scmp.ge.u32.totalorder", a, b) == (ua >= ub)
    assert evaluate("scmp.ne.s32.totalorder", a, b) == (a != b)


@given(INT32, st.integers(1, 2**31 - 1))
def test_division_rounds_towards_zero(a, b):
    unsigned = a % 2**32
    assert evaluate("sdiv.s32", a, b) == int(np.trunc(a / b))
    assert evaluate("srem.s32", a, b) == int(np.fmod(a, b))
    assert evaluate("sdiv.u32", a, b) % 2**32 == unsigned // b
    assert evaluate("srem.u32", a, b) == unsigned % b


@given(st.booleans(), st.booleans())
def test_predicates(p, q):
    assert evaluate("pnand", p, q) == (not (p and q))
    assert evaluate("por", p, q) == (p or q)
    assert evaluate("pneg", p) == (not p)
    assert evaluate("scalar_select", p, 3, 4) == (3 if p else 4)


@pytest.mark.parametrize("trips", [1, 2, 400])
def test_a_wait_ends_when_the_transfer_does_or_at_once(trips):
    # The read is issued at cycle 1 and takes 1000 granules x 0.5 cycles and the latency; a pass is 4 cycles.
    arrival = 1 + 500 + 100
    loop_end = 2 + 4 * trips
    assert play(LOOP.format(trips=trips)) == max(arrival, loop_end) + 2


def test_rows_of_a_strided_transfer_cost_extra():
    text = LOOP.format(trips=1).replace("[#allocation3] }", "[#allocation3], 64, 64, 2 }", 1)
    rows = 1000 * 32 / (512 * 2)
    assert play(text) == 1 + 500 + rows * 3 + 100 + 2


def test_a_write_has_a_top_rate_of_its_own():
    text = LOOP.format(trips=1).replace("dma.hbm_to_vmem", "dma.vmem_to_hbm")
    assert play(text) == 1 + 1000 * 2 + 50 + 2


def test_matrix_multiplies_stall_where_their_unit_is_busy():
    pushes = "\n".join(
        f"  {hex(address)}   :  {{ %{address} = vmatmul.bf16.gmra.mxu{address % 2} %v1_v1 }}" for address in range(1, 9)
    )
    text = f"     0   :  {{ %s1_s0 = smov 0 }}\n{pushes}\n   0x9   :  {{}}\n"
    # Four pushes on each of two units: the last one waits for the three before it.
    assert play(text) == 1 + 1 + 3 * 16 + 1 + 1


def test_a_branch_on_loaded_data_is_refused_not_guessed():
    text = LOOP.format(trips=4).replace("%s12_s0, 4 ", "%s30_s4, 4 ")
    text = text.replace("%s10_s0 = smov 0 /* trip */", "%s10_s0 = smov 0  ;;  %s30_s4 = sld [smem:[#allocation9]]")
    with pytest.raises(UnresolvedError, match="only a run would load"):
        play(text)


def test_an_instruction_not_known_here_is_named():
    text = LOOP.format(trips=4).replace("sadd.s32 1,", "sfrobnicate.s32 1,")
    with pytest.raises(UnresolvedError, match=r"sfrobnicate\.s32"):
        play(text)


@pytest.mark.parametrize("comment", ["core id", "megacore core id :: core id"])  # libtpu 0.0.42 and 0.0.50
def test_each_core_takes_its_own_way(comment):
    text = LOOP.format(trips="%s40_s5").replace(
        "%s10_s0 = smov 0 /* trip */", "%s10_s0 = smov 0  ;;  %s40_s5 = sld [smem:[#allocation0]] /* COMMENT */"
    )
    text = text.replace("scmp.ge.s32.totalorder %s12_s0, %s40_s5", "scmp.gt.s32.totalorder %s12_s0, %s40_s5")
    text = text.replace("COMMENT", comment)
    text = text.replace("1000", "1").replace("4294966296", "4294967295")
    assert play(text, index=0) < play(text, index=100)


def test_slots_that_are_listed_as_one_empty_bundle_still_take_their_cycles():
    folding = Core(delay_slots=6, cycles_per_push=8, folds_slots=True)
    assert play(LOOP.format(trips=400), folding) == 2 + 400 * (3 + 6) + 2


def test_a_branch_may_stand_in_the_slots_of_another():
    text = """
     0   :  { %p1_p0 = pmov 0  ;;  %p2_p1 = pmov 1 }
   0x1   :  { %3 = sbr.rel (%p1_p0) target = $region7 }
   0x2   :  { %4 = sbr.rel (%p2_p1) target = $region8 }
   0x3   :  {}
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   :  {} /* Start region 7 */
   0x8   :  {}
   0x9   :  {} /* Start region 8 */
"""
    # The first is not taken; the second one is, past its four slots, over bundles 7 and 8.
    assert play(text, Core(delay_slots=4, cycles_per_push=8)) == 8


def test_waiting_for_nothing_is_refused():
    with pytest.raises(UnresolvedError, match="never started"):
        play(LOOP.format(trips=1).replace("[#allocation3], 1000", "[#allocation4], 1000"))


def test_what_is_no_listing_is_refused():
    with pytest.raises(ValueError, match="no bundles"):
        parse_bundles("HloModule jit_f\n")


def test_unknown_values_stay_unknown_through_arithmetic():
    unknown = Unknown("from nowhere")
    for result in (unknown + 1, 1 - unknown, unknown * 2, unknown & 3, unknown << 1, unknown < 4, unknown == 4):
        assert isinstance(result, Unknown)
    with pytest.raises(UnresolvedError, match="from nowhere"):
        bool(unknown)
