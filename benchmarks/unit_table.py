"""Which functional unit binds a config: what the bundles of its hot regions issue, beside the slots there are.

    python benchmarks/unit_table.py KERNEL [--target v5e,v6e] [--problem NAME|k=v,…] [--config k=v,…]

Compiles the config (by default the one in use: preset or heuristic) and plays its schedule. A region is a run of
bundles that ran equally often: a loop's body, or a part of one; it is named by its first bundle's address. A unit's
figure is the share of its slots that the region's operations fill, stalls and waits included; that share of the
region's cycles is the least those operations can take on this unit, however they are scheduled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from autotune import render
from autotune.chips import Chip, get_chip
from autotune.engines import _jobs
from autotune.engines._pool import WorkerPool
from autotune.engines.compiler import units
from autotune.engines.compiler.units import Region, UnitUse
from autotune.kernel import Kernel, get_kernel
from autotune.outcome import Outcome
from autotune.presets.resolve import find
from autotune.problem import Problem, parse_pairs
from autotune.space import format_config

TIMEOUT_S = 600.0
MARKDOWN_WIDTH = 200
SHORT_WAIT = 20  # cycles; delay slots that are not listed are no more
NAMES = {
    "MXU": "MXU multiplying",
    "XLU": "cross-lane (XLU)",
    "VEX": "MXU and XLU issue",
    "VALU": "VALU",
    "EUP": "transcendental (EUP)",
    "VPOP": "results popped",
    "VLOAD": "vector load",
    "VSTORE": "vector store",
    "SALU": "scalar",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel")
    parser.add_argument("--target", default="v5e", help="one or several, with commas between")
    parser.add_argument("--problem", default="")
    parser.add_argument("--config", default="", help="default: the one in use")
    parser.add_argument("--regions", type=int, default=4, help="at most so many, those that take most cycles")
    parser.add_argument("--course", action="store_true", help="also how it changes along the hottest region")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    kernel = get_kernel(options.kernel)
    problem = kernel.parse_problem(options.problem)
    failed = False
    pool = WorkerPool(1, warm_up="autotune.engines.compiler.toolchain:warm_up", environment=units.environment())
    try:
        for target in options.target.split(","):
            chip = get_chip(target)
            config, how = config_of(kernel, problem, chip, options.config)
            job = {"kernel": _jobs.kernel_path(kernel), "problem": problem.to_dict(), "target": chip.name}
            measuring = pool.submit(f"{units.__name__}:measure", {**job, "config": config}, timeout_s=TIMEOUT_S)
            found = measuring.result()
            outcome = Outcome.from_dict(found["outcome"])
            out = render.console()
            out.print(f"{kernel.name} {problem} on {chip.name}, {how}: {format_config(config)}\n", soft_wrap=True)
            if found["use"] is None:
                failed = True
                out.print(f"No schedule was played: {outcome.status.value} {outcome.message}", soft_wrap=True)
                continue
            roofline_ms = kernel.cost(problem).roofline_ms(chip)
            use = units.parse_use(found["use"])
            show(use, outcome, chip, roofline_ms, options.regions, options.markdown)
            if options.course:
                show_course(max(use.regions, key=lambda region: region.cycles), use, options.markdown)
    finally:
        pool.close()
    return 1 if failed else 0


def config_of(kernel: Kernel, problem: Problem, chip: Chip, given: str) -> tuple[dict[str, Any], str]:
    """The config and where it came from."""
    if given:
        space = kernel.space(problem, chip)
        config = space.parse(parse_pairs(given, "--config"))
        space.check(config)
        return config, "given"
    match = find(kernel, problem, chip)
    return dict(match.config), {"exact": "preset", "nearest": "nearest preset"}.get(match.how, match.how)


def show(use: UnitUse, outcome: Outcome, chip: Chip, roofline_ms: float, most: int, markdown: bool) -> None:
    out = render.console()
    hot = sorted(use.regions, key=lambda region: -region.cycles)[:most]
    hot = sorted((region for region in hot if region.cycles > 0.01 * use.cycles), key=lambda region: region.first)
    if markdown:
        out.width = MARKDOWN_WIDTH
    table = _table("region", "slots", *(_name(region, hot) for region in hot), markdown=markdown)
    table.add_row("bundles", "", *(f"{region.bundles}" for region in hot))
    table.add_row("runs", "", *(f"{region.runs}" for region in hot))
    table.add_row("cycles a run", "", *(f"{region.cycles / region.runs:.0f}" for region in hot))
    table.add_row("of all cycles", "", *(_share(region.cycles / use.cycles) for region in hot))
    for unit, name in NAMES.items():
        shares = (_share(region.occupancy(unit, use.slots)) for region in hot)
        table.add_row(name, str(use.slots[unit]), *shares)
    moves = [region.used["VLOAD"] + region.used["VSTORE"] for region in hot]
    spills = (_share(region.spilled / moved if moved else 0) for region, moved in zip(hot, moves, strict=True))
    table.add_row("spills, of loads and stores", "", *spills)
    out.print(table)
    end = "  " if markdown else ""
    for region in hot:
        out.print(f"{_name(region, hot)}: {in_words(region, use)}.{end}", soft_wrap=True)
    out.print(f"{whole_in_words(use, chip)}; roofline {render.milliseconds(roofline_ms)}.{end}", soft_wrap=True)
    whole, compute, memory = map(render.milliseconds, (outcome.time_ms, outcome.compute_ms, outcome.memory_ms))
    parts = f"of it {compute} in bundles and matrix stalls; HBM transfers alone {memory}"
    out.print(f"Whole: {whole}, {parts}.{end}", soft_wrap=True)
    out.print(f"All {render.provenance(outcome.source, chip.name)}.\n", soft_wrap=True)


def show_course(region: Region, use: UnitUse, markdown: bool) -> None:
    """Shares of the slots filled in each of the region's parts, in percent."""
    out = render.console()
    table = _table(f"{region.first:#x}, in %", *(str(place + 1) for place in range(units.PARTS)), markdown=markdown)
    table.add_row("cycles", *(f"{part['cycles']:.0f}" for part in region.course))
    for unit, name in NAMES.items():
        shares = (part[unit] / (use.slots[unit] * max(1, part["cycles"])) for part in region.course)
        table.add_row(name, *(f"{100 * share:.0f}" for share in shares))
    if markdown:
        out.width = MARKDOWN_WIDTH
    out.print(table)


