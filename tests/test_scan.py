"""scan_segments against the plain run: every kind of step, state and surroundings, cut in many ways"""
import contextlib
import copy
import gc
import random
import threading
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import group_of_one
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from gruckpt.engine import captures as surroundings
from gruckpt.engine.scan import grad_sink, plain, scan_segments
from gruckpt.plan.segment import Plan

T, B, I, D = 7, 2, 3, 4
F64 = torch.float64
REFUSED = (RuntimeError, ValueError)
PLAN = Plan.split(T, 3)


def x_TBI(): return torch.randn(T, B, I, dtype=F64)
def h_BD(): return torch.zeros(B, D, dtype=F64)
def data(): return x_TBI(), h_BD(), PLAN


# --- two oracles, one comparison

def loop(step, xs, state, plan, time_dim=0):
    "The plain run, written down again"
    outs = []
    for a in range(0, plan.n_steps, plan.seg_len):
        n = min(plan.seg_len, plan.n_steps - a)
        cut = tree_map(lambda x, a=a, n=n: x.narrow(time_dim, a, n) if torch.is_tensor(x) else x, xs)
        out, state = step(cut, state)
        outs.append(out)
    return outs, state


def total(tree):
    "A sum in which every number that carries a gradient has a weight of its own"
    return sum((t * torch.linspace(.5, 1.5 + i, t.numel()).view(t.shape).to(t)).sum()
               for i, t in enumerate(tree_leaves(tree)) if torch.is_tensor(t) and t.requires_grad)


def emptied(queue):
    "What was put into a queue: a log that no recomputation can take back"
    return [queue.get() for _ in range(queue.qsize())]


def draws(generators):
    "What every random source gives next"
    own = [torch.rand(1, generator=g).item() for g in generators]
    return [*own, torch.rand(1).item(), random.random(), np.random.rand()]


def state_of(c):
    "Buffers and flags of the case's modules, in order"
    flags = [(m.training, getattr(m, 'n', 0)) for r in c.modules for m in r.modules()]
    return flags, [b.detach().clone() for r in c.modules for b in r.buffers()]


def measure(build, how, n_segments, between=None, twice=False):
    "Everything that a run shows: results, gradients, what it left behind"
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    c = build()
    plan = Plan.split(c.steps, n_segments)
    with plain() if how == 'plain' else contextlib.nullcontext():
        run = loop if how == 'loop' else scan_segments
        result = run(c.step, c.xs, c.state, plan, time_dim=c.time_dim)
    first = draws(c.generators)
    if between: between(c)
    kept = state_of(c)
    loss = total(result) + (0 if c.extra is None else c.extra())
    grads = torch.autograd.grad(loss, c.leaves, allow_unused=True, retain_graph=twice)
    if twice: grads += torch.autograd.grad(loss, c.leaves, allow_unused=True)
    for a, b in zip(tree_leaves(kept), tree_leaves(state_of(c)), strict=True): assert same(a, b)
    return result, grads, first, draws(c.generators), kept


def same(a, b, eps=1e-12):
    "Equal kind, and equal value within `eps` relative"
    if not torch.is_tensor(a): return type(a) is type(b) and a == b
    return torch.is_tensor(b) and a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, eps, eps)


def check(build, n_segments, learns=None, **kw):
    "A scan gives what the two oracles give"
    got = measure(build, 'scan', n_segments, **kw)
    for how in ('plain', 'loop'):
        want = measure(build, how, n_segments, **kw)
        names = 'results', 'gradients', 'draws', 'later draws', 'left behind'
        for name, g, w in zip(names, got, want, strict=True):
            for a, b in zip(tree_leaves(g), tree_leaves(w), strict=True): assert same(a, b), (name, how, a, b)
        for a, b in zip(got[1], want[1], strict=True): assert (a is None) == (b is None)
    if learns is not None: assert sum(g is not None and bool(g.norm() > 0) for g in got[1]) == learns


def case(step, leaves, xs=None, state=None, modules=(), generators=(), extra=None, time_dim=0,
         steps=T, **more):
    "A run to compare: inputs are random and the state zero unless said otherwise"
    xs = x_TBI() if xs is None else xs
    state = h_BD() if state is None else state
    return SimpleNamespace(step=step, leaves=list(leaves), xs=xs, state=state, modules=modules, steps=steps,
                           generators=generators, extra=extra, time_dim=time_dim,
                           args=(step, xs, state, PLAN), **more)


def gru(): return nn.GRUCell(I, D).double()


def advance(cell, xs, h, change=lambda h: h):
    "A cell over the steps of `xs`: all states, the last one"
    hs = []
    for x in xs: hs.append(h := change(cell(x, h)))
    return torch.stack(hs), h


CASES = {}
def a_case(f): CASES[f.__name__] = f; return f
def cases(f): return pytest.mark.parametrize('name', CASES)(f)


# --- E01, E02, E11, E17 and their families: the scan equals the plain run

@a_case
def e01_all_learn():
    cell = gru()
    return case(lambda xs, h: advance(cell, xs, h), cell.parameters())

@a_case
def e01_frozen_embedding():
    embed, cell = nn.Embedding(5, I).double().requires_grad_(False), gru()
    return case(lambda xs, h: advance(cell, embed(xs), h), cell.parameters(), torch.randint(5, (T, B)))

@a_case
def e01_only_weight_hh():
    cell = gru().requires_grad_(False)
    return case(lambda xs, h: advance(cell, xs, h), [cell.weight_hh.requires_grad_()])

@a_case
def e02_dropout():
    cell, drop = gru(), nn.Dropout(.5)
    return case(lambda xs, h: advance(cell, drop(xs), h, drop), cell.parameters())

@a_case
def e02_own_generator():
    cell, coin = gru(), torch.Generator().manual_seed(3)
    def step(xs, h): return advance(cell, xs, h, lambda h: h * torch.rand(h.shape, generator=coin, dtype=F64))
    return case(step, cell.parameters(), generators=[coin])

@a_case
def e02_sampled_tokens():
    embed, cell, head = nn.Embedding(5, I).double(), gru(), nn.Linear(D, 5).double()
    def step(xs, state):
        token, h, loss = *state, 0.
        for y in xs:
            fed = torch.where(torch.rand(B) < .5, y, token)
            h = cell(embed(fed), h)
            loss = loss + F.cross_entropy(head(h), y, reduction='sum')
            token = torch.multinomial(head(h).softmax(-1), 1)[:, 0]
        return loss, (token, h)
    leaves = [p for m in (embed, cell, head) for p in m.parameters()]
    return case(step, leaves, torch.randint(5, (T, B)), (torch.zeros(B).long(), h_BD()))

@a_case
def e02_python_random():
    cell = gru()
    return case(lambda xs, h: advance(cell, xs, h, lambda h: h * random.random()), cell.parameters())

@a_case
def e02_numpy_random():
    cell = gru()
    return case(lambda xs, h: advance(cell, xs, h, lambda h: h * np.random.rand()), cell.parameters())

class Counter(nn.Module):
    "A cell whose result depends on how often it ran, counted in the way that `how` says"
    def __init__(self, how, count=None):
        super().__init__()
        self.cell, self.how, self.n = gru(), how, 0
        count = torch.ones((), dtype=F64) if count is None else count
        self.register_buffer('count', None if how == 'lazy' else count)
    def forward(self, x, h):
        if self.how == 'add_': self.count.add_(1)
        if self.how == 'assign': self.count = self.count + 1
        if self.how == 'data': self.count.data.add_(1)
        if self.how == 'lazy': self.count = x.new_zeros(()) if self.count is None else self.count + 1
        if self.how == 'python': self.n += 1
        return self.cell(x, h) * (1 + .1 * self.n + .1 * self.count)

def counting(how):
    def build():
        model = Counter(how)
        return case(lambda xs, h: advance(model, xs, h), model.parameters(), modules=[model])
    return build
CASES |= {f'e11_{how}': counting(how) for how in ('add_', 'assign', 'data', 'lazy', 'python')}

@a_case
def e11_buffer_of_two_modules():
    count = torch.ones((), dtype=F64)
    a, b = Counter('add_', count), Counter('add_', count)
    def step(xs, h): return advance(b, advance(a, xs, h)[0][..., :I], h)
    return case(step, [*a.parameters(), *b.parameters()], modules=[a, b])

class Normed(nn.Module):
    def __init__(self): super().__init__(); self.cell, self.norm = gru(), nn.BatchNorm1d(D).double()
    def forward(self, xs, h): return advance(self.cell, xs, h, self.norm)

@a_case
def e11_batch_norm():
    model = Normed()
    return case(model, model.parameters(), modules=[model])

@a_case
def e11_batch_norm_no_count():
    model = Normed()
    model.norm.num_batches_tracked = None
    return case(model, model.parameters(), modules=[model])

