"""GRU and LSTM: what does not fit their page. Cases E01-E20 and G01-G13 as they concern the layers."""
import copy
import itertools

import pytest
import torch
from processes import group_of_one
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gruckpt.engine.convert import convert
from gruckpt.measure.meter import Meter
from gruckpt.measure.shadow import shadow
from gruckpt.engine.recurrent import GRU, LSTM
from gruckpt.engine.scan import plain

F64 = torch.float64
KINDS = {'gru': (nn.GRU, GRU), 'lstm': (nn.LSTM, LSTM)}


def pair(kind, *args, ours=None, **kw):
    "torch's layer and ours with the same weights, in float64"
    torch.manual_seed(0)
    Theirs, Ours = KINDS[kind]
    theirs, mine = Theirs(*args, **kw).double(), Ours(*args, **kw, **(ours or {})).double()
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def run(rnn, x, state=None, extra=()):
    "Output, final state and gradients at x, the state, the weights"
    leaves = [x, *(extra or ()), *[p for p in rnn.parameters() if p.requires_grad]]
    out, final = rnn(x, state)
    finals = final if isinstance(final, tuple) else (final,)
    weighed = [t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in (out, *finals)]
    total = sum(t.sum() for t in weighed)
    return [out, *finals, *torch.autograd.grad(total, [t for t in leaves if t.requires_grad])]


def same(a, b, eps=1e-10):
    for x, y in zip(a, b, strict=True): assert x.shape == y.shape and (x - y).norm() <= eps * y.norm()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('keep', ['hidden', 'gates'])
@pytest.mark.parametrize('seg_len,chunk_len', itertools.product([None, 1, 4, 7, 13, 99], [None, 3]))
def test_every_cut_is_torchs(kind, keep, seg_len, chunk_len):
    mine, theirs = pair(kind, 3, 4, 2, ours=dict(keep=keep, seg_len=seg_len, chunk_len=chunk_len))
    x = torch.randn(13, 2, 3, dtype=F64, requires_grad=True)
    same(run(mine, x), run(theirs, x))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('bias,batch_first,bidirectional', itertools.product(*[[False, True]] * 3))
@pytest.mark.parametrize('layers', [1, 3])
def test_every_option_is_torchs(kind, bias, batch_first, bidirectional, layers):
    mine, theirs = pair(kind, 3, 4, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
    x = torch.randn(2, 5, 3, dtype=F64, requires_grad=True)
    same(run(mine, x), run(theirs, x))


@pytest.mark.parametrize('lengths', [[7, 4, 1], [3, 3, 3], [1, 7, 7], [2, 5, 4]])
@pytest.mark.parametrize('kind,bidirectional,seg_len', itertools.product(KINDS, [False, True], [None, 2, 3]))
def test_packed(kind, bidirectional, seg_len, lengths):
    mine, theirs = pair(kind, 3, 4, 2, bidirectional=bidirectional, ours=dict(seg_len=seg_len))
    x = torch.randn(7, 3, 3, dtype=F64, requires_grad=True)
    got = []
    for rnn in (mine, theirs):
        out, final = rnn(pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False))
        padded, back = pad_packed_sequence(out, total_length=9)
        assert padded.shape[0] == 9 and back.tolist() == lengths
        finals = final if isinstance(final, tuple) else (final,)
        total = padded.square().sum() + sum(f.sum() for f in finals)
        got.append([padded, *finals, *torch.autograd.grad(total, [x, *rnn.parameters()])])
    same(*got)


@pytest.mark.parametrize('trainable', [['weight_hh_l0'], ['bias_ih_l1'], ['weight_ih_l0', 'bias_hh_l0']])
@pytest.mark.parametrize('seg_len', [None, 2])
def test_e01_only_some_weights_learn(trainable, seg_len):
    mine, theirs = pair('gru', 3, 4, 2, ours=dict(seg_len=seg_len))
    for rnn in (mine, theirs):
        for n, p in rnn.named_parameters(): p.requires_grad_(n in trainable)
    x = torch.randn(6, 2, 3, dtype=F64)
    got = run(mine, x)
    same(got, run(theirs, x))
    assert all(g.norm() > 0 for g in got[2:])


@pytest.mark.parametrize('seg_len', [None, 3])
def test_e04_autocast_backward_outside(seg_len):
    rnn, x = GRU(3, 8, 2, seg_len=seg_len), torch.randn(9, 4, 3)
    seen = []
    for inside in (True, False):
        with torch.autocast('cpu', torch.bfloat16):
            total = rnn(x)[0].float().square().sum()
            if inside: seen.append(torch.autograd.grad(total, list(rnn.parameters())))
        if not inside: seen.append(torch.autograd.grad(total, list(rnn.parameters())))
    for a, b in zip(*seen, strict=True): assert torch.equal(a, b)


@pytest.mark.parametrize('seg_len', [None, 2])
def test_e13_partial_and_repeated_backward(seg_len):
    mine, theirs = pair('lstm', 3, 4, 2, ours=dict(seg_len=seg_len))
    x = torch.randn(5, 2, 3, dtype=F64, requires_grad=True)
    for wrt in ([x], list(mine.parameters())):
        total = mine(x)[0].square().sum()
        twice = [torch.autograd.grad(total, wrt, retain_graph=True), torch.autograd.grad(total, wrt)]
        oracle = [x] if wrt[0] is x else list(theirs.parameters())
        other = torch.autograd.grad(theirs(x)[0].square().sum(), oracle)
        for got in twice: same(got, other)
        with pytest.raises(RuntimeError, match='second time'): torch.autograd.grad(total, wrt)


