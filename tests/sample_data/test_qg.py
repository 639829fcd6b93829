"""The two-layer QG model: spectral transform, waves, conservation, forcing, and the weather that comes of it."""

import math

import numpy as np
import pytest
import torch

from utils.sample_data.qg import CHANNELS, DAY, DEFORMATION_RADIUS, OMEGA, RADIUS, SphericalHarmonics, TwoLayerQG
from utils.sample_data.write import one_thread


@pytest.fixture(autouse=True)
def single_thread():
    """Small transforms, and other work on the machine: more threads only make these tests slower."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def weather() -> tuple[TwoLayerQG, torch.Tensor]:
    """Developed weather of two trajectories after 40 days, float32, q [2, 2, M, L]."""
    model = TwoLayerQG()
    q = model.initial_state(2, seed=1)
    with torch.inference_mode(), one_thread():
        for _ in range(int(40 * DAY / model.time_step)):
            q = model.step(q)
    return model, q.clone()


def inviscid(time_step: float) -> TwoLayerQG:
    return TwoLayerQG(21, time_step, math.inf, math.inf, math.inf, dtype=torch.float64)


def mean_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over the sphere of the product of two fields, from coefficients [..., M, L] of normalised harmonics."""
    twice = torch.full((x.shape[-2], 1), 2.0, dtype=torch.float64)  # orders m and -m
    twice[0] = 1
    return ((x * y.conj()).real * twice).sum((-2, -1))


# --- the spectral transform -------------------------------------------------------------------------------------------


def test_analysis_of_a_synthesis_returns_the_coefficients():
    model = inviscid(900)
    q = model.initial_state(2, seed=3)
    back = model.grid.to_coefficients(model.grid.to_grid(q))
    assert (back - q).abs().max() < 1e-12 * q.abs().max()


def test_the_harmonics_are_those_of_the_textbook():
    mu = np.array([-0.7, 0.1, 0.9])
    harmonics = SphericalHarmonics(mu, 16, 3, torch.float64)
    c = torch.zeros(4, 4, dtype=torch.complex128)
    c[1, 2], c[0, 3] = 0.5, 1.0  # order 1 counts twice, as cos
    longitude = 2 * np.pi * np.arange(16) / 16
    p12 = np.sqrt(5 / 6) * 3 * mu * np.sqrt(1 - mu**2)  # Abramowitz and Stegun 8.6.18, mean square 1
    p03 = np.sqrt(7) * (5 * mu**3 - 3 * mu) / 2
    expected = p12[:, None] * np.cos(longitude) + p03[:, None]
    assert np.abs(harmonics.to_grid(c).numpy() - expected).max() < 1e-13
    d12 = np.sqrt(5 / 6) * 3 * (1 - 2 * mu**2) * np.sqrt(1 - mu**2)  # (1 - mu^2) dP/dmu
    d03 = np.sqrt(7) * (15 * mu**2 - 3) / 2 * (1 - mu**2)
    expected = d12[:, None] * np.cos(longitude) + d03[:, None]
    assert np.abs(harmonics.to_grid(c, slope=True).numpy() - expected).max() < 1e-13


# --- the dynamics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [1, -1], ids=["barotropic", "baroclinic"])
def test_a_single_harmonic_is_a_rossby_haurwitz_wave(mode):
    """It drifts west without change of shape (Haurwitz 1940), with 2 / R^2 in the denominator if the layers oppose."""
    order, degree, amplitude, steps = 3, 5, 2e6, 48
    model = inviscid(1800)
    psi = torch.zeros(1, 2, 22, 22, dtype=torch.complex128)
    psi[0, 0, order, degree], psi[0, 1, order, degree] = amplitude, mode * amplitude
    q = model.potential_vorticity(psi)
    for _ in range(steps):
        q = model.step(q)
    wavenumbers = degree * (degree + 1) + (0 if mode == 1 else 2 * (RADIUS / DEFORMATION_RADIUS) ** 2)
    phase = 2 * OMEGA * order / wavenumbers * steps * model.time_step
    assert phase > 0.1, "the wave must move for the test to mean anything"
    expected = psi * complex(math.cos(phase), math.sin(phase))
    assert (model.streamfunction(q) - expected).abs().max() < 1e-5 * amplitude


