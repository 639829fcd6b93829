"""A two-layer quasi-geostrophic (QG) model of the mid-latitude atmosphere on the sphere, in spherical harmonics.

It makes the built-in data: jets, and storms that grow on them, move east and decay. Two layers of equal depth carry
potential vorticity q (PV), from which the streamfunction psi follows, and from that everything else:

    dq_k/dt + J(psi_k, q_k + f) = heating_k - drag_k - hyperdiffusion_k            k = 1 (upper), 2 (lower)
    q_1 = lap psi_1 - (psi_1 - psi_2) / R^2,    q_2 = lap psi_2 + (psi_1 - psi_2) / R^2,    f = 2 Omega sin(latitude)

Sources: Marshall and Molteni 1993, J. Atmos. Sci. 50, 1792-1818 (QG equations on the sphere with relaxation, Ekman
drag and an eighth-order diffusion; theirs has three levels); Vallis 2017, Atmospheric and Oceanic Fluid Dynamics,
chapter 5 (two layers, energy), chapter 9 (why the sheared jet breaks into storms).

Shapes: B trajectories (all advance together), 2 layers, M orders, L degrees, J latitudes, I longitudes. Coefficients
are complex [..., M, L] for order m >= 0 and degree l >= m, both up to the truncation; grids are real [..., J, I].
Latitude enters as mu = sin(latitude). SI units: m, s, psi in m2 s-1, q in s-1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RADIUS = 6.371e6  # of the Earth, m
OMEGA = 7.292e-5  # the Earth's rotation, s-1
DAY = 86400.0  # s
DEFORMATION_RADIUS = 7.0e5  # R above, m: sets the size of the storms, a few R
JET_SPEED, JET_LATITUDE, JET_WIDTH = 55.0, 42.0, 16.0  # the shear that heating drives towards: m s-1, degrees, degrees

CHANNELS = [f"{name}_{layer}" for layer in ("upper", "lower") for name in ("u", "v", "vor", "psi")]
UNITS = ["m s-1", "m s-1", "s-1", "m2 s-1"] * 2


def legendre(mu: np.ndarray, truncation: int) -> tuple[np.ndarray, np.ndarray]:
    """Associated Legendre functions P and their slopes (1 - mu^2) dP/dmu, each float64 [M, L, J], zero where l < m.

    Normalised so that P^2 has mean 1 over mu in [-1, 1]. Recurrences in degree: Abramowitz and Stegun 1964, 8.5.3 (P)
    and 8.5.4 (slope), here in the normalised form of Durran 2010, Numerical Methods for Fluid Dynamics, chapter 6.
    """
    m, l = np.arange(truncation + 1)[:, None], np.arange(truncation + 2)[None]  # noqa: E741 (the field's name)
    epsilon = np.sqrt(np.maximum(l**2 - m**2, 0) / (4.0 * l**2 - 1))[..., None]
    # One degree more than asked for: the slope at degree l needs P at l + 1.
    p = np.zeros((truncation + 1, truncation + 2, len(mu)))
    p[0, 0] = 1
    for n in range(1, truncation + 2):
        # At n = 1 the index n - 2 wraps round, harmlessly: its factor epsilon is 0.
        p[:n, n] = (mu * p[:n, n - 1] - epsilon[:n, n - 1] * p[:n, n - 2]) / epsilon[:n, n]
        if n <= truncation:
            p[n, n] = np.sqrt((2 * n + 1) / (2 * n) * (1 - mu**2)) * p[n - 1, n - 1]
    below = np.concatenate((np.zeros_like(p[:, :1]), p[:, :-2]), axis=1)
    degree = l[:, :-1, None]
    slope = (degree + 1) * epsilon[:, :-1] * below - degree * epsilon[:, 1:] * p[:, 1:]
    return p[:, :-1], slope


class SphericalHarmonics:
    """The spectral transform between coefficients [..., M, L] and a grid [..., J, I] of given latitudes.

    `mu` [J] is sin(latitude) of the rows, in any order; columns are `longitudes` equal steps from 0E. `weights` [J]
    (Gauss-Legendre) are needed only to go from the grid to coefficients.
    """

    def __init__(self, mu: np.ndarray, longitudes: int, truncation: int, dtype: torch.dtype, weights=None):
        p, slope = legendre(mu, truncation)
        self.longitudes, self.truncation = longitudes, truncation
        self.p, self.slope = torch.tensor(p, dtype=dtype), torch.tensor(slope, dtype=dtype)
        # Half: the weights sum to 2, the mean over mu is wanted.
        self.p_weighted = None if weights is None else torch.tensor(p * weights / 2, dtype=dtype)
        self.cos_squared = torch.tensor(1 - mu**2, dtype=dtype)[:, None]  # [J, 1]

    def to_grid(self, coefficients: Tensor, slope: bool = False) -> Tensor:
        """Sum the harmonics: [..., M, L] -> [..., J, I]. With `slope`, (1 - mu^2) d/dmu of that sum.

        Coefficients beyond this transform's truncation are left out.
        """
        n = self.truncation + 1
        waves = torch.einsum(
            "...mlc,mlj->...jmc", torch.view_as_real(coefficients[..., :n, :n]), self.slope if slope else self.p
        )  # c: real and imaginary part, so that the product with a real table stays real arithmetic
        return torch.fft.irfft(torch.view_as_complex(waves.contiguous()), n=self.longitudes, norm="forward")

    def to_coefficients(self, grid: Tensor) -> Tensor:
        """Project on the harmonics: [..., J, I] -> [..., M, L]; exact for a grid made of them."""
        waves = torch.fft.rfft(grid, norm="forward")[..., : self.truncation + 1]  # [..., J, M]
        projected = torch.einsum("...jmc,mlj->...mlc", torch.view_as_real(waves), self.p_weighted)
        return torch.view_as_complex(projected.contiguous())


@dataclass(eq=False)
class TwoLayerQG:
    """The model: `initial_state`, then `step` as often as wanted, and `fields` to look at the state.

    The state is relative PV, q [B, 2, M, L]. The time scales of heating, drag and hyperdiffusion are in days;
    `math.inf` switches one off. `time_step` is in seconds.
    """

    truncation: int = 31
    time_step: float = 2700.0
    relaxation_days: float = 20.0
    drag_days: float = 4.0
    hyperdiffusion_days: float = 0.25
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        truncation, time_step, dtype = self.truncation, self.time_step, self.dtype
        self.relaxation_rate, self.drag_rate = 1 / (self.relaxation_days * DAY), 1 / (self.drag_days * DAY)
        # Enough points that products of two fields alias nothing back into the truncation (Orszag's 3/2 rule).
        latitudes = 2 * ((3 * truncation + 8) // 4)
        mu, weights = np.polynomial.legendre.leggauss(latitudes)
        self.grid = SphericalHarmonics(mu, 2 * latitudes, truncation, dtype, weights)

        degree = torch.arange(truncation + 1, dtype=torch.float64)
        laplacian = -degree * (degree + 1) / RADIUS**2  # of a harmonic of that degree, [L]
        self.coupling = 1 / DEFORMATION_RADIUS**2  # 1/R^2
        # The two layers' mean and half difference (barotropic and baroclinic mode) decouple the inversion q -> psi.
        # Degree 0 of the mean has no wind: any constant will do, 0 is taken.
        inverse = torch.where(degree > 0, 1 / laplacian, 0.0)
        self.laplacian, self.invert_mean = laplacian.to(dtype), inverse.to(dtype)
        self.invert_difference = (1 / (laplacian - 2 * self.coupling)).to(dtype)
        self.d_longitude = 1j * torch.arange(truncation + 1, dtype=dtype)[:, None]  # [M, 1]
        # lap^4 (eighth order), scaled to act on the smallest waves within `hyperdiffusion_days`; integrated exactly.
        damping = (laplacian / laplacian[-1]) ** 4 / (self.hyperdiffusion_days * DAY)
        self.hyperdiffusion = torch.exp(-time_step * damping).to(dtype)
        self.equilibrium = self._equilibrium_shear(mu, weights)

    def _equilibrium_shear(self, mu: np.ndarray, weights: np.ndarray) -> Tensor:
        """The difference psi_1 - psi_2 [M, L] of a westerly jet aloft in each hemisphere, which heating drives towards.

        A zonal wind u has vorticity -1/a d(u cos(latitude))/dmu (Holton 2004, chapter 4). Projected on P and
        integrated by parts it needs no derivative of u: 1/a times the mean of u cos(latitude) dP/dmu.
        """
        cosine = np.sqrt(1 - mu**2)
        latitude = np.degrees(np.arcsin(mu))
        u = JET_SPEED * np.exp(-(((np.abs(latitude) - JET_LATITUDE) / JET_WIDTH) ** 2))
        slope = legendre(mu, self.truncation)[1][0]  # order 0: the same all round the globe, [L, J]
        vorticity = slope @ (weights / 2 * u / cosine) / RADIUS
        psi = torch.zeros(self.truncation + 1, self.truncation + 1, dtype=torch.complex128)
        psi[0, 1:] = torch.from_numpy(vorticity)[1:] / self.laplacian[1:].double()
        return psi.to(self.dtype.to_complex())

    def streamfunction(self, q: Tensor) -> Tensor:
        """Streamfunction from relative PV, both [B, 2, M, L]: the inverse of `potential_vorticity`."""
        upper, lower = q.unbind(1)
        mean = (upper + lower) / 2 * self.invert_mean
        half_difference = (upper - lower) / 2 * self.invert_difference
        return torch.stack((mean + half_difference, mean - half_difference), 1)

    def potential_vorticity(self, psi: Tensor) -> Tensor:
        """Relative PV (without f) from the streamfunction, both [B, 2, M, L]. Vallis 2017, chapter 5."""
        stretching = (psi[:, 0] - psi[:, 1]) * self.coupling
        return self.laplacian * psi + torch.stack((-stretching, stretching), 1)

    def tendency(self, q: Tensor) -> Tensor:
        """dq/dt without hyperdiffusion, [B, 2, M, L] s-2. Marshall and Molteni 1993, section 2."""
        psi = self.streamfunction(q)
        both = torch.stack((psi, q), 2)
        psi_lon, q_lon = self.grid.to_grid(self.d_longitude * both).unbind(2)
        psi_mu, q_mu = self.grid.to_grid(both, slope=True).unbind(2)
        advection = (psi_lon * q_mu - psi_mu * q_lon) / (RADIUS**2 * self.grid.cos_squared)  # J(psi, q)
        # J(psi, f) is linear, so it needs no grid: df/dmu = 2 Omega.
        dq = -self.grid.to_coefficients(advection) - 2 * OMEGA / RADIUS**2 * self.d_longitude * psi
        heating = (psi[:, 0] - psi[:, 1] - self.equilibrium) * (self.coupling * self.relaxation_rate)
        drag = self.laplacian * psi[:, 1] * self.drag_rate
        return dq + torch.stack((heating, -heating - drag), 1)

    def step(self, q: Tensor) -> Tensor:
        """One time step of the classical fourth-order Runge-Kutta method (Durran 2010, chapter 2)."""
        dt = self.time_step
        k1 = self.tendency(q)
        k2 = self.tendency(q + dt / 2 * k1)
        k3 = self.tendency(q + dt / 2 * k2)
        k4 = self.tendency(q + dt * k3)
        return (q + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)) * self.hyperdiffusion

    def initial_state(self, trajectories: int, seed: int) -> Tensor:
        """Noise on a weak jet, q [B, 2, M, L]; every trajectory has its own noise, drawn from `seed`.

        It is as strong as weather but without its order: twenty to thirty days turn it into jets and storms.
        """
        generator = torch.Generator().manual_seed(seed)
        size = self.truncation + 1
        noise = torch.randn(trajectories, 2, size, size, 2, generator=generator, dtype=self.dtype)
        psi = torch.view_as_complex(noise).triu() * 2.0e5  # triu keeps l >= m
        psi[:, :, 0] = psi[:, :, 0].real.to(psi.dtype)  # order 0 of a real field is real
        psi[..., 0] = 0
        psi[:, 0] += 0.6 * self.equilibrium
        return self.potential_vorticity(psi)

    def fields(self, q: Tensor, grid: SphericalHarmonics) -> Tensor:
        """The state as weather maps on `grid`, [B, 8, J, I] in the order of `CHANNELS` (units: `UNITS`).

        u = -(1/a) dpsi/dlatitude, v = 1/(a cos(latitude)) dpsi/dlongitude, vorticity = lap psi (Holton 2004,
        An Introduction to Dynamic Meteorology, chapter 6).
        """
        psi = self.streamfunction(q)
        a_cos = RADIUS * grid.cos_squared.sqrt()
        u = -grid.to_grid(psi, slope=True) / a_cos
        v = grid.to_grid(self.d_longitude * psi) / a_cos
        maps = torch.stack((u, v, grid.to_grid(self.laplacian * psi), grid.to_grid(psi)), 2)  # [B, 2, 4, J, I]
        return maps.flatten(1, 2)
