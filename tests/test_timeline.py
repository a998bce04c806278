"""Programs of many devices: loops, collectives and what runs beside them, with times worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.chips import GIB, get_chip
from autotune.engines._refusals import classify_compile_error
from autotune.engines.compiler.schedule.scalar import UnresolvedError
from autotune.engines.compiler.timeline import Interconnect, awaited_bytes, parse, walk
from autotune.engines.compiler.timeline.collectives import replica_groups
from autotune.engines.compiler.timeline.ops import OpTime
from autotune.outcome import Status

V5E = get_chip("v5e")
LINK = 45e3 * 0.9  # bytes a microsecond, one link of v5e, one direction
MIB = 2**20


def square(side: int) -> list[tuple[int, int]]:
    return [(x, y) for y in range(side) for x in range(side)]


def links(side: int = 4) -> Interconnect:
    return Interconnect(V5E, square(side))


def op(one) -> OpTime:
    """Every op takes 100 µs, but those whose name says another number."""
    number = one.name.partition("_us")[0].rpartition(".")[2]
    took = float(number) if number.isdigit() and "_us" in one.name else 100.0
    return OpTime(took, took, 0.0)


def run(text: str, side: int = 4):
    return walk(parse(text), op, links(side))


def module(body: str, before: str = "") -> str:
    return f"HloModule m, is_scheduled=true, x={{}}\n\n{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


LOOP = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %step = s32[]{:T(128)} constant(STEP)
  %x = f32[8]{0:T(128)} get-tuple-element(%p), index=1
  %next = s32[]{:T(128)} add(%i, %step)
  %work.7_us = f32[8]{0:T(128)} fusion(%x), kind=kLoop, calls=%inner
  ROOT %out = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%next, %work.7_us)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %n = s32[]{:T(128)} constant(LIMIT)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %n), direction=LT
}

%inner (q: f32[8]) -> f32[8] {
  %q = f32[8]{0:T(128)} parameter(0)
  ROOT %neg = f32[8]{0:T(128)} negate(%q)
}
"""
CALL = """
  %p = f32[8]{0:T(128)} parameter(0)
  %zero = s32[]{:T(128)} constant(START)
  %in = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) tuple(%zero, %p)
  %loop = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%in), condition=%cond, body=%body
  ROOT %out = f32[8]{0:T(128)} get-tuple-element(%loop), index=1
"""


@given(st.integers(-5, 40), st.integers(1, 5), st.integers(-5, 60))
def test_a_loop_counts_as_often_as_it_runs(start, step, limit):
    text = module(CALL.replace("START", str(start)), LOOP.replace("STEP", str(step)).replace("LIMIT", str(limit)))
    assert run(text).total_us == pytest.approx(7.0 * max(0, math.ceil((limit - start) / step)))


def test_a_loop_whose_end_only_a_run_would_know_is_refused():
    body = CALL.replace("%zero = s32[]{:T(128)} constant(START)", "%zero = s32[]{:T(128)} custom-call(%p)")
    with pytest.raises(UnresolvedError, match="how often the loop loop runs depends on what only a run would know"):
        run(module(body, LOOP.replace("STEP", "1").replace("LIMIT", "4")))


def test_a_loop_in_a_loop_knows_what_it_was_handed():
    """The inner one's limit comes with the outer one's tuple, unchanged."""
    outer = """
%outer_body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %y = f32[8]{0:T(128)} get-tuple-element(%p.2), index=1
  %from = s32[]{:T(128)} get-tuple-element(%p.2), index=2
  %one = s32[]{:T(128)} constant(1)
  %j2 = s32[]{:T(128)} add(%j, %one)
  %in.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%from, %y)
  %loop.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%in.2), condition=%cond, body=%body
  %y2 = f32[8]{0:T(128)} get-tuple-element(%loop.2), index=1
  ROOT %out.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%j2, %y2, %from)
}

%outer_cond (p: (s32[], f32[8], s32[])) -> pred[] {
  %p.3 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %j.3 = s32[]{:T(128)} get-tuple-element(%p.3), index=0
  %three = s32[]{:T(128)} constant(3)
  ROOT %less.3 = pred[]{:T(512)} compare(%j.3, %three), direction=LT
}
"""
    entry = """
  %p = f32[8]{0:T(128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %two = s32[]{:T(128)} constant(2)
  %in = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%zero, %p, %two)
  ROOT %loop = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) while(%in), condition=%outer_cond, body=%outer_body
"""
    text = module(entry, LOOP.replace("STEP", "1").replace("LIMIT", "6") + outer)
    assert run(text).total_us == pytest.approx(3 * 4 * 7.0)