@a_case
def q02_moving_range():
    class Observer(nn.Module):
        def __init__(self): super().__init__(); self.register_buffer('top', torch.tensor(.1, dtype=F64))
        def forward(self, h):
            self.top.lerp_(h.detach().abs().max(), .1)
            scale = self.top.item() / 127
            return torch.fake_quantize_per_tensor_affine(h.float(), scale, 0, -128, 127).double()
    cell, seen = gru(), Observer()
    return case(lambda xs, h: advance(cell, xs, h, seen), cell.parameters(), modules=[seen])

@a_case
def e11_instance_norm():
    "Writes its running statistics and counts nothing"
    cell, norm = gru(), nn.InstanceNorm1d(D, track_running_stats=True).double()
    def step(xs, h):
        hs, h = advance(cell, xs, h)
        return norm(torch.cat([hs, hs + 1]).permute(1, 2, 0)) * (1 + norm.running_mean[:, None]), h
    return case(step, cell.parameters(), modules=[norm])

@a_case
def e02_captured_generators():
    cell, own, a, b = gru(), random.Random(1), np.random.default_rng(2), np.random.RandomState(3)
    def change(h): return h * own.random() * a.random() * b.rand()
    return case(lambda xs, h: advance(cell, xs, h, change), cell.parameters())

@a_case
def mask_by_length():
    "A cache that the short last segment adds to"
    cell, masks = gru(), {}
    def step(xs, h):
        if len(xs) not in masks: masks[len(xs)] = torch.full((len(xs), 1, 1), .5, dtype=F64)
        return advance(cell, xs * masks[len(xs)], h)
    step(x_TBI()[:3], h_BD())
    return case(step, cell.parameters())

@a_case
def leaf_made_inside(): return gradient_inside_step()

@a_case
def spectral_norm():
    cell = gru()
    parametrizations.spectral_norm(cell, 'weight_hh')
    return case(lambda xs, h: advance(cell, xs, h), cell.parameters(), modules=[cell])

@a_case
def weight_norm():
    cell = parametrizations.weight_norm(gru(), 'weight_hh')
    return case(lambda xs, h: advance(cell, xs, h), cell.parameters())

@a_case
def weight_norm_by_hook():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        cell = nn.utils.weight_norm(gru(), 'weight_hh')
    return case(lambda xs, h: advance(cell, xs, h), cell.parameters())

@a_case
def tied_weight():
    embed, cell, head = nn.Embedding(5, I).double(), gru(), nn.Linear(I, 5, bias=False).double()
    head.weight = embed.weight
    def step(xs, h):
        hs, h = advance(cell, embed(xs), h)
        return F.cross_entropy(head(hs[..., :I]).flatten(0, 1), xs.flatten(), reduction='sum'), h
    return case(step, [embed.weight, *cell.parameters()], torch.randint(5, (T, B)))

@a_case
def cell_twice():
    cell = gru()
    return case(lambda xs, h: advance(cell, advance(cell, xs, h)[0][..., :I], h), cell.parameters())

@a_case
def functional_call_inside():
    cell, other = gru().requires_grad_(False), {n: p.detach() * 2 for n, p in gru().named_parameters()}
    for p in other.values(): p.requires_grad_()
    def step(xs, h): return advance(lambda *a: torch.func.functional_call(cell, other, a), xs, h)
    return case(step, other.values())

@a_case
def whole_lstm():
    lstm = nn.LSTM(I, D, 2, dropout=.5).double()
    h0 = torch.randn(2, B, D, dtype=F64)
    return case(lstm, lstm.parameters(), state=(h0, h0 + 1))

@a_case
def returns_a_weight():
    cell, w = gru(), nn.Parameter(torch.randn(B, D, dtype=F64))
    return case(lambda xs, h: ((advance(cell, xs, h)[0], w), w), [*cell.parameters(), w])

@a_case
def state_reset_to_a_weight():
    cell, w = gru(), nn.Parameter(torch.randn(B, D, dtype=F64))
    return case(lambda xs, h: (advance(cell, xs, h)[0], w), [*cell.parameters(), w])

@a_case
def learned_first_state():
    cell, h0 = gru(), nn.Parameter(torch.randn(D, dtype=F64))
    return case(lambda xs, h: advance(cell, xs, h), [*cell.parameters(), h0], state=h0.expand(B, D))

@a_case
def x_and_h0_require_grad():
    cell = gru()
    x, h0 = x_TBI().requires_grad_(), torch.randn(B, D, dtype=F64).requires_grad_()
    return case(lambda xs, h: advance(cell, xs, h), [x, h0, *cell.parameters()], x, h0)

@a_case
def x_only():
    cell, x = gru().requires_grad_(False), x_TBI().requires_grad_()
    return case(lambda xs, h: advance(cell, xs, h), [x], x)

@a_case
def x_computed():
    below, cell, x = nn.Linear(I, I).double(), gru(), x_TBI().requires_grad_()
    leaves = [x, *below.parameters(), *cell.parameters()]
    return case(lambda xs, h: advance(cell, xs, h), leaves, below(x).tanh())

@a_case
def x_also_captured():
    cell, x = gru(), x_TBI().requires_grad_()
    return case(lambda xs, h: advance(cell, xs * x.mean(), h), [x, *cell.parameters()], x)

@a_case
def xs_dict():
    embed, cell, x = nn.Embedding(5, I).double(), gru(), x_TBI().requires_grad_()
    def step(xs, h): return advance(cell, embed(xs['id']) * xs['x'] + xs['again'][0], h)
    xs = {'id': torch.randint(5, (T, B)), 'x': x, 'again': [x, None, 3], 'unused': x * 2}
    return case(step, [x, *embed.parameters(), *cell.parameters()], xs)

@a_case
def xs_expanded_batch_first():
    cell, x = gru(), torch.randn(1, T, I, dtype=F64).requires_grad_()
    def step(xs, h): return advance(cell, xs.transpose(0, 1), h)
    return case(step, [x, *cell.parameters()], x.expand(B, T, I), time_dim=1)

@a_case
def xs_time_last():
    cell, x = gru(), torch.randn(B, I, T, dtype=F64).requires_grad_()
    return case(lambda xs, h: advance(cell, xs.permute(2, 0, 1), h), [x, *cell.parameters()], x, time_dim=-1)

@a_case
def state_nested():
    cell = gru()
    def step(xs, s):
        hs, h = advance(cell, xs, s['h'][0])
        return hs.sum(), {'h': (h, None, s['h'][2] + len(xs)), 'n': s['n'] + 1, 'b': s['b'] | True}
    h0 = torch.randn(B, D, dtype=F64).requires_grad_()
    s = {'h': (h0, None, 0), 'n': torch.zeros(2).long(), 'b': torch.tensor(False)}
    return case(step, [h0, *cell.parameters()], state=s)

@a_case
def state_shares_input():
    cell, x = gru(), torch.randn(T, B, D, dtype=F64).requires_grad_()
    def step(xs, s): hs, h = advance(cell, xs[..., :I], s[0]); return hs, (h, s[1])
    return case(step, [x, *cell.parameters()], x, (x[0], x[0]))

@a_case
def state_untouched():
    cell, h0 = gru(), torch.randn(B, D, dtype=F64).requires_grad_()
    return case(lambda xs, h: (advance(cell, xs, h)[0], h), [h0, *cell.parameters()], state=h0)

@a_case
def state_in_float32():
    cell = gru()
    def step(xs, h): hs, h = advance(cell, xs, h.double()); return hs, h.float()
    return case(step, cell.parameters(), state=torch.zeros(B, D))

@a_case
def state_written_by_steps():
    cell = gru()
    def step(xs, h):
        hs, h = advance(cell, xs, h)
        return hs, h.clone().mul_(.5).add_(h)
    return case(step, cell.parameters())

@a_case
def outs_aliased():
    cell, x = gru(), x_TBI().requires_grad_()
    def step(xs, h):
        hs, h2 = advance(cell, xs, h)
        return (hs, hs, hs[0], hs[-1].t(), xs, xs[0], h, h2, h2.view(-1)), h2
    return case(step, [x, *cell.parameters()], x)

@a_case
def e17_outs_of_any_kind():
    cell = gru()
    def step(xs, h):
        hs, h = advance(cell, xs, h)
        n = len(xs)
        return {'hs': hs, 'len': torch.tensor(n), 'mask': hs > 0, 'none': None, 'n': n, 's': 'a'}, h
    return case(step, cell.parameters())

@a_case
def outs_one_a_step():
    cell = gru()
    def step(xs, h):
        hs, h = advance(cell, xs, h)
        return [*hs.unbind(), torch.tensor(len(xs)), hs.detach()], h
    return case(step, cell.parameters())

