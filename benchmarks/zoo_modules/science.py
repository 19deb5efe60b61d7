"""Graphs, fields and differential equations: torch_geometric, neuraloperator, e3nn, torchdiffeq, zuko."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from typing_extensions import override

from zoo_modules.base import Regressor, Work, line, normal


class Nodes(LightningModule):
    """Classifies the nodes of one graph, as torch_geometric's examples do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(data.x, data.edge_index), data.y)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.005, weight_decay=5e-4)


class Graphs(LightningModule):
    """Classifies graphs, of which each batch has several."""

    def __init__(self, net: nn.Module, width: int, classes: int = 10) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(width, classes)

    @override
    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        from torch_geometric.nn import global_add_pool

        nodes = self.net(data.x, data.edge_index)
        return F.cross_entropy(self.head(global_add_pool(nodes, data.batch, size=data.num_graphs)), data.y)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def _graph(nodes: int, edges: int, features: int, classes: int = 10) -> Any:
    def make(generator: Generator) -> Any:
        from torch_geometric.data import Data

        return Data(
            x=torch.randn(nodes, features, generator=generator),
            edge_index=torch.randint(nodes, (2, edges), generator=generator),
            y=torch.randint(classes, (nodes,), generator=generator),
        )

    return make


def _graphs(count: int, nodes: int, features: int, classes: int = 10) -> Any:
    """Return what makes a batch of graphs that differ in size, as molecules do."""

    def make(generator: Generator) -> Any:
        from torch_geometric.data import Batch, Data

        made = []
        for size in torch.randint(nodes // 2, nodes * 3 // 2, (count,), generator=generator).tolist():
            edges = torch.randint(size, (2, 4 * size), generator=generator)
            x, y = torch.randn(size, features, generator=generator), torch.randint(classes, (1,), generator=generator)
            made.append(Data(x=x, edge_index=edges, y=y))
        return Batch.from_data_list(made)

    return make


@line("pyg_gcn", "graph", "torch_geometric", draws=True)
def pyg_gcn(tiny: bool) -> Work:
    """A graph convolutional network over one large graph."""
    from torch_geometric.nn import GCN

    nodes, edges, features, width = (50, 200, 8, 16) if tiny else (100_000, 1_000_000, 256, 512)
    return Work(Nodes(GCN(features, width, 3, out_channels=10, dropout=0.5)), _graph(nodes, edges, features))


@line("pyg_sage", "graph", "torch_geometric")
def pyg_sage(tiny: bool) -> Work:
    """GraphSAGE."""
    from torch_geometric.nn import GraphSAGE

    nodes, edges, features, width = (50, 200, 8, 16) if tiny else (100_000, 1_000_000, 256, 512)
    return Work(
        Nodes(GraphSAGE(features, width, 3, out_channels=10, norm="batch_norm")), _graph(nodes, edges, features)
    )


@line("pyg_gat", "graph", "torch_geometric", gate=True)
def pyg_gat(tiny: bool) -> Work:
    """GATv2: attention over neighbors."""
    from torch_geometric.nn import GAT

    nodes, edges, features, width = (50, 200, 8, 16) if tiny else (50_000, 500_000, 128, 256)
    return Work(Nodes(GAT(features, width, 3, out_channels=10, heads=4, v2=True)), _graph(nodes, edges, features))


@line("pyg_gin", "graph", "torch_geometric")
def pyg_gin(tiny: bool) -> Work:
    """GIN over batches of small graphs, whose sizes vary; bound by the host."""
    from torch_geometric.nn import GIN

    count, nodes, width = (4, 8, 16) if tiny else (128, 24, 128)
    return Work(Graphs(GIN(8, width, 4, norm="batch_norm"), width), _graphs(count, nodes, 8))


class GraphTransformer(nn.Module):
    """As torch_geometric's example of GPS has it."""

    def __init__(self, features: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        from torch_geometric.nn import GINConv, GPSConv

        self.first, self.layers = nn.Linear(features, width), nn.ModuleList()
        for _ in range(layers):
            mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            self.layers.append(GPSConv(width, GINConv(mlp), heads=heads, attn_type="multihead"))

    @override
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edge_index, batch)
        return x


class PooledTransformer(LightningModule):
    """Regresses a number for each graph."""

    def __init__(self, net: nn.Module, width: int) -> None:
        super().__init__()
        self.net, self.head = net, nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 1))

    @override
    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        nodes = self.net(data.x, data.edge_index, data.batch)
        return (self.head(global_mean_pool(nodes, data.batch)).squeeze(-1) - data.y).abs().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=1e-5)


