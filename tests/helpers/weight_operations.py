"""The operations that modules and libraries apply to a weight, as one table: by how the weight is stored.

Each product is compared with the first one of its table; every layout holds the same matrices, so that they agree bit
for bit. Blocks of MXFP8 lie within rows, and groups of tokens are whole blocks: no scale depends on how a product is
written, nor on how the model is sharded.
"""

import copy

import torch
import torch.nn.functional as F
from experts import parts
from saving import through_a_file
from torch import nn

import hybridtensor as ht

RECIPE = "mxfp8"
FEATURES, OUT, EXPERTS, TOKENS = 64, 128, 4, 160
ENDS = (32, 32, 96, TOKENS)  # one expert has no tokens
EVEN = TOKENS // EXPERTS  # rows per expert in batches


def _x3(x):
    return x.view(2, -1, FEATURES)


PRODUCTS = {
    "[out, in]": {
        "F.linear": lambda w, x: F.linear(x, w),
        "F.linear of three dimensions": lambda w, x: F.linear(_x3(x), w).flatten(0, 1),
        "x @ w.t()": lambda w, x: x @ w.t(),
        "x @ w.T of three dimensions": lambda w, x: (_x3(x) @ w.T).flatten(0, 1),
        "x.matmul(w.mT)": lambda w, x: x.matmul(w.mT),
        "mm": lambda w, x: torch.mm(x, w.transpose(0, 1)),
        "addmm": lambda w, x: torch.addmm(x.new_zeros(OUT), x, w.t()),
        "w @ x.t()": lambda w, x: (w @ x.t()).t(),
        "w @ x of three dimensions": lambda w, x: (w @ _x3(x).transpose(1, 2)).transpose(1, 2).flatten(0, 1),
        "torch.matmul(w, x)": lambda w, x: torch.matmul(w, x.t()).t(),
        "of a view": lambda w, x: F.linear(x, w.view(OUT, FEATURES)),
        "in place on the output": lambda w, x: F.linear(_x3(x), w).mul_(1.0).flatten(0, 1),
    },
    "[in, out]": {
        "addmm": lambda w, x: torch.addmm(x.new_zeros(OUT), x, w),
        "x @ w": lambda w, x: x @ w,
        "x @ w of three dimensions": lambda w, x: (_x3(x) @ w).flatten(0, 1),
        "mm": lambda w, x: torch.mm(x, w),
        "F.linear of w.t()": lambda w, x: F.linear(x, w.t()),
        "w.t() @ x.t()": lambda w, x: (w.t() @ x.t()).t(),
    },
    "[E, out, in]": {
        "grouped_mm": lambda w, x, ends: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends),
        "F.linear of w[e]": lambda w, x, ends: _each(x, ends, lambda e, rows: F.linear(rows, w[e])),
        "x @ w[e].t()": lambda w, x, ends: _each(x, ends, lambda e, rows: rows @ w[e].t()),
        "unbind": lambda w, x, ends: _each(x, ends, lambda e, rows: F.linear(rows, w.unbind()[e])),
        "for w in weights": lambda w, x, ends: _each(x, ends, lambda e, rows: rows @ list(w)[e].mT),
    },
    "[E, in, out]": {
        "grouped_mm": lambda w, x, ends: torch._grouped_mm(x, w, offs=ends),
        "x @ w[e]": lambda w, x, ends: _each(x, ends, lambda e, rows: rows @ w[e]),
        "F.linear of w[e].t()": lambda w, x, ends: _each(x, ends, lambda e, rows: F.linear(rows, w[e].t())),
        "unbind": lambda w, x, ends: _each(x, ends, lambda e, rows: rows @ w.unbind(0)[e]),
    },
}
BATCHES = {
    "[E, out, in]": {
        "bmm": lambda w, x, ends: torch.bmm(x.view(EXPERTS, EVEN, FEATURES), w.mT),
        "matmul": lambda w, x, ends: x.view(EXPERTS, EVEN, FEATURES) @ w.transpose(1, 2),
        "F.linear of w[e]": lambda w, x, ends: torch.stack([F.linear(r, w[e]) for e, r in enumerate(x.split(EVEN))]),
    },
    "[E, in, out]": {
        "bmm": lambda w, x, ends: torch.bmm(x.view(EXPERTS, EVEN, FEATURES), w),
        "matmul": lambda w, x, ends: x.view(EXPERTS, EVEN, FEATURES) @ w,
        "x @ w[e]": lambda w, x, ends: torch.stack([r @ w[e] for e, r in enumerate(x.split(EVEN))]),
    },
}


