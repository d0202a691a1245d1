"""What `certify` must pass and what it must catch: noise that is no fault, faults that look like noise.

The broken layers of this file stand for faults that were found in the package: sums keyed by a number that is
not the tensor's (N01), a cast copy handed out for another weight (N02), weights that are no parameters (N03).
They stay broken, whatever becomes of the package, so that what `certify` catches is known.
"""
import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrize

from gruckpt.engine.certify import certify
from gruckpt.engine.convert import convert
from gruckpt.engine.recurrent import GRU, LSTM

TINY = 1e-9    # of the largest gradient: what a wrong one must not hide behind


def square(model, x): return model(x).square().mean()

def made(shape, dtype, seed):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


class Tagger(nn.Module):
    "Gradients zero in exact arithmetic: of the convolution's bias, of the scores' bias, of the lift's bias"
    ZERO = {'conv.bias', 'score.bias', 'lift.bias'}

    def __init__(self, kind=nn.GRU, dropout=0., seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.bn = nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.rnn = kind(6, 5, num_layers=2, dropout=dropout, batch_first=True)
        self.score, self.lift, self.bn2 = nn.Linear(5, 1), nn.Linear(5, 7), nn.BatchNorm1d(7)

    def forward(self, x):
        h = self.bn(self.conv(x.transpose(1, 2))).relu().transpose(1, 2)
        out, _ = self.rnn(h)
        return self.bn2(self.lift((self.score(out).softmax(1)*out).sum(1))).tanh()


def converted(dtype=torch.float64, seg_len=4, **how):
    model = Tagger(**how).to(dtype)
    original = copy.deepcopy(model)
    convert(model, seg_len=seg_len)
    return model, original, made((8, 11, 4), dtype, seed=1)


def unequal(*models_and_x):
    "Parameters whose gradients are not the same bits in two models: of zeros these are noise."
    *models, x = models_and_x
    a, b = ({n: p.grad for n, p in m.named_parameters()} for m in models if square(m, x).backward() is None)
    return {n for n in a if not torch.equal(a[n], b[n])}


# ---- what is right passes

@pytest.mark.parametrize('seg_len', [None, 4])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('seed', range(2))
def test_N06_gradients_zero_in_exact_arithmetic(dtype, seg_len, seed):
    model, original, x = converted(dtype, seg_len, seed=seed)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2.}.get(dtype)   # 16 bits: that it runs
    cert = certify(model, x, square, original=original, tolerance=tolerance)
    assert cert.passed, cert
    if dtype == torch.float64:
        assert set(cert.original.rounding) == Tagger.ZERO & unequal(model, original, x)
    if dtype == torch.float32: assert set(cert.original.rounding) >= Tagger.ZERO       # small ones: by kernel


@pytest.mark.parametrize('kind', [nn.GRU, nn.LSTM])
def test_N06_both_oracles_and_the_floor_are_said(kind):
    model, original, x = converted(kind=kind, dropout=0.2)
    said = repr(certify(model, x, square, original=original))
    assert said.count('passed') == 2
    assert 'beside the same step without recomputation' in said
    assert 'beside the original model' in said
    assert 'rounding: 3 differ no more than 8 times' in said
    assert 'rounding: no gradient needed its floor' in repr(certify(nn.Linear(4, 2), x[0].float(), square))


