"""meter beyond its page: grids of operations, stand-ins for the driver and CUDA, threads, leaks."""
import functools, gc, threading, types, warnings, weakref
from dataclasses import dataclass

import pynvml
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gruckpt.measure.meter import GPUState, Meter, gpu_state, human, nbytes, parse_bytes, timed
from gruckpt.measure.shadow import shadow


def measured(fn, *args):
    with Meter() as m: out = fn(*args)
    del out
    return m.start, m.peak, m.live, m.phases


def in_shadow(fn, *args):
    m = shadow(fn, *args)
    return m.start, m.peak, m.live, m.phases


def through(fn, x, *args, **kw):
    "Forward and backward of a function of a floating tensor and other things."
    x = x.clone().requires_grad_()
    with Meter.phase('forward'): out = fn(x, *args, **kw)
    out = out[0] if isinstance(out, (tuple, list)) else out
    with Meter.phase('backward'): out.float().abs().sum().backward()


# -- the meter and its shadow over many operations

x, y, w = torch.rand(12, 10) * .8 + .1, torch.rand(12, 10), torch.randn(10, 6)
image, sign, label = torch.randn(2, 4, 9, 9), torch.randn(12, 10).sign(), torch.randint(10, (12,))
query = x.view(1, 2, 6, 10)

def written(a):
    buffer = torch.zeros(12, 10)
    for i in range(12): buffer[i] = a[i] * i
    return buffer

OPERATIONS = {
    **{f.__name__: (f, x) for f in (
        torch.exp, torch.log, torch.sigmoid, torch.tanh, torch.relu, torch.var, torch.std, torch.prod,
        torch.norm, torch.diff, torch.sin, torch.erf,
        F.gelu, F.silu, F.softplus, F.elu, F.glu, F.dropout, F.normalize)},
    **{f.__name__: (f, x, y) for f in (
        torch.add, torch.mul, torch.div, torch.pow, torch.maximum, torch.atan2, torch.hypot, F.l1_loss,
        F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits, F.poisson_nll_loss)},
    **{f'{f.__name__}, dim': (functools.partial(f, dim=1), x) for f in (
        F.softmax, F.log_softmax, torch.cumsum, torch.cumprod, torch.logsumexp, torch.max, torch.sort,
        torch.unbind)},
    'divergence': (functools.partial(F.kl_div, reduction='batchmean'), x, y),
    'soft margin': (F.soft_margin_loss, x, sign),
    'no reduction': (functools.partial(F.mse_loss, reduction='none'), x, y),
    'broadcast loss': (F.mse_loss, x, y[:1].expand(12, 10)),
    'cross entropy': (F.cross_entropy, x, label),
    'margin': (F.multi_margin_loss, x, label),
    'matmul': (torch.matmul, x, w), 'bmm': (torch.bmm, x.view(4, 3, 10), y.view(4, 10, 3)),
    'einsum': (lambda a, b: torch.einsum('ij,jk->ik', a, b), x, w),
    'linear of a transpose': (lambda a, b: F.linear(a.t(), b.t()[:, :12], b[:6, 0]), x, torch.randn(12, 6)),
    'gather': (lambda a, i: a.gather(1, i[:, None]), x, label), 'index': (lambda a, i: a[i], x, label),
    'scatter': (lambda a, i: torch.zeros(12, 10).scatter_add(1, i[:, None], a[:, :1]), x, label),
    'index_put': (lambda a, i: torch.zeros(20, 10).index_put((i,), a), x, label),
    'where': (lambda a, b: torch.where(a > .5, a, b), x, y),
    'masked_fill': (lambda a: a.masked_fill(a > .5, 0), x),
    'cat': (lambda a: torch.cat([a, a[:3], a]), x), 'stack': (lambda a: torch.stack([a, a]), x),
    'pad': (lambda a: F.pad(a, (1, 2)), x), 'roll': (lambda a: a.roll(3, 1), x),
    'flip': (lambda a: a.flip(0), x),
    'expand': (lambda a: a.expand(5, 12, 10) * 2, x), 'repeat': (lambda a: a.repeat(3, 1), x),
    'chunk': (lambda a: a.chunk(2, 1)[0].sigmoid() * a.chunk(2, 1)[1], x),
    'conv2d': (F.conv2d, image, torch.randn(6, 4, 3, 3)),
    'conv1d': (F.conv1d, image[0], torch.randn(6, 9, 3)),
    'conv transposed': (F.conv_transpose2d, image, torch.randn(4, 6, 3, 3)),
    'channels last': (lambda a, b: F.conv2d(a.contiguous(memory_format=torch.channels_last), b), image,
                      torch.randn(6, 4, 3, 3)),
    'max pool': (functools.partial(F.max_pool2d, kernel_size=2), image),
    'mean pool': (functools.partial(F.avg_pool2d, kernel_size=2), image),
    'interpolate': (functools.partial(F.interpolate, scale_factor=2), image),
    'unfold': (lambda a: a.unfold(1, 3, 1) * 1, x),
    'layer norm': (functools.partial(F.layer_norm, normalized_shape=(10,)), x),
    'rms norm': (functools.partial(F.rms_norm, normalized_shape=(10,)), x),
    'group norm': (functools.partial(F.group_norm, num_groups=2), image),
    'batch norm': (lambda a: F.batch_norm(a, None, None, training=True), x),
    'attention': (functools.partial(F.scaled_dot_product_attention, is_causal=True), query, query, query),
    'masked attention': (F.scaled_dot_product_attention, query, query, query, torch.ones(6, 6).tril().bool()),
    'to bfloat16': (lambda a: (a.bfloat16() @ a.bfloat16().t()), x),
    'to float64': (lambda a: a.double().exp(), x),
    'fake quantize': (lambda a: torch.fake_quantize_per_tensor_affine(a, .1, 0, 0, 255), x),
    'buffer written in a loop': (written, x),
}


