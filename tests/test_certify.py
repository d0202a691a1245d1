"""What of `certify` does not fit its page: ways to recompute, kinds of module, places of a cut."""
import copy
import warnings
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts)

from gruckpt.engine.certify import certify, gradient_flow
from gruckpt.engine.scan import scan_segments
from gruckpt.plan.segment import Plan


def square(model, x): return model(x).square().mean()
def linear(): return nn.Linear(4, 4)


class Net(nn.Module):
    "Named modules and a function that runs them"
    def __init__(self, run, *others, **modules):
        super().__init__()
        self.run = run
        for i, other in enumerate(others): setattr(self, f'other{i}', other)
        for name, module in modules.items(): self.add_module(name, module)

    def forward(self, x): return self.run(self, x)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 4)


# ---- ways to recompute

def selective(): return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])
def sequential(f, x, reentrant):
    return checkpoint_sequential([f, nn.Identity()], 2, x, use_reentrant=reentrant)

WAYS = {
    'reentrant': lambda f, x: checkpoint(f, x, use_reentrant=True),
    'non_reentrant': lambda f, x: checkpoint(f, x, use_reentrant=False),
    'selective': lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=selective),
    'sequential': lambda f, x: sequential(f, x, False),
    'sequential_reentrant': lambda f, x: sequential(f, x, True),
    'wrapper': lambda f, x: checkpoint_wrapper(f)(x),
    'wrapper_reentrant': lambda f, x: checkpoint_wrapper(f, CheckpointImpl.REENTRANT)(x),
}

class Counted(nn.Module):
    "Notes its calls, in a queue: a list would be wound back for a recomputation"
    def __init__(self):
        super().__init__()
        self.linear, self.calls = linear(), SimpleQueue()

    def forward(self, x):
        self.calls.put(len(x))
        return self.linear(x).tanh()

@pytest.mark.parametrize('name', WAYS)
def test_every_way_to_recompute_is_switched_off_in_the_plain_run(name, x):
    "The layer runs once in the plain step, and twice in the step as it is."
    model = Net(lambda m, x: WAYS[name](m.a, x), a=Counted())
    cert = certify(model, x.requires_grad_(), square)
    assert cert.passed and cert.n_recomputed and model.a.calls.qsize() == 3


# ---- where a graph is cut

def under_no_grad(m, x):
    with torch.no_grad(): h = m.a(x)
    return m.b(h)

def into_buffer(m, x):
    out = torch.empty(3, 8)
    out[:, :4] = m.a(x).detach()
    out[:, 4:] = m.b(x)
    return m.c(out)

def loop(m, x):
    first, h = m.a(x).detach(), torch.zeros(3, 4)
    for _ in range(200): h = m.cell(first, h)
    return m.c(h)

CUTS = {
    'detach': (lambda m, x: m.c(m.b(m.a(x).detach())), 'b'),
    'data': (lambda m, x: m.b(m.a(x).data), 'b'),
    'no_grad': (under_no_grad, 'b'),
    'functions between': (lambda m, x: m.b(m.a(x).detach().relu()*2), 'b'),
    'keyword': (lambda m, x: m.b(input=m.a(x).detach()), 'b'),
    'in-place writes': (into_buffer, 'c'),
    'two routes': (lambda m, x: m.b(m.a(x).detach()) + m.cell(m.a(x).detach()), 'b'),
    'loop': (loop, 'cell'),
    'in a checkpoint': (lambda m, x: checkpoint(lambda h: m.b(h.detach()), m.a(x), use_reentrant=False), 'b'),
    'after the modules': (lambda m, x: m.a(x).detach() + m.b(x), '(loss)'),
    'argmax': (lambda m, x: m.b(F.one_hot(m.a(x).argmax(-1), 4).float()), '(not in the loss)'),
    'numpy': (lambda m, x: m.b(torch.from_numpy(m.a(x).detach().numpy().copy())), '(not in the loss)'),
    'dropped': (lambda m, x: [m.a(x), m.b(x)][1], '(not in the loss)'),
}