def test_N06_nothing_is_left_behind():
    model, original, x = converted(dropout=0.2)
    kept = [{n: t.clone() for n, t in m.state_dict().items()} for m in (model, original)]
    state = torch.get_rng_state()
    assert certify(model, x, square, original=original).original.rounding    # so that weights were moved
    for m, was in zip((model, original), kept):
        assert all(torch.equal(t, was[n]) for n, t in m.state_dict().items())
        assert m.rnn.dropout == 0.2 and all(p.grad is None for p in m.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_N06_original_may_share_its_parameters():
    model, original, x = converted()
    for name, p in model.named_parameters():
        parent, _, leaf = name.rpartition('.')
        original.get_submodule(parent).register_parameter(leaf, p)
    assert certify(model, x, square, original=original).passed


# ---- what is wrong does not, however small

class Off(torch.autograd.Function):
    "The tensor itself; its gradient is off by `by` in one place"
    @staticmethod
    def forward(ctx, t, by):
        ctx.by = by
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.view(-1)[0] += ctx.by
        return grad, None


@pytest.mark.parametrize('name', ['conv.bias', 'score.bias', 'lift.bias', 'score.weight', 'rnn.weight_hh_l0'])
def test_N06_a_wrong_gradient_has_no_floor_to_hide_behind(name):
    model, original, x = converted()
    largest = max(d.plain for d in certify(model, x, square).gradients)

    def loss(m, x):
        if m is original: return square(m, x)
        params = {n: Off.apply(p, TINY*largest) if n == name else p for n, p in m.named_parameters()}
        return torch.func.functional_call(m, params, x).square().mean()

    convert_free = copy.deepcopy(original)     # torch's layers: a fault is the loss's alone
    cert = certify(convert_free, x, loss, original=original)
    assert not cert.passed
    assert [d.name for d in cert.original.gradients if cert.original.differs(d)] == [name]


def test_N06_a_model_that_draws_from_nowhere_does_not_excuse_itself():
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(0)    # held by no module: neither read nor set
    def loss(m, x): return (m(x)*torch.rand(x.shape[0], 2, generator=source)).sum()
    cert = certify(nn.Linear(4, 2), made((3, 4), torch.float32, 1), loss)
    assert not cert.passed and cert.rounding == ()


# ---- the kinds of fault that were found

class ByNumber(torch.autograd.Function):
    "A step run again; sums of gradients are looked up by id, as if what was saved were the weight (N01)"
    @staticmethod
    def forward(ctx, sums, x, w):
        ctx.sums = sums
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        pre = grad*(1 - torch.tanh(x @ w)**2)
        into = ctx.sums.setdefault(id(w), torch.zeros_like(w))
        into += x.T @ pre
        return None, pre @ w.T, None


class Collect(torch.autograd.Function):
    "Hands the sum to the weight once all steps have added to it"
    @staticmethod
    def forward(ctx, sums, w):
        ctx.sums, ctx.number = sums, id(w)
        return w.view_as(w)

    @staticmethod
    def backward(ctx, grad): return None, grad + ctx.sums.pop(ctx.number, 0.)


class SumsByNumber(nn.Module):
    "A recurrence whose steps add to sums by id"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(made((5, 5), torch.float64, 0)/3)

    def forward(self, x):
        sums, h = {}, x[0]
        first = Collect.apply(sums, self.w)
        h = h + 0*first.sum()
        for x_t in x: h = x_t + ByNumber.apply(sums, h, self.w)
        return h


def looped(model, x):
    "The same recurrence by plain autograd"
    h = x[0]
    for x_t in x: h = x_t + torch.tanh(h @ model.w)
    return h.square().mean()


def test_N01_sums_by_id_under_saved_tensor_hooks_are_caught():
    model, x = SumsByNumber(), made((6, 3, 5), torch.float64, 1)
    assert certify(model, x, square, reference=looped).passed
    def offloaded(model, x):
        with save_on_cpu(): return square(model, x)
    cert = certify(model, x, offloaded, reference=looped)
    assert not cert.passed and cert.rounding == ()
    assert [d.name for d in cert.gradients if cert.differs(d)] == ['w']


class CastOnce(nn.Module):
    "Casts are kept by id of a tensor that may be gone: another weight gets the copy (N02)"
    def __init__(self, broken):
        super().__init__()
        torch.manual_seed(0)
        self.maps, self.broken = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)), broken
        for m in self.maps: parametrize.register_parametrization(m, 'weight', nn.Tanh())

    def forward(self, x):
        copies = {}
        def cast(w, i):
            key = w.shape if self.broken else i       # the shape, as a number used twice: the same each time
            return copies.setdefault(key, w.to(torch.bfloat16))
        x = x.to(torch.bfloat16)
        for i, m in enumerate(self.maps): x = torch.tanh(x @ cast(m.weight, i).T)
        return x.float()


@pytest.mark.parametrize('broken', [False, True])
def test_N02_another_weights_copy_is_caught(broken):
    "As with float32 parameters in 16-bit arithmetic, where the tolerance must be a wide one"
    right, x = CastOnce(False), made((16, 4), torch.float32, 1)
    cert = certify(CastOnce(broken), x, square, original=right, tolerance=0.05)
    assert cert.passed != broken
    if broken: assert cert.original.loss.difference > 0.05


