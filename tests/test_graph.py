"""Walks recorded over static buffers and replayed: the eager gradients; what a capture needs."""
import copy
import gc
import importlib
import pickle
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence

import gruckpt
from gruckpt.charlm.text import Batch
from gruckpt.engine import cells, graph
from gruckpt.engine.cells import BACKENDS, EAGER, GRUCell, LSTMCell, backend_for, make_cell
from gruckpt.engine.layer_bytes import LayerBytes
from gruckpt.engine.recurrent import layers_of
from gruckpt.measure.meter import Launches

CELLS = [GRUCell(reset, norm) for reset in ('after', 'before') for norm in (None, 'rms')] + [
    LSTMCell(), make_cell('mingru')]
every_cell = pytest.mark.parametrize('cell', CELLS, ids=lambda c: c.form)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def no_buffers():
    "Every test begins and ends without buffers."
    graph.release_buffers()
    yield
    graph.release_buffers()


def values(rnn, x, *args, **kw):
    "Outputs, states and all gradients, flat."
    x = x.detach().clone().requires_grad_()
    out, state = rnn(x, *args, **kw)
    tensors = [out, *([state] if torch.is_tensor(state) else state)]
    total = sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in tensors)
    return [*tensors, *torch.autograd.grad(total, [x, *rnn.parameters()])]


def same(found, oracle, eps=1e-10):
    for a, b in zip(found, oracle, strict=True): assert (a - b).norm() <= eps * b.norm()


def both(rnn, x, *args, **kw):
    "By the eager walks and, twice, by replays."
    rnn.backend = 'eager'
    oracle = values(rnn, x, *args, **kw)
    rnn.backend = 'graph'
    for _ in range(2): same(values(rnn, x, *args, **kw), oracle, TOLERANCE[x.dtype])
    return oracle


@every_cell
@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
def test_gradients_are_the_eager_ones(cell, dtype):
    torch.manual_seed(0)
    x = torch.randn(9, 3, 5, dtype=dtype)
    rnn = layers_of(cell, 5, 6, 2, chunk_len=4, dtype=dtype)
    for rnn.keep, rnn.seg_len in (('hidden', None), ('gates', 6), (('gates', 'hidden'), None), ('hidden', 5)):
        both(rnn, x)


@pytest.mark.parametrize('options', [
    dict(bidirectional=True), dict(bidirectional=True, seg_len=5), dict(bias=False), dict(dropout=.4),
    dict(dropout=.4, seg_len=5), dict(batch_first=True), dict(chunk_len=None), dict(chunk_len=1)], ids=str)
@pytest.mark.parametrize('make', [gruckpt.GRU, gruckpt.LSTM])
def test_options(make, options):
    torch.manual_seed(0)
    rnn = make(5, 6, 2, **{'chunk_len': 4} | options).double()
    both(rnn, torch.randn(11, 3, 5).double(), seed=3)


def test_more_options():
    torch.manual_seed(0)
    x = torch.randn(11, 3, 5).double()
    both(gruckpt.LSTM(5, 6, 2, proj_size=3, chunk_len=4, seg_len=5).double(), x)
    both(gruckpt.GRU(5, 6, 2, norm='output', chunk_len=4, seg_len=5).double(), x)
    both(gruckpt.GRU(5, 6, chunk_len=4).double(), x[:, 0])                       # unbatched


def test_packed():
    torch.manual_seed(0)
    xs = [torch.randn(n, 5).double() for n in (9, 7, 7, 2)]
    rnn = gruckpt.GRU(5, 6, 2, seg_len=4, chunk_len=3).double()
    def gradients():
        out, h = rnn(pack_sequence(xs))
        return torch.autograd.grad(out.data.square().sum() + h.sum(), [*rnn.parameters()])
    oracle = gradients()
    rnn.backend = 'graph'
    for _ in range(2): same(gradients(), oracle)


@every_cell
def test_autocast(cell):
    torch.manual_seed(0)
    x, rnn = torch.randn(11, 3, 5), layers_of(cell, 5, 6, 2, chunk_len=4, seg_len=6)
    found = []
    for rnn.backend in ('eager', 'graph', 'graph'):
        with torch.autocast('cpu', torch.bfloat16): found.append(values(rnn, x))
    for again in found[1:]: same(again, found[0], 0 if cell.form != 'mingru' else .02)    # a scan, not a walk