@pytest.mark.parametrize('name', CUTS)
def test_cut_is_named(name, x):
    run, cut = CUTS[name]
    model = Net(run, a=linear(), b=linear(), c=nn.Linear(8 if name == 'in-place writes' else 4, 2),
                cell=nn.GRUCell(4, 4))
    flow = gradient_flow(model, x, square)
    assert {p.name: p.cut for p in flow.params if p.state == 'starved'} == {'a.weight': cut, 'a.bias': cut}
    assert {p.cut for p in flow.params if p.state != 'starved'} == {None}


def test_one_route_left_is_enough(x):
    model = Net(lambda m, x: m.b(m.a(x).detach()) + m.a(x), a=linear(), b=linear())
    assert gradient_flow(model, x, square).passed


def test_tied_weights_learn_by_either_use(x):
    model = Net(lambda m, x: m.b(m.a(x).detach()), a=linear(), b=linear())
    model.b.weight = model.a.weight
    assert gradient_flow(model, x, square).starved == ('a.bias',)


@pytest.mark.parametrize('kind', [nn.GRU, nn.LSTM, nn.RNN])
def test_every_weight_of_a_recurrent_layer_learns(kind, x):
    model = kind(4, 4, num_layers=2, dropout=0.3, bidirectional=True)
    flow = gradient_flow(model, x[:, None], lambda m, x: m(x)[0].square().sum())
    assert {p.state for p in flow.params} == {'learns'}


# ---- ways to recompute

def test_composable_checkpoint(x):
    composable = pytest.importorskip('torch.distributed._composable.checkpoint_activation')
    model = nn.Sequential(nn.Sequential(linear(), nn.Dropout(0.5), linear()), linear())
    composable.checkpoint(model[0])
    cert = certify(model, x, square)
    assert cert.passed and cert.n_recomputed


@pytest.mark.parametrize('cut', [False, True])
def test_compiled_model(cut, x):
    def run(m, x): return m.b((lambda h: h.detach() if cut else h)(checkpoint(m.a, x, use_reentrant=False)))
    model = torch.compile(Net(run, a=nn.Sequential(linear(), nn.Tanh()), b=linear()), backend='aot_eager')
    assert certify(model, x, square).passed
    flow = gradient_flow(model, x, square)
    assert {p.cut for p in flow.params if p.state == 'starved'} == ({'_orig_mod.b'} if cut else set())


@pytest.mark.parametrize('n_segments', [1, 2, 3, 7])
@pytest.mark.parametrize('trainable', ['all', 'weight_hh'])
def test_scanned_cell_with_dropout(n_segments, trainable):
    torch.manual_seed(0)
    cell, x = nn.GRUCell(4, 5, dtype=torch.float64), torch.randn(7, 2, 4, dtype=torch.float64)
    if trainable == 'weight_hh': cell.requires_grad_(False).weight_hh.requires_grad_(True)

    def loss(cell, x):
        def step(xs, h):
            for x_t in xs: h = F.dropout(cell(x_t, h), 0.5)
            return h.square().sum(), h
        return sum(scan_segments(step, x, x.new_zeros(2, 5), Plan.split(7, n_segments))[0])

    cert = certify(cell, x, loss)
    assert cert.passed, cert
    assert bool(cert.n_recomputed) == (n_segments > 1)
    assert not cert.none and not cert.zero
    assert gradient_flow(cell, x, loss).passed


@pytest.mark.parametrize('wrapped', ['first', 'second'])
def test_reentrant_region_without_a_gradient_at_its_inputs(wrapped, x):
    def run(m, x):
        if wrapped == 'second': return checkpoint(m.b, m.a(x), use_reentrant=True)
        return m.b(checkpoint(m.a, x, use_reentrant=True))
    model = Net(run, a=linear(), b=linear())
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # torch: "None of the inputs have requires_grad=True"
        cert = certify(model, x, square)
    lost = ('a.weight', 'a.bias') if wrapped == 'first' else ()
    assert cert.none == lost
    assert {d.name for d in cert.gradients if cert.differs(d)} == set(lost)
    assert cert.loss.difference == 0


def test_attribute_changed_between_forward_and_backward(x):
    def run(m, x): return checkpoint(lambda h: m.b(h*m.ratio), m.a(x), use_reentrant=False)
    model = Net(run, a=linear(), b=linear())
    model.ratio = 1.

    def decayed(model, x):
        out = square(model, x)
        model.ratio = 0.25
        return out

    cert = certify(model, x, decayed)
    assert not cert.passed and cert.loss.difference == 0 and model.ratio == 1.
    assert [d.name for d in cert.gradients if cert.differs(d)] == ['b.weight']
    assert abs(cert.worst.difference - 0.75) < 1e-6