def test_energy_and_potential_enstrophy_are_conserved_without_forcing():
    """Vallis 2017, chapter 5: kinetic and available potential energy, and (q + f)^2 of each layer.

    The truncated equations keep them to rounding. A run loses the time step's error: measured 3e-6, 1.1e-7 and 4e-9 in
    two days with steps of 1800, 900 and 450 s, so falling with the fifth power of the step.
    """
    model = inviscid(900)
    psi = model.streamfunction(model.initial_state(2, seed=5))
    psi[:, 0] += TwoLayerQG(21, dtype=torch.float64).equilibrium  # a strong jet on which storms grow
    q = start = model.potential_vorticity(psi)
    planetary = torch.zeros_like(q)
    planetary[..., 0, 1] = 2 * OMEGA / math.sqrt(3)  # f in normalised harmonics

    change = model.tendency(q)
    for field in (psi, q + planetary):  # the energy changes by -psi dq/dt, the enstrophy by (q + f) dq/dt
        size = (mean_product(field, field) * mean_product(change, change)).sqrt()
        assert (mean_product(field, change) / size).abs().max() < 1e-13

    def invariants(q):
        energy = -mean_product(model.streamfunction(q), q).sum(1) / 4
        return torch.cat((energy[:, None], mean_product(q + planetary, q + planetary)), 1)

    for _ in range(round(2 * DAY / model.time_step)):
        q = model.step(q)
    assert (invariants(q) / invariants(start) - 1).abs().max() < 1e-6
    assert (q - start).abs().max() > 0.1 * start.abs().max(), "the flow must evolve for the test to mean anything"


def test_heating_drag_and_hyperdiffusion_do_what_their_time_scales_say():
    def after(psi, **time_scales):
        off = dict(relaxation_days=math.inf, drag_days=math.inf, hyperdiffusion_days=math.inf)
        model = TwoLayerQG(21, 900.0, **{**off, **time_scales}, dtype=torch.float64)
        q = model.potential_vorticity(psi)
        for _ in range(96):  # a day
            q = model.step(q)
        return model, model.streamfunction(q)

    nothing = torch.zeros(1, 2, 22, 22, dtype=torch.complex128)
    # Drag takes 1 / (its time scale) of the lower layer's vorticity, and leaves the upper layer alone. The flow is
    # zonal and the same in both layers, so that nothing else changes it.
    jet = nothing.clone()
    jet[..., 0, 7] = 1e6
    model = TwoLayerQG(21, 900.0, math.inf, 2.0, math.inf, dtype=torch.float64)
    change = model.tendency(model.potential_vorticity(jet))
    rate = 1 / (2 * DAY)
    assert change[0, 1, 0, 7].real == pytest.approx(rate * 7 * 8 / RADIUS**2 * 1e6, rel=1e-9)
    assert change[0, 0].abs().max() < 1e-12 * change[0, 1].abs().max()
    # From rest, heating sets up the shear it relaxes to, slowed by the inertia of the vorticity.
    model, psi = after(nothing, relaxation_days=10.0)
    shear, goal = (psi[0, 0] - psi[0, 1])[0, 3].real, model.equilibrium[0, 3].real
    stretching = 2 / DEFORMATION_RADIUS**2
    rate = 0.1 * stretching / (stretching + 12 / RADIUS**2)
    assert shear / goal == pytest.approx(1 - math.exp(-rate), rel=0.01)
    # Hyperdiffusion: the smallest waves decay within its time scale, twice as long ones 256 times slower.
    small, large = nothing.clone(), nothing.clone()
    small[..., 0, 21], large[..., 0, 10] = 1e6, 1e6
    ratio = (10 * 11 / (21 * 22)) ** 4
    _, psi = after(small, hyperdiffusion_days=0.5)
    assert psi[0, 0, 0, 21].real / 1e6 == pytest.approx(math.exp(-2), rel=1e-6)
    _, psi = after(large, hyperdiffusion_days=0.5)
    assert psi[0, 0, 0, 10].real / 1e6 == pytest.approx(math.exp(-2 * ratio), rel=1e-6)