# 16 devices on an open square of 4 by 4: what all are given comes along both dimensions, one link each.
GATHERED = 16 * MIB
GATHER_US = 3 + 3 + GATHERED * 15 / 16 / (2 * LINK)
GATHER = (
    "%gather = bf16[8388608]{0:T(1024)} all-gather(%p), channel_id=1, replica_groups=[1,16]<=[16], dimensions={0}, "
    "use_global_device_ids=true"
)


def test_a_collective_that_nothing_hides_is_waited_for():
    timeline = run(module(f"  %p = bf16[524288]{{0:T(1024)}} parameter(0)\n  ROOT {GATHER}"))
    assert timeline.parts_us["collectives"] == pytest.approx(GATHER_US)
    assert timeline.total_us == pytest.approx(GATHER_US)


REDUCE = "all-reduce(%p), channel_id=1, replica_groups=[1,16]<=[16], use_global_device_ids=true, to_apply=%add"


def test_an_all_reduce_of_which_each_keeps_a_part_is_half_of_one():
    """Fused with its slice it is a reduce-scatter; followed by a slice it is not."""
    whole = 2 * GATHER_US
    apart = f"""
  %p = bf16[8388608]{{0:T(1024)}} parameter(0)
  %i = s32[]{{:T(128)}} parameter(1)
  %r = bf16[8388608]{{0:T(1024)}} {REDUCE}
  ROOT %part.0_us = bf16[524288]{{0:T(1024)}} dynamic-slice(%r, %i)
"""
    fused = """
  %p = bf16[8388608]{0:T(1024)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  ROOT %all-reduce-scatter = bf16[524288]{0:T(1024)} fusion(%p, %i), kind=kCustom, calls=%scattered
"""
    before = f"%scattered (p: bf16[8388608], i: s32[]) -> bf16[524288] {{{apart.replace('.0_us', '')}}}\n"
    assert run(module(apart)).total_us == pytest.approx(whole)
    assert run(module(fused, before)).total_us == pytest.approx(whole / 2)


@pytest.mark.parametrize(("between", "waits"), [(100, GATHER_US - 100), (1000, 0.0)])
def test_what_is_between_start_and_done_hides_a_collective(between, waits):
    text = f"""
  %p = bf16[524288]{{0:T(1024)}} parameter(0)
  %start = (bf16[524288]{{0:T(1024)}}, bf16[8388608]{{0:T(1024)}}) all-gather-start(%p), channel_id=1, GROUPS
  %work.{between}_us = f32[8]{{0:T(128)}} fusion(%p), kind=kLoop, calls=%inner
  ROOT %done = bf16[8388608]{{0:T(1024)}} all-gather-done(%start)
"""
    everyone = ",".join(map(str, range(16)))
    timeline = run(module(text.replace("GROUPS", f"replica_groups={{{{{everyone}}}}}"), LOOP))
    assert timeline.parts_us["collectives"] == pytest.approx(waits)
    assert timeline.total_us == pytest.approx(between + waits)
    assert timeline.collectives_us == pytest.approx(GATHER_US)