def _each(x, ends, product):
    """Return what the experts that have tokens make of them, one after the other."""
    return torch.cat([product(e, x[i:j]) for e, (i, j) in enumerate(parts(ends.tolist())) if j > i])


# What training does to a parameter between steps: it changes the values, and so the next product.
WRITES = {
    "mul_": lambda p: p.mul_(0.5),
    "add_": lambda p: p.add_(torch.ones_like(p), alpha=0.25),
    "sub_": lambda p: p.sub_(0.125),
    "lerp_": lambda p: p.lerp_(torch.zeros_like(p), 0.5),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0.25),
    "copy_": lambda p: p.copy_(torch.full_like(p, 0.25)),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p], 0.5),
    "_foreach_add_": lambda p: torch._foreach_add_([p], [torch.ones_like(p)], alpha=0.5),
    "detach().mul_": lambda p: p.detach().mul_(0.5),
    "data.mul_": lambda p: p.data.mul_(0.5),
    "out=": lambda p: torch.add(p.data, torch.ones_like(p.data), alpha=0.25, out=p.data),
}


# What libraries make of a module: another one that computes the same.
def _replaced(make):
    def apply(module):
        module.weight = make(module.weight)
        return module

    return apply


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: through_a_file(module, weights_only=False),
    "to": lambda module: module.to(torch.float64).to(torch.float32),
    "nn.Parameter": _replaced(lambda p: nn.Parameter(p)),
    "type(p)(p, requires_grad)": _replaced(lambda p: type(p)(p, requires_grad=p.requires_grad)),
    "detach": _replaced(lambda p: nn.Parameter(p.detach())),
    "clone": _replaced(lambda p: nn.Parameter(p.detach().clone())),
    "state dict": lambda module: _loaded(module),
}


def _loaded(module):
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
    other.load_state_dict(module.state_dict())
    return other


class Dense(nn.Linear):
    """A layer whose forward is one of the products."""

    def __init__(self, product):
        super().__init__(FEATURES, OUT, bias=False)
        self.product = product

    def forward(self, x):
        return self.product(self.weight, x)


class Transposed(nn.Module):
    """The same with a weight ``[in, out]``."""

    is_transposed = True

    def __init__(self, product):
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.empty(FEATURES, OUT)), product

    def forward(self, x):
        return self.product(self.weight, x)


class Stack(nn.Module):
    """Experts whose forward is one of the products."""

    def __init__(self, product, transposed):
        super().__init__()
        self.num_experts, self.is_transposed, self.product = EXPERTS, transposed, product
        shape = (FEATURES, OUT) if transposed else (OUT, FEATURES)
        self.weight = nn.Parameter(torch.empty(EXPERTS, *shape))

    def forward(self, x, ends=None):
        ends = torch.tensor(ENDS, dtype=torch.int32, device=x.device) if ends is None else ends
        return self.product(self.weight, x, ends)


def layer(stored, product, *, recipe=RECIPE, persistent=False, device="cpu"):
    """Return a quantized layer in a model; weights of all layouts hold the same matrices."""
    values = torch.randn(EXPERTS, OUT, FEATURES, generator=torch.Generator().manual_seed(1), device="cpu") / 8
    if stored == "[out, in]":
        made, values = Dense(product), values[0]
    elif stored == "[in, out]":
        made, values = Transposed(product), values[0].t()
    else:
        made = Stack(product, stored == "[E, in, out]")
        values = values.mT if made.is_transposed else values
    with torch.no_grad():
        made.weight.copy_(values)
    return ht.quantize_(nn.Sequential(made).to(device), recipe, persistent=persistent)


def data(device="cpu"):
    """Return an input, and the gradient of the output."""
    numbers = torch.Generator().manual_seed(2)
    return tuple(torch.randn(TOKENS, size, generator=numbers, device="cpu").to(device) for size in (FEATURES, OUT))


def run(model, x, grad, *given):
    """Return output, gradient of the input and of the weight ``[..., out, in]``, as plain tensors."""
    x = x.clone().requires_grad_()
    y = model(x) if not given else model[0](x, *given)
    y.backward(grad.view(y.shape))
    (weight,) = model.parameters()
    dw = weight.grad
    dw = dw.full_tensor() if hasattr(dw, "full_tensor") else dw
    weight.grad = None
    first = model[0]
    return y.detach(), x.grad, dw.mT if getattr(first, "is_transposed", False) else dw


def difference(found, expected):
    """Return which of the results of ``run`` differ, in words, or ''."""
    names = ("output", "grad_input", "grad_weight")
    wrong = [n for n, a, b in zip(names, found, expected, strict=True) if not torch.equal(a, b)]
    return ", ".join(wrong)