@pytest.mark.parametrize('name', OPERATIONS)
def test_operation(name):
    assert measured(through, *OPERATIONS[name]) == in_shadow(through, *OPERATIONS[name])


@pytest.mark.parametrize('dtype', (torch.float16, torch.bfloat16, torch.float64))
@pytest.mark.parametrize('make', (nn.Linear, nn.GRU))
def test_types(make, dtype):
    model, data = make(10, 7).to(dtype), torch.randn(5, 4, 10, dtype=dtype)
    expected = in_shadow(through, call, data, model)
    assert measured(through, call, data, model) == expected


def call(a, model): return model(a)


# -- whole regions: models, phases, optimizers

def backward(model, a, *targets):
    "Forward and backward, through the square of the (first) output or a loss"
    model.zero_grad()
    with Meter.phase('forward'):
        out = model(a)
        out = out[0] if isinstance(out, tuple) else out
        loss = F.cross_entropy(out.flatten(0, 1), targets[0].flatten()) if targets else out.square().mean()
    with Meter.phase('backward'): loss.backward()

def adam(model, a, **kw):
    opt = torch.optim.Adam(model.parameters(), **kw)
    for _ in range(2):
        backward(model, a)
        opt.step()

def regress(model, a):
    model.zero_grad()
    F.mse_loss(model(a), a[:, :8]).backward()

def autocast(model, a):
    with torch.autocast('cpu', torch.bfloat16): backward(model, a)

def inference(model, a):
    with torch.inference_mode(): return model(a)

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a * a

    @staticmethod
    def backward(ctx, grad):
        a, = ctx.saved_tensors
        return 3 * grad * a * a

class SelfAttention(nn.MultiheadAttention):
    def forward(self, a): return super().forward(a, a, a, need_weights=False)

def cubes(a): Cube.apply(Cube.apply(a.clone().requires_grad_())).sum().backward()

def buffers(a):
    torch.mm(a, a.T, out=(buffer := torch.empty(0)))
    buffer.resize_(2000)
    return torch.stack([buffer[:10], torch.tensor([1.] * 10)])

def mlp():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Dropout(.5), nn.Linear(64, 8))

def gru(): return nn.GRU(16, 32, 3)
def convolution(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2))

row, steps, batches = torch.randn(32, 16), torch.randn(8, 4, 16), torch.randn(2, 9, 16)
ids, pixels = torch.randint(50, (4, 7)), torch.randn(2, 3, 17, 17)
REGIONS = {
    'layer norm and dropout': lambda: (backward, mlp(), row),
    'GRU, both directions': lambda: (backward, nn.GRU(16, 32, batch_first=True, bidirectional=True), steps),
    'GRU, inference': lambda: (inference, gru(), steps),
    'LSTM, float64': lambda: (backward, nn.LSTM(16, 32).double(), steps.double()),
    'self-attention': lambda: (backward, SelfAttention(16, 4, batch_first=True), batches),
    'transformer layer': lambda: (backward, nn.TransformerEncoderLayer(16, 4, 32), batches),
    'convolution, norm, pooling': lambda: (backward, convolution(), pixels),
    'embedding, cross entropy': lambda: (backward, nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)),
                                         ids, ids),
    'mean squared error': lambda: (regress, mlp(), row),
    'bfloat16 autocast': lambda: (autocast, gru(), steps),
    'Adam, loop': lambda: (adam, mlp(), row),
    'Adam, foreach, amsgrad': lambda: (functools.partial(adam, foreach=True, amsgrad=True), mlp(), row),
    'own autograd function': lambda: (cubes, row),
    'out=, resize_, torch.tensor': lambda: (buffers, row)}


