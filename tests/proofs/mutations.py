"""Does the certificate see every reduction? Remove or double each, one at a time, and run it on the changed code.

    make mutations          about 10 minutes on 2 cores

A change that the certificate does not see ends the run with code 1. The overflow of fp16 is a MAX, which is removed
only: doubled, it is the same. (So is the recorded norm, and it is equal on all ranks but with --noddp.)
"""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.proofs.mutate import try_mutations

MAPPINGS, HELPERS = "distributed/mappings.py", "distributed/helpers.py"
# file, line as it stands, line as it is changed to, what that means
MUTATIONS = [
    (MAPPINGS, "return _all_reduce(grad, ctx.group), None", "return grad, None", "copy: no all-reduce in the backward"),
    (
        MAPPINGS,
        "return _all_reduce(grad, ctx.group), None",
        "return _all_reduce(_all_reduce(grad, ctx.group), ctx.group), None",
        "copy: twice",
    ),
    (MAPPINGS, "        return _all_reduce(x, group)\n", "        return x.clone()\n", "reduce: no all-reduce"),
    (
        MAPPINGS,
        "        return _all_reduce(x, group)\n",
        "        return _all_reduce(_all_reduce(x, group), group)\n",
        "reduce: twice",
    ),
    (
        MAPPINGS,
        "return grad, None\n\n\nclass _Scatter",
        "return _all_reduce(grad, dist.group.WORLD), None\n\n\nclass _Scatter",
        "reduce: summed in the backward as well",
    ),
    (
        MAPPINGS,
        "return _reduce_scatter(grad, ctx.dim, ctx.group), None, None\n",
        "return _own_chunk(grad, ctx.dim, ctx.group), None, None\n",
        "all_gather: own chunk in the backward, not the sum",
    ),
    (
        MAPPINGS,
        "return _reduce_scatter(grad, ctx.dim, ctx.group), None, None\n",
        "return _reduce_scatter(_all_reduce(grad, ctx.group), ctx.dim, ctx.group), None, None\n",
        "all_gather: summed twice in the backward",
    ),
    (
        MAPPINGS,
        "        return _reduce_scatter(x, dim, group)\n",
        "        return _own_chunk(x, dim, group)\n",
        "reduce_scatter: own chunk, not the sum",
    ),
    (
        MAPPINGS,
        "        return _reduce_scatter(x, dim, group)\n",
        "        return _reduce_scatter(_all_reduce(x, group), dim, group)\n",
        "reduce_scatter: summed twice",
    ),
    (
        MAPPINGS,
        "return _reduce_scatter(grad @ weight, ctx.dim, ctx.group), rows",
        "return _own_chunk(grad @ weight, ctx.dim, ctx.group), rows",
        "gathered_linear: own chunk in the backward, not the sum",
    ),
    (
        MAPPINGS,
        "return _reduce_scatter(grad @ weight, ctx.dim, ctx.group), rows",
        "return _reduce_scatter(_all_reduce(grad @ weight, ctx.group), ctx.dim, ctx.group), rows",
        "gathered_linear: summed twice in the backward",
    ),
    (HELPERS, "dist.all_reduce(flat, group=self.group)", "pass", "replicas: gradients not added up over tp"),
    (
        HELPERS,
        "dist.all_reduce(flat, group=self.group)",
        "[dist.all_reduce(flat, group=self.group) for _ in range(2)]",
        "replicas: added up twice",
    ),
    (HELPERS, "replicas + reduce(shards, self.group)", "replicas + shards", "norm: only this rank's slices"),
    (
        HELPERS,
        "replicas + reduce(shards, self.group)",
        "replicas + reduce(reduce(shards, self.group), self.group)",
        "norm: slices counted twice",
    ),
    (HELPERS, "replicas + reduce(shards, self.group)", "reduce(replicas + shards, self.group)", "norm: replicas too"),
    (
        HELPERS,
        "dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.group)",
        "pass",
        "fp16: an overflow is not shared",
    ),
    ("train_mp.py", "gradient_factor=grid.get_size(\"cp\")", "gradient_factor=1", "no factor cp"),
    (
        "train_mp.py",
        "data_parallel(model, config, grid.get_group(\"dp-cp\"))",
        "data_parallel(model, config, grid.get_group(\"dp\"))",
        "DDP over dp only",
    ),
    ("train.py", "dist.get_world_size(group) == 1 or config.noddp", "True", "no DDP"),
    ("train_mp.py", "gradient_factor=grid", "gradient_factor=2 * grid", "factor 2 cp"),
    ("train_mp.py", "        gradients.sync()\n", "", "gradients of replicas are not added up"),
    (
        "train_mp.py",
        "partial(relative_l2, total=partial(reduce, group=shard.group))",
        "relative_l2",
        "loss: a rank's tokens only",
    ),
    (
        "train_mp.py",
        "total=partial(reduce, group=shard.group)",
        "total=lambda x: reduce(reduce(x, shard.group), shard.group)",
        "loss: tokens summed twice",
    ),
    ("utils/data/token_shard.py", "dist.all_reduce(values, group=self.group)", "pass", "metrics: a rank's tokens only"),
    (
        "utils/data/token_shard.py",
        "dist.all_reduce(values, group=self.group)",
        "[dist.all_reduce(values, group=self.group) for _ in range(2)]",
        "metrics: summed twice over the tokens",
    ),
    ("utils/metrics.py", "dist.all_reduce(self.sums, group=self.group)", "pass", "metrics: a rank's samples only"),
    (
        "utils/metrics.py",
        "dist.all_reduce(self.sums, group=self.group)",
        "[dist.all_reduce(self.sums, group=self.group) for _ in range(2)]",
        "metrics: samples counted twice",
    ),
    ("utils/record/steps.py", "dist.all_reduce(losses)", "pass", "recorded loss: this rank's samples only"),
    (
        "utils/record/steps.py",
        "dist.all_reduce(losses)",
        "[dist.all_reduce(losses) for _ in range(2)]",
        "recorded loss: summed twice",
    ),
]  # fmt: skip
CERTIFICATE = ["benchmarks/certificate.py", "--ranks", "4", "--images", "10 tokens"]
MODES = ["--modes", "float64", "re-gather", "fp16"]


def look(copy: Path, _: str) -> str | None:
    """Run the certificate on the changed code."""
    command = [sys.executable, *CERTIFICATE, *MODES]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    found = [line for line in done.stderr.splitlines() if line.startswith("certificate: ")]
    seen = [line for line in found if "ended early" not in line]  # a crash is no proof
    if not seen:
        print(done.stderr[-2000:])
    return seen[-1] if seen else None


if __name__ == "__main__":
    sys.exit(try_mutations(MUTATIONS, look))