def test_only_the_final_state_matters():
    for kind in KINDS:
        mine, theirs = pair(kind, 3, 4, 2, ours=dict(seg_len=2))
        x = torch.randn(5, 2, 3, dtype=F64, requires_grad=True)
        finals = [rnn(x)[1] for rnn in (mine, theirs)]
        last = [f if torch.is_tensor(f) else f[-1] for f in finals]
        same(*[torch.autograd.grad(f.sum(), x) for f in last])


@pytest.mark.parametrize('seg_len', [None, 2])
def test_e16_nothing_is_kept_without_grad(seg_len):
    rnn, x = GRU(3, 4, 2, seg_len=seg_len), torch.randn(8, 2, 3)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), Meter() as meter:
            out, h = rnn(x)
            assert meter.live <= 4 * ((8 + 1) * 2 * 4 + 2 * 2 * 4)          # the last layer's states, and h_n
        assert out.grad_fn is None
    rnn.eval()
    assert all(g.norm() > 0 for g in torch.autograd.grad(rnn(x)[0].square().sum(), list(rnn.parameters())))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, F64])
@pytest.mark.parametrize('norm,reset', [(None, 'after'), ('state', 'before'), ('output', 'after')])
def test_dtypes_against_the_plain_loop(dtype, norm, reset):
    torch.manual_seed(0)
    rnn = GRU(6, 8, 2, norm=norm, reset=reset, seg_len=4).to(dtype)
    x = torch.randn(9, 3, 6).to(dtype).requires_grad_()
    with plain(): want = run(rnn, x)
    got = run(rnn, x)
    assert {t.dtype for t in got} == {dtype}
    eps = {torch.float16: 2**-6, torch.bfloat16: 2**-3, torch.float32: 1e-5, F64: 1e-10}[dtype]
    for a, b in zip(got, want, strict=True): assert (a - b).double().norm() <= eps * b.double().norm()


def test_g09_zero_input_is_finite():
    rnn = GRU(3, 4, 2, norm='state', bias=False)
    out, _ = rnn(torch.zeros(5, 2, 3))
    assert not out.any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), list(rnn.parameters())))


@pytest.mark.parametrize('seg_len', [None, 4])
def test_g12_state_carried_over_batches(seg_len):
    mine, theirs = pair('gru', 3, 4, 2, ours=dict(seg_len=seg_len))
    state = [None, None]
    for _ in range(20):
        x = torch.randn(6, 2, 3, dtype=F64, requires_grad=True)
        got = []
        for i, rnn in enumerate((mine, theirs)):
            got.append(run(rnn, x, state[i]))
            state[i] = got[-1][1].detach()
        same(*got)


def test_g11_moves_copies_and_ddp(tmp_path):
    rnn, x = GRU(3, 4, 2, seg_len=2).double(), torch.randn(5, 2, 3, dtype=F64)
    want = torch.autograd.grad(rnn(x)[0].sum(), list(rnn.parameters()))
    twin = copy.deepcopy(rnn).float().double()
    twin.load_state_dict(rnn.state_dict())
    same(torch.autograd.grad(twin(x)[0].sum(), list(twin.parameters())), want)
    with group_of_one(tmp_path/'store'):
        wrapped = nn.parallel.DistributedDataParallel(rnn)
        wrapped(x)[0].sum().backward()
        same([p.grad for p in rnn.parameters()], want)


@pytest.mark.parametrize('make', [lambda: GRU(8, 16, 2, dropout=.2), lambda: GRU(8, 16, 2, seg_len=4),
                                  lambda: LSTM(8, 16, bidirectional=True, keep='gates'),
                                  lambda: GRU(8, 16, norm='state', reset='before')])
def test_shadow_sees_the_same_peak(make):
    rnn, x = make(), torch.randn(12, 4, 8)
    def step(rnn, x): rnn(x)[0].square().mean().backward()
    with Meter() as meter: step(rnn, x)
    rnn.zero_grad()
    assert shadow(step, rnn, x).peak == meter.peak


def test_tied_layer_is_converted_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.GRU(4, 4)
            self.b = self.a
        def forward(self, x): return self.b(self.a(x)[0])[0]
    model = Twice()
    assert list(convert(model)) == ['a', 'b'] and model.a is model.b and len(list(model.parameters())) == 4



PEERS = {'GRU': dict(encoder_hidden_size=8), 'LSTM': dict(encoder_hidden_size=8), 'TFT': dict(hidden_size=8)}

@pytest.fixture
def in_float64():
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize('name', PEERS)
def test_convert_a_forecasting_library(name, in_float64):
    models = pytest.importorskip('neuralforecast.models', reason='extra `peers` is not installed')
    torch.manual_seed(0)
    model = getattr(models, name)(h=4, input_size=12, max_steps=1, **PEERS[name]).double()
    def loss(model):
        torch.manual_seed(1)
        seen = torch.randn(3, 12, 1, dtype=F64)
        batch = dict(insample_y=seen, insample_mask=torch.ones_like(seen), futr_exog=None, hist_exog=None,
                     stat_exog=None)
        return model(batch).square().mean()
    want = torch.autograd.grad(loss(model), list(model.parameters()), allow_unused=True)
    found = convert(model, seg_len=4)
    assert len(found) and not [m for m in model.modules() if type(m) in (nn.GRU, nn.LSTM)]
    got = torch.autograd.grad(loss(model), list(model.parameters()), allow_unused=True)
    assert [g is None for g in got] == [g is None for g in want]
    same([g for g in got if g is not None], [g for g in want if g is not None])
