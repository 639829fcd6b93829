"""What to do about it: the one table from which the verdict, the doctor and docs/symptoms.md take their words."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from utils.config.settings import Config

ASIDE = ("validation", "checkpoint", "logging", "profiling", "setup")  # parts of a run that are no training
SLOWEST = "waiting for the slowest rank"
STAGING = "1-one-device.md#data-loading---num_data_workers---read_depth---data_loader_config"
EXAMPLE = {"workers": 4, "cores": 8, "depth": 16, "half": 4, "twice": 2, "cp": 2, "tp": 2, "node": "its node",
           "part": "time", "best": 16}  # fmt: skip


def always(*_: Any) -> bool:
    return True


class Remedy(NamedTuple):
    """What may help. A program says `flags` and `why`; the page links the flags to a rung of the ladder, or a heading.

    Args:
        when: asked of a Measured (utils/measure/verdict.py) and the run's Config; None for what only the page says.
        more: what the page adds.
    """

    flags: str
    why: str = ""
    when: Callable[[Any, Config], bool] | None = always
    link: str = ""
    more: str = ""

    def on_page(self) -> str:
        flags = f"`{self.flags}`" if self.flags.startswith("--") else re.sub(r"--\w+", r"`\g<0>`", self.flags)
        link = self.link if ".md" in self.link else f"ladder.md#ladder-{self.link}"
        return ((f"[{flags}]({link})" if self.link else flags) + self.why + self.more).format(**EXAMPLE)


class Row(NamedTuple):
    """A symptom: what bounds a run, or fills the memory; how the page says it, what to try, and what that costs."""

    bound: str
    symptom: str
    cost: str
    remedies: tuple[Remedy, ...]


JIT = Remedy("--enable_jit", ": fewer and larger kernels", lambda m, c: not c.enable_jit, "demo-steps-compile")
FUSED = Remedy("--enable_fused", ": the optimiser in one kernel", lambda m, c: not c.enable_fused, "demo-steps-fused")
ATTENTION = Remedy("--attention auto", "", lambda m, c: c.attention == "math", "base-alone-plain-attention")

# The best first: a program says those that the run has not taken yet.
SLOW = (
    Row("reading", "bound by reading; `data wait` in the time table, `data_wait_frac` in `metrics.jsonl`",
        "memory for the batches ahead; room on the node", (
        Remedy("--num_data_workers {workers}", ", which reads ahead while the device computes",
               lambda m, c: not c.num_data_workers, "demo-steps-workers"),
        Remedy("--read_depth {depth}", ", more reads at once: far storage answers many at a time",
               lambda m, c: m.is_direct and depth(c) < 32, "demo-steps-prefetch"),
        Remedy("--num_data_workers {cores}", ", one for each core: each decodes a frame at a time",
               lambda m, c: not m.is_direct and c.num_data_workers < m.cores, more=" (compressed files)"),
        Remedy("--stage_dir", ", a folder on the node's own disk: the files are copied there once",
               lambda m, c: c.stage_dir is None, STAGING),
        Remedy("fewer channels, or files on faster storage"),
    )),
    Row("copying", "bound by copying; on a GPU `data copy in i` stands alone in its row", "compilation; cores", (
        JIT._replace(why=", which normalises in one kernel", link="demo-alone-compile"),
        Remedy("--data_loader_config dali", ", which normalises on its own stream",
               lambda m, c: m.on_gpu and c.data_loader_config != "dali", "demo-alone-dali"),
        Remedy("files of float16", ": half the bytes"),
    )),
    Row("launching", "bound by launching; gaps between short kernels", "compilation; a larger batch may train worse", (
        JIT, FUSED,
        Remedy("train_mp_graphs.py", ", which launches a recorded step at once",
               lambda m, c: m.on_gpu and not m.is_recorded, "demo-steps-graphs"),
        Remedy("a larger --local_batch_size", ": more work for each launch", link="demo-alone-twice-the-batch"),
    )),
    Row("computing", "bound by computing, in float32", "digits: compare the loss change", (
        Remedy("--amp_mode bf16", ": matrix products of half the width",
               lambda m, c: m.has_bf16 and c.amp_mode == "none", "base-steps-bf16"),
        Remedy("--tf32", when=None, link="demo-steps-tf32", more=" is on by default"),
    )),
    Row("computing", "bound by computing, and attention leads the table of operators", "nothing", (
        ATTENTION._replace(why=", which never writes the table of tokens x tokens"),
    )),
    Row("computing", "bound by computing, with checkpoints of activations", "memory", (
        Remedy("--activation_checkpoint none", ", if the memory suffices: nothing is computed twice",
               lambda m, c: c.activation_checkpoint != "none", "base-alone-checkpoint-blocks"),
    )),
    Row("computing", "bound by computing, outside the matrix products", "compilation", (
        JIT._replace(why=", which fuses what lies between the matrix products"), FUSED,
    )),
    Row("computing", "bound by computing, all of that done", "a larger global batch", (
        Remedy("more ranks", ": this one is busy with what it has to do", link="demo-weak-scaling-4-ranks"),
    )),
    Row("communicating", "bound by communicating, data parallel", "a larger batch", (
        Remedy("--accumulation_steps 2", " with a larger batch: gradients travel once a step",
               lambda m, c: c.tensor_parallel * c.context_parallel < len(m.nodes) and c.accumulation_steps == 1,
               "demo-alone-two-passes"),
        Remedy("--noddp", when=None, link="demo-data-parallel-no-gradients-sent",
               more=" shows what sending costs (for timing alone: it trains wrongly)"),
        Remedy("--bucket_cap_mb", when=None, link="demo-data-parallel-buckets-of-1-mib"),
    )),
    Row("communicating", "bound by communicating, context parallel", "heads must divide", (
        Remedy("--cp_attention ulysses", ", which sends less",
               lambda m, c: c.context_parallel > 1 and c.cp_attention == "gather", "demo-model-parallel-cp-4-ulysses"),
    )),
    Row("communicating", "bound by communicating, tensor parallel", "memory", (
        Remedy("a smaller --tensor_parallel", ": its ranks talk in every block",
               lambda m, c: c.tensor_parallel > 1, "demo-model-parallel-tp-4"),
        Remedy("--parallel_order tp-cp-dp", when=None, link="demo-model-parallel-tp-2-x-cp-2-tp-cp-dp",
               more=", which keeps them inside a node"),
    )),
    Row("communicating", "bound by communicating, on any grid", "a larger batch may train worse", (
        Remedy("a larger --local_batch_size", ": more computing for each byte that is sent"),
    )),
    Row(SLOWEST, SLOWEST, "", (
        Remedy("less often what takes its {part}", when=lambda m, c: m.slowest_rank()[1] in ASIDE),
        Remedy("`make doctor` on {node}", ": another job there, fewer cores, a slower clock?",
               more=" (`sbatch -w`); a slow disk: as for reading"),
    )),
    Row("aside", "much `validation`, `logging`, `checkpoint`", "less to see; more to lose", (
        Remedy("--limit_nsamples_val"), Remedy("fewer --plot_channels"), Remedy("a larger --checkpoint_every"),
    )),
)  # fmt: skip

MEMORY = (
    Row("activations", "activations, and `math` attention", "nothing",
        (ATTENTION._replace(more=": the table of tokens x tokens is never whole"),)),
    Row("activations", "activations, with more than one sample a rank", "little",
        (Remedy("--local_batch_size {half} --accumulation_steps {twice}", "",
                lambda m, c: c.local_batch_size % 2 == 0, "demo-alone-two-passes",
                ": the same batch in two passes"),)),
    Row("activations", "activations, with one sample", "a third more computing, or less",
        (Remedy("--activation_checkpoint block", "", lambda m, c: c.activation_checkpoint == "none",
                "base-alone-checkpoint-blocks"),
         Remedy("--activation_checkpoint mlp", when=None, link="base-alone-checkpoint-mlps", more=", which costs less"),
         Remedy("--mlp_chunks 4", when=None, link="base-alone-chunks"))),
    Row("activations", "activations, still", "communication in each block",
        (Remedy("--context_parallel {cp}", " of train_mp.py", link="demo-model-parallel-cp-4",
                more=": each rank has half of the tokens"),)),
    Row("others", "weights, gradients and optimiser", "communication in each block",
        (Remedy("--tensor_parallel {tp}", " of train_mp.py", link="demo-model-parallel-tp-4",
                more=": each rank has half of each"),)),
    Row("cached", "`cached`, far above the parts", "nothing",
        (Remedy("no --no_expandable_segments", ", no settings of your own in `PYTORCH_ALLOC_CONF`"),)),
    Row("host", "the host's memory, not the GPU's", "reading",
        (Remedy("fewer --num_data_workers"), Remedy("a smaller --read_depth"))),
)  # fmt: skip

# What the doctor finds in a run's data, storage and network; of the machine itself benchmarks/machine.py knows.
DOCTOR = {
    "dp-cp": ("sending gradients takes more than half as long as a step computes",
              "a larger batch, in several --accumulation_steps, or a faster network (NCCL_DEBUG=INFO names it)"),
    "tp": ("so does what tensor parallel ranks send",
           "a smaller --tensor_parallel, or its ranks in one node (--parallel_order tp-cp-dp)"),
    "cp": ("so does what context parallel ranks send",
           "--cp_attention ulysses, a smaller --context_parallel, or its ranks in one node"),
    "tp-cp": ("so does what goes over both", "a smaller grid, or its ranks in one node (--parallel_order tp-cp-dp)"),
    "peer": ("an all-reduce is slower with peer-to-peer copies", "export NCCL_P2P_DISABLE=1, and ask the site why"),
    "gzip": ("storage gives less than the node computes, and files are compressed",
             "--num_data_workers: each decodes a frame at a time; or files that are not compressed"),
    "depth": ("it would suffice with more reads at once", "--num_data_workers 4 --read_depth {best}"),
    "storage": ("it would not", "--stage_dir on the node's own disk, less channels, or float16 files"),
    "finite": ("values are not finite", "mend the files: python -m utils.prepare_data check FOLDER"),
    "statistics": ("normalised values have another mean than 0, or another standard deviation than 1",
                   "the statistics are of other data: make them anew (docs/data.md)"),
}  # fmt: skip


def depth(config: Config) -> int:
    """Return how many reads go on at once."""
    return config.read_depth or config.num_data_workers


def remedies(bound: str, measured: Any, config: Config, **words: Any) -> Iterator[str]:
    """Yield what a program says of a symptom, the best first; what the run does already is left out."""
    for remedy in (remedy for row in SLOW + MEMORY if row.bound == bound for remedy in row.remedies):
        if remedy.when and remedy.when(measured, config):
            yield (remedy.flags + remedy.why).format(**words)


def table(name: str) -> str:
    """Return a table for docs/symptoms.md: `slow`, `memory`, or `doctor`."""
    if name == "doctor":
        rows = [(found, re.sub(r"--\w+", r"`\g<0>`", change).format(**EXAMPLE)) for found, change in DOCTOR.values()]
        head = ("what the doctor finds", "change")
    else:
        told = "the largest part" if name == "memory" else "what the report, the log or the trace shows"
        head = (told, "try", "what it costs")
        rows = [
            (row.symptom, "; ".join(remedy.on_page() for remedy in row.remedies), row.cost)
            for row in (MEMORY if name == "memory" else SLOW)
        ]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