@line("pyg_gps", "graph", "torch_geometric")
def pyg_gps(tiny: bool) -> Work:
    """A graph transformer: messages and attention within each graph."""
    count, nodes, width, layers, heads = (4, 8, 16, 2, 2) if tiny else (256, 48, 512, 6, 8)
    return Work(PooledTransformer(GraphTransformer(8, width, layers, heads), width), _graphs(count, nodes, 8))


class Field(LightningModule):
    """An operator between fields with neuraloperator's relative loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        from neuralop.losses import LpLoss

        self.net, self.loss = net, LpLoss(d=2, p=2)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return self.loss(self.net(inputs), targets)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)]


def _spectral() -> type[nn.Module]:
    """Return neuraloperator's layer outside of autocast, since a GPU has no Fourier transform of bfloat16."""
    from neuralop.layers.spectral_convolution import SpectralConv

    class Spectral(SpectralConv):
        @override
        def forward(self, x: Tensor, output_shape: Any = None) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                return super().forward(x.float(), output_shape)

    return Spectral


def _fields(tiny: bool, *, batch: int = 16, size: int = 128) -> Any:
    batch, size = (2, 16) if tiny else (batch, size)
    return normal((batch, 1, size, size), (batch, 1, size, size))


@line("fno", "operator", "neuralop", gate=True)
def fno(tiny: bool) -> Work:
    """A Fourier neural operator: complex weights, transforms outside of autocast."""
    from neuralop.models import FNO

    modes, width, layers = (4, 8, 2) if tiny else (32, 128, 4)
    net = FNO(
        n_modes=(modes, modes),
        in_channels=1,
        out_channels=1,
        hidden_channels=width,
        n_layers=layers,
        conv_module=_spectral(),
    )
    return Work(Field(net), _fields(tiny))


@line("tfno", "operator", "neuralop", "tltorch")
def tfno(tiny: bool) -> Work:
    """The same with factorized weights."""
    from neuralop.models import TFNO

    modes, width, layers = (4, 8, 2) if tiny else (32, 96, 4)
    net = TFNO(
        n_modes=(modes, modes),
        in_channels=1,
        out_channels=1,
        hidden_channels=width,
        n_layers=layers,
        factorization="tucker",
        implementation="factorized",
        rank=0.1,
        conv_module=_spectral(),
    )
    return Work(Field(net), _fields(tiny))


@line("uno", "operator", "neuralop")
def uno(tiny: bool) -> Work:
    """A U-shaped neural operator."""
    from neuralop.models import UNO

    width, modes = (8, 4) if tiny else (64, 24)
    net = UNO(
        in_channels=1,
        out_channels=1,
        hidden_channels=width,
        n_layers=4,
        uno_out_channels=[width, 2 * width, 2 * width, width],
        uno_n_modes=[[modes, modes]] * 4,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [2.0, 2.0]],
        horizontal_skips_map=None,
        channel_mlp_skip="linear",
        integral_operator=_spectral(),
    )
    return Work(Field(net), _fields(tiny))


class Equivariant(LightningModule):
    """Energies of point clouds."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        energies = batch["energy"]
        return F.mse_loss(self.net({k: v for k, v in batch.items() if k != "energy"}), energies)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3, amsgrad=True)


@line("e3nn", "graph", "e3nn")
def e3nn(tiny: bool) -> Work:
    """An equivariant network of e3nn: tensor products in generated code."""
    from e3nn.nn.models.v2106.gate_points_networks import NetworkForAGraphWithAttributes

    clouds, points, width, layers, order = (2, 4, 4, 1, 1) if tiny else (32, 24, 32, 2, 2)
    net = NetworkForAGraphWithAttributes(
        irreps_node_input="4x0e",
        irreps_node_attr="1x0e",
        irreps_edge_attr="1x0e",
        irreps_node_output="1x0e",
        max_radius=4.0,
        num_neighbors=points - 1,
        num_nodes=points,
        mul=width,
        layers=layers,
        lmax=order,
    )

    def make(generator: Generator) -> dict[str, Tensor]:
        within = torch.cartesian_prod(torch.arange(points), torch.arange(points))
        within = within[within[:, 0] != within[:, 1]].T
        edges = torch.cat([within + points * cloud for cloud in range(clouds)], 1)
        return {
            "pos": torch.randn(clouds * points, 3, generator=generator),
            "node_input": torch.randn(clouds * points, 4, generator=generator),
            "node_attr": torch.ones(clouds * points, 1),
            "edge_attr": torch.ones(edges.shape[1], 1),
            "edge_index": edges,
            "batch": torch.arange(clouds).repeat_interleave(points),
            "energy": torch.randn(clouds, 1, generator=generator),
        }

    return Work(Equivariant(net), make)


class Dynamics(nn.Module):
    """The right-hand side of a differential equation."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.out = nn.Linear(hidden, width)

    @override
    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.out(self.net(y**3))


