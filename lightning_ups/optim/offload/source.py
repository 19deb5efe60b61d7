"""What an offloaded optimizer is given: parameters, their gradients, and the tensors that are stepped for them."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups.optim.master_weights import Writes
from lightning_ups.optim.mastered import MasteredOptimizer


class Source:
    """The parameters of an optimizer, which are stepped themselves.

    Attributes:
        writes: What others may have written into parameters that have masters.
        stood: If a list, another tensor always stands in for a parameter, and stays alive in it: no other tensor may be
            taken for it by its id.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.writes = optimizer, Writes()
        self.stood: list[nn.Parameter] | None = None

    def pairs(self) -> Iterator[tuple[int, nn.Parameter, nn.Parameter]]:
        """Yield the index of a group, a parameter of the module, and what is stepped for it."""
        for index, group in enumerate(self._optimizer.param_groups):
            yield from ((index, parameter, self.stepped_for(parameter)) for parameter in group["params"])

    def stepped_for(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what is stepped for ``parameter``: itself, or its master."""
        return parameter

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what the next step uses for ``parameter``, before any clipping."""
        return parameter.grad

    def gradients(self) -> Sequence[Tensor]:
        """Return every gradient that the next step uses."""
        found = (self.gradient(parameter) for _, parameter, _ in self.pairs())
        return [gradient for gradient in found if gradient is not None]

    def spent(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that a step has used the gradients of ``parameters``, which an optimizer leaves."""

    def undo(self) -> None:
        """Let what is stepped be parameters like others again."""


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


class MasteredSource(Source):
    """The parameters that a `MasteredOptimizer` shows, whose masters are stepped."""

    def __init__(self, optimizer: MasteredOptimizer) -> None:
        super().__init__(optimizer)
        self._of, self._gradients = optimizer.masters.of, optimizer.master_gradients
        self.writes = optimizer.masters.writes
        self._on_host: list[nn.Parameter] = []

    @override
    def stepped_for(self, parameter: nn.Parameter) -> nn.Parameter:
        key = self._of.get(parameter, parameter)
        if key is not parameter and not isinstance(key, HostMaster):
            gradient, key.grad = key.grad, None
            key.__class__ = HostMaster
            key.grad = gradient
            self._on_host.append(key)
        return key

    @override
    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        master = self._of.get(parameter)
        if master is None or (master.grad is None and self._gradients.wrapper is None):
            return parameter.grad
        return master.grad

    @override
    def gradients(self) -> Sequence[Tensor]:
        self._gradients.complete()
        return super().gradients()

    @override
    def spent(self, parameters: Iterable[nn.Parameter]) -> None:
        mastered = [parameter for parameter in parameters if parameter in self._of]
        self._gradients.spend(mastered, [self._of[parameter] for parameter in mastered])

    @override
    def undo(self) -> None:
        while self._on_host:
            key = self._on_host.pop()
            key.grad = None
            key.__class__ = nn.Parameter