def test_generator_held_by_a_module(x):
    def run(m, x):
        def layer(h): return m.a(h)*(torch.rand(h.shape, generator=m.other0) < 0.5)
        return m.b(checkpoint(layer, x, use_reentrant=False))
    model = Net(run, torch.Generator().manual_seed(3), a=linear(), b=linear())
    before = model.other0.get_state()
    cert = certify(model, x, square)
    assert cert.random == ('other0 after backward',)
    assert {d.name for d in cert.gradients if cert.differs(d)} == {'a.weight', 'a.bias'}
    assert torch.equal(model.other0.get_state(), before)


# ---- nothing left behind

@pytest.mark.parametrize('ask', [certify, gradient_flow])
@pytest.mark.parametrize('fails', [False, True])
def test_caller_finds_everything_as_it_was(ask, fails, x):
    model = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.5), linear())
    square(model, x).backward()
    model[0].bias.grad = None
    grads = [p.grad if p.grad is None else (p.grad, p.grad.clone()) for p in model.parameters()]
    values, versions = copy.deepcopy(model.state_dict()), [p._version for p in model.parameters()]
    x.requires_grad_()
    state = torch.get_rng_state()

    def loss(model, x):
        model[1].note = 'seen'
        out = square(model, x)
        model.eval()
        if fails: raise ArithmeticError
        return out

    if fails:
        with pytest.raises(ArithmeticError): ask(model, x, loss)
    else: ask(model, x, loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model[1].training and not hasattr(model[1], 'note')
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert p.grad is None if grad is None else p.grad is grad[0] and torch.equal(*grad)
    for name, value in model.state_dict().items(): assert torch.equal(value, values[name])
    assert [p._version for p in model.parameters()] == versions  # not even written with the same values
    assert x.grad is None
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_swapped_weight_leaves_the_other_storage_alone(x):
    model, average = linear(), torch.zeros(4, 4)

    def swapped(model, x):
        out = square(model, x)
        model.weight.data = average
        return out

    weight, address = model.weight.detach().clone(), model.weight.data_ptr()
    certify(model, x, swapped)
    assert torch.equal(model.weight, weight) and model.weight.data_ptr() == address
    assert torch.equal(average, torch.zeros(4, 4))


# ---- kinds of module

def test_scripted_sparse_and_complex():
    scripted = torch.jit.script(nn.Sequential(linear(), nn.BatchNorm1d(4)))
    sparse = nn.Sequential(nn.Embedding(10, 4, sparse=True), linear())
    spiral = nn.Linear(4, 2, dtype=torch.complex64)
    z = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for model, batch, loss in [(scripted, torch.randn(3, 4), square), (sparse, torch.tensor([1, 2]), square),
                               (spiral, z, lambda m, z: m(z).abs().square().sum())]:
        assert certify(model, batch, loss).passed
        assert gradient_flow(model, batch, loss).passed


def test_inside_the_callers_autocast(x):
    model = Net(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False).detach()), a=linear(), b=linear())
    with torch.autocast('cpu', torch.bfloat16):
        square(model, x)  # leaves cast weights in autocast's cache
        flow = gradient_flow(model, x, square)
        assert certify(model, x, square).passed
    assert {p.name: p.cut for p in flow.params if p.state == 'starved'} == {'a.weight': 'b', 'a.bias': 'b'}
    assert flow.of('unused') == ()


def test_long_table_is_cut_and_says_so(x):
    cert = certify(nn.Sequential(*(linear() for _ in range(12))), x, square)
    assert len(cert.gradients) == 24
    lines = repr(cert).splitlines()
    assert sum(line.startswith('| `') for line in lines) == 20
    assert lines[-1] == '4 more, which differ by 0.0e+00 or less'
    model = nn.Sequential(*(linear() for _ in range(12)))
    flow = gradient_flow(model, x, lambda m, x: m[11](m[:11](x).detach()).sum())
    lines = repr(flow).splitlines()
    assert lines[0] == '24 parameters: 22 starved, 2 learns' and lines[-1] == '4 more'
