"""Families against scipy.stats, the constants of the paper, and a user's own."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

import oracle
from softstair import noise

pytestmark = pytest.mark.quick

CLASSES = {
    "uniform": noise.Uniform,
    "triangular": noise.Triangular,
    "normal": noise.Normal,
    "logistic": noise.Logistic,
}
WITHIN = {"uniform": 0.288675, "triangular": 0.204124, "normal": 0.255107, "logistic": 0.247546}
SUPPORT = {"uniform": math.sqrt(3), "triangular": math.sqrt(6)}


class Laplace(noise.Noise):
    """A user's symmetric family, from a cdf and a pdf alone."""

    def cdf(self, z):
        tail = 0.5 * torch.exp(-math.sqrt(2) * z.abs())
        return torch.where(z < 0, tail, 1 - tail)

    def pdf(self, z):
        return torch.exp(-math.sqrt(2) * z.abs()) / math.sqrt(2)


class Gumbel(noise.Noise):
    """A user's skewed family: its mode, median and mean are three different points."""

    scale = math.sqrt(6) / math.pi

    def cdf(self, z):
        return torch.exp(-torch.exp(-(z / self.scale + np.euler_gamma)))

    def pdf(self, z):
        w = z / self.scale + np.euler_gamma
        return torch.where(w < -80, 0.0, torch.exp(-w - torch.exp(-w.clamp(min=-80)))) / self.scale


OWN = {"laplace": Laplace, "gumbel": Gumbel}


def grid(dtype: torch.dtype) -> torch.Tensor:
    """Standardised points, a hair off the support edges, where densities may be one-sided."""
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    edges = z.new_tensor([e * s for e in SUPPORT.values() for s in (1 + 1e-4, 1 - 1e-4)])
    extremes = z.new_tensor([-1e30, -700.0, -40.0, 0.0, 40.0, 700.0, 1e30])
    return torch.cat([z, edges, -edges, extremes]).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str
)
@pytest.mark.parametrize("name", oracle.NAMES)
def test_cdf_and_pdf_equal_scipy(name, dtype, tolerance):
    """Standardised cdf and pdf, in the dtype they are asked in."""
    family, truth, z = CLASSES[name](), oracle.FAMILIES[name], grid(dtype)
    for ours, theirs in ((family.cdf(z), truth.cdf), (family.pdf(z), truth.pdf)):
        assert ours.dtype == dtype
        np.testing.assert_allclose(oracle.numpy(ours), theirs(oracle.numpy(z)), 0, tolerance)


@pytest.mark.parametrize("name", oracle.NAMES)
def test_ppf_equals_scipy_and_inverts_the_cdf(name):
    """The inverse cdf, tails included, in float64 and float32."""
    family, truth = CLASSES[name](), oracle.FAMILIES[name]
    u = torch.cat([torch.linspace(0, 1, 2001)[1:-1], torch.tensor([1e-6, 1 - 1e-6])]).double()
    np.testing.assert_allclose(oracle.numpy(family.ppf(u)), truth.ppf(u.numpy()), 1e-9, 1e-9)
    torch.testing.assert_close(family.cdf(family.ppf(u)), u, rtol=0, atol=1e-12)
    single = u[:-2].float()
    exact = truth.ppf(oracle.numpy(single))
    np.testing.assert_allclose(oracle.numpy(family.ppf(single)), exact, 2e-4, 1e-5)
    ends = family.ppf(torch.tensor([0.0, 1.0], dtype=torch.float64))
    limit = SUPPORT.get(name, math.inf)
    assert family.support == pytest.approx(limit)
    torch.testing.assert_close(ends, torch.tensor([-limit, limit], dtype=torch.float64))


