"""What an offloaded optimizer is given: parameters, their gradients, and the tensors that are stepped for them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups.optim.master_weights import Writes
from lightning_ups.optim.mastered import MasteredOptimizer

__all__ = ["Mastered", "Plain", "Source"]


class Source(Protocol):
    """Parameters, and what is stepped for each: itself, or its master.

    Attributes:
        writes: What others may have written into parameters that have masters.
        stood: If a list, another tensor always stands in for a parameter, and stays alive in it: no other tensor may be
            taken for it by its id.
    """

    writes: Writes
    stood: list[nn.Parameter] | None

    def pairs(self) -> Iterator[tuple[int, nn.Parameter, nn.Parameter]]:
        """Yield the index of a group, a parameter of the module, and what is stepped for it."""
        ...

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what the next step uses for ``parameter``, before any clipping."""
        ...

    def gradients(self) -> Sequence[Tensor]:
        """Return every gradient that the next step uses."""
        ...

    def spent(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that a step has used the gradients of ``parameters``."""
        ...


class Plain:
    """The parameters of an optimizer, which are stepped themselves."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.writes = optimizer, Writes()
        self.stood: list[nn.Parameter] | None = None

    def pairs(self) -> Iterator[tuple[int, nn.Parameter, nn.Parameter]]:
        """See `Source`."""
        for index, group in enumerate(self._optimizer.param_groups):
            yield from ((index, parameter, parameter) for parameter in group["params"])

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """See `Source`."""
        return parameter.grad

    def gradients(self) -> Sequence[Tensor]:
        """See `Source`."""
        return [parameter.grad for _, parameter, _ in self.pairs() if parameter.grad is not None]

    def spent(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the gradients: an optimizer does."""


class HostMaster(nn.Parameter):
    """A master on the host, whose gradient is on the device: torch wants both in one place."""

    _gradient: Tensor | None = None

    @property
    @override
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradient, wherever it is."""
        return self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._gradient = value

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._gradient = None


class Mastered:
    """The parameters that a `MasteredOptimizer` shows, whose masters are stepped."""

    def __init__(self, optimizer: MasteredOptimizer) -> None:
        self._optimizer, self._of, self._gradients = optimizer, optimizer.masters.of, optimizer.master_gradients
        self.writes = optimizer.masters.writes
        self.stood: list[nn.Parameter] | None = None
        self._on_host: list[nn.Parameter] = []
        self._follow()

    def _follow(self) -> None:
        for group in self._optimizer.param_groups:
            for key in (self._of[p] for p in group["params"] if p in self._of):
                if not isinstance(key, HostMaster):
                    gradient, key.grad = key.grad, None
                    key.__class__ = HostMaster
                    key.grad = gradient
                    self._on_host.append(key)

    def pairs(self) -> Iterator[tuple[int, nn.Parameter, nn.Parameter]]:
        """See `Source`."""
        self._follow()  # there may be groups that there were not before
        for index, group in enumerate(self._optimizer.param_groups):
            parameters: list[nn.Parameter] = group["params"]
            yield from ((index, parameter, self._of.get(parameter, parameter)) for parameter in parameters)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """See `Source`."""
        master = self._of.get(parameter)
        if master is None or (master.grad is None and self._gradients.wrapper is None):
            return parameter.grad
        return master.grad

    def gradients(self) -> Sequence[Tensor]:
        """See `Source`."""
        self._gradients.complete()
        found = (self.gradient(parameter) for _, parameter, _ in self.pairs())
        return [gradient for gradient in found if gradient is not None]

    def spent(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give the gradients up, as a `MasteredOptimizer` does."""
        mastered = [parameter for parameter in parameters if parameter in self._of]
        self._gradients.spend(mastered, [self._of[parameter] for parameter in mastered])

    def undo(self) -> None:
        """Let masters be parameters like others again."""
        while self._on_host:
            key = self._on_host.pop()
            key.grad = None
            key.__class__ = nn.Parameter
