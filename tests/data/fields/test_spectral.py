import math

import pytest
import torch

from lightning_ups.data.fields.equations import Burgers, NavierStokes
from lightning_ups.data.fields.spectral import _etdrk4


@pytest.mark.parametrize("z", [-1e3, -1.0, -1e-4, 0.0, 0.5])
def test_coefficients_are_those_of_the_series(z):
    dt = 0.1
    whole, half, q, f1, f2, f3 = (c.item() for c in _etdrk4(torch.tensor([z], dtype=torch.float64), dt))
    phi = [sum_or_formula(order, z) for order in range(4)]
    assert (whole, half) == pytest.approx((math.exp(z), math.exp(z / 2)))
    assert q == pytest.approx(dt / 2 * sum_or_formula(1, z / 2))
    assert f1 == pytest.approx(dt * (phi[1] - 3 * phi[2] + 4 * phi[3]))
    assert f2 == pytest.approx(dt * (phi[2] - 2 * phi[3]))
    assert f3 == pytest.approx(dt * (4 * phi[3] - phi[2]))


def sum_or_formula(order, z):
    """Return the function phi of this order: the series near zero, else the recursion."""
    if abs(z) < 1.5:
        return sum(z**n / math.factorial(n + order) for n in range(30))
    return math.exp(z) if order == 0 else (sum_or_formula(order - 1, z) - 1 / math.factorial(order - 1)) / z


def test_slopes_are_exact_for_waves_that_the_grid_carries():
    solver = NavierStokes(viscosity=0.1, points=16, dtype=torch.float64)
    x = solver.grid()
    field = torch.sin(3 * x)[:, None] * torch.cos(2 * x)
    dx, dy = (solver.to_grid(solver.slope(solver.to_modes(field), axis)) for axis in (0, 1))
    torch.testing.assert_close(dx, 3 * torch.cos(3 * x)[:, None] * torch.cos(2 * x))
    torch.testing.assert_close(dy, -2 * torch.sin(3 * x)[:, None] * torch.sin(2 * x))


def test_random_fields_are_normal_and_equal_on_every_grid():
    fields = {
        points: Burgers(viscosity=0.1, points=points, dtype=torch.float64).random_field(
            64, peak=3, generator=torch.Generator().manual_seed(0)
        )
        for points in (32, 64)
    }
    torch.testing.assert_close(fields[64][:, ::2], fields[32])
    torch.testing.assert_close(fields[32].square().mean(-1), torch.ones(64, dtype=torch.float64))
    torch.testing.assert_close(fields[32].mean(-1), torch.zeros(64, dtype=torch.float64))


@pytest.mark.gpu
def test_a_gpu_finds_the_same():
    start = NavierStokes(viscosity=1e-2).initial_state(2, generator=torch.Generator().manual_seed(0))
    found = [NavierStokes(viscosity=1e-2, device=device).advance(start, steps=20).cpu() for device in ("cpu", "cuda")]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
