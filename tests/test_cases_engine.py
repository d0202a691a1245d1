"""The engine's cases: gradients under hooks and wrappers, outputs, cuts by time, one step, derivatives"""
import warnings
from functools import partial
from threading import Thread

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gruckpt.engine.head import head_loss
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.measure.meter import Meter
from gruckpt.engine.recurrent import GRU, LSTM
from gruckpt.engine.scan import GradSink, grad_sink, plain, scan_segments
from gruckpt.plan.segment import Plan

F64 = torch.float64
def rand(*shape, dtype=F64): return torch.randn(*shape, dtype=dtype)

def grads(model, loss):
    "The gradients of every parameter"
    model.zero_grad()
    loss().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

def near(a, b, eps=1e-10):
    for x, y in zip(a, b, strict=True):
        assert (x - y).norm() <= eps * max(y.norm(), 1e-9), (x - y).norm() / y.norm()

def total(result): return result[0].square().sum()

def pair(kind=GRU, *args, **ours):
    "Ours and torch's, with the same weights"
    torch.manual_seed(0)
    theirs = (nn.GRU if kind is GRU else nn.LSTM)(*args).double()
    mine = kind(*args, **ours).double()
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


# N01: whatever comes back from the saved tensors
HOOKS = {'cpu': save_on_cpu, 'identity': lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
         'clone': lambda: saved_tensors_hooks(lambda t: t, lambda t: t.clone())}

@pytest.mark.parametrize('hook', HOOKS)
@pytest.mark.parametrize('make', [lambda: GRU(3, 4, seg_len=4), lambda: LSTM(3, 4, 2, seg_len=4),
                                  lambda: GRU(3, 4, 2, norm='output', seg_len=5), lambda: GRU(3, 4)])
def test_N01_saved_tensor_hooks(make, hook):
    torch.manual_seed(0)
    rnn, x, w = make().double(), rand(12, 2, 3), rand(12, 2, 4)     # squares of normed rows sum to a constant
    with plain(): oracle = grads(rnn, lambda: total(rnn(x)) + (w * rnn(x)[0]).sum())
    def loss():
        with HOOKS[hook](): return total(rnn(x)) + (w * rnn(x)[0]).sum()
    near(grads(rnn, loss), oracle)

def test_N01_checkpoint_around_and_inside():
    rnn, x = GRU(3, 4, 2, seg_len=4).double(), rand(12, 2, 3)
    with plain(): oracle = grads(rnn, lambda: total(rnn(x)))
    near(grads(rnn, lambda: total(checkpoint(rnn, x, use_reentrant=False))), oracle)
    near(grads(rnn, lambda: total(checkpoint(rnn, x.clone().requires_grad_(), use_reentrant=True))), oracle)
    bare = GRU(3, 4, 2).double()
    bare.load_state_dict(rnn.state_dict())
    def step(x, h): return checkpoint(bare, x, h, use_reentrant=False)
    def loss(): return torch.cat(scan_segments(step, x, rand(2, 2, 4) * 0, Plan(12, 4))[0]).square().sum()
    near(grads(bare, loss), oracle)

def test_N01_language_model_under_hooks():
    torch.manual_seed(0)
    model = GRULM(GRUSpec(7, 8, 2)).double()
    class batch: inputs = targets = torch.randint(0, 7, (2, 12))
    def loss(n): return model.loss(batch, plan=Plan.split(12, n))[0]
    oracle = grads(model, lambda: loss(1))
    def hooked():
        with save_on_cpu(): return loss(3)
    near(grads(model, hooked), oracle)

def test_N01_a_step_that_differentiates_inside_itself():
    "Its gradient is its own affair: it must not land in the scan's sums"
    rnn, x = GRU(3, 4).double(), rand(6, 2, 3)
    def step(x, h):
        with torch.enable_grad(): inner, = torch.autograd.grad(rnn(x, h.detach())[0].sum(), rnn.weight_hh_l0)
        out, h = rnn(x, h)
        return out.square().sum() * (1 + inner.detach().sum()), h
    def loss(n): return sum(scan_segments(step, x, torch.zeros(1, 2, 4, dtype=F64), Plan.split(6, n))[0])
    near(grads(rnn, lambda: loss(3)), grads(rnn, lambda: loss_plain(loss)))

def loss_plain(loss):
    with plain(): return loss(3)