@a_case
def loss_only_early():
    cell, w = gru(), nn.Parameter(torch.ones((), dtype=F64))
    def step(xs, h):
        hs, h = advance(cell, xs['x'], h)
        return hs.sum() * w if xs['ok'].any() else hs.new_zeros(()), h.detach()
    ok = torch.arange(T) < 1
    return case(step, [*cell.parameters(), w], {'x': x_TBI(), 'ok': ok},
                extra=lambda: w * 2)

@a_case
def loss_only_late():
    cell = gru()
    def step(xs, h):
        hs, h = advance(cell, xs['x'], h)
        return hs.sum() if xs['ok'].any() else hs.new_zeros(()), h
    return case(step, cell.parameters(), {'x': x_TBI(), 'ok': torch.arange(T) > 5})

@a_case
def nothing_learns_in_the_last():
    cell, w = gru(), nn.Parameter(torch.ones((), dtype=F64))
    def step(xs, h):
        if not xs['ok'].any(): return h.new_zeros(()), h.detach()
        hs, h = advance(cell, xs['x'], h)
        return hs.sum(), h
    return case(step, [*cell.parameters(), w], {'x': x_TBI(), 'ok': torch.arange(T) < 1},
                extra=lambda: w * 2)

@a_case
def step_detaches_state():
    cell = gru()
    def step(xs, h): hs, h = advance(cell, xs, h); return hs, h.detach()
    return case(step, cell.parameters())

@a_case
def scan_in_a_scan():
    cell, drop, x = Counter('add_'), nn.Dropout(.5), x_TBI().requires_grad_()
    def inner(xs, h): return advance(cell, xs, h, drop)
    def step(xs, h):
        outs, h = scan_segments(inner, xs * 2, h, Plan.split(len(xs), min(2, len(xs))))
        return torch.cat(outs).tanh(), h
    return case(step, [x, *cell.parameters()], x, modules=[cell])

@a_case
def checkpoint_in_a_scan():
    cell, drop = gru(), nn.Dropout(.5)
    def inner(xs, h): return advance(cell, xs, h, drop)
    return case(lambda xs, h: checkpoint(inner, xs, h, use_reentrant=False), cell.parameters())

@a_case
def no_rows():
    cell = gru()
    return case(lambda xs, h: advance(cell, xs, h), cell.parameters(), torch.zeros(T, 0, I, dtype=F64),
                torch.zeros(0, D, dtype=F64))


@pytest.mark.parametrize('n_segments', [1, 2, 3, 7])
@cases
def test_equals_plain(name, n_segments): check(CASES[name], n_segments)

TWICE = 'e02_dropout', 'e11_add_', 'scan_in_a_scan', 'xs_dict', 'checkpoint_in_a_scan'
@pytest.mark.parametrize('name', TWICE)
def test_e13_backward_twice(name): check(CASES[name], 3, twice=True)

def test_e01_every_weight_learns(): check(e01_all_learn, 3, learns=4)

def test_first_step_weight():
    "A weight that only the first segment reads: as plain, or refused"
    def build():
        cell, start = gru(), nn.Linear(I, D).double()
        def step(xs, s):
            h, t = s
            hs, h = advance(cell, xs, start(xs[0]) if t == 0 else h)
            return hs, (h, t + 1)
        return case(step, [*start.parameters(), *cell.parameters()], state=(h_BD(), 0))
    with contextlib.suppress(*REFUSED): check(build, 3)


# --- E20: every way to cut

@pytest.mark.parametrize('n_steps', [1, 2, 7, 13])
def test_e20_every_cut(n_steps):
    def build():
        cell, x = gru(), torch.randn(n_steps, B, I, dtype=F64).requires_grad_()
        return case(lambda xs, h: advance(cell, xs, h), [x, *cell.parameters()], x, steps=n_steps)
    for n_segments in {k for k in (1, 2, 3, 5, 8, n_steps) if k <= n_steps}: check(build, n_segments)
    for n_segments in (n_steps + 1, 0, -1):
        with pytest.raises(ValueError): Plan.split(n_steps, n_segments)

SHORT = *map(torch.zeros, (6, 8, ())), {'a': torch.zeros(T, B), 'b': torch.zeros(B, T)}
@pytest.mark.parametrize('xs', SHORT)
def test_wrong_length_is_refused(xs):
    with pytest.raises(ValueError, match='7 steps long'):
        scan_segments(lambda xs, h: (xs, h), xs, torch.zeros(1), PLAN)


# --- E03: random numbers that cannot be replayed

def test_e03_unknown_device_is_refused():
    class Mps(torch.Tensor):
        device = torch.device('mps')
    x = torch.zeros(T, B, I).as_subclass(Mps)
    with pytest.raises(ValueError, match='mps'):
        scan_segments(lambda xs, h: (xs, h), x, torch.zeros(B, D).requires_grad_(), PLAN)


# --- E04-E06: precision

CASTS = ('on', None), ('on', 'off'), ('off', 'on'), (None, 'on'), (None, None)
@pytest.mark.parametrize('outer, inner', CASTS)
def test_e04_autocast(outer, inner):
    def cast(on):
        if on is None: return contextlib.nullcontext()
        return torch.autocast('cpu', torch.bfloat16, on == 'on')
    def build(log):
        i_map, h_map = nn.Linear(I, D), nn.Linear(D, D)
        def step(xs, h):
            for x in xs:
                with cast(inner): a = i_map(x)
                h = torch.tanh(a + h_map(h)).float()
                log.put((a.dtype, h_map(h).dtype))
            return h.sum(), h
        return case(step, [*i_map.parameters(), *h_map.parameters()], torch.randn(T, B, I), torch.zeros(B, D))
    def go(how, log):
        torch.manual_seed(0)
        c = build(log)
        with cast(outer), plain() if how == 'plain' else contextlib.nullcontext():
            outs, _ = scan_segments(*c.args)
        return torch.autograd.grad(sum(outs), c.leaves)
    once, again = SimpleQueue(), SimpleQueue()
    want, got = go('plain', once), go('scan', again)
    once, again = emptied(once), emptied(again)
    assert again[:T] == once and again[T:] == once[3:6] + once[:3]       # last segment is not recomputed
    for g, w in zip(got, want, strict=True): assert (g - w).norm() <= 2**-7 * w.norm() and w.norm() > 0

@pytest.mark.parametrize('rollout', [False, True])
@pytest.mark.parametrize('inside', [False, True])
def test_e05_e06_one_autocast_block(rollout, inside):
    "A pass under no_grad, then training, all in one block; backward inside the block or after it"
    torch.manual_seed(0)
    cell, x, h0 = nn.GRUCell(I, D), torch.randn(T, B, I), torch.zeros(B, D)
    def step(xs, h):
        hs, h = advance(cell, xs, h)
        return hs.float().sum(), h.float()
    def go(how, plan):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast('cpu', torch.bfloat16))
            if how == 'plain': stack.enter_context(plain())
            if rollout:
                with torch.no_grad(): scan_segments(step, x, h0, plan)
            loss = sum(scan_segments(step, x, h0, plan)[0]) + scan_segments(step, x, h0 + 1, plan)[0][0]
            if inside: return torch.autograd.grad(loss, list(cell.parameters()))
        return torch.autograd.grad(loss, list(cell.parameters()))
    for g, w in zip(go('scan', PLAN), go('plain', PLAN), strict=True):
        assert w.norm() > 0 and (g - w).norm() <= 2**-6 * w.norm()

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.complex128])
def test_dtypes(dtype):
    torch.manual_seed(0)
    w, x = torch.randn(D, D, dtype=dtype).requires_grad_(), torch.randn(T, B, D, dtype=dtype).requires_grad_()
    def step(xs, h):
        for x in xs: h = torch.tanh(x + h @ w)
        return torch.view_as_real(h).sum() if h.is_complex() else h.sum(), h
    def go():
        outs, h = scan_segments(step, x, torch.zeros(B, D, dtype=dtype), PLAN)
        return *torch.autograd.grad(sum(outs), [w, x]), h.detach()
    with plain(): want = go()
    eps = {torch.float16: 2**-8, torch.bfloat16: 2**-6, torch.float32: 1e-5, torch.complex128: 1e-12}[dtype]
    for g, v in zip(go(), want, strict=True):
        assert g.dtype == v.dtype == dtype and (g - v).norm() <= eps * v.norm()


# --- E08, E09, E10: what changed between forward and backward

@dataclass
class Config: ratio: float = 1.

class Scaled(nn.Module):
    "A cell scaled by a ratio kept in many places"
    def __init__(self):
        super().__init__()
        self.cell, self.drop, self.frozen = gru(), nn.Dropout(.5), nn.Parameter(torch.ones((), dtype=F64))
        self.ratio, self.np_ratio, self.list_ratio = 1., np.float64(1), [1.]
        self.config, self.space, self.act = Config(), SimpleNamespace(ratio=1.), torch.tanh
        self.tensor, self.off = torch.ones((), dtype=F64), {'k': torch.ones((), dtype=F64)}
        self.pair, self.none, self.sub = (1., 1.), None, nn.Tanh()
        self.register_buffer('buffer', torch.ones((), dtype=F64))
    def forward(self, x, h):
        scale = self.ratio * self.np_ratio * self.list_ratio[0] * self.config.ratio * self.space.ratio
        scale = scale * self.buffer * self.tensor * self.off['k'] * self.frozen.detach() * self.pair[0]
        h = self.sub(self.act(self.drop(self.cell(x, h)))) * scale
        return h if self.none is None else h * self.none