def test_no_grad_retain_graph_and_two_steps():
    torch.manual_seed(0)
    x, rnn = torch.randn(11, 3, 5).double(), gruckpt.GRU(5, 6, chunk_len=4).double()
    oracle = both(rnn, x)
    with torch.no_grad(): assert torch.equal(rnn(x)[0], oracle[0])
    assert graph.idle_bytes() == sum(o.gates.nbytes + sum(t.nbytes for t in (*o.states, *o.back, o.w.w_h))
                                     for o in graph._idle)
    loss = rnn(x)[0].square().sum()
    first = torch.autograd.grad(loss, [*rnn.parameters()], retain_graph=True)
    rnn(2 * x)[0].sum().backward()                                               # another pass in between
    same(torch.autograd.grad(loss, [*rnn.parameters()]), first, 0)


def test_buffers_made_in_inference_mode_serve_outside():
    torch.manual_seed(0)
    x, rnn = torch.randn(11, 3, 5), gruckpt.GRU(5, 6, 2, norm='state', chunk_len=4, backend='graph')
    with torch.inference_mode(): out = rnn(x)[0]
    assert len(graph._idle) == 1
    same(both(rnn, x)[:1], [out], 0)
    with torch.inference_mode(): same(rnn(x)[:1], [out], 0)


def test_a_backward_pass_in_another_thread_is_bit_equal():
    torch.manual_seed(0)
    x, rnn = torch.randn(11, 3, 5), gruckpt.GRU(5, 6, 2, norm='state', reset='before', chunk_len=4, seg_len=6,
                                                backend='graph')
    found, errors = [], []
    def back(loss):
        try: loss.backward()
        except BaseException as e: errors.append(e)
    for other in (False, True):
        rnn.zero_grad()
        loss = rnn(x)[0].square().sum()
        if other:
            thread = threading.Thread(target=back, args=(loss,))
            thread.start()
            thread.join()
        else: back(loss)
        assert not errors
        found.append([p.grad.clone() for p in rnn.parameters()])
    same(*found, 0)


def test_threads_at_once_have_buffers_of_their_own():
    torch.manual_seed(0)
    x, rnn = torch.randn(40, 3, 5), gruckpt.GRU(5, 6, 2, chunk_len=4, backend='graph')
    oracle, found, meet = values(rnn, x), [], threading.Barrier(3)
    def run():
        meet.wait()
        for _ in range(3): found.append(values(rnn, x))
    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(found) == 9
    for again in found: same(again, oracle, 0)
    assert len(graph._idle) <= graph.MOST_IDLE


def test_copies_pickles_and_moves():
    torch.manual_seed(0)
    x, rnn = torch.randn(11, 3, 5), gruckpt.GRU(5, 6, 2, chunk_len=4, backend='graph')
    oracle = values(rnn, x)
    for twin in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))): same(values(twin, x), oracle, 0)
    twin.load_state_dict(rnn.state_dict())
    same(values(twin, x), oracle, 0)
    both(twin.double(), x.double())                                              # the weights moved
    optimizer = torch.optim.AdamW(twin.parameters(), .1)
    twin(x.double())[0].sum().backward()
    optimizer.step()                                                             # written in place
    both(twin, x.double())


def test_the_cache_is_bounded_and_released():
    rnn = gruckpt.GRU(3, 4, chunk_len=4, backend='graph')
    for B in range(1, 8):
        rnn(torch.randn(5, B, 3))[0].sum().backward()
        assert len(graph._idle) <= graph.MOST_IDLE
    for T in range(1, 40): rnn(torch.randn(T, 1, 3), torch.zeros(1, 1, 4))
    rnn.chunk_len = 64
    for T in range(2, 40): rnn(torch.randn(T, 1, 3))
    assert all(len(o.replays) <= graph.MOST_LENGTHS for o in graph._idle)
    assert graph.release_buffers() <= graph.MOST_IDLE
    assert graph.idle_bytes() == 0 == graph.release_buffers()


def test_a_failed_pass_gives_its_buffers_back(monkeypatch):
    rnn, x = gruckpt.GRU(3, 4, backend='graph'), torch.randn(5, 2, 3)
    def broken(*args): raise RuntimeError('broken')
    monkeypatch.setattr(GRUCell, 'project', broken)
    with pytest.raises(RuntimeError, match='broken'): rnn(x)
    assert len(graph._idle) == 1
    monkeypatch.undo()
    both(rnn.double(), x.double())


TIMES = iter(range(99))