def test_N01_weights_that_arrive_as_input():
    "A weight among the inputs of the scan gets its gradient"
    rnn, x = GRU(3, 4).double(), rand(6, 2, 3)
    w = rand(12, 4).requires_grad_()
    def step(x, carried):
        h, w = carried
        out, h = functional_call(rnn, {'weight_hh_l0': w}, (x, h))
        return out.square().sum(), (h, w)
    def loss(): return sum(scan_segments(step, x, (torch.zeros(1, 2, 4, dtype=F64), w), Plan.split(6, 3))[0])
    found, = torch.autograd.grad(loss(), w)
    with plain(): oracle, = torch.autograd.grad(loss(), w)
    near([found], [oracle])


# N02: copies of temporaries
@pytest.mark.parametrize('names', [('weight_hh',), ('weight_ih', 'weight_hh')])
def test_N02_casts_of_parametrized_weights(names):
    for seed in range(4):
        torch.manual_seed(seed)
        rnn, x = GRU(8, 8, 2, seg_len=4), torch.randn(12, 2, 8)
        for n in [n for n, _ in rnn.named_parameters() if n.startswith(names)]:
            parametrizations.weight_norm(rnn, n)
        with torch.autocast('cpu', torch.bfloat16):
            out = rnn(x)[0]
            with plain(): oracle = rnn(x)[0]
        assert (out - oracle).norm() <= .02 * oracle.norm()

def test_N02_copies_and_sums_belong_to_one_object_at_one_version():
    sink = GradSink()
    for i in range(50):                                # each takes the number of the one before
        w = torch.full((3,), float(i))
        assert sink.slot(w).prepare('twice', lambda w=w: w * 2)[0] == 2 * i
    leaf = torch.ones(3, requires_grad=True)
    def twice(w): return sink.slot(w).prepare('twice', lambda: w.detach() * 2)[0]
    assert twice(leaf) == 2
    with torch.no_grad(): leaf.mul_(5)
    assert twice(leaf) == 10                               # written since
    sink.sum_of(leaf).add_(1)
    del leaf, w
    assert len(list(sink.slots)) == 0 and grad_sink() is None


# N04: outputs that may be written
@pytest.mark.parametrize('more', [{}, dict(batch_first=True), dict(bidirectional=True)])
@pytest.mark.parametrize('change', [lambda o: o.data.mul_(0), lambda o: o.detach().numpy().fill(0)])
def test_N04_writes_that_autograd_does_not_see(change, more):
    torch.manual_seed(0)
    theirs, x = nn.GRU(3, 4, 2, **more).double(), rand(5, 2, 3)
    mine = GRU(3, 4, 2, **more).double()
    mine.load_state_dict(theirs.state_dict())
    def loss(rnn):
        out, _ = rnn(x)
        value = out.sum()
        change(out)
        return value
    near(grads(mine, lambda: loss(mine)), grads(theirs, lambda: loss(theirs)))

WRITES = {'relu_': lambda o: o.relu_(), '+=': lambda o: o.add_(1), 'slice': lambda o: o[3:].zero_(),
          'dropout': lambda o: nn.functional.dropout(o, .5, True, inplace=True)}

@pytest.mark.parametrize('write', WRITES)
@pytest.mark.parametrize('kind', [GRU, LSTM])
@pytest.mark.parametrize('seg_len', [None, 2])
def test_N04_in_place_operations_on_outputs(kind, write, seg_len):
    mine, theirs = pair(kind, 3, 4, 2, seg_len=seg_len)
    x = rand(5, 2, 3)
    def loss(rnn):
        out, state = rnn(x)
        torch.manual_seed(1)
        WRITES[write](out)
        for s in state if kind is LSTM else [state]: s.mul_(2)
        return out.square().sum() + sum(s.sum() for s in (state if kind is LSTM else [state]))
    near(grads(mine, lambda: loss(mine)), grads(theirs, lambda: loss(theirs)))

def test_N04_one_step_may_be_written_too():
    mine, theirs = pair(GRU, 3, 4, 2)
    x = rand(3, 2, 3)
    def loss(rnn):
        h, value = torch.zeros(2, 2, 4, dtype=F64), 0.
        for x_BI in x:
            out, h = rnn(x_BI[None], h)
            out.relu_()
            h = h * 1
            h[:, 0] = 0
            value = value + out.square().sum()
        return value + h.sum()
    near(grads(mine, lambda: loss(mine)), grads(theirs, lambda: loss(theirs)))


