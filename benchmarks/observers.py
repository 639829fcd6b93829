"""What does `--report` cost? The same steps with and without its clocks, in turn.

    python benchmarks/observers.py --json benchmarks/results/observers.json

`report_overhead` is the time of a step with the report over that without, less 1: the clock at the edges of all parts,
and the look at the machine once a second. `profile_sec` comes once in a run: the profile of one step. `span_us` is what
a named range of time costs where nobody looks, in microseconds; a step of chapter 2 has about 120. `verify_at_100` is
what `--verify_every 100` takes of training: the time of a sum of all bits, over that of a hundred steps.
"""

import statistics
import sys
import time
import timeit
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.harness.bench import Bench
from benchmarks.harness.command import parser_of
from benchmarks.harness.data import PLAIN
from benchmarks.harness.record import write_record
from utils.checkpoint.state import TrainingState
from utils.device import synchronize
from utils.measure.first_profile import use_profiler_once
from utils.measure.machine import SystemWatch
from utils.measure.step_profile import StepProfiler
from utils.ranks.start import join
from utils.ranks.world import World
from utils.run.verify import Verifier
from utils.spans import span, start_timeline, stop_timeline, tell_of_gradients

SMALL = [*PLAIN, "--local_batch_size=8", "--plot_channels=None"]
PAIRS, STEPS = 24, 20


def steps(bench: Bench) -> float:
    """Take some steps as train.py does, with all its spans; return the seconds of one."""
    synchronize(bench.device)
    start = time.perf_counter()
    for i in range(STEPS):
        with span("data wait"):
            pass
        with span(f"step {i}"):
            with span(f"data copy in {i}"):
                pass
            bench.step(*bench.batch)
            with span("optimizer"):
                bench.update(1e-4)
    synchronize(bench.device)
    return (time.perf_counter() - start) / STEPS


def verify_shares(bench: Bench) -> list[float]:
    """Return the time in which a rank adds up the bits of weights and moments, over that of a hundred steps."""
    job = SimpleNamespace(config=bench.config, device=bench.device, world=World())
    state = TrainingState(bench.model, bench.optimizer, bench.scaler)
    verifier = Verifier(100)
    verifier.begin(SimpleNamespace(job=job, state=state, iteration=0, log=print))
    verifier.replicas = [[0]]  # as on several ranks
    shares = []
    for _ in range(PAIRS):
        step = steps(bench)
        start = time.perf_counter()
        verifier.check(1)
        shares.append((time.perf_counter() - start) / (100 * step))
    return shares


def empty_span() -> None:
    with span("forward"):
        pass


def measure(bench: Bench) -> dict[str, list[float]]:
    """Return the overhead of each pair, and the seconds that profiles of a step take."""
    bench.is_timed = False
    steps(bench)
    found: dict[str, list[float]] = {"report_overhead": [], "profile_sec": []}
    for number in range(PAIRS):
        seconds = {}
        for is_on in (True, False) if number % 2 else (False, True):
            if is_on:
                clock, watch = start_timeline(bench.device, bench.model), SystemWatch(bench.device)
                hooks = tell_of_gradients(bench.model)  # as on several ranks
            seconds[is_on] = steps(bench)
            if is_on:
                clock.take()
                stop_timeline()
                watch.close()
                for hook in hooks:
                    hook.remove()
        found["report_overhead"].append(seconds[True] / seconds[False] - 1)
    found["span_us"] = [seconds * 1e6 / 10000 for seconds in timeit.repeat(empty_span, number=10000, repeat=5)]
    found["verify_at_100"] = verify_shares(bench)
    known = {"weights": list(bench.model.parameters())}
    use_profiler_once(bench.device)
    for _ in range(3):
        profiler = StepProfiler(bench.device, lambda: known, None)
        begin = time.perf_counter()
        profiler.start()
        bench.step(*bench.batch)
        bench.update(1e-4)
        profiler.stop()
        found["profile_sec"].append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = parser_of(__doc__, "train.py")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    args, flags = parser.parse_known_args()
    join(World())
    found = measure(Bench(flags or SMALL))
    torch.distributed.destroy_process_group()
    figures = {name: statistics.median(values) for name, values in found.items()}
    # The middle half of the pairs: single ones meet whatever else the machine does.
    low, _, high = statistics.quantiles(found["report_overhead"], n=4)
    figures |= {"report_overhead_lower_quartile": low, "report_overhead_upper_quartile": high}
    write_record(args.json, figures, {name: [min(values), max(values)] for name, values in found.items()})
    for name, value in figures.items():
        print(f"{name}: {value:.6f}")


if __name__ == "__main__":
    main()