def scaled():
    model = Scaled()
    x, h0 = x_TBI(), torch.randn(B, D, dtype=F64)
    return case(lambda xs, h: advance(model, xs, h), model.cell.parameters(), x, h0, model=model)

@torch.no_grad()
def in_place(t): t.mul_(1.5)

def put(**values): return lambda c: [setattr(c.model, n, v) for n, v in values.items()]
def swap_data(c): c.model.cell.weight_hh.data = c.model.cell.weight_hh.data * 1.5
def new_weight(c): c.model.cell.weight_hh = nn.Parameter(c.model.cell.weight_hh.detach() * 1.5)
def load(c, **kw): c.model.load_state_dict({k: v * 2 for k, v in c.model.state_dict().items()}, **kw)
def sgd(c):
    for p in c.model.cell.parameters(): p.grad = torch.ones_like(p)
    torch.optim.SGD(c.model.cell.parameters(), .1).step()

BETWEEN = {
    'e08_weight': lambda c: in_place(c.model.cell.weight_hh), 'e08_optimizer': sgd,
    'e08_weight_data': swap_data, 'e08_new_weight': new_weight,
    'e08_load_state_dict': load, 'e08_load_assign': partial(load, assign=True),
    'e08_detached_weight': lambda c: in_place(c.model.frozen),
    'e08_frozen': lambda c: c.model.requires_grad_(False),
    'e09_ratio': put(ratio=.25), 'e09_numpy_ratio': put(np_ratio=np.float64(.25)),
    'e09_tuple': put(pair=(.25, 1.)),
    'e09_none': put(none=2.), 'e09_new_list': put(list_ratio=[.25]),
    'e09_list_item': lambda c: c.model.list_ratio.__setitem__(0, .25),
    'e09_config': lambda c: setattr(c.model.config, 'ratio', .25), 'e09_new_config': put(config=Config(.25)),
    'e09_space': lambda c: setattr(c.model.space, 'ratio', .25),
    'e09_eval': lambda c: c.model.eval(), 'e09_dropout_p': lambda c: setattr(c.model.drop, 'p', .9),
    'e09_function': put(act=torch.sigmoid), 'e09_module': put(sub=nn.Sigmoid()),
    'e09_new_tensor': put(tensor=torch.tensor(.25, dtype=F64)),
    'e09_new_buffer': put(buffer=torch.tensor(.25)),
    'e09_new_dict_item': lambda c: c.model.off.update(k=torch.tensor(.25)),
    'e10_input': lambda c: in_place(c.xs), 'e10_state': lambda c: in_place(c.state),
    'e10_tensor': lambda c: in_place(c.model.tensor), 'e10_buffer': lambda c: in_place(c.model.buffer),
    'e10_dict_item': lambda c: in_place(c.model.off['k']),
}

@pytest.mark.parametrize('change', BETWEEN)
def test_e08_e09_e10_changed_between(change):
    "The gradient of the forward pass that was, or a refusal"
    want = measure(scaled, 'plain', 3)
    try: got = measure(scaled, 'scan', 3, between=BETWEEN[change])
    except REFUSED: return
    for g, w in zip(got[1], want[1], strict=True): assert same(g, w)

def test_e08_figures():
    "Refused with the error that the plain run gives, weights and input alike"
    for change in ('e08_weight', 'e08_optimizer', 'e10_input', 'e10_state'):
        for how in ('plain', 'scan'):
            with pytest.raises(RuntimeError, match='modified by an inplace operation'):
                measure(scaled, how, 3, between=BETWEEN[change])

def test_e10_slice_of_a_buffer():
    cell, buffer = gru(), torch.randn(3 * T, B, I, dtype=F64)
    outs, _ = scan_segments(partial(advance, cell), buffer[T:2 * T], h_BD(), PLAN)
    buffer.zero_()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'): total(outs).backward()

def test_e08_saved_elsewhere():
    "save_on_cpu hands autograd copies, so that its own check sees no change"
    def go(change):
        torch.manual_seed(0)
        c = scaled()
        with torch.autograd.graph.save_on_cpu():
            loss = total(scan_segments(*c.args))
        if change: in_place(c.model.cell.weight_hh), in_place(c.xs)
        return torch.autograd.grad(loss, c.leaves)
    want = go(False)
    try: got = go(True)
    except REFUSED: return
    for g, w in zip(got, want, strict=True): assert same(g, w)

def test_e09_closure_and_global():
    "Teacher forcing as a number in a closure, decayed before the backward pass"
    global RATIO
    def go(change):
        global RATIO
        torch.manual_seed(0)
        ratio, RATIO, cell = 1., 1., gru()
        def step(xs, h): return advance(cell, xs, h, lambda h: h * ratio * RATIO)
        c = case(step, cell.parameters())
        loss = total(scan_segments(step, c.xs, c.state, PLAN))
        if change == 'closure': ratio = .25
        if change == 'global': RATIO = .25
        return torch.autograd.grad(loss, c.leaves)
    want, bad = go(None), []
    for change in ('closure', 'global'):
        with contextlib.suppress(*REFUSED):
            if not all(same(g, w) for g, w in zip(go(change), want, strict=True)): bad.append(change)
    assert not bad


class Ratio: value = 1.
class Slot: __slots__ = ('value',)

def scattered():
    "A cell scaled by numbers kept in places of all kinds"
    cell, slot, array, queue, bag = gru(), Slot(), np.ones(2), deque([1.]), {1.}
    slot.value = Ratio.value = 1.
    def scale(h, *, ratio=1.): return h * ratio
    def change(h): return scale(h) * array[0] * queue[0] * sum(bag) * Ratio.value * slot.value
    return case(lambda xs, h: advance(cell, xs, h, change), cell.parameters(),
                array=array, queue=queue, bag=bag, slot=slot, scale=scale)

SCATTERED = {
    'array': lambda c: c.array.fill(.25), 'deque': lambda c: c.queue.appendleft(.25),
    'set': lambda c: c.bag.add(.25),
    'class': lambda c: setattr(Ratio, 'value', .25), 'slot': lambda c: setattr(c.slot, 'value', .25),
    'default': lambda c: c.scale.__kwdefaults__.update(ratio=.25),
}

@pytest.mark.parametrize('change', SCATTERED)
def test_e09_scattered(change):
    "As in the forward pass, and afterwards as changed"
    want, seen = measure(scattered, 'plain', 3), []
    got = measure(scattered, 'scan', 3, between=lambda c: (SCATTERED[change](c), seen.append(c)))
    for g, w in zip(got[1], want[1], strict=True): assert same(g, w)
    c, = seen
    values = c.array[0], c.queue[0], min(c.bag), Ratio.value, c.slot.value, c.scale.__kwdefaults__['ratio']
    assert sorted(values) == [.25, 1., 1., 1., 1., 1.]

# --- how a step reaches its model: counters, flags and captured tensors behind every kind of callable

MODEL = None
class Holder:
    def __init__(self, model): self.model = model
    def run(self, xs, h): return advance(self.model, xs, h)
    def __call__(self, xs, h): return self.run(xs, h)
class Slots:
    __slots__ = ('model',)
    def __init__(self, model): self.model = model
    def run(self, xs, h): return advance(self.model, xs, h)
class Wrapped(nn.Module):
    "A module whose forward calls a function that it was given"
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, xs, h): return self.f(xs, h)
def by_global(xs, h): return advance(MODEL, xs, h)
def by_global_lambda(xs, h): return (lambda: advance(MODEL, xs, h))()
def by_global_comprehension(xs, h): return [advance(m, xs, h) for m in (lambda: [MODEL])()][0]
def by_other_function(xs, h): return by_global(xs, h)
def of_class(model):
    class Owner:
        inner = model
        def __call__(self, xs, h): return advance(self.inner, xs, h)
    return Owner()
def of_forward(model):
    class Hidden(nn.Module):
        def forward(self, xs, h): return advance(model, xs, h)
    return Hidden()
def by_keyword(model):
    def step(xs, h, *, model=model): return advance(model, xs, h)
    return step
def by_attribute(model):
    def step(xs, h): return advance(step.model, xs, h)
    step.model = model
    return step
def in_namespace(model):
    space = SimpleNamespace(model=model)
    return lambda xs, h: advance(space.model, xs, h)
def in_object(model):
    holder = Holder(model)
    return lambda xs, h: holder.run(xs, h)
