"""What a layer may meet, composed from a seed; `python tests/fuzz_engine.py FIRST LAST` runs the seeds"""
import random
import sys
import tempfile
import warnings
from contextlib import nullcontext
from functools import cache
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from gruckpt.engine.recurrent import GRU, LSTM
from gruckpt.engine.scan import plain, scan_segments
from gruckpt.plan.segment import Plan

T, B, I, D = 7, 3, 3, 4
KINDS = dict(gru=(GRU, {}), gru_before=(GRU, dict(reset='before')),
             normed=(GRU, dict(norm='state', reset='before')),
             normed_out=(GRU, dict(norm='output')), lstm=(LSTM, {}), lstm_proj=(LSTM, dict(proj_size=2)))
WAYS = ('none', 'identity hooks', 'save_on_cpu', 'clone on unpack', 'checkpoint', 'reentrant checkpoint',
        'checkpoint in a step', 'parametrization', 'weight_norm', 'old weight_norm', 'functional_call', 'ddp',
        'another thread')
WEIGHTS = 'parametrization', 'weight_norm', 'old weight_norm', 'functional_call'


class Case(NamedTuple):
    "One composition: the layer, how time is cut, what is put around it, on which weights, in which precision"
    seed: int
    kind: str
    n_layers: int
    bidirectional: bool
    packed: bool
    dropout: float
    seg_len: int|None
    keep: str
    way: str
    weights: str        # '' or one of WEIGHTS, beside `way`
    bf16: bool


def case_of(seed:int) -> Case:
    "The composition of a seed, always the same"
    r = random.Random(seed)
    way = WAYS[seed % len(WAYS)]
    inside = way == 'checkpoint in a step'
    weights = r.choice(['', '', *WEIGHTS]) if way not in (*WEIGHTS, 'ddp') else ''
    return Case(seed, r.choice(list(KINDS)), r.choice([1, 2]), r.random() < .3 and not inside,
                r.random() < .3 and not inside, r.choice([0., 0., .3]), r.choice([None, 1, 2, 3, 5]),
                r.choice(['hidden', 'gates']), way, weights, r.random() < .3)


class _Scaled(nn.Module):
    def __init__(self, like): super().__init__(); self.scale = nn.Parameter(torch.full_like(like[:1], 1.3))
    def forward(self, w): return w * self.scale


def layer_of(c:Case) -> nn.Module:
    "The layer with its weights as the case wants them"
    kind, more = KINDS[c.kind]
    rnn = kind(I, D, c.n_layers, bidirectional=c.bidirectional, dropout=c.dropout, seg_len=c.seg_len,
               keep=c.keep, **more)
    if not c.bf16: rnn = rnn.double()
    names = [n for n, _ in rnn.named_parameters() if n.startswith('weight')]
    for n in names:
        if 'parametrization' in (c.way, c.weights):
            parametrize.register_parametrization(rnn, n, _Scaled(getattr(rnn, n)))
        if 'weight_norm' in (c.way, c.weights): parametrizations.weight_norm(rnn, n)
        if 'old weight_norm' in (c.way, c.weights):
            with warnings.catch_warnings(action='ignore'): nn.utils.weight_norm(rnn, n)
    return rnn


class Whole(nn.Module):
    "The layer over tensors alone, as a checkpoint or DDP takes it"
    def __init__(self, rnn, c:Case, batch_sizes):
        super().__init__()
        self.rnn, self.c, self.batch_sizes = rnn, c, batch_sizes

    def forward(self, x, *states):
        c, state = self.c, states if len(states) > 1 else states[0]
        if c.packed: x = PackedSequence(x, self.batch_sizes)
        if 'functional_call' in (c.way, c.weights):
            derived = {n: p * 1.5 for n, p in self.rnn.named_parameters()}
            out, final = functional_call(self.rnn, derived, (x, state), dict(seed=c.seed))
        else: out, final = self.rnn(x, state, seed=c.seed)
        return (out.data if c.packed else out, *(final if isinstance(final, tuple) else (final,)))


def in_steps(whole:Whole, x, *states):
    "The layer as a step of a scan, checkpointed inside it"
    def step(x, states):
        out, *states = checkpoint(whole, x, *states, use_reentrant=False)
        return out, tuple(states)
    outs, states = scan_segments(step, x, tuple(states), Plan(T, 3))
    return (torch.cat(outs), *states)


@cache
def joined() -> bool:
    "A process group of one"
    dist.init_process_group('gloo', init_method=f'file://{tempfile.mkdtemp()}/group', rank=0, world_size=1)
    return True


HOOKS = {'identity hooks': lambda: saved_tensors_hooks(lambda t: t, lambda t: t), 'save_on_cpu': save_on_cpu,
         'clone on unpack': lambda: saved_tensors_hooks(lambda t: t, lambda t: t.clone())}

