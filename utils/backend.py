"""Can the layers that `model_backend` names run here?"""

import torch

from utils.config.settings import Config

FP8_GPU = (8, 9)  # compute capability of Ada, the first with products of 8 bits; Hopper has 9.0


def check_backend(config: Config, device: torch.device) -> None:
    """Raise ValueError where layers of Transformer Engine are asked for, and cannot be had, with what is missing."""
    if config.model_backend == "pytorch":
        return
    asked, instead = "model_backend transformer-engine", "take --model_backend pytorch: it has the same weights"
    if device.type != "cuda" or torch.version.hip:
        found = "an AMD GPU" if torch.version.hip else device.type
        raise ValueError(f"{asked} needs a GPU of NVIDIA, and the device is {found}: {instead}")
    try:
        import transformer_engine.pytorch  # noqa: F401
        from transformer_engine.common.recipe import Float8CurrentScaling  # noqa: F401 - of release 2.2
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # it asserts that its parts fit
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{asked} needs the package transformer_engine, 2.2 or newer ({why}): `pip install --no-build-isolation "
            f"transformer_engine[pytorch]`, an image of NVIDIA's that has it, or {instead}"
        ) from None
    if config.enable_jit:
        raise ValueError(f"{asked} has kernels of its own, which enable_jit cannot compile: add --no_enable_jit")
    if config.amp_mode == "none" and not config.tf32:
        raise ValueError(f"{asked} rounds products of float32 to TF32, which no_tf32 forbids: add --tf32, or {instead}")
    if not config.fp8:
        return
    if config.amp_mode == "none":
        raise ValueError("fp8 is for products, and amp_mode none leaves all else in float32: take --amp_mode bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_GPU:
        found, needed = (".".join(map(str, version)) for version in (capability, FP8_GPU))
        raise ValueError(f"fp8 needs a GPU of compute capability {needed}, this one has {found}: add --no_fp8")
    multiple = 16 * config.tensor_parallel
    if config.embed_dim % multiple:
        raise ValueError(
            f"fp8 with tensor_parallel {config.tensor_parallel} needs an embed_dim that is a multiple of {multiple}, "
            f"and it is {config.embed_dim}: change it, or add --no_fp8"
        )
