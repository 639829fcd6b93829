"""Compilation of chosen modules with torch.compile."""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from utils.config.settings import Config, module_options

GRAPH_MODES = ("reduce-overhead", "max-autotune")  # on GPUs


def check_compiler(config: Config, device: torch.device, trains: bool = True) -> None:
    """Raise ValueError where the model or the optimiser is to be compiled, and cannot be so here."""
    asked, instead = "enable_jit", "take --no_enable_jit"
    if not config.enable_jit:
        asked, instead = "optimizer Adam8bit, which is compiled,", "take --optimizer Adam"
        if config.optimizer != "Adam8bit":
            return
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ValueError(
            f"{asked} needs a C++ compiler, and {compiler} is not on PATH: load or install one (module load gcc), "
            f"name another in CXX, or {instead}"
        )
    if not config.enable_jit:
        return
    graph_mode = next(iter(config.compile_modes & {*GRAPH_MODES}), None)
    if "reduce-overhead" in config.compile_modes and device.type == "cpu":
        raise ValueError("compile_mode reduce-overhead replays CUDA graphs, and the device is cpu: take default")
    if graph_mode and device.type == "cuda" and torch.version.hip:
        raise ValueError(
            f"compile_mode {graph_mode} replays graphs, with which training on AMD GPUs was reported to "
            f"converge worse, without an error (pytorch issue 187715): take default or max-autotune-no-cudagraphs"
        )
    if graph_mode and device.type == "cuda" and config.tensor_parallel * config.context_parallel > 1:
        raise ValueError(
            f"compile_mode {graph_mode} replays CUDA graphs, here with NCCL's kernels in them, and the run could not "
            f"leave its groups of ranks at the end: take default, or train_mp_graphs.py"
        )
    recomputes = config.activation_checkpoint in ("step", "block")
    passes_again = config.accumulation_steps > 1 or config.longest_rollout > 1 or recomputes
    if graph_mode and device.type == "cuda" and trains and passes_again:
        raise ValueError(
            f"compile_mode {graph_mode} replays CUDA graphs, which overwrite gradients where a block runs "
            f"twice in a step: leave out --accumulation_steps, --rollout_steps and --activation_checkpoint=block or "
            f"step, or take another mode"
        )


def compile_modules(model: nn.Module, names: list[str], mode: str) -> None:
    """Compile each module of `model` whose class, or a class that it derives from, is named; each one by itself.

    A name may have options (`module_options`); without a mode of its own it has `mode`. Modules of one class share
    their code where their shapes agree. Nothing may fall back to Python inside a module (fullgraph), but where one
    inside it has other options: that is compiled by itself, and the outer one is cut there. Hooks and gradients of the
    module stay outside.

    Raises ValueError where the model has no module of that name, and where a name comes twice.
    """
    found: dict[nn.Module, dict[str, Any]] = {}
    if not names:
        raise ValueError("compile_modules is empty: name some, or leave --enable_jit out")
    given = [module_options("compile_modules", text) for text in names]
    if len(dict(given)) < len(given):
        raise ValueError(f"compile_modules names a class twice in {', '.join(names)}: name each once")
    for name, options in given:
        modules = [m for m in model.modules() if name in _class_names(m)]
        if not modules:
            known = sorted({cls for m in model.modules() for cls in _class_names(m)} - {"Module", "ModuleList"})
            raise ValueError(f"compile_modules names {name!r}, and the model has {', '.join(known)}: take some")
        found |= {module: {"mode": mode} | options for module in modules if module not in found}
    # It warns of operations in place where only some are computed again (`--cp_regather`): there are none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())
    # Under DDP, Dynamo cuts graphs at the buckets: a whole model's, so that gradients leave early; a block's in vain.
    torch._dynamo.config.optimize_ddp = model in found
    apart = {inner for outer in found for inner in outer.modules() if found.get(inner, found[outer]) != found[outer]}
    for module, options in found.items():
        is_whole = apart.isdisjoint({*module.modules()} - {module})
        compiled = torch.compile(module.forward, fullgraph=is_whole, **options)
        module.forward = _set_apart(compiled) if module in apart else compiled
    if any(options["mode"] in GRAPH_MODES for options in found.values()):
        # Without gradients a block's graph would take the block before for done, and free its output, which it reads.
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())


def _set_apart(compiled: Callable) -> Callable:
    """Return the function such that a compiled one that calls it does not take it into its own graph."""

    @torch.compiler.disable
    def forward(*args: Any) -> Any:
        return compiled(*args)

    return forward


def _class_names(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__ if issubclass(cls, nn.Module)]