def test_fused_collectives_begin_and_end_where_their_marks_are():
    """libtpu's own form: a start, an op that moves it on while it computes, and a done, tied by their channel."""
    inside = GATHER.replace("%p", "%q.1").replace("%gather", "%gather.1")
    moving = inside.replace("dimensions", 'frontend_attributes={chain_id="0"}, dimensions')
    before = f"""
%start_of (q: bf16[524288]) -> bf16[8] {{
  %q.1 = bf16[524288]{{0:T(1024)}} parameter(0)
  {moving}
  ROOT %call.1 = (bf16[524288]{{0}}, u32[]{{:S(2)}}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}}

%moves (q: bf16[524288]) -> bf16[8] {{
  %q.1 = bf16[524288]{{0:T(1024)}} parameter(0)
  {moving}
  ROOT %conv = f32[8]{{0}} convolution(%q.1, %q.1)
}}

%done_of (q: bf16[524288]) -> bf16[8] {{
  %q.1 = bf16[524288]{{0:T(1024)}} parameter(0)
  {moving}
  ROOT %call.2 = bf16[8388608]{{0}} custom-call(%gather.1), custom_call_target="AsyncCollectiveDone"
}}
"""
    entry = """
  %p = bf16[524288]{0:T(1024)} parameter(0)
  %async-start = (bf16[524288]{0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%start_of
  %fused.120_us = f32[8]{0:T(128)} fusion(%p), kind=kOutput, calls=%moves
  ROOT %async-done = bf16[8388608]{0:T(1024)} fusion(%fused.120_us), kind=kCustom, calls=%done_of
"""
    timeline = run(module(entry, before))
    assert timeline.parts_us == {"compute": pytest.approx(120.0), "collectives": pytest.approx(GATHER_US - 120.0)}
    lost = entry.replace("%async-start = (bf16[524288]{0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%start_of", "")
    with pytest.raises(UnresolvedError, match="awaits a collective that was never started"):
        run(module(lost, before))


def test_copies_take_hbm_and_the_host_is_slower():
    text = """
  %p = f32[262144]{0:T(1024)} parameter(0)
  %near = (f32[262144]{0:T(1024)S(1)}, f32[262144]{0:T(1024)}, u32[]{:S(2)}) copy-start(%p)
  %near.done = f32[262144]{0:T(1024)S(1)} copy-done(%near)
  %far = (f32[262144]{0:T(1024)S(5)}, f32[262144]{0:T(1024)}, u32[]{:S(2)}) copy-start(%p)
  ROOT %far.done = f32[262144]{0:T(1024)S(5)} copy-done(%far)
"""
    parts = run(module(text)).parts_us
    assert parts["copies"] == pytest.approx(MIB / (819e3 * 0.916))
    assert parts["host"] == pytest.approx(MIB / 16e3)


def test_the_two_ways_to_the_host_are_apart_and_each_does_one_thing_at_a_time():
    away = "(f32[262144]{0:T(1024)S(5)}, f32[262144]{0:T(1024)}, u32[]{:S(2)}) copy-start(%p)"
    back = (
        "((f32[4,262144]{1,0:T(8,128)S(5)}, s32[]{:T(128)}), f32[1,262144]{1,0:T(8,128)}, u32[]{:S(2)}) "
        "dynamic-slice-start(%kept, %i)"
    )
    text = f"""
  %p = f32[262144]{{0:T(1024)}} parameter(0)
  %kept = f32[4,262144]{{1,0:T(8,128)S(5)}} parameter(1)
  %i = s32[]{{:T(128)}} parameter(2)
  %a = {away}
  %b = {back}
  %c = {away}
  %b.done = f32[1,262144]{{1,0:T(8,128)}} dynamic-slice-done(%b)
  %a.done = f32[262144]{{0:T(1024)S(5)}} copy-done(%a)
  ROOT %c.done = f32[262144]{{0:T(1024)S(5)}} copy-done(%c)
"""
    assert run(module(text)).parts_us == {"host": pytest.approx(2 * MIB / 16e3)}


def test_numbers_made_of_numbers_are_free_and_what_reads_arrays_is_not():
    text = """
  %p = f32[1024]{0:T(1024)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %j = s32[]{:T(128)} fusion(%i), kind=kLoop, calls=%inner
  %scale = f32[]{:T(128)} fusion(%i), kind=kLoop, calls=%inner
  ROOT %finite.30_us = pred[]{:T(512)} fusion(%p), kind=kLoop, calls=%inner
"""
    assert run(module(text, LOOP)).total_us == pytest.approx(30.0)


