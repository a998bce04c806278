"""From the compiler's final VLIW bundles to a time: the schedule is played, not estimated.

`bundles` reads a listing, `program` compiles its scalar instructions to Python, `memory` and `mxu` say
how long transfers and matrix multiplies take, `smem` and `steering` what is known of the scalar memory,
`module` plays the whole program on a chip.
"""

from autotune.engines.compiler.schedule.hlo import estimated_cycles
from autotune.engines.compiler.schedule.module import Timing, play_module, play_op, read_dumps
from autotune.engines.compiler.schedule.scalar import UnresolvedError
from autotune.engines.compiler.schedule.steering import PallasCall

__all__ = ["PallasCall", "Timing", "UnresolvedError", "estimated_cycles", "play_module", "play_op", "read_dumps"]