@pytest.mark.parametrize('name', REGIONS)
def test_region(name):
    region = REGIONS[name]()
    expected = in_shadow(*region)
    for _ in range(2): assert measured(*region) == expected


@pytest.mark.parametrize('form', [(1, 1, 1, 1), (3, 7, 5, 2), (0, 3, 4, 5)])
def test_a_gru_keeps_seven_numbers_a_unit(form):
    B, T, I, D = form
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        layer = nn.GRU(I, D, dtype=dtype)
        with Meter() as m: loss = layer(torch.randn(T, B, I, dtype=dtype))[0].sum()
        assert m.live - loss.nbytes == T * B*(I + 7*D) * dtype.itemsize


# -- autograd in all its forms

def twice(a):
    loss = (a.exp() * a).sum()
    loss.backward(retain_graph=True)
    loss.backward()

def second_order(a):
    g, = torch.autograd.grad((a ** 3).sum(), a, create_graph=True)
    g.square().sum().backward()

def reentrant(a): checkpoint(lambda b: b.exp().sin(), a, use_reentrant=True).sum().backward()
def not_reentrant(a): checkpoint(lambda b: F.dropout(b.exp()).sin(), a, use_reentrant=False).sum().backward()
def given_inputs(a): (a * 2).sum().backward(inputs=[a])
def offloaded(a):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        (a.exp() * a).sum().backward()

@pytest.mark.parametrize('fn', (twice, second_order, reentrant, not_reentrant, given_inputs, offloaded))
def test_autograd(fn):
    def region(a): fn(a.clone().requires_grad_())
    assert measured(region, x) == in_shadow(region, x)


@pytest.mark.parametrize('make', (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop))
@pytest.mark.parametrize('foreach', (False, True))
def test_optimizer_with_state(make, foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3))
    opt = make(model.parameters(), lr=.1, weight_decay=.1, foreach=foreach)
    def step(model, opt, data):
        opt.zero_grad()
        model(data).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
    for _ in range(2):                                             # without state, then with
        before, held = [p.detach().clone() for p in model.parameters()], nbytes(opt)
        expected = in_shadow(step, model, opt, x)
        assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
        assert nbytes(opt) == held
        assert measured(step, model, opt, x) == expected


def test_gradients_from_before_are_added_to():
    "A shadow must know that .grad exists: the second backward pass adds in place and makes no new one."
    model = nn.Linear(10, 7)
    def step(model, data): model(data).sum().backward()
    first = in_shadow(step, model, x)
    assert measured(step, model, x) == first
    second = in_shadow(step, model, x)
    assert measured(step, model, x) == second
    assert second[2] == 0 < first[2]


# -- what can be handed to a shadow

@dataclass
class Holder:
    model: nn.Module
    data: torch.Tensor
    name: str = 'holder'

class Plain:
    def __init__(self, model, data): self.inner = {'m': [model], 'd': data}
    def run(self): return self.inner['m'][0](self.inner['d'])

def test_shadow_finds_tensors_anywhere():
    model = nn.GRU(10, 7)
    data = x.view(4, 3, 10)
    expected = measured(model, data)
    assert in_shadow(model, data) == expected
    assert in_shadow(model.forward, data) == expected
    assert in_shadow(functools.partial(model, data)) == expected
    assert in_shadow(Plain(model, data).run) == expected
    assert in_shadow(lambda h: h.model(h.data), Holder(model, data)) == expected
    assert in_shadow(lambda pair: pair[0](pair[1]['x']), (model, {'x': data})) == expected