def forward(c:Case, whole:Whole, leaves:list):
    "Run the layer as the case says"
    if c.way == 'checkpoint': return checkpoint(whole, *leaves, use_reentrant=False)
    if c.way == 'reentrant checkpoint': return checkpoint(whole, *leaves, use_reentrant=True)
    if c.way == 'checkpoint in a step': return in_steps(whole, *leaves)
    if c.way == 'ddp' and joined(): return DistributedDataParallel(whole)(*leaves)
    with HOOKS.get(c.way, nullcontext)(): return whole(*leaves)


def gradients(c:Case, whole:Whole, inputs:list, run) -> list:
    "Outputs, and the gradients at the inputs and parameters"
    whole.zero_grad()
    leaves = [t.clone().requires_grad_() for t in inputs]
    with torch.autocast('cpu', torch.bfloat16, enabled=c.bf16): outs = run(c, whole, leaves)
    g = torch.Generator().manual_seed(c.seed)
    factors = [torch.randn(o.shape, generator=g, dtype=torch.double).to(o.dtype) for o in outs]
    loss = sum((o * factor).double().sum() for o, factor in zip(outs, factors))
    if c.way == 'another thread':
        (thread := Thread(target=loss.backward)).start()
        thread.join()
    else: loss.backward()
    return [*(o.detach() for o in outs), *(t.grad for t in leaves), *(p.grad for p in whole.parameters())]


def theirs_of(c:Case, rnn) -> nn.Module|None:
    "torch's layer with the same weights, if there is one"
    if c.kind not in ('gru', 'lstm', 'lstm_proj') or c.dropout or c.bf16: return None
    if c.weights or c.way in WEIGHTS: return None
    kind = nn.GRU if c.kind == 'gru' else nn.LSTM
    theirs = kind(I, D, c.n_layers, bidirectional=c.bidirectional, **KINDS[c.kind][1]).double()
    theirs.load_state_dict(rnn.state_dict())
    return theirs


def run_torch(c:Case, whole:Whole, leaves:list):
    x, *states = leaves
    x = PackedSequence(x, whole.batch_sizes) if c.packed else x
    out, final = whole.rnn(x, tuple(states) if len(states) > 1 else states[0])
    return (out.data if c.packed else out, *(final if isinstance(final, tuple) else (final,)))


def run_plain(c:Case, whole:Whole, leaves:list):
    if c.way == 'checkpoint in a step':
        outs, states = [], leaves[1:]
        for x in leaves[0].split(3):
            with plain(): out, *states = whole(x, *states)
            outs.append(out)
        return (torch.cat(outs), *states)
    with plain(): return whole(*leaves)


def furthest(a:list, b:list) -> float:
    "The largest relative difference, by norm"
    pairs = zip(a, b, strict=True)
    return max(float((x - y).double().norm() / y.double().norm().clamp_min(1e-6)) for x, y in pairs)


def difference(seed:int) -> tuple:
    "(the case, the largest difference from its oracles, what is allowed)"
    c = case_of(seed)
    torch.manual_seed(seed)
    whole_batch = torch.randn(T, B, I, dtype=torch.float if c.bf16 else torch.double)
    packed = pack_padded_sequence(whole_batch, torch.tensor([T, 4, 2]))
    rnn = layer_of(c)
    n, width = c.n_layers * (1 + c.bidirectional), KINDS[c.kind][1].get('proj_size', D)
    widths = [width, D] if c.kind.startswith('lstm') else [width]
    states = [torch.randn(n, B, w, dtype=whole_batch.dtype) for w in widths]
    inputs = [packed.data if c.packed else whole_batch, *states]
    whole = Whole(rnn, c, packed.batch_sizes)
    found, oracle = gradients(c, whole, inputs, forward), gradients(c, whole, inputs, run_plain)
    if c.bf16:      # as near to the unrounded run as plain() in bf16 is, give or take
        exact = gradients(c._replace(bf16=False), whole, inputs, run_plain)
        return c, furthest(found, exact), 2**-5 + 4 * furthest(oracle, exact)
    far = furthest(found, oracle)
    if (theirs := theirs_of(c, rnn)) is not None:
        far = max(far, furthest(found, gradients(c, Whole(theirs, c, packed.batch_sizes), inputs, run_torch)))
    return c, far, 1e-10


if __name__ == '__main__':
    torch.set_num_threads(1)
    first, last = map(int, sys.argv[1:])
    worst, failed = {False: 0., True: 0.}, []
    for seed in range(first, last):
        c, far, allowed = difference(seed)
        worst[c.bf16] = max(worst[c.bf16], far)
        if not far <= allowed:
            failed.append(seed)
            print(far, c, flush=True)
    print(f'{last - first} compositions, {len(failed)} differ {failed}; largest in float64 '
          f'{worst[False]:.1e}, in bf16 {worst[True]:.1e}')
    sys.exit(bool(failed))