def test_a_start_of_what_is_no_transfer_is_refused():
    for opcode in ("custom-call-start", "fusion-start"):
        text = f"""
  %p = f32[1024]{{0:T(1024)}} parameter(0)
  ROOT %s = ((f32[1024]{{0}}), f32[8]{{0}}, u32[]{{:S(2)}}) {opcode}(%p), calls=%inner
"""
        with pytest.raises(UnresolvedError, match="is not understood"):
            run(module(text, LOOP))


def test_what_an_inner_loop_changes_is_not_known_to_the_outer_ones_next_pass():
    """The inner loop's counter comes back in the element it came in: ten passes in all, not ten each time."""
    outer = """
%outer_body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%p.2), index=2
  %one = s32[]{:T(128)} constant(1)
  %j2 = s32[]{:T(128)} add(%j, %one)
  %k = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %y = f32[8]{0:T(128)} get-tuple-element(%p.2), index=1
  %in.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%k, %y)
  %loop.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%in.2), condition=%cond, body=%body
  %k2 = s32[]{:T(128)} get-tuple-element(%loop.2), index=0
  %y2 = f32[8]{0:T(128)} get-tuple-element(%loop.2), index=1
  ROOT %out.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%k2, %y2, %j2)
}

%outer_cond (p: (s32[], f32[8], s32[])) -> pred[] {
  %p.3 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %j.3 = s32[]{:T(128)} get-tuple-element(%p.3), index=2
  %three = s32[]{:T(128)} constant(3)
  ROOT %less.3 = pred[]{:T(512)} compare(%j.3, %three), direction=LT
}
"""
    entry = """
  %p = f32[8]{0:T(128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %in = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%zero, %p, %zero)
  ROOT %loop = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) while(%in), condition=%outer_cond, body=%outer_body
"""
    with pytest.raises(UnresolvedError, match=r"how often the loop loop\.2 runs"):
        run(module(entry, LOOP.replace("STEP", "1").replace("LIMIT", "10") + outer))


def test_only_whole_cubes_are_joined():
    def cube(*sides: int) -> Interconnect:
        x, y, z = sides
        return Interconnect(get_chip("v4"), [(i, j, k) for k in range(z) for j in range(y) for i in range(x)])

    along = [0, 4, 8, 12]  # z of 2x2x4
    assert cube(2, 2, 4).gather_us(along, 4 * MIB) == pytest.approx(3 + 3 * MIB / LINK)
    along = [0, 16, 32, 48]  # z of 4x4x4
    assert cube(4, 4, 4).gather_us(along, 4 * MIB) == pytest.approx(2 + 3 * MIB / (2 * LINK))
    pair = Interconnect(get_chip("v7x"), [(0, 0, 0), (0, 0, 0)])
    assert pair.permute_us([(0, 1), (1, 0)], MIB) > MIB / 200e3  # two devices of one chip: not for nothing


def test_other_devices_than_a_ring_share_their_links():
    line = links(4)
    row = [0, 1, 2, 3]
    assert line.gather_us(row, 4 * MIB) == pytest.approx(3 + 3 * MIB / LINK)
    ring = Interconnect(V5E, square(16))
    assert ring.gather_us(range(16), 16 * MIB) == pytest.approx(8 + 15 * MIB / (2 * LINK))
    assert ring.permute_us([(0, 15)], MIB) == pytest.approx(1 + MIB / LINK)  # around the ring it is next
    assert line.permute_us([(0, 3)], MIB) == pytest.approx(3 + MIB / LINK)
    # All of a row to its last: three loads meet on the last link.
    assert line.permute_us([(0, 3), (1, 3), (2, 3)], MIB) == pytest.approx(3 + 3 * MIB / LINK)
    assert line.gather_us([5], MIB) == 0.0
    assert line.reduce_us(row, 4 * MIB) == pytest.approx(2 * line.gather_us(row, 4 * MIB))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=1,'c'=2] {'a','c'}", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'c'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3]]),
    ],
)
def test_groups_are_read_in_each_notation(text, groups):
    line = f"  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={text}, to_apply=%add"
    one = parse(module(f"  %p = f32[8]{{0}} parameter(0)\n{line}")).entry["r"]
    assert replica_groups(one, 4) == groups


