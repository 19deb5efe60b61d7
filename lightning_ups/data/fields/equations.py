"""Five equations: Navier-Stokes, Burgers, Kuramoto-Sivashinsky, Gray-Scott and shallow water, on periodic domains."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ups.data.fields.spectral import SpectralSolver

Equation = Literal["navier_stokes", "burgers", "kuramoto_sivashinsky", "gray_scott", "shallow_water"]
Parameter = Tensor | float  # one for each trajectory [batch], or one for all
Ranges = Mapping[str, tuple[float, float]]
_SOLVED_AT_ONCE = 64


class NavierStokes(SpectralSolver):
    """The vorticity ``w`` of an incompressible fluid: ``dw/dt + u . grad w = nu lap w - drag w + f cos(m y)``.

    Args:
        viscosity: ``nu``.
        drag: Slows large whirls, so that a stirred flow becomes stationary.
        forcing: ``f``.
        forcing_wave: ``m``.
        points: Grid points along each axis.
        length: Of the domain along each axis.
        **options: Of `SpectralSolver`.
    """

    fields: ClassVar = ("vorticity",)
    num_axes: ClassVar = 2
    ranges: ClassVar[Ranges] = {"viscosity": (5e-3, 5e-2)}
    interval: ClassVar = 0.2
    settling_time: ClassVar = 2.0

    def __init__(
        self,
        *,
        viscosity: Parameter,
        drag: float = 0.1,
        forcing: float = 2.0,
        forcing_wave: int = 4,
        points: int = 64,
        length: float = 2 * math.pi,
        **options: Any,
    ) -> None:
        self._viscosity, self._drag = viscosity, drag
        super().__init__(points=points, length=length, **options)
        self._inverse = torch.where(self.square > 0, 1 / self.square, 0).to(self.dtype)
        wave = forcing * torch.cos(forcing_wave * (2 * math.pi / length) * self.grid())
        self._forcing = self.to_modes(wave.expand(points, points))

    @classmethod
    @override
    def stable_dt(cls, points: int) -> float:
        return min(0.02, 1.28 / points)

    @override
    def linear(self) -> Tensor:
        return -self.column(self._viscosity) * self.square - self._drag

    @override
    def nonlinear(self, state: Tensor) -> Tensor:
        stream = self._inverse * state
        u, v = self.slope(stream, 1), -self.slope(stream, 0)
        u, v, dx, dy = self.to_grid(torch.stack([u, v, self.slope(state, 0), self.slope(state, 1)]))
        return self._forcing - self.to_modes(u * dx + v * dy)

    @override
    def initial_state(self, batch: int, *, generator: torch.Generator) -> Tensor:
        return 4 * self.random_field(batch, peak=4, generator=generator)[:, None]


class Burgers(SpectralSolver):
    """Burgers' equation in one dimension: ``du/dt + u du/dx = nu d2u/dx2``.

    Args:
        viscosity: ``nu``. Shocks are about ``4 nu`` wide and need some grid points.
        points: Grid points.
        length: Of the domain.
        **options: Of `SpectralSolver`.
    """

    fields: ClassVar = ("velocity",)
    num_axes: ClassVar = 1
    ranges: ClassVar[Ranges] = {"viscosity": (3e-2, 3e-1)}
    interval: ClassVar = 0.05
    settling_time: ClassVar = 0.0

    def __init__(self, *, viscosity: Parameter, points: int = 256, length: float = 2 * math.pi, **options: Any) -> None:
        self._viscosity = viscosity
        super().__init__(points=points, length=length, **options)

    @classmethod
    @override
    def stable_dt(cls, points: int) -> float:
        return min(0.01, 1.28 / points)

    @override
    def linear(self) -> Tensor:
        return -self.column(self._viscosity) * self.square

    @override
    def nonlinear(self, state: Tensor) -> Tensor:
        return -0.5 * self.slope(self.to_modes(self.to_grid(state).square()))

    @override
    def initial_state(self, batch: int, *, generator: torch.Generator) -> Tensor:
        return self.random_field(batch, peak=2, generator=generator)[:, None]


class KuramotoSivashinsky(SpectralSolver):
    """The Kuramoto-Sivashinsky equation in one dimension: ``du/dt + u du/dx + d2u/dx2 + nu d4u/dx4 = 0``. Chaotic.

    Args:
        viscosity: ``nu``.
        points: Grid points.
        length: Of the domain.
        **options: Of `SpectralSolver`.
    """

    fields: ClassVar = ("height",)
    num_axes: ClassVar = 1
    ranges: ClassVar[Ranges] = {"viscosity": (0.5, 1.5)}
    interval: ClassVar = 1.0
    settling_time: ClassVar = 100.0

    def __init__(self, *, viscosity: Parameter = 1.0, points: int = 128, length: float = 64.0, **options: Any) -> None:
        self._viscosity = viscosity
        super().__init__(points=points, length=length, **options)

    @classmethod
    @override
    def stable_dt(cls, points: int) -> float:
        return min(0.1, 12.8 / points)

    @override
    def linear(self) -> Tensor:
        return self.square - self.column(self._viscosity) * self.square**2

    @override
    def nonlinear(self, state: Tensor) -> Tensor:
        return -0.5 * self.slope(self.to_modes(self.to_grid(state).square()))

    @override
    def initial_state(self, batch: int, *, generator: torch.Generator) -> Tensor:
        return self.random_field(batch, peak=4, generator=generator)[:, None]


class GrayScott(SpectralSolver):
    """Two substances that react and diffuse, in two dimensions; they form spots and stripes.

    ``da/dt = D_a lap a - a b^2 + F (1 - a)`` and ``db/dt = D_b lap b + a b^2 - (F + k) b``.

    Args:
        feed: ``F``.
        kill: ``k``.
        diffusion: ``D_a`` and ``D_b``.
        points: Grid points along each axis.
        length: Of the domain along each axis.
        **options: Of `SpectralSolver`.
    """

    fields: ClassVar = ("a", "b")
    num_axes: ClassVar = 2
    ranges: ClassVar[Ranges] = {"feed": (0.03, 0.045), "kill": (0.057, 0.062)}
    interval: ClassVar = 20.0
    settling_time: ClassVar = 200.0

    def __init__(
        self,
        *,
        feed: Parameter,
        kill: Parameter,
        diffusion: tuple[float, float] = (2e-5, 1e-5),
        points: int = 64,
        length: float = 1.25,
        **options: Any,
    ) -> None:
        self._feed, self._kill, self._diffusion = feed, kill, diffusion
        super().__init__(points=points, length=length, **options)
        modes = torch.zeros(points, points // 2 + 1, device=self.device, dtype=self.dtype)
        modes[0, 0] = points**2  # a field of ones
        self._supply = self.column(feed).to(self.dtype)[:, 0] * modes

    @classmethod
    @override
    def stable_dt(cls, points: int) -> float:
        return 1.0

    @override
    def linear(self) -> Tensor:
        feed, kill = self.column(self._feed), self.column(self._kill)
        first, second = self._diffusion
        return -torch.cat([first * self.square + feed, second * self.square + feed + kill], dim=1)

    @override
    def nonlinear(self, state: Tensor) -> Tensor:
        a, b = self.to_grid(state).unbind(1)
        reaction = self.to_modes(a * b.square())
        return torch.stack([self._supply - reaction, reaction], dim=1)

    @override
    def initial_state(self, batch: int, *, generator: torch.Generator) -> Tensor:
        spots = torch.sigmoid(8 * (self.random_field(batch, peak=4, generator=generator) - 0.8))
        return torch.stack([1 - 0.5 * spots, 0.25 * spots], dim=1)


class ShallowWater(SpectralSolver):
    """The depth ``h`` of a rotating layer of water and its velocity ``(u, v)``, in two dimensions.

    ``dh/dt + div(h u) = nu lap h`` and ``du/dt + (curl u + f) z x u + grad(g h + |u|^2 / 2) = nu lap u``. Mass is
    conserved exactly, and without viscosity energy up to the error in time. The diffusion of ``h`` is numerical: it
    keeps steep waves smooth.

    Args:
        gravity: ``g``. The mean depth is 1, so that long waves have the speed ``sqrt(g)``.
        rotation: ``f``.
        viscosity: ``nu``.
        points: Grid points along each axis.
        length: Of the domain along each axis.
        **options: Of `SpectralSolver`.
    """

    fields: ClassVar = ("depth", "velocity_x", "velocity_y")
    num_axes: ClassVar = 2
    ranges: ClassVar[Ranges] = {"gravity": (0.5, 2.0), "rotation": (0.25, 4.0)}
    interval: ClassVar = 0.2
    settling_time: ClassVar = 0.0

    def __init__(
        self,
        *,
        gravity: Parameter,
        rotation: Parameter,
        viscosity: Parameter = 5e-3,
        points: int = 64,
        length: float = 2 * math.pi,
        **options: Any,
    ) -> None:
        self._viscosity = viscosity
        super().__init__(points=points, length=length, **options)
        self._gravity, self._rotation = (self.column(p).to(self.dtype)[:, 0] for p in (gravity, rotation))

    @classmethod
    @override
    def stable_dt(cls, points: int) -> float:
        return min(0.02, 1.28 / points)

    @override
    def linear(self) -> Tensor:
        return -self.column(self._viscosity) * self.square

    @override
    def nonlinear(self, state: Tensor) -> Tensor:
        _, u_modes, v_modes = state.unbind(1)
        curl = self.to_grid(self.slope(v_modes, 0) - self.slope(u_modes, 1)) + self._rotation
        h, u, v = self.to_grid(state).unbind(1)
        head = self._gravity * h + 0.5 * (u.square() + v.square())
        flow_x, flow_y, turn_x, turn_y, head = self.to_modes(torch.stack([h * u, h * v, curl * v, -curl * u, head]))
        dh = -self.slope(flow_x, 0) - self.slope(flow_y, 1)
        return torch.stack([dh, turn_x - self.slope(head, 0), turn_y - self.slope(head, 1)], dim=1)

    @override
    def initial_state(self, batch: int, *, generator: torch.Generator) -> Tensor:
        depth = 1 + 0.1 * self.random_field(batch, peak=2, generator=generator)
        return torch.stack([depth, torch.zeros_like(depth), torch.zeros_like(depth)], dim=1)


EQUATIONS: Mapping[Equation, type[SpectralSolver]] = MappingProxyType(
    {
        "navier_stokes": NavierStokes,
        "burgers": Burgers,
        "kuramoto_sivashinsky": KuramotoSivashinsky,
        "gray_scott": GrayScott,
        "shallow_water": ShallowWater,
    }
)


def draw_parameters(ranges: Ranges, count: int, *, generator: torch.Generator) -> dict[str, Tensor]:
    """Return ``count`` values of each parameter, uniform in the logarithm, in float64."""
    drawn = {}
    for name, (low, high) in ranges.items():
        share = torch.rand(count, generator=generator, dtype=torch.float64)
        drawn[name] = low * (high / low) ** share
    return drawn


def solve(
    equation: Equation,
    *,
    count: int,
    frames: int,
    points: int,
    seed: int,
    interval: float | None = None,
    ranges: Ranges | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Return trajectories [count, frames, channels, *grid] from random states, and their parameters [count, P].

    A parameter is given as its place in its range, from -1 to 1, in the logarithm. The trajectories are solved in
    batches of 64, which bounds the memory. The result is on the CPU.

    Raises:
        ValueError: If a parameter is unknown or its range is not positive.
        RuntimeError: If a trajectory has values that are not finite.
    """
    kind = EQUATIONS[equation]
    ranges = {**kind.ranges, **(ranges or {})}
    for name, (low, high) in ranges.items():
        if name not in kind.ranges or not 0 < low <= high:
            raise ValueError(
                f"The range {name}=({low}, {high}) does not fit {equation}, whose parameters are"
                f" {', '.join(kind.ranges)}. Give a known name with 0 < low <= high."
            )
    interval = kind.interval if interval is None else interval
    steps = math.ceil(interval / kind.stable_dt(points) - 1e-9)
    generator = torch.Generator().manual_seed(seed)
    parameters = draw_parameters(ranges, count, generator=generator)
    parts = []
    for first in range(0, count, _SOLVED_AT_ONCE):
        some = {name: values[first : first + _SOLVED_AT_ONCE] for name, values in parameters.items()}
        solver = kind(**some, points=points, dt=interval / steps, dtype=dtype, device=device)  # type: ignore[arg-type]
        state = solver.initial_state(min(_SOLVED_AT_ONCE, count - first), generator=generator)
        state = solver.advance(state, steps=math.ceil(kind.settling_time / solver.dt - 1e-9))
        parts.append(solver.trajectory(state, frames=frames, steps=steps).cpu())
    found = torch.cat(parts)
    if not found.isfinite().all():
        raise RuntimeError(
            f"The solution of {equation} with {points} points is not finite. The grid or the parameters are too coarse"
            f" for each other. Use more points, or ranges closer to {dict(kind.ranges)}."
        )
    places = [
        2 * (parameters[name] / low).log() / math.log(high / low) - 1 if high > low else torch.zeros(count)
        for name, (low, high) in ranges.items()
    ]
    return found, torch.stack(places, dim=1).float()