@pytest.mark.parametrize("name", oracle.NAMES)
def test_symmetry_infinities_and_nan(name):
    """F(-z) = 1 - F(z), mu(-z) = mu(z); 0, 1 and density 0 at the infinities; NaN stays NaN."""
    family = CLASSES[name]()
    z = torch.linspace(0, 30, 3000, dtype=torch.float64)
    torch.testing.assert_close(family.cdf(-z), 1 - family.cdf(z), rtol=0, atol=1e-15)
    off = (z - SUPPORT.get(name, -1.0)).abs() > 1e-9
    torch.testing.assert_close(family.pdf(-z)[off], family.pdf(z)[off], rtol=1e-12, atol=1e-300)
    for dtype in oracle.DTYPES:
        far = torch.tensor([-math.inf, math.inf, math.nan], dtype=dtype)
        assert family.cdf(far)[:2].tolist() == [0.0, 1.0]
        assert family.pdf(far)[:2].tolist() == [0.0, 0.0]
        assert family.cdf(far)[2].isnan()
        assert family.cdf(torch.zeros((), dtype=dtype)).item() == 0.5
    deep = family.cdf(torch.tensor([-6.0, -10.0], dtype=torch.float64)).numpy()
    np.testing.assert_allclose(deep, oracle.FAMILIES[name].cdf([-6.0, -10.0]), 1e-9, 0)


def test_the_uniform_density_is_right_continuous():
    """Its density is that of the closed left end and the open right end, exactly."""
    family, root = noise.Uniform(), math.sqrt(3)
    z = torch.from_numpy(np.array([-root, np.nextafter(-root, -9), root, np.nextafter(root, 0)]))
    peak = 1 / (2 * root)
    torch.testing.assert_close(family.pdf(z), torch.tensor([peak, 0, 0, peak], dtype=z.dtype))


@pytest.mark.parametrize("name", oracle.NAMES)
def test_equivalent_noises_have_the_constants_of_the_paper(name):
    """std_within: all the mass of a bounded family, the given mass of an unbounded one."""
    family = CLASSES[name]()
    std = family.std_within(0.5)
    assert isinstance(std, float)
    assert std == pytest.approx(WITHIN[name], abs=5e-7)
    assert family.std_within(0.5, mass=0.95) == std
    assert family.std_within(1.75) == pytest.approx(3.5 * std, rel=1e-12)
    for mass in (0.5, 0.9, 0.999):
        reach = SUPPORT.get(name, oracle.FAMILIES[name].ppf((1 + mass) / 2))
        assert family.std_within(0.5, mass=mass) == pytest.approx(0.5 / reach, rel=1e-9)


def test_get_finds_families_by_name():
    """The four names, and nothing else."""
    for name, family in CLASSES.items():
        assert type(noise.get(name)) is family
        assert type(pickle.loads(pickle.dumps(noise.get(name)))) is family
    oracle.refuses(lambda: noise.get("gaussian"), "gaussian", *CLASSES)
    oracle.refuses(lambda: noise.get(""), *CLASSES)


@pytest.mark.parametrize("name", OWN)
def test_a_family_of_ones_own_needs_cdf_and_pdf_alone(name):
    """ppf, support and std_within follow from the cdf, for symmetric and skewed families."""
    family, truth = OWN[name](), oracle.FAMILIES[name]
    u = torch.tensor([1e-4, 0.01, 0.2, 0.5, 0.7, 0.99, 1 - 1e-4], dtype=torch.float64)
    np.testing.assert_allclose(family.ppf(u).numpy(), truth.ppf(u.numpy()), 1e-6, 1e-6)
    assert family.support == math.inf
    for mass in (0.5, 0.95):
        reach = 0.5 / family.std_within(0.5, mass=mass)
        assert truth.cdf(reach) - truth.cdf(-reach) == pytest.approx(mass, abs=1e-6)


@pytest.mark.parametrize(
    ("half", "mass", "field"), [(0.0, 0.9, "half"), (math.nan, 0.9, "half"), (0.5, 1.5, "mass")]
)
def test_std_within_raises_for_a_wrong_argument(half, mass, field):
    with pytest.raises(ValueError, match=field):
        noise.Normal().std_within(half, mass)