def test_groups_in_an_unknown_notation_are_refused():
    for text in ("v9<axes>", "mesh['a'=16] {'a':(1)2}", "mesh['a'=16] {'b'}", "mesh['a'=16], device_ids=(x) {'a'}"):
        line = f"  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={text}, to_apply=%add"
        with pytest.raises(UnresolvedError, match="unknown notation"):
            run(module(f"  %p = f32[8]{{0}} parameter(0)\n{line}"))


COPIED = """
  %p = f32[256,1024]{1,0:T(8,128)} parameter(0)
  BETWEEN
  %turn.call-start = (TYPES) call-start(%p), async_execution_thread="sparsecore", to_apply=%c
  AFTER
  ROOT %turn.call-done = f32[1024,256]{1,0:T(8,128)} call-done(%turn.call-start)
"""
ALSO = "%work = f32[8]{0:T(128)} fusion(%p), kind=kLoop, calls=%c"


@pytest.mark.parametrize(
    ("before", "after", "nbytes"),
    [("", "", 2 * MIB), (ALSO, "", 2 * MIB), ("", ALSO, 0)],
    ids=["alone", "before", "beside"],
)
def test_copies_by_other_cores_count_where_nothing_is_done_beside_them(before, after, nbytes):
    types = "(f32[256,1024]{1,0:T(8,128)}, token[]), f32[1024,256]{1,0:T(8,128)}"
    text = COPIED.replace("TYPES", types).replace("BETWEEN", before).replace("AFTER", after)
    assert awaited_bytes(parse(module(text))) == nbytes


def test_lines_of_a_kernels_own_metadata_do_not_end_a_computation():
    text = """
  %p = f32[8]{0} parameter(0)
  %kernel = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": "1024",
}}, metadata={op_name="kernel"}
  ROOT %out = f32[8]{0} fusion(%kernel), kind=kLoop, calls=%c
"""
    assert [one.name for one in parse(module(text)).entry] == ["p", "kernel", "out"]


def test_a_program_that_is_not_scheduled_is_refused():
    with pytest.raises(UnresolvedError, match="not scheduled"):
        parse("HloModule m\n")


def test_a_refusal_for_memory_says_how_much_was_needed():
    text = "E1000: CompileTimeHbmOom: Ran out of memory in memory space hbm. Used 20.15G of 15.75G hbm. Exceeded by 4G."
    outcome = classify_compile_error(text)
    assert outcome.status is Status.HBM_OOM
    assert outcome.peak_bytes == int(20.15 * GIB)
    assert outcome.over_bytes == pytest.approx(4.4 * GIB, abs=2)
    text = "the total memory required for HLO temporaries (33.35G) exceeds available HBM (15.75G)."
    early = classify_compile_error(f"RESOURCE_EXHAUSTED: Ran out of memory on HBM, {text}")
    assert (early.status, early.peak_bytes) == (Status.HBM_OOM, int(33.35 * GIB))
    assert early.over_bytes == pytest.approx(17.6 * GIB, abs=2)
    vast = classify_compile_error("in memory space hbm. Used 1.20T of 15.75G hbm.")
    assert vast.over_bytes > 1000 * GIB
    rounded = classify_compile_error("in memory space hbm. Used 15.75G of 15.75G hbm. Exceeded by 3.1M")
    assert rounded.over_bytes == 1
    silent = classify_compile_error("E1000: CompileTimeHbmOom")
    assert (silent.status, silent.peak_bytes, silent.over_bytes) == (Status.HBM_OOM, None, None)