def in_container(model):
    box = {'a': [(model,)]}
    return lambda xs, h: advance(box['a'][0][0], xs, h)
def in_deque(model):
    box = deque([model])
    return lambda xs, h: advance(box[0], xs, h)
SPACE = ModuleType('space')
def by_python_module(xs, h): return advance(SPACE.model, xs, h)
def in_python_module(model): SPACE.model = model; return by_python_module

REACH = {
    'closure': lambda m: lambda xs, h: advance(m, xs, h), 'partial': lambda m: partial(advance, m),
    'global': lambda m: by_global, 'global_lambda': lambda m: by_global_lambda,
    'global_comprehension': lambda m: by_global_comprehension, 'other_function': lambda m: by_other_function,
    'bound_method': lambda m: Holder(m).run, 'callable_object': Holder, 'slots': lambda m: Slots(m).run,
    'module': lambda m: Wrapped(partial(advance, m)),
    'module_method': lambda m: Wrapped(partial(advance, m)).forward,
    'class_attribute': of_class, 'forward_closure': of_forward, 'keyword_only': by_keyword,
    'function_attribute': by_attribute, 'namespace': in_namespace, 'object': in_object,
    'container': in_container,
    'deque': in_deque, 'python_module': in_python_module,
}

@pytest.mark.parametrize('how', REACH)
def test_reach(how):
    "Counted once, ratio as it was, a captured tensor's change refused, a captured generator replayed"
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.count, self.coin = Counter('add_'), torch.Generator().manual_seed(1)
            self.ratio, self.tensor = 1., torch.ones((), dtype=F64)
        def forward(self, x, h):
            return self.count(x, h) * self.ratio * self.tensor * torch.rand(1, generator=self.coin, dtype=F64)
    def go(how_run, change=None):
        global MODEL
        torch.manual_seed(0)
        model = MODEL = Model()
        run = scan_segments if how_run == 'scan' else loop
        loss = total(run(REACH[how](model), *data()))
        if change: change(model)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return [*grads, model.count.count, torch.rand(1, generator=model.coin)]
    want, bad = go('loop'), []
    if not all(map(same, go('scan'), want)): bad.append('run again')
    if not all(map(same, go('scan', lambda m: setattr(m, 'ratio', .25)), want)): bad.append('ratio')
    with contextlib.suppress(*REFUSED):
        if not all(map(same, go('scan', lambda m: in_place(m.tensor)), want)): bad.append('tensor changed')
    assert not bad


# --- what no segment may hide: refused, or the plain gradient

@dataclass
class Out: loss: torch.Tensor

def out_in_dataclass():
    cell = gru()
    def step(xs, h): hs, h = advance(cell, xs, h); return Out(hs.sum()), h
    return case(step, cell.parameters())

def out_in_object():
    cell = gru()
    def step(xs, h): hs, h = advance(cell, xs, h); return SimpleNamespace(loss=hs.sum()), h
    return case(step, cell.parameters())

def state_in_dataclass():
    cell = gru()
    def step(xs, s): hs, h = advance(cell, xs, s.loss); return hs.sum(), Out(h)
    return case(step, cell.parameters(), state=Out(h_BD()))

def xs_in_dataclass():
    cell = gru()
    return case(lambda xs, h: advance(cell, xs.loss, h), cell.parameters(), Out(x_TBI()))

def xs_in_numpy():
    cell = gru()
    x = np.random.rand(T, B, I)
    return case(lambda xs, h: advance(cell, torch.from_numpy(xs), h), cell.parameters(), x)

def weight_cached_by_hand():
    cell, raw, cache = gru(), nn.Parameter(torch.ones((), dtype=F64)), {}
    def step(xs, h):
        if not cache: cache['w'] = raw.exp()
        return advance(cell, xs * cache['w'], h)
    return case(step, [raw, *cell.parameters()])

def weight_outside():
    cell, raw = gru(), nn.Parameter(torch.ones((), dtype=F64))
    w = raw.exp()
    return case(lambda xs, h: advance(cell, xs * w, h), [raw, *cell.parameters()])

def captured_written():
    cell, sums = gru(), torch.ones((), dtype=F64)
    def step(xs, h):
        sums.add_(1)
        return advance(cell, xs * sums, h)
    return case(step, cell.parameters())

def alias_of_a_buffer():
    model = Counter('none')
    count = model.count
    def step(xs, h):
        count.add_(1)
        return advance(model, xs * count, h)
    return case(step, model.parameters(), modules=[model])

def state_written():
    cell = gru()
    def step(xs, h): h.mul_(.5); return advance(cell, xs, h)
    return case(step, cell.parameters(), state=torch.ones(B, D, dtype=F64))

def input_written():
    cell = gru()
    def step(xs, h): xs.mul_(.5); return advance(cell, xs, h)
    return case(step, cell.parameters())

def embedding_max_norm():
    embed, cell = nn.Embedding(5, I, max_norm=.5).double(), gru()
    return case(lambda xs, h: advance(cell, embed(xs), h), [embed.weight, *cell.parameters()],
                torch.randint(5, (T, B)))

def sparse_embedding():
    embed, cell = nn.Embedding(5, I, sparse=True).double(), gru()
    return case(lambda xs, h: advance(cell, embed(xs), h), cell.parameters(), torch.randint(5, (T, B)))

def buffer_from_the_second_on():
    model = Counter('none')
    def step(xs, s):
        h, t = s
        if t: model.count.add_(1)
        hs, h = advance(model, xs, h)
        return hs, (h, t + 1)
    return case(step, model.parameters(), state=(h_BD(), 0), modules=[model])

def other_number_of_outs():
    cell, calls = gru(), []
    def step(xs, h):
        calls.append(1)
        hs, h = advance(cell, xs, h)
        return [hs.sum()] * (1 + len(calls) % 3), h
    return case(step, cell.parameters())

def list_counter():
    cell, n = gru(), [0]
    def step(xs, h):
        n[0] += 1
        return advance(cell, xs * n[0], h)
    return case(step, cell.parameters())

def gradient_inside_step():
    cell = gru()
    def step(xs, h):
        with torch.enable_grad():
            x = xs.detach().requires_grad_()
            force, = torch.autograd.grad(advance(cell, x, h)[0].pow(2).sum(), x, create_graph=True)
        return force, advance(cell, xs, h)[1]
    return case(step, cell.parameters())

def state_on_a_module():
    class Stateful(nn.Module):
        def __init__(self): super().__init__(); self.cell, self.h = gru(), h_BD()
        def forward(self, xs, _): hs, self.h = advance(self.cell, xs, self.h); return hs, _
    model = Stateful()
    return case(model, model.parameters())

def state_in_a_tuple_on_a_module():
    model = nn.Module()
    model.cell, model.hc = nn.LSTMCell(I, D).double(), (h_BD(), h_BD())
    def step(xs, _):
        hs = []
        for x in xs:
            model.hc = model.cell(x, model.hc)
            hs.append(model.hc[0])
        return torch.stack(hs), _
    return case(step, model.parameters())

def detached_state_on_a_module(late=False):
    "Detached when it is left there, or when it is read"
    model = nn.Module()
    model.cell, model.h = gru(), h_BD()
    def step(xs, _):
        hs, h = advance(model.cell, xs, model.h.detach())
        model.h = h if late else h.detach()
        return hs, _
    return case(step, model.parameters())

def lazy_written_in_place(how):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = gru()
            self.register_buffer('n', None) if how == 'buffer' else setattr(self, 'n', None)
        def forward(self, x, h):
            if self.n is None: self.n = x.new_zeros(())
            self.n.add_(1)
            return self.cell(x, h) * (1 + self.n)
    model = Lazy()
    return case(lambda xs, h: advance(model, xs, h), model.parameters())

def buffer_in_a_tuple():
    model = Counter('add_')
    held = (model.count,)
    return case(lambda xs, h: advance(model, xs * held[0], h), model.parameters(), modules=[model])

def lazy_buffer(): return lazy_written_in_place('buffer')
def lazy_attribute(): return lazy_written_in_place('attribute')
def state_detached_late(): return detached_state_on_a_module(late=True)

HIDDEN = [state_in_a_tuple_on_a_module, detached_state_on_a_module, state_detached_late, lazy_buffer,
          lazy_attribute, buffer_in_a_tuple,
          out_in_dataclass, out_in_object, state_in_dataclass, weight_cached_by_hand, state_on_a_module,
          weight_outside,
          gradient_inside_step,
          captured_written, alias_of_a_buffer, state_written, input_written, embedding_max_norm,
          sparse_embedding, buffer_from_the_second_on, other_number_of_outs, list_counter]

def total_of_objects(tree):
    "As `total`, also through objects that pytrees do not open"
    def opened(t): return vars(t) if hasattr(t, '__dict__') and not torch.is_tensor(t) else t
    return total([opened(t) for t in tree_leaves(tree)])

