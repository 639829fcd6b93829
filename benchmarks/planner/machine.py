"""What a machine can do, from a file: measured there, or from datasheets. All that the planner knows of hardware.

A curve is a list of pairs: a size, and what is reached at that size. Between two sizes both change in equal ratios.
"""

import bisect
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import first_line
from utils.files import to_json, write_text
from utils.reading import is_count, is_text, read_json

FOLDER = Path(__file__).parent / "machines"
Curve = Sequence[Sequence[float]]
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16")
PLACES = ("node", "network")


@dataclass(frozen=True)
class Link:
    """How ranks send: inside a node, or between nodes.

    Attributes:
        alpha: seconds that a message takes which has no size, from one rank to the next.
        bandwidth: bytes per second that one rank sends while all do.
        collectives: measured seconds by bytes (of the largest tensor), for a kind and a number of ranks, such as
            `all_reduce 4`.
    """

    alpha: float
    bandwidth: float
    collectives: dict[str, Curve] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """A machine of equal nodes, each rank with a device, or with its part of a CPU's cores.

    Attributes:
        name: in words.
        source: `measured`, or `datasheets` until somebody measures.
        device: cuda (AMD's GPUs, too) or cpu.
        per_node: ranks of a node.
        memory: bytes that a rank has.
        beside: bytes of it that no tensor can have: the context, libraries, buffers of collectives.
        host: seconds that the host takes for an operation, whatever its size.
        products: FLOP/s of a matrix product by its FLOPs, for each dtype.
        attention: FLOP/s of a fused kernel by the FLOPs of one head and sample, for each dtype, pass and head size:
            attention["bfloat16"]["forward 64"].
        moving: bytes per second of operations that compute little, by their bytes; "" stands for all not named.
        links: of a node, and of the network between nodes; each where it was measured.
        copy: bytes per second from the host to a rank's device; None where the device is the host.
        storage: bytes per second that a node reads, or writes; None where nobody knows: no bound.
        noise: standard deviation of a rank's step over its mean.
        sources: where each figure comes from.
        filesystem: bytes per second that all nodes together read or write; None where nobody knows: no bound.
        failures: how many of a rank's device, and of what goes with it, end a job in an hour; None where nobody knows.
        restart: seconds from such an end to the next step: to find the node, to start, to load; None counts as 0.
        drift: how far the machine's steps lay apart over the minutes that it was measured: half their range over their
            median; None where it was not.
    """

    name: str
    source: str
    device: str
    per_node: int
    memory: float
    beside: float
    host: float
    products: dict[str, Curve]
    attention: dict[str, dict[str, Curve]]
    moving: dict[str, Curve]
    links: dict[str, Link]
    copy: float | None
    storage: float | None
    noise: float
    sources: dict[str, str]
    filesystem: float | None = None
    failures: float | None = None
    restart: float | None = None
    drift: float | None = None

    def nodes(self, ranks: int) -> int:
        """Return how many nodes have so many ranks."""
        return -(-ranks // self.per_node)

    def stored(self, nodes: int) -> float:
        """Return the bytes per second that so many nodes read, or write, together; infinite where nobody knows."""
        bound = math.inf if self.filesystem is None else self.filesystem
        return bound if self.storage is None else min(nodes * self.storage, bound)


def at(curve: Curve, size: float) -> float:
    """Return the rate that a curve has at a size: outside of all sizes that of the nearest."""
    i = bisect.bisect([point[0] for point in curve], size)
    if i in (0, len(curve)):
        return curve[min(i, len(curve) - 1)][1]
    (a, x), (b, y) = curve[i - 1], curve[i]
    return x * (y / x) ** (math.log(size / a) / math.log(b / a))


def seconds_at(curve: Curve, size: float) -> float:
    """Return the seconds that a curve has at a size: below all sizes those of the least, above all in proportion."""
    most, longest = curve[-1]
    return at(curve, size) if size < most else longest * size / most


def load_machine(name: str) -> Machine:
    """Return the machine of a file, or of one that comes with the project, by its name.

    Raises ValueError where there is none, with those that there are, and where it is not as a machine's file should be.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        found = read_json(path)
    except OSError as error:
        raise ValueError(
            f"cannot read the machine {name} ({error.strerror}): take a file that make doctor wrote, or {known()}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): take a file that make doctor wrote") from None
    try:
        return machine_of(found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{path} is no machine's file ({first_line(error)}): take one that make doctor wrote"
        ) from None


def write_machine(path: Path, found: dict[str, Any]) -> None:
    """Write what a machine's file holds, each point of a curve in a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    point = re.compile(r"\[\s+([-+.e\d]+),\s+([-+.e\d]+)\s+\]")
    write_text(path, point.sub(r"[\1, \2]", to_json(found, indent=1)) + "\n")


def known() -> str:
    """Return the names of the machines that come with the project."""
    return ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))


def machine_of(found: dict[str, Any]) -> Machine:
    """Return the machine of what a file holds. Raises an error that says what is missing or wrong."""
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(Machine)}
    if missing := {name for name, is_needed in fields.items() if is_needed} - found.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    if unknown := found.keys() - fields.keys():
        raise ValueError(f"it has {', '.join(sorted(unknown))}, which no machine has")
    if unknown := found["links"].keys() - {*PLACES}:
        raise ValueError(f"links of {', '.join(sorted(unknown))}: places are {', '.join(PLACES)}")
    machine = Machine(**{**found, "links": {place: Link(**link) for place, link in found["links"].items()}})
    if not is_count(machine.per_node) or not is_text(machine.name) or not machine.name.isprintable():
        raise ValueError(f"per_node is {machine.per_node!r}, name {machine.name!r}: a whole number above 0, and a line")
    for dtype, passes in machine.attention.items():
        ways = {name.partition(" ")[0] for name in passes if re.fullmatch(r"(forward|backward) [1-9]\d{0,5}", name)}
        if ways != {"forward", "backward"} or not all(re.fullmatch(r"\w+ \d+", name) for name in passes):
            raise ValueError(
                f"attention of {dtype} is {', '.join(passes)}: forward and backward, each with a head size"
            )
    if machine.device not in ("cpu", "cuda"):
        raise ValueError(f"device is {machine.device!r}: cpu or cuda")
    figures = [getattr(machine, name) for name in ("per_node", "memory", "beside", "host", "noise")]
    optional = ("copy", "storage", "filesystem", "failures", "restart", "drift")
    figures += [x for name in optional if (x := getattr(machine, name)) is not None]
    figures += [x for link in machine.links.values() for x in (link.alpha, link.bandwidth)]
    for curve in curves(machine):
        if not curve or [size for size, _ in curve] != sorted({size for size, _ in curve}):
            raise ValueError(f"a curve is {curve}: it takes pairs in increasing order of size")
        figures += [x for point in curve for x in point]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) and x > 0 for x in figures):
        raise ValueError("each figure is a number above 0")
    if unknown := machine.products.keys() - {*DTYPES}:
        raise ValueError(f"products of {', '.join(sorted(unknown))}: dtypes are {', '.join(DTYPES)}")
    if "" not in machine.moving:
        raise ValueError('moving has no entry "", which stands for all operations that are not named')
    return machine


def curves(machine: Machine) -> Iterator[Curve]:
    """Yield all curves of a machine."""
    yield from machine.products.values()
    yield from machine.moving.values()
    for passes in machine.attention.values():
        yield from passes.values()
    for link in machine.links.values():
        yield from link.collectives.values()
