"""Requests that every backend is compared on, and what it is compared with: float64 and autograd."""

from dataclasses import dataclass

import torch

from lightning_ups.kernels.attention import Documents, reference_attention


@dataclass(frozen=True)
class Case:
    name: str
    seq: int = 96
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    batch: int = 2
    causal: bool = True
    window: int | None = None
    packed: bool = False
    softcap: float | None = None
    scale: float | None = None
    keys: int | None = None

    @property
    def plain(self):
        return self.window is None and not self.packed

    def options(self, device="cpu"):
        documents = None
        if self.packed:
            lengths = torch.tensor([self.seq // 3, self.seq - self.seq // 3, 1, self.seq - 1]).repeat(self.batch // 2)
            boundaries = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
            documents = Documents.from_cu_seqlens(boundaries, batch=self.batch, seq=self.seq).to(device)
        return {
            "causal": self.causal,
            "window": self.window,
            "documents": documents,
            "softcap": self.softcap,
            "scale": self.scale,
        }

    def tensors(self, dtype=torch.float32, device="cpu", *, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(seq, heads):
            return torch.randn(self.batch, seq, heads, self.dim, generator=generator).to(device, dtype)

        keys = self.keys or self.seq
        return draw(self.seq, self.heads[0]), draw(keys, self.heads[1]), draw(keys, self.heads[1])


CASES = [
    Case("causal"),
    Case("full", causal=False),
    Case("odd", seq=77),
    Case("one_position", seq=1),
    Case("multi_head", heads=(4, 4)),
    Case("one_kv_head", heads=(4, 1)),
    Case("scale", scale=0.7),
    Case("window", window=10),
    Case("window_of_one", window=1, seq=33),
    Case("window_beyond_all", window=1000, seq=33),
    Case("window_not_causal", window=10, causal=False),
    Case("documents", packed=True, seq=150),
    Case("documents_not_causal", packed=True, causal=False),
    Case("documents_and_window", packed=True, window=7, seq=141),
    Case("softcap", softcap=2.0),
    Case("everything", softcap=2.0, packed=True, window=40, seq=150, scale=0.3),
    Case("cross", causal=False, keys=40),
    Case("softcap_of_0", softcap=0.0),
]


def gradients(function, tensors, options):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.device, out.dtype)
    (out * weight).sum().backward()
    return out.detach(), *(leaf.grad for leaf in leaves)


def expected(tensors, options):
    """Return output and gradients by the reference in float64."""
    return gradients(reference_attention, [tensor.double() for tensor in tensors], options)


BAND = 4e-6  # of `worst`, for float32: processors add in other orders, and the widest seen is 2.1e-6


def worst(found, wanted):
    """Return the largest error relative to the largest true value or one, over output and gradients."""
    return max(
        ((f.double() - w).abs().max() / w.abs().max().clamp(min=1.0)).item() for f, w in zip(found, wanted, strict=True)
    )
