"""Experts as models have them, and twins that are a loop over linear layers."""

import torch
import torch.nn.functional as F
from torch import nn

from hybridtensor.subclasses import MasterWeight

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 64, 128, 160
ENDS = [(32, 96, 96, 160), (5, 5, 65, 128), (160, 160, 160, 160), (0, 0, 0, 0), (0, 0, 0, 160), (1, 33, 34, 159)]


class Experts(nn.Module):
    """A SwiGLU for each expert, of tokens sorted by expert."""

    def __init__(self, count=EXPERTS, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.num_experts = count
        self.w1, self.w3 = (nn.Parameter(torch.randn(count, hidden, width) / 8) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(count, width, hidden) / 11)

    def forward(self, x, ends):
        gate = torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)
        up = torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(F.silu(gate) * up, self.w2.transpose(-2, -1), offs=ends)


class Stored(nn.Module):
    """Experts that are stored the other way: two matrices each."""

    def __init__(self, count=EXPERTS, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.num_experts, self.is_transposed = count, True
        self.up = nn.Parameter(torch.randn(count, width, hidden) / int(width**0.5))
        self.down = nn.Parameter(torch.randn(count, hidden, width) / int(hidden**0.5))

    def forward(self, x, ends):
        hidden = torch._grouped_mm(x, self.up, offs=ends).relu()
        return torch._grouped_mm(hidden, self.down, offs=ends)


class Mixture(nn.Module):
    """A router and experts: each token goes to two of them."""

    def __init__(self, count=EXPERTS, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.router, self.experts = nn.Linear(width, count, bias=False), Experts(count, width, hidden)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self.experts.num_experts).cumsum(0, dtype=torch.int32)
        y = self.experts(x[order // 2], ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, y)


def offsets(ends, device="cpu"):
    return torch.tensor(ends, dtype=torch.int32, device=device)


def parts(ends):
    """Return where the tokens of each expert begin and end."""
    return list(zip((0, *ends[:-1]), ends, strict=True))


def one_by_one(x, weights, grad, ends, config, *, transposed=False):
    """Return output, input gradient and weight gradients of a linear layer per expert; zeros where no tokens are.

    ``transposed`` weights lie ``[in, out]``: some CPUs add up products in high precision in another order then.
    """
    y = x.new_zeros(x.shape[0], weights.shape[1])
    dx, dw = torch.zeros_like(x), torch.zeros_like(weights)
    for e, (start, stop) in enumerate(parts(ends)):
        if start == stop:
            continue
        own = x[start:stop].detach().requires_grad_()
        stored = weights[e].t().contiguous() if transposed else weights[e].clone()
        weight = nn.Parameter(MasterWeight(stored, config))
        out = F.linear(own, weight.t() if transposed else weight)
        out.backward(grad[start:stop])
        y[start:stop], dx[start:stop] = out.detach(), own.grad
        dw[e] = weight.grad.t() if transposed else weight.grad
    return y, dx, dw
