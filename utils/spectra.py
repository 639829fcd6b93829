"""Power spectra along circles of latitude: how much of a field lies at which scale."""

import torch
from torch import Tensor


def zonal_spectrum(field: Tensor, weights: Tensor) -> Tensor:
    """Return the power at each zonal wavenumber, [..., W // 2 + 1], in units squared.

    The squares of the Fourier coefficients along each row, averaged over the rows. Over all wavenumbers they add up to
    the mean square of the field (Parseval), so a forecast that is too smooth lies below the truth at large ones.

    Args:
        field: [..., H, W], rows that go once round the globe.
        weights: of the rows, adding up to 1, [H].
    """
    W = field.shape[-1]
    power = torch.fft.rfft(field, dim=-1, norm="forward").abs().square()
    # Each wavenumber stands for its negative one, too, but for 0 and the last one of an even number of columns.
    power[..., 1 : (W + 1) // 2] *= 2
    return torch.einsum("...hk,h->...k", power, weights)
