"""One process of a pod: ``python -m tests.pod_child PROCESS_ID PORT TIMEOUT_S DEED…``: process 0 writes a line each."""

from __future__ import annotations

import json
import sys

from autotune.chips import get_chip
from autotune.engines import Task
from autotune.engines.device.engine import open_device_engine
from autotune.engines.device.pod import Place, follow, lead
from autotune.errors import AutotuneError
from tests.pod_kernels import MeetKernel, MeetProblem


def main(number: str, port: str, timeout_s: str, *deeds: str) -> int:
    place = Place("localhost", int(port), 2, int(number))
    try:
        if place.process_id:
            print(follow(place, lambda line: print(line, file=sys.stderr)))
            return 0
        problem = MeetProblem()
        task = Task(MeetKernel(), problem, get_chip("cpu"))
        with (
            lead(place, problem.devices, lambda line: print(line, file=sys.stderr)) as pod,
            open_device_engine(task, jobs=1, timeout_s=float(timeout_s), pod=pod) as engine,
        ):
            for deed in deeds:
                outcome = engine.evaluate({"deed": deed}).result()
                print(json.dumps({"deed": deed, **outcome.to_dict()}), flush=True)
        return 0
    except AutotuneError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
