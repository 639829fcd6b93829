"""What does `--report` cost? The same steps with and without its clocks, in turn.

    python benchmarks/observers.py --json benchmarks/results/observers.json

`report_overhead` is the time of a step with the report over that without, less 1: the clock at the edges of all parts,
and the look at the machine once a second. `profile_sec` comes once in a run: the profile of one step. `span_us` is what
a named range of time costs where nobody looks, in microseconds; a step of chapter 2 has about 120. `verify_at_100` is
what `--verify_every 100` takes of training on two ranks: the time in which they add up all bits and compare the sums,
over that of a hundred steps.
"""

import json
import statistics
import sys
import tempfile
import time
import timeit
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

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


def verify_shares(rank: int, flags: list[str], store: str, folder: str) -> None:
    """Be one of two ranks; rank 0 writes the time of comparing weights and moments, over that of a hundred steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    bench = Bench(flags)
    bench.is_timed = False
    job = SimpleNamespace(config=bench.config, device=bench.device, world=World(rank, 2, rank))
    state = TrainingState(bench.model, bench.optimizer, bench.scaler)
    steps(bench)  # moments are there from the first one on
    verifier = Verifier(100)
    verifier.begin(SimpleNamespace(job=job, state=state, iteration=0, log=print))
    assert verifier.replicas == [[0, 1]]
    shares = []
    for i in range(1, PAIRS + 1):
        step = steps(bench)
        dist.barrier()
        start = time.perf_counter()
        verifier.check(i)
        shares.append((time.perf_counter() - start) / (100 * step))
    if not rank:
        Path(folder, "shares.json").write_text(json.dumps(shares))
    dist.destroy_process_group()


def verify_at_100(flags: list[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(verify_shares, (flags, f"{folder}/store", folder), nprocs=2)
        return json.loads(Path(folder, "shares.json").read_text())


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
    found = {"verify_at_100": verify_at_100(flags or SMALL)}
    join(World())
    found |= measure(Bench(flags or SMALL))
    dist.destroy_process_group()
    figures = {name: statistics.median(values) for name, values in found.items()}
    # The middle half of the pairs: single ones meet whatever else the machine does.
    low, _, high = statistics.quantiles(found["report_overhead"], n=4)
    figures |= {"report_overhead_lower_quartile": low, "report_overhead_upper_quartile": high}
    write_record(args.json, figures, {name: [min(values), max(values)] for name, values in found.items()})
    for name, value in figures.items():
        print(f"{name}: {value:.6f}")


if __name__ == "__main__":
    main()
