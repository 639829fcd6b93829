"""The layers of a model's blocks: PyTorch's, or those of another library."""

import torch

from networks.vit import ViT


def use_backend(model: ViT, name: str, fp8: bool, device: torch.device | None) -> ViT:
    """Return the model with the layers of a library, pytorch or transformer-engine, in place, with the same weights.

    Without a device it keeps PyTorch's, which have the same shapes.
    """
    if name == "pytorch" or device is None:
        return model
    from networks.transformer_engine import use_transformer_engine  # a package that few have

    return use_transformer_engine(model, fp8)