class Odd(GRUCell):
    "A cell that cannot be recorded."
    form = 'odd'
    trouble = None
    def advance(self, gates, prev, new, w, order):
        self.trouble(prev[0], new[0])
        super().advance(gates, prev, new, w, order)


@pytest.mark.parametrize('trouble, why', [
    (lambda prev, new: prev.sum().item(), 'which asks for a value'),
    (lambda prev, new: prev[prev > 0], 'which asks for a value'),
    (lambda prev, new: new.add_(Odd.outside), 'reads a tensor of'),
    (lambda prev, new: new.mul_(2) if next(TIMES) else new.add_(1), 'differs from the first time')])
def test_what_cannot_be_recorded_is_one_line(trouble, why, monkeypatch):
    monkeypatch.setattr(Odd, 'trouble', staticmethod(trouble))
    monkeypatch.setattr(Odd, 'outside', torch.ones(4), raising=False)
    graph.graph_over('graph', EAGER, 'odd')
    rnn = gruckpt.Recurrent(Odd(), 3, 4, backend='graph')
    with pytest.raises(RuntimeError, match=why) as e:
        for _ in range(2): rnn(torch.randn(5, 2, 3))
    assert str(e.value).startswith("backend='graph' cannot record")
    assert str(e.value).endswith("use backend='eager'")
    for device in ('cpu', 'cuda'): del BACKENDS['odd', device]


@pytest.mark.parametrize('triton', [True, False])
def test_auto_takes_it_on_cuda_and_a_device_without_it_is_named(triton, monkeypatch):
    monkeypatch.setattr(cells, 'triton_runs', lambda: triton)
    for cell in CELLS:
        assert backend_for(cell, 'cpu').name == backend_for(cell, 'cpu', 'eager').name
        for record, best in zip((True, False), ('graph+triton', 'triton') if triton else ('graph', 'eager')):
            name = 'scan' if cell.form == 'mingru' else best
            assert backend_for(cell, 'cuda', 'auto', record).name == name
    with pytest.raises(ValueError, match="got 'graph' for the cell gru after on mps"):
        backend_for(GRUCell(), 'mps', 'graph')


def lm(backend, **spec):
    torch.manual_seed(0)
    model = gruckpt.GRULM(gruckpt.GRUSpec(20, 8, 3, norm='state', reset='before', **spec)).double()
    model.rnn.backend = backend
    return model


def test_a_language_model_in_segments():
    ids = torch.randint(20, (2, 2, 25), generator=torch.Generator().manual_seed(1))
    found = []
    for backend in ('eager', 'graph'):
        model = lm(backend, dropout=.2)
        torch.manual_seed(5)
        loss, state = model.loss(Batch(*ids, fresh=True), plan=gruckpt.Plan(25, 8))
        loss.backward()
        found.append([loss, state, *[p.grad for p in model.parameters()]])
    same(found[1], found[0])
    assert [o.steps for o in graph._idle] == [8]         # three layers, all segments: one set


@every_cell
@pytest.mark.parametrize('item', [4, 2])
def test_bytes_are_the_meters(cell, item):
    B, D, n = 3, 16, 45
    rnn = layers_of(cell, D, D, backend='graph')
    rnn._read_only_output = True
    x = torch.randn(n, B, D, requires_grad=True)
    o = LayerBytes(cell, D, D, B, item=item, backend='graph')
    state = [torch.zeros(1, B, D) for _ in range(cell.n_states)]
    with gruckpt.Meter() as meter, torch.autocast('cpu', torch.bfloat16, enabled=item == 2):
        out, _ = rnn(x, state if len(state) > 1 else state[0])
        out.sum().backward()
    del out
    assert graph.idle_bytes() == o.held(n)[1]
    if item == 2: return
    gradients = 4 * (o.numbers + n*B*D)
    assert meter.peak == o.held(n)[1] + o.record(n) + gradients + 8 + o.backward(n) + o.row * cell.n_states


