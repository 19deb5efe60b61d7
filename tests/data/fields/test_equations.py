import itertools
import math

import pytest
import torch

from lightning_ups.data.fields.equations import (
    EQUATIONS,
    Burgers,
    GrayScott,
    KuramotoSivashinsky,
    NavierStokes,
    ShallowWater,
    draw_parameters,
    solve,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
F64 = {"dtype": torch.float64}
PARAMETERS = {
    name: {p: math.sqrt(low * high) for p, (low, high) in kind.ranges.items()} for name, kind in EQUATIONS.items()
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def made(name, **options):
    return EQUATIONS[name](**PARAMETERS[name], **F64, **options)


class TestAll:
    @pytest.mark.parametrize("name", EQUATIONS)
    def test_the_error_falls_with_the_fourth_power_of_the_time_step(self, name):
        time, coarse = {
            "navier_stokes": (0.4, 0.02),
            "burgers": (0.4, 0.02),
            "kuramoto_sivashinsky": (10.0, 0.5),
            "gray_scott": (40.0, 4.0),
            "shallow_water": (0.8, 0.04),
        }[name]
        start = made(name, points=32).initial_state(2, generator=seeded())
        ends = []
        for divisor in (1, 2, 4, 8):
            solver = made(name, points=32, dt=coarse / divisor)
            ends.append(solver.advance(start, steps=round(time / solver.dt)))
        first, second, third = ((one - other).norm() for one, other in itertools.pairwise(ends))
        assert 3.5 < math.log2(first / second) < 4.6
        assert 3.6 < math.log2(second / third) < 4.4

    @pytest.mark.parametrize("name", EQUATIONS)
    def test_a_finer_grid_gives_the_same_solution(self, name):
        points = {1: 96, 2: 64}[EQUATIONS[name].num_axes]
        coarse, fine = (made(name, points=count, dt=0.01) for count in (points, 2 * points))
        one, other = (solver.initial_state(2, generator=seeded()) for solver in (coarse, fine))
        every = (..., *[slice(None, None, 2)] * coarse.num_axes)
        torch.testing.assert_close(other[every], one, **EXACT)
        one, other = coarse.advance(one, steps=20), fine.advance(other, steps=20)
        assert (other[every] - one).norm() < 2e-3 * one.norm()

    @pytest.mark.parametrize("name", EQUATIONS)
    def test_single_precision_follows_double(self, name):
        found = [
            solve(name, count=2, frames=3, points=32, seed=0, dtype=dtype)[0]
            if name != "kuramoto_sivashinsky"  # forgets its initial state while it settles
            else EQUATIONS[name](dtype=dtype, points=32).trajectory(
                made(name, points=32).initial_state(2, generator=seeded()), frames=3, steps=10
            )
            for dtype in (torch.float32, torch.float64)
        ]
        assert found[0].dtype == torch.float32
        torch.testing.assert_close(found[0].double(), found[1], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("name", EQUATIONS)
    def test_trajectories_of_a_batch_do_not_depend_on_one_another(self, name):
        kind = EQUATIONS[name]
        parameters = draw_parameters(kind.ranges, 3, generator=seeded())
        together = kind(**parameters, points=32, **F64)
        start = together.initial_state(3, generator=seeded())
        end = together.advance(start, steps=5)
        for index in range(3):
            alone = kind(**{key: value[index].item() for key, value in parameters.items()}, points=32, **F64)
            torch.testing.assert_close(alone.advance(start[index, None], steps=5)[0], end[index], **EXACT)

    @pytest.mark.parametrize("name", EQUATIONS)
    def test_trajectories_are_alive_and_smooth_on_the_grid(self, name):
        points = {1: 128, 2: 64}[EQUATIONS[name].num_axes]
        found, places = solve(name, count=2, frames=3, points=points, seed=1)
        assert found.shape == (2, 3, len(EQUATIONS[name].fields), *[points] * EQUATIONS[name].num_axes)
        assert places.shape == (2, len(EQUATIONS[name].ranges))
        assert places.abs().max() <= 1
        assert (found[:, -1] - found[:, 0]).norm() > 1e-3 * found[:, 0].norm()
        modes = torch.fft.rfft(found.double(), dim=-1).abs().square().flatten(0, -2).mean(0)
        assert modes[points // 3 :].sum() < 1e-3 * modes[1:].sum()


class TestNavierStokes:
    def test_a_flow_that_starts_at_rest_is_the_laminar_one(self):
        viscosity, drag = torch.tensor([1e-3, 1e-2]), 0.1
        solver = NavierStokes(viscosity=viscosity, drag=drag, points=32, **F64)
        found = solver.advance(torch.zeros(2, 1, 32, 32), steps=25)
        slowed = 16 * viscosity.double() + drag
        height = 2 / slowed * (1 - torch.exp(-slowed * 25 * solver.dt))
        wave = torch.cos(4 * solver.grid()).expand(32, 32)
        torch.testing.assert_close(found[:, 0], height[:, None, None] * wave, **EXACT)

    def test_taylor_and_green_s_vortices_decay(self):
        solver = NavierStokes(viscosity=0.05, drag=0.0, forcing=0.0, points=32, **F64)
        wave = torch.cos(solver.grid())
        start = (2 * wave[:, None] * wave)[None, None]
        found = solver.advance(start, steps=50)
        torch.testing.assert_close(found, start * math.exp(-2 * 0.05 * 50 * solver.dt), **EXACT)

    def test_energy_and_enstrophy_of_an_ideal_flow_are_conserved(self):
        solver = NavierStokes(viscosity=0.0, drag=0.0, forcing=0.0, points=32, dt=0.005, **F64)
        start = solver.initial_state(2, generator=seeded())
        end = solver.advance(start, steps=200)
        assert (end - start).norm() > 0.5 * start.norm()
        for quantity in (self.energy, self.enstrophy):
            torch.testing.assert_close(quantity(solver, end), quantity(solver, start), rtol=1e-6, atol=0)

    def energy(self, solver, vorticity):
        modes = solver.to_modes(vorticity)
        stream = solver.to_grid(torch.where(solver.square > 0, modes / solver.square, 0))
        return (stream * vorticity).mean(dim=(1, 2, 3))

    def enstrophy(self, solver, vorticity):
        return vorticity.square().mean(dim=(1, 2, 3))


class TestBurgers:
    def test_the_solution_of_cole_and_hopf(self):
        viscosity = torch.tensor([0.05, 0.2], dtype=torch.float64)
        solver = Burgers(viscosity=viscosity, points=64, dt=0.005, **F64)
        found = solver.advance(self.exact(solver, viscosity, 0.0), steps=200)
        torch.testing.assert_close(found, self.exact(solver, viscosity, 1.0), rtol=1e-7, atol=1e-7)

    def exact(self, solver, viscosity, time):
        x, nu = solver.grid(), viscosity[:, None]
        decay = torch.exp(-nu * time)
        return (2 * nu * decay * x.sin() / (1.5 + decay * x.cos()))[:, None]

    def test_momentum_is_conserved_and_energy_falls(self):
        solver = Burgers(viscosity=0.1, points=128, **F64)
        start = solver.initial_state(2, generator=seeded()) + 0.5
        end = solver.advance(start, steps=100)
        torch.testing.assert_close(end.mean(-1), start.mean(-1), **EXACT)
        assert (end.square().mean(-1) < start.square().mean(-1)).all()


class TestKuramotoSivashinsky:
    def test_small_waves_grow_and_decay_at_their_rates(self):
        solver = KuramotoSivashinsky(viscosity=1.0, points=64, length=20.0, dt=0.05, **F64)
        for count in (1, 2, 4):
            k = 2 * math.pi * count / 20
            start = 1e-8 * torch.cos(k * solver.grid())[None, None]
            found = solver.advance(start, steps=40)
            torch.testing.assert_close(found, start * math.exp((k**2 - k**4) * 2), rtol=1e-5, atol=1e-14)

    def test_the_mean_is_conserved_and_a_moving_frame_changes_nothing(self):
        solver = KuramotoSivashinsky(points=128, length=64.0, dt=0.05, **F64)
        start = solver.initial_state(2, generator=seeded())
        speed = 64 / 128 * 8 / 2  # eight grid points within the time
        still, moving = solver.advance(start, steps=40), solver.advance(start + speed, steps=40)
        torch.testing.assert_close(still.mean(-1), start.mean(-1), **EXACT)
        torch.testing.assert_close(moving - speed, still.roll(8, dims=-1), rtol=1e-4, atol=1e-4)

    def test_chaos_has_its_known_strength(self):
        found, _ = solve(
            "kuramoto_sivashinsky", count=8, frames=50, points=128, seed=0, ranges={"viscosity": (1.0, 1.0)}
        )
        assert 1.1 < found.std().item() < 1.5  # 1.3 in the literature, for long domains


class TestGrayScott:
    def test_food_alone_diffuses_and_is_fed(self):
        solver = GrayScott(feed=0.04, kill=0.06, points=32, **F64)
        wave = torch.cos(2 * math.pi / solver.length * solver.grid()).expand(32, 32)
        start = torch.stack([1 + 0.1 * wave, torch.zeros_like(wave)])[None]
        rate = 0.04 + 2e-5 * (2 * math.pi / solver.length) ** 2
        found = solver.advance(start, steps=20)
        torch.testing.assert_close(found[0, 0], 1 + 0.1 * math.exp(-rate * 20) * wave, **EXACT)
        torch.testing.assert_close(found[0, 1], torch.zeros_like(wave), **EXACT)

    def test_the_sum_changes_by_feed_and_kill_alone(self):
        feed, kill = 0.04, 0.06
        solver = GrayScott(feed=feed, kill=kill, points=32, dt=0.05, **F64)
        start = solver.initial_state(2, generator=seeded())
        before, now, after = solver.trajectory(start, frames=3, steps=1).mean(dim=(-1, -2)).unbind(1)
        change = (after - before).sum(1) / (2 * solver.dt)
        torch.testing.assert_close(change, feed * (1 - now[:, 0]) - (feed + kill) * now[:, 1], rtol=1e-5, atol=1e-8)


class TestShallowWater:
    def made(self, **options):
        return ShallowWater(**{"gravity": 1.5, "rotation": 2.0, "viscosity": 0.0, "points": 32, **F64, **options})

    def test_a_flow_in_geostrophic_balance_stays(self):
        solver = self.made()
        depth = 1 + 0.2 * torch.cos(solver.grid()).expand(32, 32)  # along the last axis, y
        u = 1.5 / 2.0 * 0.2 * torch.sin(solver.grid()).expand(32, 32)  # f u = -g dh/dy
        start = torch.stack([depth, u, torch.zeros_like(u)])[None]
        torch.testing.assert_close(solver.advance(start, steps=100), start, **EXACT)

    def test_small_waves_oscillate_at_the_frequency_of_poincare(self):
        solver = self.made(dt=0.01)
        wave, frequency = torch.cos(3 * solver.grid())[:, None].expand(32, 32), math.sqrt(2.0**2 + 1.5 * 9)
        # All of a standing wave is potential energy, and the depth has a part that stays in geostrophic balance.
        start = torch.stack([1 + 1e-7 * wave, torch.zeros_like(wave), torch.zeros_like(wave)])[None]
        found = solver.advance(start, steps=100)
        share = 1.5 * 9 / frequency**2
        height = 1 - share + share * math.cos(frequency * 1.0)
        torch.testing.assert_close((found[0, 0] - 1) / 1e-7, height * wave, rtol=1e-4, atol=1e-4)

    def test_mass_and_energy_are_conserved(self):
        solver = self.made(points=64, dt=0.01)
        start = solver.initial_state(2, generator=seeded())
        end = solver.advance(start, steps=50)
        assert (end - start).norm() > 0.05 * start.norm()
        torch.testing.assert_close(end[:, 0].mean(dim=(1, 2)), start[:, 0].mean(dim=(1, 2)), **EXACT)
        torch.testing.assert_close(self.energy(end), self.energy(start), rtol=1e-7, atol=0)

    def energy(self, state):
        h, u, v = state.unbind(1)
        return (0.5 * h * (u.square() + v.square()) + 0.5 * 1.5 * h.square()).mean(dim=(1, 2))


class TestSolve:
    def test_the_seed_decides(self):
        one, same, other = (solve("burgers", count=2, frames=2, points=32, seed=seed) for seed in (0, 0, 1))
        assert torch.equal(one[0], same[0])
        assert not torch.equal(one[0], other[0])

    def test_frames_are_an_interval_apart(self):
        short, long = (solve("burgers", count=1, frames=3, points=64, seed=0, interval=t)[0] for t in (0.02, 0.04))
        torch.testing.assert_close(short[:, 2], long[:, 1], rtol=1e-4, atol=1e-4)

    def test_unknown_parameters_are_refused(self):
        with pytest.raises(ValueError, match="viscosty"):
            solve("burgers", count=1, frames=2, points=32, seed=0, ranges={"viscosty": (0.1, 0.2)})
        with pytest.raises(ValueError, match="viscosity"):
            solve("burgers", count=1, frames=2, points=32, seed=0, ranges={"viscosity": (0.0, 0.2)})

    def test_a_solution_that_is_not_finite_is_refused(self, monkeypatch):
        monkeypatch.setattr(NavierStokes, "stable_dt", lambda points: 1.0)
        with pytest.raises(RuntimeError, match="more points"):
            solve("navier_stokes", count=1, frames=20, points=32, seed=0, interval=1.0)
