"""A pseudo-spectral solver on periodic grids, for batches of trajectories with parameters of their own."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

_CONTOUR_POINTS = 32
_RANDOM_MODES = 8  # along each axis; the number does not depend on the grid, so that equal seeds give equal fields


class SpectralSolver(ABC):
    """Solves ``du/dt = L u + N(u)``, where ``L`` is diagonal in Fourier space, by ETDRK4.

    The linear part is integrated exactly, so that diffusion never limits the time step; the error of the rest is of
    fourth order. The coefficients are those of Kassam and Trefethen (2005), "Fourth-order time-stepping for stiff
    PDEs". Products are dealiased by the 2/3 rule.

    A state is a tensor [batch, channels, *grid]. An axis has ``points`` points on ``[0, length)``.

    Args:
        points: Grid points along each axis.
        length: Of the domain along each axis.
        dt: The time step. None: `stable_dt`.
        dtype: float32 or float64.
        device: Where to compute.
    """

    fields: ClassVar[tuple[str, ...]]  # names of the channels
    num_axes: ClassVar[int]
    ranges: ClassVar[Mapping[str, tuple[float, float]]]  # of the parameters: positive, drawn uniformly in the logarithm
    interval: ClassVar[float]  # between the frames of a trajectory
    settling_time: ClassVar[float]  # before the first frame

    def __init__(
        self,
        *,
        points: int,
        length: float,
        dt: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.points, self.length, self.dtype, self.device = points, length, dtype, torch.device(device)
        self.dt = self.stable_dt(points) if dt is None else dt
        self._axes = tuple(range(-self.num_axes, 0))
        full = torch.fft.fftfreq(points, 1 / points, dtype=torch.float64)
        half = torch.arange(points // 2 + 1, dtype=torch.float64)
        waves = torch.meshgrid(*[full] * (self.num_axes - 1), half, indexing="ij")
        scale = 2 * math.pi / length
        kept = torch.stack([wave.abs() < points / 3 for wave in waves]).all(0)
        # For an even number of points, the wave of Nyquist's frequency has no derivative on the grid.
        self.wave = [torch.where(wave.abs() * 2 == points, 0, wave * scale).to(self.device) for wave in waves]
        self.square = (torch.stack(waves) * scale).square().sum(0).to(self.device)
        self._kept = kept.to(self.device, dtype)
        self._i_wave = [1j * wave.to(dtype) for wave in self.wave]
        self._coefficients = [c.to(dtype) for c in _etdrk4(self.linear().to(self.device) * self.dt, self.dt)]

    @classmethod
    @abstractmethod
    def stable_dt(cls, points: int) -> float:
        """Return a time step that is stable and accurate for fields as `initial_state` makes them."""

    @abstractmethod
    def linear(self) -> Tensor:
        """Return the factors of ``L`` [batch or 1, channels or 1, *modes], real, in float64."""

    @abstractmethod
    def nonlinear(self, state: Tensor) -> Tensor:
        """Return ``N`` for a ``state`` in Fourier space, also in Fourier space, before dealiasing."""

    @abstractmethod
    def initial_state(self, batch: int, *, generator: torch.Generator) -> Tensor:
        """Return random initial states [batch, channels, *grid], drawn by a generator of the CPU."""

    def advance(self, state: Tensor, *, steps: int) -> Tensor:
        """Return the state after so many time steps."""
        whole, half, q, f1, f2, f3 = self._coefficients
        v = self.to_modes(state.to(self.device, self.dtype))
        for _ in range(steps):
            n_v = self._change(v)
            a = half * v + q * n_v
            n_a = self._change(a)
            n_b = self._change(half * v + q * n_a)
            n_c = self._change(half * a + q * (2 * n_b - n_v))
            v = whole * v + f1 * n_v + 2 * f2 * (n_a + n_b) + f3 * n_c
        return self.to_grid(v)

    def trajectory(self, state: Tensor, *, frames: int, steps: int) -> Tensor:
        """Return ``state`` and what follows, ``steps`` time steps apart: [batch, frames, channels, *grid]."""
        found = [state.to(self.device, self.dtype)]
        for _ in range(frames - 1):
            found.append(self.advance(found[-1], steps=steps))
        return torch.stack(found, dim=1)

    def grid(self) -> Tensor:
        """Return the coordinates along one axis [points]."""
        return torch.arange(self.points, device=self.device, dtype=self.dtype) * (self.length / self.points)

    def to_modes(self, field: Tensor) -> Tensor:
        """Return the Fourier coefficients of ``field``."""
        return torch.fft.rfftn(field, dim=self._axes)

    def to_grid(self, modes: Tensor) -> Tensor:
        """Return the field of these Fourier coefficients."""
        return torch.fft.irfftn(modes, s=(self.points,) * self.num_axes, dim=self._axes)

    def slope(self, modes: Tensor, axis: int = 0) -> Tensor:
        """Return the derivative along a spatial axis, in Fourier space."""
        return self._i_wave[axis] * modes

    def random_field(self, batch: int, *, peak: float, generator: torch.Generator) -> Tensor:
        """Return smooth random fields [batch, *grid] of mean 0 and variance 1, equal on every grid.

        Args:
            batch: Number of fields.
            peak: Amplitudes fall beyond this wavenumber, counted in waves along an axis.
            generator: Of the CPU.
        """
        count = 2 * _RANDOM_MODES + 1
        shape = (batch, *[count] * self.num_axes)
        drawn = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
        wave = torch.arange(-_RANDOM_MODES, _RANDOM_MODES + 1, dtype=torch.float64)
        square = torch.stack(torch.meshgrid(*[wave] * self.num_axes, indexing="ij")).square().sum(0)
        drawn *= ((square > 0) / (1 + square / peak**2) ** 2)[..., None]
        kept = min(_RANDOM_MODES, (self.points - 1) // 3)
        places = torch.arange(-kept, kept + 1)
        modes = torch.view_as_complex(drawn)
        full = torch.zeros(batch, *[self.points] * self.num_axes, dtype=torch.complex128)
        for axis in range(self.num_axes):
            modes = modes.index_select(axis + 1, places + _RANDOM_MODES)
        index = torch.meshgrid(*[places % self.points] * self.num_axes, indexing="ij")
        full[(slice(None), *index)] = modes
        field = torch.fft.ifftn(full, dim=self._axes).real
        return (field / field.std(dim=self._axes, correction=0, keepdim=True)).to(self.device, self.dtype)

    def column(self, value: Tensor | float) -> Tensor:
        """Return a parameter, one for each trajectory or one for all, as [batch or 1, 1, *ones] in float64."""
        column = torch.as_tensor(value, dtype=torch.float64, device=self.device).reshape(-1, 1)
        return column[(..., *[None] * self.num_axes)]

    def _change(self, modes: Tensor) -> Tensor:
        return self._kept * self.nonlinear(modes)


def _etdrk4(z: Tensor, dt: float) -> Sequence[Tensor]:
    """Return the six coefficients for ``z``, the linear part times the time step, by averages over a circle around it.

    The formulas divide small differences by powers of ``z``; on the circle nothing cancels.
    """
    q, f1, f2, f3 = (torch.zeros_like(z) for _ in range(4))
    for index in range(_CONTOUR_POINTS):  # `z` is real: the upper half of the circle is enough
        angle = math.pi * (index + 0.5) / _CONTOUR_POINTS
        r = z + complex(math.cos(angle), math.sin(angle))
        e = r.exp()
        q += ((r / 2).exp() - 1).div(r).real
        f1 += ((-4 - r + e * (4 - 3 * r + r**2)) / r**3).real
        f2 += ((2 + r + e * (r - 2)) / r**3).real
        f3 += ((-4 - 3 * r - r**2 + e * (4 - r)) / r**3).real
    scale = dt / _CONTOUR_POINTS
    return z.exp(), (z / 2).exp(), q * scale, f1 * scale, f2 * scale, f3 * scale