def drawn(backend, norm, autocast=False):
    "Own characters of a window, the loss on them and its gradients, and a continuation."
    torch.manual_seed(0)
    model = gruckpt.GRULM(gruckpt.GRUSpec(20, 8, 2, norm=norm, reset='before', dropout=.2))
    model.rnn.backend = backend
    ids = torch.randint(20, (2, 3, 12), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        loss, (h, guess) = model.loss(Batch(*ids, fresh=True), plan=gruckpt.Plan(12, 5), teacher_forcing=.3)
    loss.backward()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        text = model.generate(ids[0, 0], 9, temperature=.5)
    return [guess, text], [loss, h, *[p.grad for p in model.parameters()]]


@pytest.mark.parametrize('norm', [None, 'state', 'output'])
@pytest.mark.parametrize('autocast', [False, True])
def test_rolled_out_steps_are_replayed(norm, autocast):
    (ids, numbers), (same_ids, same_numbers) = (drawn(name, norm, autocast) for name in ('eager', 'graph'))
    for a, b in zip(ids, same_ids): assert torch.equal(a, b)
    same(same_numbers, numbers, 1e-5)


class Counted(Launches):
    "Launches, where a replay is one and what the stand-in does inside is none."
    inside = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.inside: return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def count(monkeypatch):
    "`count(run)`: launches by name. No kernel of Triton runs: numbers do not matter here."
    replay, active = graph.Checked.__call__, []
    def once(self, run, static):
        for mode in active: mode.names['replay'], mode.inside = mode.names['replay'] + 1, True
        try: return replay(self, run, static)
        finally:
            for mode in active: mode.inside = False
    kernels = importlib.import_module('gruckpt.engine.triton')
    monkeypatch.setattr(kernels, '_launch', lambda *args, **constants: None)
    monkeypatch.setattr(kernels, '_need', lambda device: None)
    monkeypatch.setattr(graph.Checked, '__call__', once)
    monkeypatch.setattr(graph.Buffers, 'poison', lambda self, *tensors: None)     # the stand-in's alone
    def counted(run):
        with Counted() as mode:
            active.append(mode)
            run()
            active.remove(mode)
        return mode.names
    return counted


def training_step(backend, S, K, L=3):
    "A step of V3a's model but for its widths, K segments of S steps"
    torch.manual_seed(0)
    model = gruckpt.GRULM(gruckpt.GRUSpec(9, 4, L, norm='state', reset='before'))
    ids = torch.zeros(2, 1, S*K).long()
    model.rnn.backend, model.rnn.chunk_len = backend, 64
    return lambda: model.loss(Batch(*ids, fresh=True), plan=gruckpt.Plan(S*K, S))[0].backward()


def test_launches_of_a_step_of_v3a(count):
    """K=16 segments of 32 steps. By the kernels a step of a layer is 4 launches forward, again 4 but in the
    last segment, and 4 back; a replay is one whatever its steps"""
    K, L, S = 16, 3, 32
    launches = {(backend, S): count(training_step(backend, S, K)).total()
                for backend in ('eager', 'triton', 'graph+triton') for S in (2, 3)}
    at = {b: n + (S - 2)*(launches[b, 3] - n) for (b, s), n in launches.items() if s == 2}
    assert launches['triton', 3] - launches['triton', 2] == L*(4*(2*K - 1) + 4*K) == 564
    assert launches['eager', 3] - launches['eager', 2] == L*(12*(2*K - 1) + 13*K) == 1740
    assert launches['graph+triton', 3] == launches['graph+triton', 2] == at['graph+triton'] <= 3_000
    # 72,700 where a chunk had four steps; tutorials/gpu tells these
    assert at == {'eager': 58_326, 'triton': 19_797, 'graph+triton': 2_148}
    replays = count(training_step('graph+triton', 2, K))['replay']
    assert replays == L*(2*K - 1 + K)                                # a pass of a segment and layer is one


def test_a_character_is_one_replay(count):
    model = lm('graph')
    names = count(lambda: model.generate(torch.tensor([1, 2, 3]), 9))
    assert names['replay'] == 3 + 8                             # the prompt's three layers, then one each
    assert names['addmm'] + names['addmm.out'] + names['addmm_'] == 4        # the prompt's: no step by hand


@pytest.mark.parametrize('make', [gruckpt.GRU, gruckpt.LSTM])
def test_a_call_of_one_step_goes_through_the_backend(make, count):
    torch.manual_seed(0)
    x, rnn, found = torch.randn(1, 3, 5).double(), make(5, 6, 2).double(), []
    for rnn.backend in ('eager', 'graph'):
        with torch.no_grad(): out, state = rnn(x)
        for _ in range(4): out, state = rnn(x + out.mean(), state)
        names = count(lambda state=state: rnn(x, state))
        loss = out.sum()
        found.append([loss, *torch.autograd.grad(loss, [*rnn.parameters()])])
    assert names['replay'] == 2                                  # a layer each
    same(*found)


@pytest.mark.parametrize('backend', ['graph', 'graph+triton'])
def test_fake_tensors_pass_through_and_leave_nothing(backend, monkeypatch):
    "As a prediction runs them."
    monkeypatch.setattr(importlib.import_module('gruckpt.engine.triton'), '_need', lambda device: None)
    with FakeTensorMode():
        rnn = gruckpt.GRU(5, 6, 2, norm='state', reset='before', chunk_len=4, seg_len=6, backend=backend)
        x = torch.randn(11, 3, 5, requires_grad=True)
        rnn(x)[0].sum().backward()
    assert x.grad.shape == x.shape and not graph._idle


# ---- what CUDA would be asked for, by stand-ins: no GPU was at hand ----

@pytest.fixture
def cuda(monkeypatch):
    "What happened, in order; `cuda.fails` raises inside a capture, whose end then fails too, as CUDA's does"
    did = SimpleNamespace(log=[], current='main', fails=None, n=0)
    def number():
        did.n += 1
        return did.n
    class CUDAGraph:
        def replay(self): did.log.append('replay')
        def reset(self): did.log.append('reset')
    @contextmanager
    def stream(s):
        before, did.current = did.current, s
        try: yield
        finally: did.current = before
    @contextmanager
    def capture(made, pool, stream, capture_error_mode):
        did.log.append(('capture', pool, stream, capture_error_mode))
        assert did.current == stream and graph._recording.locked()
        did.current = f'{stream} inside'
        yield
        if did.fails is not None: raise did.fails                  # and the stream stays
        did.current = stream
    for name, what in dict(CUDAGraph=CUDAGraph, stream=stream, graph=capture, graph_pool_handle=number,
                           Stream=lambda device: f'stream {number()}').items():
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(graph, '_streams', {})
    return did


def test_the_first_call_runs_the_second_is_captured_the_third_replays(cuda):
    captured, n = graph.Captured(graph.Place('cuda:0')), iter(range(9))
    assert [captured(lambda: next(n), []) for _ in range(4)] == [0, 1, 2, 2]    # 2: what the capture made
    assert cuda.log == [('capture', 2, 'stream 1', 'thread_local'), 'replay', 'replay']
    assert cuda.current == 'main'


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('CUDA out of memory'), RuntimeError('invalidated')])
def test_a_capture_that_fails_leaves_the_stream_and_no_pool_behind(cuda, error):
    o = graph.Buffers(graph.Shape(EAGER, GRUCell(), 4, 2, (4,), (), torch.float64, torch.device('cpu'), 0), 3)
    o.place = before = graph.Place('cuda:0')
    o.forget = lambda: (o.replays.clear(), setattr(o, 'place', graph.Place('cuda:0')))   # as on CUDA
    for what in ('a', 'a'): o.replay((what,), lambda: 1)
    cuda.fails = error
    o.replay(('b',), lambda: 1)
    with pytest.raises(RuntimeError, match='out of memory|this chunk, which failed: invalidated'):
        o.replay(('b',), lambda: 1)
    assert cuda.current == 'main' and not graph._recording.locked()
    assert not o.replays and o.place.pool != before.pool and o.place.stream != before.stream
    cuda.fails = None
    assert [o.replay(('b',), lambda: 1) for _ in range(3)] == [1]*3 and cuda.log[-1] == 'replay'


def test_no_two_places_share_a_stream_and_a_place_goes_as_a_whole(cuda):
    first, second = graph.Place('cuda:0'), graph.Place('cuda:0')
    assert first.stream != second.stream
    captured = graph.Captured(first)
    for _ in range(2): captured(lambda: 1, [])
    used = first.stream
    del first
    gc.collect()
    assert 'reset' not in cuda.log                              # a recording holds its place
    del captured
    gc.collect()
    assert cuda.log[-1] == 'reset'
    assert graph.Place('cuda:0').stream == used                 # free again


def test_buffers_know_how_matmuls_round():
    o, (rnn, x) = torch.backends.cuda.matmul, (gruckpt.GRU(3, 4, backend='graph'), torch.randn(5, 2, 3))
    before = o.fp32_precision
    try:
        for o.fp32_precision in ('ieee', 'tf32', 'ieee'): rnn(x)
    finally: o.fp32_precision = before
    assert [b.shape.products[0] for b in graph._idle] == ['tf32', 'ieee']