class Shadowed(nn.Module):
    "A layer whose weight is a plain tensor: made anew for each call, as by old AWD-LSTMs (N03)"
    def __init__(self, kind, own_weight):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(4, 5).double()
        raw = self.rnn.weight_hh_l0
        if own_weight: self.register_parameter('raw', nn.Parameter(raw.detach().clone()))
        else:
            del self.rnn.weight_hh_l0
            self.register_parameter('raw', nn.Parameter(raw.detach().clone()))
            self.rnn.weight_hh_l0 = self.raw*1.

    def forward(self, x):
        if 'weight_hh_l0' not in self.rnn._parameters: self.rnn.weight_hh_l0 = self.raw*1.
        return self.rnn(x)[0]


def test_N03_weights_that_are_not_followed_are_caught():
    "The plain loop agrees with the layer: both compute with a parameter that nobody set."
    model, original = Shadowed(GRU, True), Shadowed(nn.GRU, False)
    with torch.no_grad(): model.rnn.weight_hh_l0.uniform_(-1, 1, generator=torch.Generator().manual_seed(9))
    x = made((7, 3, 4), torch.float64, 1)
    cert = certify(model, x, square, original=original)
    assert not cert.original.passed and not cert.passed
    assert "'rnn.weight_hh_l0' is only in this model" in cert.original.before
    bad = {d.name for d in cert.original.gradients if cert.original.differs(d)}
    assert {'raw', 'rnn.weight_hh_l0'} <= bad


# ---- the package itself: right, or refused, or caught; never a pass of something wrong

def passes_or_stops(*args, **how):
    "Is it right, as far as certify says? None if the package would not run it"
    try: return certify(*args, **how).passed
    except (RuntimeError, ValueError): return None


@pytest.mark.parametrize('kind', [GRU, LSTM])
def test_N01_the_package_under_save_on_cpu(kind):
    torch.manual_seed(0)
    model, x = kind(3, 4, seg_len=4).double(), made((12, 2, 3), torch.float64, 1)
    def offloaded(m, x):
        with save_on_cpu(): return m(x)[0].square().mean()
    w = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    theirs = (nn.GRU if kind is GRU else nn.LSTM)(3, 4).double()
    torch.func.functional_call(theirs, w, x)[0].square().mean().backward()
    offloaded(model, x).backward()
    right = all(torch.allclose(p.grad, w[n].grad, rtol=1e-10, atol=1e-13)
                for n, p in model.named_parameters())
    model.zero_grad()
    assert passes_or_stops(model, x, offloaded) == right


def test_N02_the_package_with_parametrized_weights_in_16_bits():
    torch.manual_seed(0)
    model, x = GRU(8, 8, 2, seg_len=4), made((12, 2, 8), torch.float32, 1)
    for name in [n for n, _ in model.named_parameters() if n.startswith('weight')]:
        nn.utils.parametrizations.weight_norm(model, name)
    outs = []
    def cast(m, x):
        with torch.autocast('cpu', torch.bfloat16): outs.append(m(x)[0].float())
        return outs[-1].square().mean()
    verdict = passes_or_stops(model, x, cast, tolerance=0.2)
    apart = [(out.detach() - outs[0].detach()).norm()/outs[0].detach().norm() for out in outs]
    if max(apart) > 0.2: assert not verdict     # whether a number is used again is up to the allocator


def test_N03_the_package_with_a_plain_attribute_for_a_weight():
    model, original = Shadowed(nn.GRU, False), Shadowed(nn.GRU, False)
    x = made((7, 3, 4), torch.float64, 1)
    try: convert(model)
    except ValueError: return    # refused by name before anything was changed
    verdict = passes_or_stops(model, x, square, original=original)
    if verdict: assert torch.allclose(model(x), original(x), rtol=1e-10)    # it followed the weight


def test_N06_a_mask_of_infinities_is_equal_to_itself():
    "A buffer that masks attention; a real model had one."
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4)
            self.register_buffer('mask', torch.full((5, 5), -torch.inf).triu(1))
        def forward(self, x):
            out = self.rnn(x)[0].transpose(0, 1)
            return (out @ out.mT + self.mask).softmax(-1) @ out

    torch.manual_seed(0)
    original = Masked().double()
    model = copy.deepcopy(original)
    convert(model, seg_len=2)
    x = torch.randn(5, 2, 3, dtype=torch.double)
    cert = certify(model, x, lambda model, x: model(x).square().mean(), original=original)
    assert cert.passed and cert.original.passed, cert
