"""The schedule player: scalar semantics, control flow and transfers, on listings written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.engines.compiler.schedule.bundles import Instruction, parse_bundles
from autotune.engines.compiler.schedule.core import Core
from autotune.engines.compiler.schedule.hlo import NO_ESTIMATE, estimated_cycles, signatures
from autotune.engines.compiler.schedule.memory import Memory, TransferTiming
from autotune.engines.compiler.schedule.program import NOTHING_KNOWN, Program
from autotune.engines.compiler.schedule.scalar import HELPERS, Unknown, UnresolvedError, expression
from autotune.engines.compiler.schedule.smem import Operands, device_words
from autotune.engines.compiler.schedule.steering import PallasCall, known_operands

CORE = Core(delay_slots=1, cycles_per_push=16, cycles_per_float32_push=8)
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


def new_memory(cores: int = 2, foreign: bool = True) -> Memory:
    timing = TransferTiming(granule_bytes=32, pipe=0.5, write=2.0, row=3.0, read_latency=100.0, write_latency=50.0)
    return Memory(timing, cores=cores, foreign=foreign)


def play(
    text: str,
    core: Core = CORE,
    index: int = 0,
    operands: Operands = NOTHING_KNOWN,
    strict: bool = True,
    memory: Memory | None = None,
) -> float:
    memory = memory or new_memory()
    program = Program(parse_bundles(text), core, strict=strict)
    end, _, _ = program.play(memory, index, 0.0, lambda op, start, passed: start, operands)
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
            "smulhi.u32": ((a % 2**32) * (b % 2**32) >> 32 ^ 2**31) - 2**31,
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


@pytest.mark.parametrize(("opcode", "cycles"), [("vmatmul.mubr.bf16.gmra", 16), ("vmatmul.mubr.f32.gmra", 8)])
def test_a_register_of_32_bits_holds_half_the_rows(opcode, cycles):
    pushes = "\n".join(f"  {hex(address)}   :  {{ %{address} = {opcode}.mxu0 %v1_v1 }}" for address in range(1, 5))
    assert play(f"     0   :  {{ %s1_s0 = smov 0 }}\n{pushes}\n   0x5   :  {{}}\n") == 1 + 3 * cycles + 1 + 1


# Loops as often as the word of scalar memory says that `load` reads.
COUNTED = LOOP.replace("{trips}", "%s30_s4").replace(
    "%s10_s0 = smov 0 /* trip */", "%s10_s0 = smov 0  ;;  {before}%s30_s4 = sld [smem:[{load}]]"
)


def counted(load: str, before: str = "") -> str:
    return COUNTED.format(load=load, before=before)


def test_what_is_stored_in_scalar_memory_is_loaded_again():
    text = counted("#allocation9 + %s50_s1", "%60 = sst [smem:[#allocation9 + $0x2]] 400  ;;  %s50_s1 = smov 2  ;;  ")
    assert play(text) == play(LOOP.format(trips=400))


@pytest.mark.parametrize(
    "store",
    [
        "%60 = sst [smem:[#allocation9]] %s99_s1",  # an unknown value
        "%60 = sst [smem:[%s99_s1]] 7",  # somewhere
        "%60 = sst [smem:[#allocation9]] (%p99_p1), 7",  # perhaps
        "%60 = sst [smem:[#allocation9]] (!%p99_p1), 7",  # perhaps not
    ],
)
def test_scalar_memory_forgets_what_an_unknown_store_may_have_changed(store):
    known = "%61 = sst [smem:[#allocation9]] 400  ;;  "
    unknown = "%s99_s1 = sld [smem:[#allocation8]]  ;;  %p99_p1 = scmp.eq.s32.totalorder %s99_s1, 1  ;;  "
    assert play(counted("#allocation9", known + unknown)) == play(LOOP.format(trips=400))
    with pytest.raises(UnresolvedError, match="only a run would load"):
        play(counted("#allocation9", f"{known}{unknown}{store}  ;;  "))


PREFETCH = (
    "%s70_s1 = inlined_call_operand.vmem [shape: s32[200], index: 1, kind: input, shape index: {{}}]  ;;  "
    "%s71_s1 = sshll.u32 %s70_s1, 4  ;;  %s72_s1 = int_to_ptr.vmem [resolvable:$true] %s71_s1  ;;  "
    "%73 = dma.vmem_to_smem %s72_s1, /*size_in_granules=*/{granules}, /*smem=*/[#allocation9], [#allocation7]  ;;  "
)


def test_an_array_that_steers_the_kernel_is_read_where_it_was_brought():
    words = tuple(range(300, 556))
    text = counted("#allocation9 + $0x80", PREFETCH.format(granules=32))
    assert play(text, operands=Operands({1: words})) == play(LOOP.format(trips=300 + 0x80))
    for operands in (Operands({0: words}), Operands({}), NOTHING_KNOWN):
        with pytest.raises(UnresolvedError, match="only a run would load"):
            play(text, operands=operands)
    with pytest.raises(UnresolvedError, match="only a run would load"):  # past what was brought
        play(counted("#allocation9 + $0x80", PREFETCH.format(granules=16)), operands=Operands({1: words}))


def test_a_scalar_operand_is_known_or_unknown_but_never_zero():
    text = LOOP.format(trips="%s30_s4").replace(
        "%s10_s0 = smov 0 /* trip */",
        "%s10_s0 = smov 0  ;;  %s30_s4 = inlined_call_operand.<no memory space> "
        "[shape: s32[], index: 3, kind: input, shape index: {}] /* operand 3 */",
    )
    assert play(text, operands=Operands(scalars={3: 250})) == play(LOOP.format(trips=250))
    with pytest.raises(UnresolvedError, match="only a run would load"):
        play(text)


def test_a_selection_by_an_unknown_value_only_matters_where_it_decides():
    unknown = "%s30_s4 = sld [smem:[#allocation9]]  ;;  %p31_p4 = scmp.eq.s32.totalorder %s30_s4, 0  ;;  "
    chosen = "%s32_s5 = smov (%p31_p4, %s30_s4), 8  ;;  %s33_s5 = scalar_select %p31_p4, 1, 2"
    text = LOOP.format(trips=400).replace("%s10_s0 = smov 0 /* trip */", f"%s10_s0 = smov 0  ;;  {unknown}{chosen}")
    assert play(text) == play(LOOP.format(trips=400))
    for name in ("s32", "s33"):
        with pytest.raises(UnresolvedError, match="only a run would load"):
            play(text.replace("%s12_s0, 400 ", f"%{name}_s5, 400 "))


def test_a_branch_to_a_region_that_no_bundle_names_ends_the_op():
    text = """
     0   :  { %p1_p0 = pmov 1 }
   0x1   :  { %3 = sbr.rel (%p1_p0) target = $region7 }
   0x2   :  {}
   0x3   :  {}
   0x4   :  {} /* End region 1 */