@pytest.mark.parametrize('build', HIDDEN, ids=lambda f: f.__name__)
def test_as_plain_or_refused(build):
    def go(run):
        torch.manual_seed(0), np.random.seed(0)
        c = build()
        outs, _ = run(*c.args)
        return torch.autograd.grad(total_of_objects(outs), c.leaves, allow_unused=True), state_of(c)
    try: got = go(scan_segments)
    except REFUSED: return
    for a, b in zip(tree_leaves(got), tree_leaves(go(loop)), strict=True): assert same(a, b)

@pytest.mark.parametrize('build', [xs_in_dataclass, xs_in_numpy], ids=lambda f: f.__name__)
def test_inputs_that_cannot_be_cut(build):
    "Refused, whatever the plan: a segment must not get all of time"
    c = build()
    for n_segments in (1, 3):
        with pytest.raises(ValueError): scan_segments(c.step, c.xs, c.state, Plan.split(T, n_segments))

NESTS = {'xs': lambda x, h: (Out(x), h, None), 'state': lambda x, h: (x, Out(h), None),
         'array': lambda x, h: (x, np.ones(2), None), 'out': lambda x, h: (x, h, lambda xs, h: (Out(xs), h)),
         'after': lambda x, h: (x, h, lambda xs, h: (xs, Out(h))),
         'form': lambda x, h: (x, h, lambda xs, h: (xs, [h]))}
@pytest.mark.parametrize('how', NESTS)
def test_malformed_nests_whatever_the_plan(how):
    xs, state, step = NESTS[how](*data()[:2])
    errors = []
    for n_segments in (1, 3):
        with pytest.raises(ValueError) as e:
            scan_segments(step or (lambda xs, h: (xs, h)), xs, state, Plan.split(T, n_segments))
        errors.append(str(e.value))
    assert errors[0] == errors[1]

def middle_weight(xs, h, t, w): return xs * w if t == 3 else xs, [h.sum()]
def middle_output(xs, h, t, w): return xs, [h.sum(), h.sum() * w if t == 3 else h.sum().detach()]
@pytest.mark.parametrize('middle', [middle_weight, middle_output])
def test_what_only_a_middle_segment_has(middle):
    "A weight, or an output with a gradient, that neither the first nor the last segment knows"
    cell, w = gru(), nn.Parameter(torch.ones((), dtype=F64))
    def step(xs, s):
        xs, out = middle(xs, s[0], s[1], w)
        hs, h = advance(cell, xs, s[0])
        return [hs.sum(), *out], (h, s[1] + len(xs))
    outs, _ = scan_segments(step, x_TBI(), (h_BD(), 0), PLAN)
    with pytest.raises(RuntimeError, match='segment 1'): total(outs).backward()

@pytest.mark.parametrize('collect', ['attribute', 'list'])
def test_auxiliary_loss_left_behind(collect):
    "Collected from the model after the scan it would learn from the last segment alone"
    model = nn.Module()
    model.cell, model.aux = gru(), [] if collect == 'list' else None
    def step(xs, h):
        hs, h = advance(model.cell, xs, h)
        if collect == 'list': model.aux.append(hs.pow(2).mean())
        else: model.aux = hs.pow(2).mean()
        return hs.sum(), h
    outs, _ = scan_segments(step, *data())
    with pytest.raises(RuntimeError, match='return it from step'):
        (sum(outs) + sum(tree_leaves(model.aux))).backward()
    outs, _ = scan_segments(step, *data())
    sum(outs).backward()                                             # left there and not used: fine

@pytest.mark.parametrize('n_modules', [5, 50])
def test_unchanged_surroundings_cost_nothing_at_a_cut(n_modules, monkeypatch):
    "Places read or written for each segment more: the same few, however many modules there are"
    model, log, counts = nn.ModuleList([gru() for _ in range(n_modules)]), [], []
    def step(xs, h): log.append(1); return advance(model[0], xs, h)
    read, write = surroundings._read, surroundings._write
    monkeypatch.setattr(surroundings, '_read', lambda p: counts.append(1) or read(p))
    monkeypatch.setattr(surroundings, '_write', lambda p, v: counts.append(1) or write(p, v))
    def cost(n_segments):
        counts.clear()
        x = torch.randn(12, B, I, dtype=F64)
        total(scan_segments(step, x, h_BD(), Plan.split(12, n_segments))).backward()
        return len(counts)
    cost(3)
    assert 0 < cost(12) - cost(6) <= 6 * 10

def test_parametrize_cached():
    "A weight computed once in a `cached` block, first under no_grad"
    def go(run):
        torch.manual_seed(0)
        cell = parametrizations.weight_norm(gru(), 'weight_hh')
        with parametrize.cached():
            loss = total(run(partial(advance, cell), *data()))
            return torch.autograd.grad(loss, list(cell.parameters()), allow_unused=True)
    try: got = go(scan_segments)
    except REFUSED: return
    for g, w in zip(got, go(loop), strict=True): assert same(g, w)

@pytest.mark.parametrize('frozen', [False, True])
def test_functional_call_around(frozen):
    "Weights that a module wears for one call only: gone when the backward pass recomputes"
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.cell = gru()
        def forward(self, x, run):
            return run(partial(advance, self.cell), x, h_BD(), PLAN)
    def go(run):
        torch.manual_seed(0)
        model = Model().requires_grad_(not frozen)
        own = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
        loss = total(torch.func.functional_call(model, own, (x_TBI(), run)))
        return torch.autograd.grad(loss, list(own.values()))
    try: got = go(scan_segments)
    except REFUSED: return
    for g, w in zip(got, go(loop), strict=True): assert same(g, w)


# --- E13: parts of a backward pass

def scan_of(n_segments=3, **kw):
    torch.manual_seed(0)
    c = x_and_h0_require_grad()
    return c, *scan_segments(c.step, c.xs, c.state, Plan.split(T, n_segments), **kw)

def plain_of(n_segments=3):
    with plain(): return scan_of(n_segments)

@pytest.mark.parametrize('part', [lambda outs, h: outs[0].sum(), lambda outs, h: outs[1].sum(),
                                  lambda outs, h: outs[-1].sum(), lambda outs, h: h.sum(),
                                  lambda outs, h: outs[0].sum() + h.pow(2).sum()])
@pytest.mark.parametrize('wrt', ['x', 'h0', 'weights', 'all'])
def test_e13_part_of_the_outputs(part, wrt):
    def go(make):
        c, outs, h = make()
        leaves = {'x': c.leaves[:1], 'h0': c.leaves[1:2], 'weights': c.leaves[2:], 'all': c.leaves}[wrt]
        return torch.autograd.grad(part(outs, h), leaves, allow_unused=True)
    for g, w in zip(go(scan_of), go(plain_of), strict=True):
        assert same(w if g is None and not w.any() else g, w)

def test_e13_one_output_after_the_other():
    "With retain_graph as often as one likes; without it torch's own error"
    (c, outs, h), (p, p_outs, p_h) = scan_of(), plain_of()
    for i in (0, 2, 1, 0):
        for results in (outs, p_outs): results[i].sum().backward(retain_graph=True)
    h.sum().backward(), p_h.sum().backward()
    for a, b in zip(c.leaves, p.leaves, strict=True): assert same(a.grad, b.grad)
    with pytest.raises(RuntimeError, match='second time'): outs[0].sum().backward()

def test_e13_second_derivative_is_refused():
    c, outs, h = scan_of()
    with pytest.raises(RuntimeError, match='[Ss]econd derivatives'):
        torch.autograd.grad(total(outs), c.leaves[0], create_graph=True)[0].pow(2).sum().backward()

def test_e13_second_derivative_in_plain_and_one_segment():
    def go(make):
        c, outs, h = make()
        g, = torch.autograd.grad(total(outs), c.leaves[0], create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), c.leaves, allow_unused=True)
    for g, w in zip(go(lambda: scan_of(1)), go(lambda: plain_of(1)), strict=True): assert same(g, w)
    assert go(plain_of)[0].norm() > 0

def test_gradcheck():
    cell = gru()
    x, h0 = torch.randn(4, B, I, dtype=F64).requires_grad_(), torch.randn(B, D, dtype=F64).requires_grad_()
    def f(x, h0): return total(scan_segments(partial(advance, cell), x, h0, Plan.split(4, 2)))
    assert torch.autograd.gradcheck(f, (x, h0))

def test_backward_accumulates():
    (c, outs, h), (p, p_outs, p_h) = scan_of(), plain_of()
    for a, b in zip(c.leaves, p.leaves, strict=True): a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    total((outs, h)).backward(), total((p_outs, p_h)).backward()
    for a, b in zip(c.leaves, p.leaves, strict=True): assert same(a.grad, b.grad)

@pytest.mark.parametrize('write', [lambda outs, h: outs[0].add_(1), lambda outs, h: h.mul_(2),
                                   lambda outs, h: outs[-1].zero_()])