# N07: weights that were computed from others
class Dropped(nn.Module):
    "AWD-LSTM's wrapper: a dropped weight is set before every call"
    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.raw = rnn, rnn.weight_hh_l0
        del rnn.weight_hh_l0

    def forward(self, x):
        torch.manual_seed(3)
        self.rnn.weight_hh_l0 = nn.functional.dropout(self.raw, .5)
        return self.rnn(x)

def with_norm(rnn):
    with warnings.catch_warnings(action='ignore'): return nn.utils.weight_norm(rnn, 'weight_hh_l0')

class Called(nn.Module):
    def __init__(self, rnn): super().__init__(); self.rnn = rnn

    def forward(self, x):
        return functional_call(self.rnn, {n: p * 2 for n, p in self.rnn.named_parameters()}, x)

WRAPPED = {'weight_norm': with_norm, 'prune': partial(prune.l1_unstructured, name='weight_hh_l0', amount=.4),
           'dropped': Dropped, 'functional_call': Called}

@pytest.mark.parametrize('how', WRAPPED)
@pytest.mark.parametrize('options', [dict(), dict(bidirectional=True)])
def test_N07_weights_computed_before_the_call(how, options):
    torch.manual_seed(0)
    model, x = WRAPPED[how](GRU(3, 4, seg_len=3, **options).double()), rand(8, 2, 3)
    found = grads(model, lambda: total(model(x)))
    with plain(): near(found, grads(model, lambda: total(model(x))))
    assert any(g.norm() > 0 for g in found)

def test_N07_cached_parametrization():
    torch.manual_seed(0)
    rnn, x = GRU(3, 4, 2, seg_len=3).double(), rand(8, 2, 3)
    parametrizations.weight_norm(rnn, 'weight_hh_l1')
    def loss():
        with parametrize.cached(): return total(rnn(x)) + total(rnn(x * 2))
    found = grads(rnn, loss)
    with plain(): near(found, grads(rnn, loss))


# N08: cuts that save
def kept(rnn, x):
    with Meter() as meter:
        loss = rnn(x)[0]
        loss = (loss if torch.is_tensor(loss) else loss.data).sum()
        held = meter.live
    loss.backward()
    return held

def test_N08_packed_sequences_are_cut_by_absolute_time():
    x, lengths = torch.randn(128, 8, 4), torch.tensor([128, 127, 121, 115, 104, 100, 80, 64])
    packed = pack_padded_sequence(x, lengths)
    whole, cut = kept(GRU(4, 16, 3), packed), kept(GRU(4, 16, 3, seg_len=16), packed)
    assert cut < .5 * whole, (cut, whole)
    for bidirectional in (False, True):
        torch.manual_seed(0)
        rnn = LSTM(4, 5, 2, bidirectional=bidirectional, seg_len=16).double()
        theirs = nn.LSTM(4, 5, 2, bidirectional=bidirectional).double()
        theirs.load_state_dict(rnn.state_dict())
        packed = pack_padded_sequence(x[:40].double(), torch.tensor([40, 39, 33, 17, 16, 9, 8, 1]))
        def loss(m, packed=packed):
            out, (h, c) = m(packed)
            return out.data.square().sum() + h.sum() + c.square().sum()
        near(grads(rnn, partial(loss, rnn)), grads(theirs, partial(loss, theirs)))

def test_N08_both_directions_are_cut():
    x = torch.randn(256, 8, 16)
    for n_layers in (1, 2):
        whole = kept(GRU(16, 16, n_layers, bidirectional=True), x)
        cut = kept(GRU(16, 16, n_layers, bidirectional=True, seg_len=16), x)
        states = 2 * n_layers * 256 * 8 * 16 * 4       # of every step: cut, they are not kept
        assert whole - cut > .75 * states, (whole, cut, states)


# N09: what does not pass says so
@pytest.mark.parametrize('seg_len', [None, 2])
def test_N09_transforms_are_refused_in_one_line(seg_len):
    rnn, x = GRU(3, 4, seg_len=seg_len).double(), rand(5, 2, 3)
    def f(x): return rnn(x)[0].sum()
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.vmap,
                      lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(RuntimeError, match='do not pass through this layer'): transform(f)(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match='forward-mode .* do not pass'):
        rnn(forward_ad.make_dual(x, torch.ones_like(x)))
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match='batched backward passes do not pass'):
        torch.autograd.functional.jacobian(lambda x: rnn(x)[0][:, 0, 0], leaf, vectorize=True)
    with pytest.raises(RuntimeError, match='second derivatives do not pass'):
        torch.autograd.grad(f(leaf), leaf, create_graph=True)
    with plain():
        near([torch.func.grad(f)(x)], [torch.autograd.grad(f(leaf), leaf)[0]])
        torch.func.jvp(f, (x,), (x,))