"""
    assert play(text) == 3


def test_a_wait_for_a_sparse_core_is_counted_and_costs_nothing():
    waiting = "%s40_s1 = sld [smem:[#allocation1]]  ;;  %41 = dma.done.wait %s40_s1, 1 /* sparse-core-wait */  ;;  "
    text = LOOP.format(trips=1).replace("0x7   :  { ", f"0x7   :  {{ {waiting}")
    memory = new_memory()
    assert play(text, memory=memory) == play(LOOP.format(trips=1))
    assert memory.foreign_waits == 1


@pytest.mark.parametrize("sender", ["0", "1"])
def test_a_read_that_one_core_sends_to_all_reaches_each(sender):
    flag = (
        "%s50_s1 = sld [smem:[#allocation0]] /* core id */  ;;  %p51_p1 = scmp.eq.s32.totalorder %s50_s1, SENDER  ;;  "
        "%s52_s2 = scalar_lea.sflag [#allocation3], 0  ;;  %s53_s2 = sor.u32 24576, %s52_s2  ;;  "
        "%s54_s2 = sshll.u32 %s53_s2, 16  ;;  %s55_s2 = sor.u32 %s54_s2, %s52_s2  ;;  "
    )
    text = LOOP.format(trips=1).replace("%s10_s0 = smov 0 /* trip */", f"{flag}%s10_s0 = smov 0")
    text = text.replace("[thread:$0]", "[thread:$0] (%p51_p1),").replace("%s8_s2, [#allocation3]", "%s8_s2, %s55_s2")
    text = text.replace("SENDER", sender)
    if sender != "0":
        with pytest.raises(UnresolvedError, match="several cores"):
            play(text)
        return
    # 1000 granules are 500 cycles of the HBM, half of which each of the two bears.
    assert play(text, index=0) == play(text, index=1) == 1 + 250 + 100 + 2
    assert play(text, memory=new_memory(cores=1)) == 1 + 500 + 100 + 2


def test_at_the_top_level_a_signal_of_one_may_come_from_another_core():
    waiting = LOOP.format(trips=1).replace("[#allocation3], 1000", "[#allocation4], 1")
    memory = new_memory()
    assert play(waiting, strict=False, memory=memory) < play(LOOP.format(trips=1))
    assert memory.foreign_waits == 1
    large, own = (
        waiting.replace("allocation4], 1 ", "allocation4], 5 "),
        waiting.replace("allocation4]", "allocation3]"),
    )
    for text, options in (
        (waiting, {}),  # within an op
        (waiting, {"strict": False, "memory": new_memory(foreign=False)}),  # a chip that has no such cores
        (large, {"strict": False}),  # no signal, but a transfer
        (own.replace("1000", "0"), {"strict": False}),  # a semaphore of this core's transfers
    ):
        with pytest.raises(UnresolvedError, match="never started"):
            play(text, **options)


DTYPES = st.sampled_from(["int8", "int16", "int32"])


@given(st.integers(1, 40), st.integers(1, 300), DTYPES)
def test_words_of_a_tiled_array_lie_where_the_device_has_them(rows, columns, dtype):
    """``T(8,128)``, and for narrow types a second tile that packs neighbouring rows into words."""
    pack = 4 // np.dtype(dtype).itemsize
    layout = "{1,0:T(8,128)" + (f"({pack},1)" if pack > 1 else "") + "S(1)}"
    array = np.arange(rows * columns).reshape(rows, columns).astype(dtype)
    words = np.array([word or 0 for word in device_words(array, layout)], np.int32).view(dtype)
    across = -(-columns // 128)
    for row, column in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3)}:
        tile = (row // 8) * across + column // 128
        r, c = row % 8, column % 128
        assert words[tile * 1024 + (r // pack) * 128 * pack + c * pack + r % pack] == array[row, column]


@given(st.integers(1, 600))
def test_words_of_a_vector_lie_in_order(length):
    array = np.arange(length, dtype=np.int32)
    words = device_words(array, "{0:T(256)}")
    assert len(words) % 256 == 0
    assert words == (*range(length), *[None] * (len(words) - length))  # padding is unknown, not zero


CALL = '%{name} = f32[8,128]{{1,0}} custom-call(%sizes.{n}, %x.1), custom_call_target="tpu_custom_call", other'
HLO = "\n".join(
    [
        "  %x.1 = f32[8,128]{1,0:T(8,128)} parameter(0)",
        *(f"  %sizes.{n} = s32[3]{{0:T(128)}} copy(%sizes.0)" for n in (1, 2)),
        *(f"  {CALL.format(name=f'gmm.{n}', n=n)}" for n in (2, 1)),
    ]
)


def call(sizes: list[int] | None, dtype: str = "int32", length: int = 3) -> PallasCall:
    steering = {} if sizes is None else {0: np.array(sizes, dtype)}
    return PallasCall((((length,), dtype), ((8, 128), "float32")), steering)


def test_values_are_used_where_all_calls_of_that_shape_agree():
    for calls in ([call([1, 2, 3])], [call([1, 2, 3])] * 2, [call([1, 2, 3]), call([1, 2, 3, 4], length=4)]):
        known = known_operands(HLO, calls)
        assert known.keys() == {"gmm.1", "gmm.2"}
        assert all(operands.arrays[0][:4] == (1, 2, 3, None) for operands in known.values())


@pytest.mark.parametrize(
    "calls",
    [
        [call([1, 2, 3]), call([4, 5, 6])],  # which is which, no order tells
        [call([1, 2, 3]), call(None)],  # the other one's are not known
        [call([1, 2, 3, 4], length=4)],  # of another shape
        [],
    ],
)
def test_values_are_not_used_where_the_call_is_not_certain(calls):
    assert not any(operands.arrays for operands in known_operands(HLO, calls).values())


@pytest.mark.parametrize(
    ("element", "dtype", "words"),
    [("s32", "bool", (1, 0, 1)), ("pred", "bool", None), ("s4", "int4", None), ("s8", "int32", None)],
)
def test_values_of_another_width_than_the_devices_are_not_used(element, dtype, words):
    jax_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1, 0, 1]).astype(jax_dtypes.int4 if dtype == "int4" else dtype)
    one = PallasCall((((3,), dtype), ((8, 128), "float32")), {0: array})
    arrays = known_operands(HLO.replace("s32[3]", f"{element}[3]"), [one])["gmm.1"].arrays
    assert (arrays[0][:3] if arrays else None) == words


def test_a_branch_on_loaded_data_is_refused_not_guessed():
    text = LOOP.format(trips=4).replace("%s12_s0, 4 ", "%s30_s4, 4 ")
    text = text.replace("%s10_s0 = smov 0 /* trip */", "%s10_s0 = smov 0  ;;  %s30_s4 = sld [smem:[#allocation9]]")
    with pytest.raises(UnresolvedError, match="only a run would load"):
        play(text)


def test_a_value_from_the_vector_unit_is_unknown():
    text = LOOP.format(trips=4).replace("%s10_s0 = smov 0 /* trip */", "%s10_s0 = smov 0  ;;  %s30_s4 = vpop.sfrf %82")
    assert play(text) == play(LOOP.format(trips=4))
    with pytest.raises(UnresolvedError, match=r"vpop\.sfrf"):
        play(text.replace("%s12_s0, 4 ", "%s30_s4, 4 "))


def test_equal_looking_kernels_share_no_listing():
    line = '%k.{n} = f32[8]{{0}} custom-call(%x), custom_call_target="tpu_custom_call"'
    body = ', backend_config={{"custom_call_config":{{"body":"{text}"}}}}'
    one, same, other = ((line + body).format(n=n, text=text) for n, text in ((1, "AAA"), (2, "AAA"), (3, "BBB")))
    texts = signatures("\n".join(["%x = f32[8]{0} parameter(0)", one, same, other, line.format(n=4), line.format(n=5)]))
    assert texts["k.1"] == texts["k.2"] != texts["k.3"]
    assert texts["k.4"] != texts["k.5"]  # without their bodies nothing says that they are equal


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
    folding = Core(delay_slots=6, cycles_per_push=8, cycles_per_float32_push=5, folds_slots=True)
    assert play(LOOP.format(trips=400), folding) == 2 + 400 * (3 + 6) + 2
    # Nor is what follows a slot for ending a region that only began there.
    text = LOOP.format(trips=400).replace("1000 }", "1000 } /* Start region 3 :: End region 3 */")
    assert play(text, folding) == 2 + 400 * (3 + 6) + 2


def test_slots_within_a_loop_count_where_empty_ones_stand_before_them():
    """As v7x lists a grid's loop: empty slots, one that hands on a value, then the rest folded into one."""
    folding = Core(delay_slots=6, cycles_per_push=8, cycles_per_float32_push=5, folds_slots=True)
    text = LOOP.format(trips=400).replace("%s12_s0 = sadd", "%s14_s0 = sadd").replace("%s12_s0, 400", "%s14_s0, 400")
    bundle = "   0x5   : > {} /* End region 2 */\n"
    slots = (
        "   0x5   :  {}\n   0x6   :  {}\n   0x7   : > { %s12_s0 = smov %s14_s0 } /* End region 2 */\n   0x8   :  {}\n"
    )
    text = text.replace("0x7   :", "0xa   :").replace("0x6   :", "0x9   :").replace(bundle, slots)
    assert play(text, folding) == 2 + 400 * (3 + 6) + 2


