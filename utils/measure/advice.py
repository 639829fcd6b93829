"""What to do about it: the verdict, the doctor and docs/symptoms.md take their words from advice.yaml."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from utils.config.settings import Config
from utils.measure.tables import markdown
from utils.optimizers import FUSED

ASIDE = ("validation", "checkpoint", "logging", "profiling", "setup")  # parts of a run that are no training
SLOWEST = "waiting for the slowest rank"
EXAMPLE = {"workers": 4, "cores": 8, "depth": 16, "half": 4, "twice": 2, "cp": 2, "tp": 2, "node": "its node",
           "part": "time", "best": 16}  # fmt: skip
# Whether a remedy is still to be tried: asked of a Measured (utils/measure/verdict.py) and the run's Config.
CONDITIONS = {
    "never": lambda m, c: False,
    "reads in the loop": lambda m, c: not c.num_data_workers,
    "few direct reads": lambda m, c: m.is_direct and depth(c) < 32,
    "decodes on few cores": lambda m, c: not m.is_direct and c.num_data_workers < m.cores,
    "no stage_dir": lambda m, c: c.stage_dir is None,
    "normalises on a GPU": lambda m, c: m.on_gpu and c.data_loader_config != "dali",
    "not compiled": lambda m, c: not c.enable_jit,
    "optimiser not fused": lambda m, c: not c.enable_fused and c.optimizer in FUSED,
    "GPU steps not recorded": lambda m, c: m.on_gpu and not m.is_recorded,
    "float32 where there is bf16": lambda m, c: m.has_bf16 and c.amp_mode == "none",
    "plain attention": lambda m, c: c.attention == "math",
    "computes twice": lambda m, c: c.activation_checkpoint != "none",
    "computes once": lambda m, c: c.activation_checkpoint == "none",
    "several steps": lambda m, c: c.activation_checkpoint == "none" and c.longest_rollout > 1,
    "even batch": lambda m, c: c.local_batch_size % 2 == 0,
    "data parallel in one pass": lambda m, c: (
        c.tensor_parallel * c.context_parallel < len(m.nodes) and c.accumulation_steps == 1
    ),
    "gathers over context ranks": lambda m, c: c.context_parallel > 1 and c.cp_attention == "gather",
    "keeps what it gathers over context ranks": lambda m, c: (
        c.context_parallel > 1
        and c.cp_attention == "gather"
        and not c.cp_regather
        and c.activation_checkpoint not in ("block", "step")
    ),
    "all ranks hold all": lambda m, c: c.shard == "none" and may_share(c),
    "all ranks hold the weights": lambda m, c: c.shard == "gradients" and may_share(c),
    "tensor parallel": lambda m, c: c.tensor_parallel > 1,
    "slowest rank looks aside": lambda m, c: m.slowest_rank()[1] in ASIDE,
}


def may_share(config: Config) -> bool:
    """Whether several ranks hold the same weights, and could share them out."""
    several = (
        config.context_parallel > 1 or config.global_batch_size > config.local_batch_size * config.accumulation_steps
    )
    return several and config.optimizer in FUSED and not config.noddp


def depth(config: Config) -> int:
    """Return how many reads go on at once."""
    return config.read_depth or config.num_data_workers


@cache
def tables() -> dict[str, Any]:
    """Return what advice.yaml holds."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def remedies(bound: str, measured: Any, config: Config, **words: Any) -> Iterator[str]:
    """Yield what a program says of a symptom, the best first; what the run does already is left out."""
    rows = (row for row in tables()["slow"] + tables()["memory"] if row["bound"] == bound)
    for remedy in (remedy for row in rows for remedy in row["try"]):
        if "when" not in remedy or CONDITIONS[remedy["when"]](measured, config):
            yield (remedy["flags"] + remedy.get("why", "")).format(**words)


def finding(name: str, **words: Any) -> str:
    """Return what to change about something that the doctor found."""
    return tables()["doctor"][name]["change"].format(**words)


def table(name: str) -> str:
    """Return a table for docs/symptoms.md: `slow`, `memory`, or `doctor`."""
    if name == "doctor":
        rows = [(row["found"], _code(row["change"]).format(**EXAMPLE)) for row in tables()[name].values()]
        head = ("what the doctor finds", "change")
    else:
        told = "the largest part" if name == "memory" else "what the report, the log or the trace shows"
        head = (told, "try", "what it costs")
        rows = [(row["symptom"], "; ".join(map(_on_page, row["try"])), row.get("cost", "")) for row in tables()[name]]
    return markdown(head, rows)


def _on_page(remedy: dict[str, str]) -> str:
    flags, link = remedy["flags"], remedy.get("link", "")
    flags = f"`{flags}`" if flags.startswith("--") else _code(flags)
    if link:
        flags = f"[{flags}]({link if '.md' in link else f'ladder.md#ladder-{link}'})"
    return (flags + remedy.get("why", "") + remedy.get("more", "")).format(**EXAMPLE)


def _code(text: str) -> str:
    return re.sub(r"--\w+", r"`\g<0>`", text)