def test_shadow_keeps_ties_and_sharing():
    tied = nn.Sequential(nn.Embedding(10, 10), nn.Linear(10, 10, bias=False))
    tied[1].weight = tied[0].weight
    def region(model, ids):
        assert model[0].weight is model[1].weight
        model(ids).sum().backward()
    expected = in_shadow(region, tied, label)
    assert measured(region, tied, label) == expected
    flat = torch.randn(100)
    a, b = flat[:50].view(5, 10), flat[50:]
    def shares(a, b): return nbytes([a, b])
    sizes = []
    shadow(lambda a, b: sizes.append(shares(a, b)), a, b)
    assert sizes == [shares(a, b)] == [400]


def test_shadow_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Dropout(.5))
    generator = torch.Generator().manual_seed(1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state, rng = generator.get_state(), torch.get_rng_state()
    data = x.clone()
    def region(model, data, generator):
        torch.manual_seed(3)
        data.zero_()
        torch.rand(4, generator=generator)
        model.train()
        model(data).sum().backward()
        model.extra = 1
    shadow(region, model.eval(), data, generator)
    assert not model.training and not hasattr(model, 'extra') and torch.equal(data, x)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model[0].weight.grad is None
    assert torch.equal(generator.get_state(), state) and torch.equal(torch.get_rng_state(), rng)


def test_shadow_of_a_meta_model_equals_the_real_one():
    def region(model, data):
        opt = torch.optim.Adam(model.parameters())
        model(data)[0].square().mean().backward()
        opt.step()
    with torch.device('meta'): dark, data = nn.GRU(10, 7, 2), torch.empty(4, 3, 10)
    assert in_shadow(region, dark, data) == measured(region, nn.GRU(10, 7, 2), x.view(4, 3, 10))


def test_shadow_inside_a_meter_is_not_seen_by_it():
    with Meter() as m:
        with Meter.phase('outer'): assert shadow(through, torch.exp, x).peak > 0
        assert (m.peak, m.live) == (0, 0)
    assert m.phases == {'outer': 0}


# -- the meter itself

def test_a_meter_holds_nothing_alive():
    gc.disable()
    try:
        t = torch.ones(10)
        m = Meter(t)
        with m: r = t * 2
        refs = [weakref.ref(t), weakref.ref(r), weakref.ref(m)]
        del t, r
        assert refs[0]() is refs[1]() is None and (m.start, m.live) == (40, 80)
        del m
        assert refs[2]() is None
        model, data = nn.GRU(10, 7), x.view(4, 3, 10).clone()
        refs = [weakref.ref(model), weakref.ref(data), weakref.ref(model.weight_hh_l0)]
        shadow(model, data)
        del model, data
        assert [r() for r in refs] == [None] * 3
    finally: gc.enable()


def test_an_error_leaves_nothing():
    for error in (RuntimeError, KeyboardInterrupt):
        m = Meter()
        with pytest.raises(error), Meter() as outer, m, Meter.phase('a'):
            kept = x + 1
            raise error
        assert m.live == outer.live == nbytes(kept) and m.phases == {'a': m.peak}
        assert torch._C._len_torch_dispatch_stack() == 0
        level = m.peak
        with Meter(): torch.ones(1000)
        assert m.peak == level                                     # it is no longer running


def test_what_was_held_is_taken_off_when_it_goes():
    a, b = torch.ones(10), torch.ones(20)
    with Meter(a, [a, b]) as m:
        assert (m.start, m.live, m.peak) == (120, 120, 120)
        del b
        c = a + 1
        assert (m.live, m.peak) == (80, 120)
        del a, c
        assert m.live == 0


def test_addresses_are_used_again():
    "A freed storage's key may come back; the new storage is another one."
    with Meter() as m:
        for i in range(1, 300):
            t = torch.empty(i)
            assert m.live == 4*i
            del t
            assert m.live == 0


def test_a_meter_sees_its_own_thread():
    with Meter() as m:
        thread = threading.Thread(target=lambda: torch.ones(1000).exp())
        thread.start()
        thread.join()
        assert m.peak == 0


def test_phases_overlap_and_repeat():
    with Meter() as m:
        with Meter.phase('a'):
            with Meter.phase('b'): t = torch.ones(10)
            with Meter.phase('b'), Meter.phase('b'): u = torch.ones(5)
        del t, u
        with Meter.phase('a'): torch.ones(3)
    assert m.phases == {'b': 60, 'a': 60} and m.peak == 60


def test_inference_mode_sees_the_inside_of_composite_operations():
    model, data = nn.GRU(10, 7), x.view(4, 3, 10)
    def run(context):
        with context: return model(data)
    assert measured(run, torch.inference_mode()) == measured(run, torch.no_grad())


def test_storages_without_an_operation_are_not_counted():
    old = torch.ones(5)
    with Meter() as m:
        torch.empty(0).set_(torch.UntypedStorage(100))
        torch.empty(0).set_(old.untyped_storage())
    assert m.peak == 0


# -- bytes

def test_nbytes_of_other_kinds():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        parts = torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), torch.ones(3)
        assert nbytes(torch.sparse_csr_tensor(*parts)) == nbytes(parts) == 3*8 + 3*8 + 3*4
        jagged = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
        assert nbytes(jagged) == 6*3*4 + 3*8                       # six rows, three offsets
        with pytest.raises(ValueError, match='layout torch._mkldnn'): nbytes(torch.eye(4).to_mkldnn())
    assert nbytes(torch.empty(3, device='meta')) == 12
    assert nbytes(Holder(nn.Linear(2, 3), x)) == 9*4 + nbytes(x)
    assert nbytes([]) == nbytes(torch.empty(0)) == nbytes(None) == 0
    assert nbytes({'a': {torch.float32: [x, {x}]}}) == nbytes(x)