def test_N09_scan_and_head_refuse_transforms_too():
    x, targets = rand(4, 3), torch.zeros(4, dtype=torch.int64)
    def step(x, h): return x.square().sum(), h
    def scanned(x): return sum(scan_segments(step, x, None, Plan.split(4, 2))[0])
    def head(x): return head_loss(x, targets, torch.ones(2, 3, dtype=F64), torch.ones(2, dtype=F64))
    for f, name in ((scanned, 'scan_segments'), (head, 'head_loss')):
        with pytest.raises(RuntimeError, match=f'do not pass through {name}'): torch.func.grad(f)(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match='forward-mode'):
        scanned(forward_ad.make_dual(x.requires_grad_(), torch.ones(4, 3, dtype=F64)))


# N10: one step a call
class Counted(TorchDispatchMode):
    "Operations that reach the dispatcher"
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))

@pytest.mark.parametrize('kind', [GRU, LSTM])
@pytest.mark.parametrize('n_layers', [1, 2])
def test_N10_one_step_takes_no_more_operations_than_torch(kind, n_layers):
    mine, theirs = pair(kind, 3, 4, n_layers)
    x = rand(1, 2, 3)
    def count(rnn, grad):
        with Counted() as counted, torch.set_grad_enabled(grad):
            out, state = rnn(x)
            if grad: (out.sum() + sum(s.sum() for s in (state if kind is LSTM else [state]))).backward()
        return counted.n
    for grad in (False, True): assert count(mine, grad) <= count(theirs, grad) + 2, grad

@pytest.mark.parametrize('kind, more', [(GRU, {}), (LSTM, {}), (LSTM, dict(proj_size=2))])
@pytest.mark.parametrize('bias', [False, True])
def test_N10_a_rollout_is_torchs(kind, more, bias):
    torch.manual_seed(0)
    theirs = (nn.GRU if kind is GRU else nn.LSTM)(3, 4, 2, bias=bias, **more).double()
    mine, x = kind(3, 4, 2, bias=bias, **more).double(), rand(6, 2, 3)
    mine.load_state_dict(theirs.state_dict())
    def roll(rnn):
        state, value = None, 0.
        for x_BI in x:
            out, state = rnn(x_BI[None], state)
            value = value + out.square().sum()
        return value
    near(grads(mine, lambda: roll(mine)), grads(theirs, lambda: roll(theirs)))
    with torch.no_grad(): near([roll(mine)], [roll(theirs)])


# N14, N31, N36
def test_N14_other_data_before_the_backward_pass():
    rnn, x = GRU(3, 4, seg_len=2).double(), rand(6, 2, 3)
    loss = total(rnn(x))
    rnn.weight_hh_l0.data = rand(12, 4)
    with pytest.raises(RuntimeError, match=r'shape \(12, 4\).* given other data'): loss.backward()
    h = rand(2, 4)
    w = rand(4)
    def step(x, h): return (x * w).sum() + h.sum(), h * w
    w.requires_grad_()
    loss = sum(scan_segments(step, rand(6, 2, 4), h, Plan.split(6, 3))[0])
    w.data = rand(4)
    with pytest.raises(RuntimeError, match='given other data'): loss.backward()

@pytest.mark.parametrize('seg_len', [None, 2])
def test_N31_backward_from_another_thread(seg_len):
    mine, theirs = pair(LSTM, 3, 4, 2, seg_len=seg_len)
    x = rand(6, 2, 3)
    def run(rnn):
        loss = total(rnn(x))
        thread = Thread(target=loss.backward)
        rnn.zero_grad()
        thread.start()
        thread.join()
        return [p.grad for p in rnn.parameters()]
    near(run(mine), run(theirs))

def test_N36_flop_counter_around_a_module_in_a_scan():
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(8, 2, 3, requires_grad=True)
    def step(x, h): return module(x).sum(), h
    def flops(loss):
        with FlopCounterMode(display=False) as counter: loss().backward()
        return counter.get_total_flops()
    scanned = flops(lambda: sum(scan_segments(step, x, None, Plan.split(8, 4))[0]))
    kept = flops(lambda: checkpoint(module, x, use_reentrant=False).sum())
    forward = kept // 4
    assert (kept, scanned) == (4 * forward, 4 * forward - forward // 4)   # the last segment runs once