def test_results_written_in_place(write):
    "As plain, or refused"
    (c, outs, h), (p, p_outs, p_h) = scan_of(), plain_of()
    try: write(outs, h), total((outs, h)).backward()
    except REFUSED: return
    write(p_outs, p_h), total((p_outs, p_h)).backward()
    for a, b in zip(c.leaves, p.leaves, strict=True): assert same(a.grad, b.grad)

def test_losses_divided_in_place():
    "The usual `loss /= n` on a loss that the step returned"
    def go(how):
        torch.manual_seed(0)
        cell = gru()
        def step(xs, h): hs, h = advance(cell, xs, h); return hs.sum(), h
        with plain() if how == 'plain' else contextlib.nullcontext():
            losses, _ = scan_segments(step, *data())
        for loss in losses: loss /= 7
        return torch.autograd.grad(sum(losses), list(cell.parameters()))
    for g, w in zip(go('scan'), go('plain'), strict=True): assert same(g, w)


# --- hooks

def test_weight_hooks_run_once():
    "On the sum over segments, as in the plain run; and they are still there afterwards"
    def go(how):
        torch.manual_seed(0)
        cell, log = gru(), []
        cell.weight_hh.register_hook(lambda g: log.append('hook') or g.clamp(-.1, .1))
        cell.weight_ih.register_post_accumulate_grad_hook(lambda p: log.append('post'))
        node = cell.bias_hh.expand_as(cell.bias_hh).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: log.append('node'))
        torch.autograd.graph.register_multi_grad_hook(list(cell.parameters()), lambda gs: log.append(len(gs)))
        for _ in range(2):
            with plain() if how == 'plain' else contextlib.nullcontext():
                loss = total(scan_segments(partial(advance, cell), *data()))
            loss.backward()
        return sorted(map(str, log)), [p.grad for p in cell.parameters()]
    (log, got), (plain_log, want) = go('scan'), go('plain')
    assert log == plain_log
    for g, w in zip(got, want, strict=True): assert same(g, w)

def test_hook_that_raises_leaves_hooks():
    cell = gru()
    def angry(g): raise KeyError('hook')
    handle = cell.weight_hh.register_hook(angry)
    c = case(partial(advance, cell), cell.parameters())
    with pytest.raises(KeyError): total(scan_segments(*c.args)).backward()
    assert len(cell.weight_hh._backward_hooks) == 1
    handle.remove()

def test_module_backward_hooks():
    "Full backward hooks see each call's gradient once"
    def go(how):
        torch.manual_seed(0)
        cell, log = gru(), []
        cell.register_full_backward_hook(lambda m, gi, go: log.append(round(go[0].sum().item(), 9)))
        with plain() if how == 'plain' else contextlib.nullcontext():
            loss = total(scan_segments(partial(advance, cell), x_TBI(),
                                       h_BD().requires_grad_(), PLAN))
        loss.backward()
        return log, [p.grad for p in cell.parameters()]
    (log, got), (plain_log, want) = go('scan'), go('plain')
    assert log == plain_log and len(log) == T
    for g, w in zip(got, want, strict=True): assert same(g, w)


# --- E16: without a gradient

@pytest.mark.parametrize('off', [torch.no_grad, torch.inference_mode])
def test_e16_no_grad(off):
    cell, calls = gru(), SimpleQueue()
    def step(xs, h): calls.put(len(xs)); return advance(cell, xs, h)
    with warnings.catch_warnings(), off():
        warnings.simplefilter('error')
        outs, h = scan_segments(step, *data())
    assert emptied(calls) == [3, 3, 1] and not h.requires_grad and h.grad_fn is None

def test_e16_eval_with_grad():
    c, calls = CASES['e02_dropout'](), SimpleQueue()
    def step(xs, h): calls.put(len(xs)); return c.step(xs, h)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        loss = total(scan_segments(step, c.xs, c.state, PLAN))
        assert emptied(calls) == [3, 3, 1]
        loss.backward()
    assert emptied(calls) == [3, 3]                                       # the last one is not recomputed

def test_e16_nothing_requires_grad():
    cell, calls = gru().requires_grad_(False), SimpleQueue()
    def step(xs, h): calls.put(len(xs)); return advance(cell, xs, h)
    outs, h = scan_segments(step, *data())
    assert emptied(calls) == [3, 3, 1] and not any(t.requires_grad for t in [*outs, h])

def test_backward_under_no_grad():
    (c, *results), (p, *p_results) = scan_of(), plain_of()
    a, b = total(results), total(p_results)
    with torch.no_grad(): a.backward(), b.backward()
    for a, b in zip(c.leaves, p.leaves, strict=True): assert same(a.grad, b.grad)


# --- other machinery around a scan

AROUND = {
    'save_on_cpu': torch.autograd.graph.save_on_cpu, 'anomaly': torch.autograd.detect_anomaly,
    'saved_hooks': lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    'deterministic_rng': lambda: torch.random.fork_rng(devices=[]),
}

@pytest.mark.filterwarnings('ignore:Anomaly')
@pytest.mark.parametrize('name', ['e02_dropout', 'xs_dict', 'scan_in_a_scan', 'e11_add_'])
@pytest.mark.parametrize('around', AROUND)
def test_inside_a_context(around, name):
    def go(run):
        torch.manual_seed(0)
        c = CASES[name]()
        with AROUND[around](): loss = total(run(*c.args))
        return torch.autograd.grad(loss, c.leaves), state_of(c)
    for g, w in zip(tree_leaves(go(scan_segments)), tree_leaves(go(loop)), strict=True): assert same(g, w)

@pytest.mark.parametrize('name', ['e01_all_learn', 'e02_dropout', 'xs_dict', 'state_nested'])
@pytest.mark.parametrize('reentrant', [False, True])
def test_scan_in_a_checkpoint(name, reentrant):
    def go(run, outer):
        torch.manual_seed(0)
        c = CASES[name]()
        c.modules = ()
        dummy = torch.ones((), dtype=F64, requires_grad=True)           # reentrant needs an input that learns
        def f(dummy): return total(run(*c.args)) * dummy
        loss = checkpoint(f, dummy, use_reentrant=reentrant) if outer else f(dummy)
        for leaf in c.leaves: leaf.grad = None
        loss.backward()
        return [leaf.grad for leaf in c.leaves]
    for g, w in zip(go(scan_segments, True), go(loop, True), strict=True): assert same(g, w)

@pytest.mark.parametrize('threads', ['forward', 'backward', 'both'])
def test_other_thread(threads):
    def in_thread(f):
        box = []
        t = threading.Thread(target=lambda: box.append(f()))
        t.start(), t.join()
        return box[0]
    want = plain_of()
    c, outs, h = in_thread(scan_of) if threads in ('forward', 'both') else scan_of()
    def back(): return torch.autograd.grad(total((outs, h)), c.leaves)
    got = in_thread(back) if threads in ('backward', 'both') else back()
    for g, w in zip(got, torch.autograd.grad(total(want[1:]), want[0].leaves), strict=True): assert same(g, w)

def test_captured_nonleaf_in_other_thread():
    "Node numbers are counted by thread: refused there too, or right"
    def go(run):
        torch.manual_seed(0)
        raw, cell, box = nn.Parameter(torch.ones((), dtype=F64)), gru(), []
        for _ in range(100): w = raw.exp()
        c = case(lambda xs, h: advance(cell, xs * w, h), [raw, *cell.parameters()])
        def work():
            with contextlib.suppress(*REFUSED):
                box.append(torch.autograd.grad(total(run(*c.args)), c.leaves))
        thread = threading.Thread(target=work)
        thread.start(), thread.join()
        return box
    for got in go(scan_segments): assert all(map(same, got, go(loop)[0]))

def test_two_threads_at_once():
    c, results = x_and_h0_require_grad(), SimpleQueue()
    def gradients(run): return torch.autograd.grad(total(run(*c.args)), c.leaves)
    def work():
        for _ in range(10): results.put(gradients(scan_segments))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    want, results = gradients(loop), emptied(results)
    assert len(results) == 20 and all(all(map(same, r, want)) for r in results)

@pytest.mark.filterwarnings('ignore')
def test_e19_compiled():
    "A compiled step with dropout: the mask of the forward pass is the mask of the gradient"
    def go(how):
        torch.manual_seed(0)
        map_, x = nn.Linear(I, I, dtype=F64), torch.randn(4, B, I, dtype=F64)
        body = torch.compile(lambda x: F.dropout(map_(x), .5), backend='aot_eager')
        def step(xs, h): return body(xs).sum(0), h
        with plain() if how == 'plain' else contextlib.nullcontext():
            outs, _ = scan_segments(step, x, h_BD(), Plan.split(4, 2))
        return [*outs, *torch.autograd.grad(total(outs), list(map_.parameters()))]
    for g, w in zip(go('scan'), go('plain'), strict=True): assert same(g, w)