@pytest.mark.parametrize('n', (0, 1, 1023, 1024, 10**9, 2**34, 2**50, 2**63, 2**70))
def test_human_and_back(n):
    assert parse_bytes(f'{n}') == parse_bytes(f'{n}B') == parse_bytes(n) == n
    assert abs(parse_bytes(human(n)) - n) <= n / 200


# -- CUDA and the driver, by stand-ins: the bookkeeping, not the numbers

class Card:
    "An allocator with the names that torch.cuda has"
    def __init__(self): self.live = self.high = 0
    def take(self, n): self.live += n; self.high = max(self.high, self.live)

def test_meter_on_cuda(monkeypatch):
    card = Card()
    def stats(device):
        return {'requested_bytes.all.current': card.live, 'requested_bytes.all.peak': card.high,
                'allocated_bytes.all.peak': 2**30}                             # rounded up
    for name, fn in dict(init=lambda: None, is_available=lambda: True, memory_stats=stats,
                         reset_peak_memory_stats=lambda d: setattr(card, 'high', card.live)).items():
        monkeypatch.setattr(torch.cuda, name, fn)
    card.take(100); card.take(-50)
    with Meter(device='cuda') as outer:
        with Meter.phase('first'): card.take(30); card.take(-20)
        with Meter(device='cuda:0') as inner:
            assert (inner.start, inner.peak) == (60, 60)
            with Meter.phase('second'): card.take(5)
            card.take(-5)
        card.take(-60)
    assert (outer.start, outer.peak, outer.live, outer.phases) == (50, 80, 0, {'first': 80, 'second': 65})
    assert (inner.start, inner.peak, inner.live, inner.phases) == (60, 65, 60, {'second': 65})


def test_timed_waits_for_cuda(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: log.append('sync'))
    timed(lambda: log.append('call'), n=2, warmup=0)
    assert log == ['sync', 'call', 'sync'] * 2


@pytest.fixture
def driver(monkeypatch):
    "A driver with one card; the test changes what it answers"
    answers = dict(nvmlInit=None, nvmlShutdown=None, nvmlDeviceGetCount=1,
                   nvmlDeviceGetHandleByIndex='card',
                   nvmlDeviceGetName='Card', nvmlDeviceGetMemoryInfo=types.SimpleNamespace(used=3, total=9),
                   nvmlDeviceGetUtilizationRates=types.SimpleNamespace(gpu=42))
    def answer(name, *args):
        if isinstance(answers[name], Exception): raise answers[name]
        return answers[name]
    for name in answers: monkeypatch.setattr(pynvml, name, functools.partial(answer, name))
    return answers


def test_gpu_state(driver):
    assert gpu_state() == GPUState('Card', 3, 9, 42)
    assert str(gpu_state()) == 'Card: 3 B of 9 B used, 42 % busy'
    with pytest.raises(ValueError, match=r'0\.\.0 \(GPUs\), got 1'): gpu_state(1)
    for query in ('Name', 'MemoryInfo', 'UtilizationRates'):
        driver[f'nvmlDeviceGet{query}'] = pynvml.NVMLError_NotSupported()
    assert gpu_state() == GPUState()
    driver['nvmlDeviceGetCount'] = 0
    assert str(gpu_state()) == 'no NVIDIA GPU'


@pytest.mark.parametrize('error', (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded))
def test_no_driver(driver, error):
    driver['nvmlInit'] = error()
    assert gpu_state() == GPUState(note='no NVIDIA driver')