def _table(*columns: str, markdown: bool) -> Table:
    made = render.table(*columns)
    if markdown:
        made.box, made.pad_edge = box.MARKDOWN, True
    return made


def in_words(region: Region, use: UnitUse) -> str:
    """Which unit bounds the region from below, and how far above that it is."""
    unit = max(NAMES, key=lambda unit: region.occupancy(unit, use.slots))
    share, cycles = region.occupancy(unit, use.slots), region.cycles / region.runs
    waits = cycles - sum(part["cycles"] for part in region.course)
    waiting = f", {waits:.0f} of them waiting for transfers" if waits > max(SHORT_WAIT, 0.05 * cycles) else ""
    return (
        f"{NAMES[unit]} is {_share(share)} full: these operations cannot take fewer than {share * cycles:.0f} cycles "
        f"a run, and take {cycles:.0f}{waiting}"
    )


def whole_in_words(use: UnitUse, chip: Chip) -> str:
    """What each unit's operations would take alone, and what the program would with every region at its bound."""
    to_ms = 1 / (chip.clock_ghz * 1e6)
    shares = [{unit: region.occupancy(unit, use.slots) for unit in NAMES} for region in use.regions]
    cycles = [region.cycles * to_ms for region in use.regions]
    least = sum(max(each.values()) * ms for each, ms in zip(shares, cycles, strict=True))
    alone = {unit: sum(each[unit] * ms for each, ms in zip(shares, cycles, strict=True)) for unit in NAMES}
    longest = sorted(NAMES, key=lambda unit: -alone[unit])[:3]
    units = ", ".join(f"{NAMES[unit]} {render.milliseconds(alone[unit])}" for unit in longest)
    return f"Alone: {units}; every region at its bound {render.milliseconds(least)}"


def _name(region: Region, shown: Sequence[Region]) -> str:
    """Its address, after the op's name where those shown are of several."""
    return f"{region.first:#x}" if len({one.op for one in shown}) == 1 else f"{region.op} {region.first:#x}"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