def test_heating_drives_towards_a_jet_in_each_hemisphere():
    model = TwoLayerQG(dtype=torch.float64)
    latitude = 90 - 180 * (np.arange(64) + 0.5) / 64
    grid = SphericalHarmonics(np.sin(np.radians(latitude)), 8, 31, torch.float64)
    shear = model.fields(model.potential_vorticity(torch.stack((model.equilibrium, 0 * model.equilibrium))[None]), grid)
    u = (shear[0, CHANNELS.index("u_upper")] - shear[0, CHANNELS.index("u_lower")])[:, 0].numpy()
    assert np.abs(u - 55 * np.exp(-(((np.abs(latitude) - 42) / 16) ** 2))).max() < 0.5


@pytest.mark.slow
def test_weather_has_jets_of_believable_strength(weather):
    model, q = weather
    latitude = 90 - 180 * (np.arange(64) + 0.5) / 64
    maps = model.fields(q, SphericalHarmonics(np.sin(np.radians(latitude)), 128, 31, torch.float32))
    assert maps.shape == (2, 8, 64, 128) and bool(torch.isfinite(maps).all())
    u, v = maps[:, CHANNELS.index("u_upper")], maps[:, CHANNELS.index("v_upper")]
    assert ((u.abs().amax((1, 2)) > 20) & (u.abs().amax((1, 2)) < 150)).all()
    # What the first noise leaves after 40 days without heating is half as strong: jets below 30, storms of 7 m/s.
    jets = u.mean(-1)
    assert (jets[:, :32].amax(1) > 35).all() and (jets[:, 32:].amax(1) > 35).all(), "one in each hemisphere, westerly"
    weights = torch.from_numpy(np.cos(np.radians(latitude)) / np.cos(np.radians(latitude)).mean())[:, None]
    assert ((v.square() * weights).mean() > 9**2).all(), "storms"
    assert (maps[:, 0].std((1, 2)) > maps[:, 4].std((1, 2))).all(), "the upper layer is the windier one"


def test_winds_and_vorticity_are_derivatives_of_the_streamfunction(weather):
    """Against centred differences on a fine grid: u, v and the vorticity 1/(a cos) (dv/dlon - d(u cos)/dlat)."""
    model, q = weather
    height, width = 360, 720
    latitude = np.radians(90 - 180 * (np.arange(height) + 0.5) / height)
    maps = model.fields(q, SphericalHarmonics(np.sin(latitude), width, 31, torch.float32))[0].double().numpy()
    cosine = np.cos(latitude)[:, None]
    inner = np.s_[30:-30]  # degrees 75N to 75S: differences in longitude lose their meaning at the poles

    def d_longitude(x):
        return (np.roll(x, -1, 1) - np.roll(x, 1, 1)) / (4 * np.pi / width)

    def d_latitude(x):
        return np.gradient(x, latitude, axis=0)

    for u, v, vorticity, psi in maps.reshape(2, 4, height, width):
        for found, expected in (
            (u, -d_latitude(psi) / RADIUS),
            (v, d_longitude(psi) / (RADIUS * cosine)),
            (vorticity, (d_longitude(v) - d_latitude(u * cosine)) / (RADIUS * cosine)),
        ):
            assert np.abs(found - expected)[inner].max() < 0.02 * np.abs(found).max()