class NeuralODE(LightningModule):
    """Fits a path by a solver whose steps depend on the values."""

    def __init__(self, net: nn.Module, *, method: str) -> None:
        super().__init__()
        self.net, self.method = net, method

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        from torchdiffeq import odeint_adjoint

        start, path = batch
        times = torch.linspace(0.0, 1.0, len(path), device=self.device)
        found: Any = odeint_adjoint(self.net, start, times, method=self.method, rtol=1e-3, atol=1e-3)
        return (found - path).abs().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


@line("neural_ode", "equation", "torchdiffeq", way="adjoint method")
def neural_ode(tiny: bool) -> Work:
    """A neural ODE with the adjoint method and fixed steps; bound by the host."""
    batch, width, hidden, times = (4, 2, 16, 4) if tiny else (512, 16, 256, 16)
    return Work(NeuralODE(Dynamics(width, hidden), method="rk4"), normal((batch, width), (times, batch, width)))


class Flow(LightningModule):
    """The likelihood of a normalizing flow."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, context = batch
        return -self.flow(context).log_prob(x).mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@line("zuko_flow", "equation", "zuko")
def zuko_flow(tiny: bool) -> Work:
    """A spline flow of zuko, whose module returns a distribution."""
    import zuko

    batch, width, hidden = (8, 3, [16]) if tiny else (4096, 16, [512, 512])
    flow = zuko.flows.NSF(features=width, context=4, transforms=2 if tiny else 4, hidden_features=hidden)
    return Work(Flow(flow), normal((batch, width), (batch, 4)))


class Physics(LightningModule):
    """A network that is to solve Burgers' equation: the loss has second derivatives of its output."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inside, border = batch
        inside = inside.detach().requires_grad_()
        u = self.net(inside)
        slope = torch.autograd.grad(u.sum(), inside, create_graph=True)[0]
        u_x, u_t = slope[:, :1], slope[:, 1:]
        u_xx = torch.autograd.grad(u_x.sum(), inside, create_graph=True)[0][:, :1]
        residual = u_t + u * u_x - 0.01 / torch.pi * u_xx
        return residual.square().mean() + (self.net(border) + torch.sin(torch.pi * border[:, :1])).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@line("pinn", "equation", "torch", way="second derivatives in the loss")
def pinn(tiny: bool) -> Work:
    """A physics-informed network."""
    points, width, depth = (16, 16, 2) if tiny else (65_536, 512, 6)
    return Work(Physics(width, depth), normal((points, 2), (points // 4, 2)))


class Emulator(Regressor):
    """Predicts the next state of a field; the network is torchvision's or timm's."""


@line("convolutional_emulator", "operator", "torch", way="gradient accumulation")
def convolutional_emulator(tiny: bool) -> Work:
    """Residual convolutions over a periodic field, with four batches for each optimizer step."""
    batch, size, width, depth = (2, 16, 8, 2) if tiny else (16, 128, 128, 8)

    def block() -> nn.Module:
        convolution = {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}
        return nn.Sequential(
            nn.Conv2d(width, width, **convolution), nn.GroupNorm(4, width), nn.GELU(), nn.Conv2d(width, width, 1)
        )

    net = nn.Sequential(nn.Conv2d(2, width, 1), *(block() for _ in range(depth)), nn.Conv2d(width, 2, 1))
    data = normal((batch, 2, size, size), (batch, 2, size, size))
    return Work(Emulator(net), data, trainer={"accumulate_grad_batches": 4})
