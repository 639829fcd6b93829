"""Predict, then measure: what does a flag bring on this machine? You say a number first, then it is found out.

    python exercises/quiz.py                            all questions, about five minutes on two cores: make quiz
    python exercises/quiz.py bf16 checkpoint            some of them
    python exercises/quiz.py bf16 --answers 1.8         where nobody can type

What was said and what was found goes to runs/quiz.jsonl, a line a question. Speeds are of the section demo (make demo
makes its data), each the median of three pairs of runs; memory is computed, of the section mp.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness.call import end_on_signals  # noqa: E402
from benchmarks.harness.command import errors_in_one_line  # noqa: E402
from benchmarks.harness.record import device_name  # noqa: E402
from benchmarks.ladder import run  # noqa: E402
from benchmarks.planner.trace import trace  # noqa: E402
from benchmarks.rungs.rungs import PLAIN, Rung  # noqa: E402
from utils.config.reader import load_config  # noqa: E402
from utils.data.dataset import WeatherData  # noqa: E402

FLAGS = ["--config=demo"]
ROUNDS, ITERATIONS, LIMIT = 3, 20, 600  # LIMIT: seconds of a run
CLOSE = 0.1  # who is off by less was right


@dataclass(frozen=True)
class Question:
    """What is asked, how the answer is found (a value for each round), and where the reason stands."""

    asks: str
    find: Callable[[], list[float]]
    why: str


def training_samples() -> int:
    """Return how many there are."""
    return len(WeatherData(load_config(FLAGS)[0].with_batches(1)).train_pairs)


def speeds(flags: tuple[str, ...], ranks: int = 1) -> list[float]:
    """Return how many times the samples per second of the plain run each of some rounds has."""
    batch = load_config(FLAGS)[0].global_batch_size
    rungs = Rung("quiz", "plain", PLAIN, batch), Rung("quiz", "asked", (*PLAIN, *flags), batch * ranks, ranks=ranks)
    samples, ratios = training_samples(), []
    for _ in range(ROUNDS):
        found = []
        for rung in rungs:
            with tempfile.TemporaryDirectory() as folder:
                result = run(rung, FLAGS, ITERATIONS, samples, Path(folder), LIMIT)
            if "samples_per_sec" not in result:
                raise ValueError(f"{' '.join(rung.flags)} does not run here: {', '.join(map(str, result.values()))}")
            found.append(result["samples_per_sec"])
        ratios.append(found[1] / found[0])
    return ratios


def sizes(*flags: str) -> list[float]:
    """Return the share of the memory of one rank that a rank needs with these flags, at the peak."""
    whole, part = (trace(1, ["--config=mp", "--local_batch_size=1", *more]).summary()["peak"] for more in ((), flags))
    return [part / whole]


QUESTIONS = {
    "bf16": Question(
        "bfloat16 in place of float32: how many times the samples per second?", partial(speeds, ("--amp_mode=bf16",)),
        "docs/1-one-device.md, mixed precision: products are faster where the processor has them; the rest is not",
    ),
    "checkpoint": Question(
        "each block computed again in the backward pass: how many times the speed without?",
        partial(speeds, ("--activation_checkpoint=block",)),
        "docs/1-one-device.md, less memory: a step is one forward and two of its kind backward; one more makes four",
    ),
    "compile": Question(
        "compiled blocks: how many times the speed without?", partial(speeds, ("--enable_jit",)),
        "docs/1-one-device.md, fewer and larger kernels: what lies between products is fused, they stay as they are",
    ),
    "dp2": Question(
        "two data parallel ranks, each with the batch of one: how many times the speed of one?",
        partial(speeds, (), ranks=2),
        "docs/1-one-device.md, data parallelism: twice the work is done; here both ranks share the cores of one",
    ),
    "tp2": Question(
        "tensor parallelism over 2 ranks (section mp, one sample): what share of one rank's memory does each need?",
        partial(sizes, "--tensor_parallel=2"),
        "docs/2-model-parallel.md, what each rank holds: weights are halved, and between them tokens; a little is not",
    ),
    "cp4": Question(
        "context parallelism over 4 ranks (section mp, one sample): what share of one rank's memory does each need?",
        partial(sizes, "--context_parallel=4"),
        "docs/2-model-parallel.md, what each rank holds: tokens are shared, weights and moments are not",
    ),
}  # fmt: skip


def answer_of(text: str) -> float:
    """Return the number that somebody said. Raises ValueError where it is none above 0."""
    try:
        number = float(text.strip().rstrip("x").replace(",", "."))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{text.strip()!r} is no number above 0: say one, such as 1.5")
    return number


def asked(question: Question) -> float:
    """Ask until there is a number."""
    while True:
        try:
            return answer_of(input(f"\n{question.asks}\n  your prediction: "))
        except EOFError:
            raise ValueError("nobody answers: give --answers, a number for each question") from None
        except ValueError as error:
            print(f"  {error}")


def verdict(said: float, found: list[float]) -> str:
    """Return how near a prediction came."""
    middle = statistics.median(found)
    if min(found) <= said <= max(found) or abs(said / middle - 1) <= CLOSE:
        return "right, as far as can be told"
    return f"{max(said / middle, middle / said):.1f} times too {'large' if said > middle else 'small'}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="question", help=f"default: {' '.join(QUESTIONS)}")
    parser.add_argument("--answers", nargs="+", help="predictions, one for each question, in place of asking")
    parser.add_argument("--json", type=Path, default=ROOT / "runs/quiz.jsonl", help="file that gets a line a question")
    args = parser.parse_intermixed_args(argv)
    if unknown := [name for name in args.questions if name not in QUESTIONS]:
        raise ValueError(f"there is no question {unknown[0]}: take some of {', '.join(QUESTIONS)}")
    names = args.questions or list(QUESTIONS)
    said = [answer_of(text) for text in args.answers or ()]
    if args.answers and len(said) != len(names):
        raise ValueError(f"{len(said)} answers for {len(names)} questions: give one for each")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        question = QUESTIONS[name]
        if said:
            print(f"\n{question.asks}\n  your prediction: {said[i]:g}", flush=True)
        prediction = said[i] if said else asked(question)
        found = question.find()
        between = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
        print(f"  found: {statistics.median(found):.2f}{between}: {verdict(prediction, found)}\n  why: {question.why}")
        line = {"question": name, "predicted": prediction, "found": found, "device": device_name()}
        with args.json.open("a") as file:
            file.write(json.dumps(line | {"time": time.strftime("%Y-%m-%d %H:%M")}) + "\n")
    print(f"\nkept in {args.json}")


if __name__ == "__main__":
    end_on_signals()
    with errors_in_one_line():
        main(sys.argv[1:])