def test_slots_go_on_past_an_empty_one_to_what_is_used_where_the_branch_leads():
    """As v7x lists a skipped start of a block: a slot of nothing, one that computes a loop's bound, then the rest."""
    text = """
     0   :  { %p1_p0 = pmov 1 }
   0x1   :  { %3 = sbr.rel (%p1_p0) target = $region4 }
   0x2   :  {}
   0x3   :  { %s5_s0 = smov 100 }
   0x4   :  {}
   0x5   :  {} /* Start region 3 */
   0x6   :  {} /* End region 3 */
   0x7   :  { %p6_p1 = scmp.eq.s32.totalorder %s5_s0, 100 } /* Start region 4 */
   0x8   :  { %7 = sbr.rel (!%p6_p1) target = $region4 }
   0x9   :  {}
   0xa   :  {}
"""
    folding = Core(delay_slots=6, cycles_per_push=8, cycles_per_float32_push=5, folds_slots=True)
    assert play(text, folding) == (2 + 6) + (2 + 6) + 1
    # On the other way bundles 5 and 6 follow; what is computed at the target itself, bundle 7, is no slot's.
    assert play(text.replace("pmov 1", "pmov 0"), folding) == (2 + 6) + 2 + (2 + 6) + 1


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
    assert play(text, Core(delay_slots=4, cycles_per_push=8, cycles_per_float32_push=5)) == 8


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
    assert (unknown & False) is (False & unknown) is False
    assert (unknown | True) is (True | unknown) is True
    assert isinstance(unknown & True, Unknown)
    assert isinstance(False | unknown, Unknown)
    with pytest.raises(UnresolvedError, match="from nowhere"):
        bool(unknown)


def test_a_program_with_an_op_that_xla_has_no_estimate_of_has_none():
    line = '%a = f32[8] add(%b, %c), backend_config={{"estimated_cycles":"{}"}}'.format
    assert estimated_cycles(f"{line(3)}\n{line(4)}") == 7
    assert estimated_cycles(f"{line(3)}\n{line(NO_ESTIMATE)}") is None
    assert estimated_cycles("%a = f32[8] add(%b, %c)") is None