def test_scripted_cell():
    def go(run):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            cell = torch.jit.script(gru())
        c = case(lambda xs, h: advance(cell, xs, h), cell.parameters())
        return torch.autograd.grad(total(run(*c.args)), c.leaves)
    for g, w in zip(go(scan_segments), go(loop), strict=True): assert same(g, w)

def test_fake_tensors():
    "A scan can be run on fake tensors, so that its bytes can be known before"
    from torch._subclasses import FakeTensorMode
    before = torch.default_generator.get_state()
    with FakeTensorMode():
        cell, norm = nn.GRUCell(I, D, dtype=F64), nn.BatchNorm1d(D, dtype=F64)
        x, h0 = torch.zeros(T, B, I, dtype=F64), h_BD()
        outs, h = scan_segments(lambda xs, h: advance(cell, xs, h, norm), x, h0, PLAN)
        total(outs).backward()
        assert cell.weight_hh.grad.shape == cell.weight_hh.shape
    assert torch.default_generator.get_state().equal(before)

@pytest.fixture(scope='module')
def world(tmp_path_factory):
    with group_of_one(tmp_path_factory.mktemp('ddp')/'store'): yield

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('unused', [False, True])
def test_ddp(world, unused):
    "The scan inside a wrapped model: each weight is reduced once"
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.cell, self.drop = gru(), nn.Dropout(.5)
        def forward(self, x):
            step = partial(advance, self.cell, change=self.drop)
            return total(scan_segments(step, x, h_BD(), PLAN))
    def go(wrap):
        torch.manual_seed(0)
        model, seen = Model(), []
        for n, p in model.named_parameters(): p.register_hook(lambda g, n=n: seen.append(n))
        net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused) if wrap else model
        for _ in range(2): net(x_TBI()).backward()
        assert sorted(seen) == sorted(2 * [n for n, _ in model.named_parameters()])
        return [p.grad for p in model.parameters()]
    for g, w in zip(go(True), go(False), strict=True): assert same(g, w)

def test_deepcopy_of_results_and_model():
    "After backward, as after any other"
    c, outs, h = scan_of()
    total((outs, h)).backward()
    assert same(copy.deepcopy(h.detach()), h.detach())
    for a in c.leaves: assert same(copy.deepcopy(a).detach(), a.detach())

# --- an exception leaves nothing behind

@pytest.mark.parametrize('at_call', range(1, 6))
def test_exception_leaves_no_trace(at_call):
    "In the forward pass (calls 1 to 3) or in a recomputation (4, 5)"
    torch.manual_seed(0)
    model, drop, calls, coin = Counter('add_'), nn.Dropout(.5), SimpleQueue(), torch.Generator()
    hook = model.cell.weight_hh.register_hook(lambda g: g)
    def step(xs, h):
        calls.put(1)
        hs, h = advance(model, xs, drop(h))
        torch.rand(1, generator=coin)
        if calls.qsize() == at_call: raise KeyError('step')
        return hs, h
    c = case(step, model.parameters(), modules=[model, drop])
    before = None
    with pytest.raises(KeyError):
        result = scan_segments(step, c.xs, c.state, PLAN)
        model.eval()
        before = state_of(c), draws([coin]), torch.get_rng_state(), coin.get_state()
        total(result).backward()
    if before:
        assert all(map(same, tree_leaves(before[0]), tree_leaves(state_of(c)))) and not model.training
        assert before[2].equal(torch.get_rng_state()) and before[3].equal(coin.get_state())
    assert grad_sink() is None and torch.is_grad_enabled() and len(model.cell.weight_hh._backward_hooks) == 1
    assert all(p.grad is None for p in model.parameters())
    hook.remove()
    check(e01_all_learn, 3)


# --- E15: what stays alive

class Held:
    "Bytes that autograd has saved and not yet let go, with their peak"
    def __init__(self): self.now = self.peak = 0
    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box[0])
        self.hooks.__enter__()
        return self
    def __exit__(self, *exc): self.hooks.__exit__(*exc)
    def pack(self, t):
        class Box(list): __slots__ = ('__weakref__',)
        box = Box([t.detach()])                      # an output with its graph would hold itself
        self.now += t.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(box, self.drop, t.nbytes)
        return box
    def drop(self, n): self.now -= n

def held(n_segments, n_steps=64, width=64):
    "Peak bytes of a forward and backward pass, weights and input aside"
    cell = nn.GRUCell(width, width)
    def step(xs, h): hs, h = advance(cell, xs, h); return hs.sum(), h
    x, h0 = torch.randn(n_steps, B, width), torch.zeros(B, width)
    with Held() as meter:
        losses, _ = scan_segments(step, x, h0, Plan.split(n_steps, n_segments))
        sum(losses).backward()
    gc.collect()
    return meter.peak

def test_e15_peak_falls_to_the_root():
    peaks = [held(k) for k in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 6 * peaks[-1]


@pytest.mark.parametrize('name', [*TWICE, 'spectral_norm'])
def test_e15_nothing_stays_after_backward(name):
    "No tensor but results and gradients, though the loss is still there; no cycle holds anything"
    torch.manual_seed(0)
    c = CASES[name]()
    seen, step = SimpleQueue(), c.step
    def spy(xs, state):
        out, new = step(xs, state)
        seen.put([weakref.ref(t) for t in tree_leaves((xs, state, out, new)) if torch.is_tensor(t)])
        return out, new
    gc.collect(), gc.disable()
    try:
        loss = total(scan_segments(spy, c.xs, c.state, PLAN))
        loss.backward()
        given = tree_leaves((c.xs, c.state))
        left = [r() for refs in emptied(seen) for r in refs if all(r() is not t for t in given)]
        assert all(t is None for t in left) and loss.grad_fn is not None
    finally: gc.enable()

def test_e15_inputs_go_with_their_owner():
    cell, x, h0 = gru(), x_TBI(), h_BD()
    loss = total(scan_segments(partial(advance, cell), x, h0, PLAN))
    data = weakref.ref(x.untyped_storage())
    loss.backward()
    del x
    assert data() is None and loss.grad_fn is not None

@pytest.mark.parametrize('backward', [True, False])
def test_e15_dropped_results_free_everything(backward):
    class Big(nn.Module):
        def __init__(self): super().__init__(); self.cell = gru()
        def forward(self, xs, h): return advance(self.cell, xs, h)
    model = Big()
    gc.collect(), gc.disable()
    try:
        loss = total(scan_segments(model, *data()))
        if backward: loss.backward()
        ref = weakref.ref(model)
        del model, loss
        assert ref() is None
    finally: gc.enable()

def test_e15_what_a_module_remembers():
    "A module that keeps its last activations, for a plot, must not keep those of every segment"
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.cell, self.seen = gru(), None
        def forward(self, xs, h):
            hs, h = advance(self.cell, xs, h)
            self.seen = hs.clone()
            refs.put(weakref.ref(self.seen))
            return hs.sum(), h
    refs = SimpleQueue()
    losses, _ = scan_segments(Model(), x_TBI(), h_BD(), Plan.split(T, 7))
    assert sum(r() is not None for r in emptied(refs)) <= 2
    sum(losses).backward()

def test_prepared_goes_after_backward():
    "What layers derive from a weight for one pass is dropped with it"
    cell, made = gru(), SimpleQueue()
    def step(xs, h):
        if sink := grad_sink():
            kept = sink.prepare(cell.weight_hh, 't', lambda: cell.weight_hh.detach().t().contiguous())
            made.put(weakref.ref(kept))
        return advance(cell, xs, h)
    loss = total(scan_segments(step, *data()))
    loss.backward()
    made = emptied(made)
    assert made and not [r for r in made if r() is not None]

def test_stateful_training_stays_flat():
    "G12: state carried over batches, detached; graph and time do not grow"
    cell, h, counts = gru(), h_BD(), []
    for i in range(6):
        hs, h = scan_segments(partial(advance, cell), x_TBI(), h.detach(), PLAN)
        total(hs).backward()
        if i in (2, 5): counts.append(sum(type(o) is torch.Tensor for o in gc.get_objects()))
    assert counts[0] == counts[1]


def test_what_a_newcomer_hands_over():
    "A first state of None, a number for a plan, a step that forgets one of its two results."
    lstm, x = nn.LSTM(I, D, dtype=F64), x_TBI()
    def step(x, state): return lstm(x, state)
    cases = ((step, None, PLAN, 'None, got .*such as zeros'),
             (step, h_BD(), 3, r'got 3; Plan.split\(n_steps, n_segments\) makes one'),
             (lambda x, h: h.sum(), h_BD(), PLAN, r'two values, \(out, state\), got'),
             (lambda x, h: (h, h, h), h_BD(), PLAN, r'two values, \(out, state\), got'))
    for bad, state, plan, said in cases:
        with pytest.raises(ValueError, match=said): scan_segments(bad, x, state, plan)
