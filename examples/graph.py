"""Graphs: a graph network in torch alone finds two communities, compiled as a whole. `python examples/graph.py`."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups import Compile, RunManifest


class GraphNet(nn.Module):
    """Label each node, from noisy features and its neighbors."""

    def __init__(self, features: int = 16, hidden: int = 32):
        super().__init__()
        self.first, self.second = nn.Linear(2 * features, hidden), nn.Linear(2 * hidden, 2)

    def forward(self, nodes, edges):
        nodes = torch.relu(self.first(self.with_neighbors(nodes, edges)))
        return self.second(self.with_neighbors(nodes, edges))

    def with_neighbors(self, nodes, edges):
        sent = nodes.new_zeros(nodes.shape).index_add(0, edges[1], nodes[edges[0]])
        degree = nodes.new_zeros(len(nodes)).index_add(0, edges[1], nodes.new_ones(edges.shape[1]))
        return torch.cat([nodes, sent / degree.clamp(min=1)[:, None]], dim=1)


class Communities(L.LightningModule):
    """Train the network."""

    def __init__(self):
        super().__init__()
        self.net = GraphNet()

    def training_step(self, batch, batch_idx):
        nodes, edges, labels = batch
        loss = nn.functional.cross_entropy(self.net(nodes, edges), labels)
        self.log("loss", loss, batch_size=len(nodes))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def communities(nodes: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a graph whose nodes are mostly linked within their community."""
    labels = torch.randint(2, (nodes,))
    pairs = torch.randint(nodes, (2, 20 * nodes))
    alike = labels[pairs[0]] == labels[pairs[1]]
    edges = pairs[:, alike.nonzero().squeeze(1)[: 4 * nodes]]
    return torch.randn(nodes, 16) + 0.3 * labels[:, None], torch.cat([edges, pairs[:, :nodes]], dim=1), labels


L.seed_everything(0)
graphs = DataLoader([communities() for _ in range(32)], batch_size=None, shuffle=True)
trainer = L.Trainer(max_steps=200, max_epochs=-1, callbacks=[Compile(scope="model"), RunManifest()])
trainer.fit(Communities(), graphs)
print(f"loss: {trainer.callback_metrics['loss']:.3f}, guessing: 0.693")
