"""`estimate_any` against a meter on small models of the kinds that packages hold, and what fits of them."""
import torch
import pytest
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, rnn

from gruckpt.charlm.model import GRUSpec
from gruckpt.engine.convert import convert
from gruckpt.plan.budget import estimate_any, fit, max_batch, max_length, what_fits
from gruckpt.measure.meter import Meter, nbytes, parse_bytes
from gruckpt.measure.shadow import NotFollowed, shadow

MAKE = {'sgd': lambda ps: torch.optim.SGD(ps, lr=.1), 'adamw': lambda ps: torch.optim.AdamW(ps, fused=True),
        'adamw foreach': lambda ps: torch.optim.AdamW(ps, foreach=True)}


class Tagger(nn.Module):
    "Embedding, LSTM in both directions, tied in and out"
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(30, 12), nn.LSTM(12, 6, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(12, 30)
        self.out.weight = self.embed.weight
    def forward(self, ids): return self.out(self.lstm(self.embed(ids))[0])


class Packed(Tagger):
    "The same over sequences of other lengths, which only values tell"
    def forward(self, batch):
        ids, lens = batch
        packed = rnn.pack_padded_sequence(self.embed(ids), lens, batch_first=True, enforce_sorted=False)
        return self.out(rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


class Filling(nn.Module):
    "Writes steps into a buffer that it made, through views, and reads them back"
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 3)
        self.register_buffer('scale', torch.ones(8))
    def forward(self, x):
        seen, h = torch.zeros(x.shape[1], x.shape[0], 8), x.new_zeros(len(x), 8)
        for t, step in enumerate(x.unbind(1)):
            h = self.cell(step, h)
            row = seen[t]
            row.copy_(h)
            row.mul_(self.scale)
            h = row.tanh()
        return self.head(seen)


class Anew(Tagger):
    "Pickles as the numbers of its weights, and builds itself anew from them: what was changed since is gone"
    def __getstate__(self): return {'numbers': self.state_dict()}
    def __setstate__(self, state):
        self.__init__()
        self.load_state_dict(state['numbers'])


def wider(kind):
    "One whose head was replaced since"
    model = kind()
    model.out = nn.Linear(12, 90)
    return model


class AnewPacked(Anew, Packed):
    "The same, run for real"


class Conv(nn.Module):
    "Batch norm with its buffers, dropout, a parametrized layer, a residual written in place"
    def __init__(self):
        super().__init__()
        self.conv, self.norm = parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1)), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        y = F.dropout(self.norm(self.conv(x.transpose(1, 2))).relu_(), .1)
        y += x.transpose(1, 2)
        return self.head(y.mean(-1))


def hooked():
    "Hooks of modules, and of a parameter"
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_full_backward_hook(lambda module, at_in, at_out: None)
    model[2].weight.register_hook(lambda grad: grad.clamp(-1, 1))
    return model


IDS, X = torch.randint(30, (4, 9)), torch.randn(4, 9, 8)
LENS = (IDS, torch.tensor([9, 3, 5, 1]))
MODELS = {'lstm, tied': (Tagger, IDS), 'packed': (Packed, LENS), 'views': (Filling, X), 'buffers': (Conv, X),
          'hooks': (hooked, X), 'anew': (lambda: wider(Anew), IDS),
          'anew, packed': (lambda: wider(AnewPacked), LENS),
          'transformer': (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), X)}


def loss(model, batch): return model(batch).float().square().mean()


def metered(model, batch, optimizer, narrow=None, scale=1.):
    "Phases of the second of two steps, with all that is handed over"
    opt = MAKE[optimizer]([p for p in model.parameters() if p.requires_grad])
    held = nbytes(model) + nbytes(batch)
    def step():
        opt.zero_grad()
        cast = torch.autocast('cpu', narrow or torch.bfloat16, enabled=narrow is not None)
        with Meter.phase('forward'), cast:
            n = loss(model, batch)
        with Meter.phase('backward'): (n * scale if scale != 1 else n).backward()
        with Meter.phase('update'): opt.step()
    with torch.backends.mkldnn.flags(enabled=False):
        step()
        opt.zero_grad()
        with Meter(model, opt, batch) as meter: step()
    assert held <= meter.start
    return meter.phases


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('kind, optimizer', [*((kind, 'adamw') for kind in MODELS),
                                             *(('buffers', o) for o in MAKE if o != 'adamw')])
def test_a_model_of_others_is_counted(kind, optimizer):
    torch.manual_seed(0)
    make, batch = MODELS[kind]
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ledger = estimate_any(model, batch, loss, optimizer)
    assert bool(ledger.note) == kind.endswith('packed')
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert ledger.phases == metered(model, batch, optimizer)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('precision, narrow, scale', [
    ('bfloat16', torch.bfloat16, 1.), ('float16', torch.float16, 128.), ('float32', None, 1.)])
@pytest.mark.parametrize('kind', ['views', 'hooks'])
def test_precision_is_an_argument(kind, precision, narrow, scale):
    torch.manual_seed(0)
    make, batch = MODELS[kind]
    model = make()
    ledger = estimate_any(model, batch, loss, 'sgd', precision=precision)
    assert ledger.phases == metered(model, batch, 'sgd', narrow, scale)


def test_what_is_run_for_real_says_so_and_stops_in_time(monkeypatch):
    torch.manual_seed(0)
    model = Packed()
    drawn = torch.get_rng_state()
    ledger = estimate_any(model, LENS, loss, 'adamw')
    assert torch.equal(drawn, torch.get_rng_state())
    assert 'run for real' in ledger.note and ledger.note in str(ledger)
    assert ledger.note in ledger._repr_markdown_()
    monkeypatch.setattr('gruckpt.plan.budget._free', lambda: 2 * nbytes((model, LENS)))
    with pytest.raises(MemoryError, match='more than its limit'): estimate_any(model, LENS, loss, 'adamw')
    monkeypatch.setattr('gruckpt.plan.budget._free', lambda: 100)
    with pytest.raises(NotFollowed, match='no memory for a real run'):
        estimate_any(model, LENS, loss, 'adamw')
    with pytest.raises(NotFollowed, match='weights on cpu'): estimate_any(Packed().to('meta'), LENS, loss)


def test_wrong_optimizers_and_precisions():
    with pytest.raises(ValueError, match='optimizer must be one of'): estimate_any(hooked(), X, loss, 'adam')
    with pytest.raises(ValueError, match='precision must be one of'):
        estimate_any(hooked(), X, loss, precision='int8')
    with pytest.raises(ValueError, match=r'hand over model.to\(torch.bfloat16\)'):
        estimate_any(hooked(), X, loss, precision='pure bfloat16')


def sliced(w, x):
    y = x @ w
    left, right = y[:, :2], y[:, 2:]
    left.mul_(2.)
    right.add_(left.sum())
    return (left.sum(1) * right.sum(1)).sum()


def rows(w, x):
    y = x @ w
    for t in range(1, len(y)):
        row = y[t]
        row.mul_(2).add_(y[t - 1])
    return torch.cat([y[0], row]).exp().sum()


def through_linear(w, x):
    y = x @ w
    view = y[:, 1:3]
    F.relu(view, inplace=True)
    return F.linear(F.dropout(view, .5), torch.ones(3, 2)).exp().sum()


@pytest.mark.parametrize('fn', [sliced, rows, through_linear])
def test_views_written_in_place_are_followed(fn):
    def step(w, x):
        with Meter.phase('forward'): n = fn(w, x)
        with Meter.phase('backward'): n.backward()
    w, x = torch.randn(6, 8, requires_grad=True), torch.randn(5, 6)
    dark = shadow(step, w, x)
    with Meter() as meter: step(w, x)
    assert dark.phases == meter.phases and dark.peak == meter.peak


TURNED = {
    'batch norm': lambda t, ids: F.batch_norm(t, None, None, training=True),
    'log sigmoid': lambda t, ids: F.logsigmoid(t),
    'cross entropy': lambda t, ids: F.cross_entropy(t, ids),
    'mse': lambda t, ids: F.mse_loss(t, t.detach().cos()),
    'smooth l1': lambda t, ids: F.smooth_l1_loss(t, t.detach().cos()),
    'huber': lambda t, ids: F.huber_loss(t, t.detach().cos())}
IMAGES = {
    'batch norm': lambda t: F.batch_norm(t, None, None, training=True),
    'reflected': lambda t: F.pad(t, (1, 1, 1, 1), 'reflect'),
    'replicated': lambda t: F.pad(t, (1, 1, 1, 1), 'replicate')}


@pytest.mark.parametrize('op', TURNED)
def test_results_are_in_the_order_of_a_cpu(op):
    "Of steps in another order than rows; what is in rows need not be copied to be so"
    def step(leaf, ids):
        turned = leaf.transpose(1, 2).exp()
        turned.register_hook(in_rows)
        out = TURNED[op](turned, ids)
        with Meter.phase('result'): out = out.contiguous()
        out.square().sum().backward()
    def in_rows(grad):
        with Meter.phase('gradient'): return grad.contiguous()
    leaf, ids = torch.randn(4, 9, 8, requires_grad=True), torch.randint(8, (4, 9))
    dark = shadow(step, leaf, ids)
    with Meter() as meter: step(leaf, ids)
    assert (dark.phases, dark.live) == (meter.phases, meter.live)


@pytest.mark.parametrize('op', IMAGES)
def test_channels_stay_last(op):
    def step(leaf):
        image = leaf.exp()
        image.register_hook(last)
        out = IMAGES[op](image)
        with Meter.phase('result'): out = out.contiguous(memory_format=torch.channels_last)
        out.square().sum().backward()
    def last(grad):
        with Meter.phase('gradient'): return grad.contiguous(memory_format=torch.channels_last)
    leaf = torch.randn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
    dark = shadow(step, leaf)
    with Meter() as meter: step(leaf)
    assert (dark.phases, dark.live) == (meter.phases, meter.live)


# ---- the largest that fits ----

class Small(Tagger):
    "One layer of it"
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(12, 12, batch_first=True)


def ids_of(batch, n_steps): return torch.randint(30, (batch, n_steps))


def packed_of(batch, n_steps): return ids_of(batch, n_steps), torch.full((batch,), n_steps)


def total(model, batch): return int(estimate_any(model, batch, loss, run=True).total)


@pytest.mark.filterwarnings('ignore:.*nested')
@pytest.mark.parametrize('kind, make, limit', [
    (Small, ids_of, '60KiB'), (Packed, packed_of, '80KiB'), ('converted', ids_of, '50KiB'),
    ('attention', lambda b, t: torch.randn(b, t, 8), '120KiB')])
def test_the_answer_fits_and_one_more_does_not(kind, make, limit):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) if kind == 'attention' else None
    model = model or (Small if kind == 'converted' else kind)()
    if kind == 'converted': convert(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    most = parse_bytes(limit)
    n = max_length(model, make, loss, limit, batch=2)
    assert total(model, make(2, n)) <= most < total(model, make(2, n + 1)) and n > 8
    n = max_batch(model, make, loss, most, n_steps=6)
    assert total(model, make(n, 6)) <= most < total(model, make(n + 1, 6)) and n > 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_fits_of_a_model_is_both_answers():
    torch.manual_seed(0)
    model, how = Small(), dict(optimizer='sgd')
    frame = what_fits(model, ids_of, loss, '30KiB', batch=2, n_steps=6, **how)
    assert frame.largest['batch'] == max_batch(model, ids_of, loss, '30KiB', n_steps=6, **how)
    assert frame.largest['steps'] == max_length(model, ids_of, loss, '30KiB', batch=2, **how)
    assert (frame.bytes <= 30 * 1024).all() and (frame['of one more'] > 30 * 1024).all()
    assert frame.counted.all()
    bound = what_fits(model, ids_of, loss, '30KiB', batch=2, n_steps=6, most={'batch': 3, 'steps': 1}, **how)
    assert list(bound.largest) == [3, 1]
    none = what_fits(model, ids_of, loss, '1KiB', batch=2, n_steps=6, **how)
    assert list(none.largest) == [0, 0] and (none['of one more'] > 1024).all()


def test_a_model_on_meta_and_a_count_that_would_take_too_long():
    torch.manual_seed(0)
    here = Small()
    with torch.device('meta'): on_meta = Small()
    want = max_length(here, ids_of, loss, '60KiB', batch=2, optimizer='sgd')
    assert max_length(on_meta, ids_of, loss, '60KiB', batch=2, optimizer='sgd') == want
    with pytest.warns(UserWarning, match=r'steps \d+ is not counted, .* through steps \[8, 16\]'):
        found = max_length(here, ids_of, loss, '60KiB', batch=2, optimizer='sgd', seconds=0.)
    assert found == want                                      # an LSTM's bytes lie on the line
    with pytest.warns(UserWarning):
        frame = what_fits(here, ids_of, loss, '60KiB', 2, 1, optimizer='sgd', seconds=0.)
    assert not frame.counted.any() and (frame.bytes <= 60 * 1024).all()


class Still(nn.Module):
    "Nothing of it grows with the batch"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))
    def forward(self, n): return self.w * n


@pytest.mark.parametrize('ask, said', [
    (lambda m: max_length(m, 3, loss, 9), 'make_batch must be a function'),
    (lambda m: max_length(m, lambda n: n, loss, 9), r'make_batch must take \(batch, n_steps\)'),
    (lambda m: max_batch(m, ids_of, None, 9), 'loss must be a function of'),
    (lambda m: max_batch(m, ids_of, loss, 9, n_steps=0), 'n_steps must be an integer of at least 1, got 0'),
    (lambda m: max_length(m, ids_of, loss, 9, batch=2.), 'batch must be an integer of at least 1, got 2.0'),
    (lambda m: max_length(m, ids_of, loss, 'a lot'), "'8GiB'.*got 'a lot'"),
    (lambda m: max_batch(m, ids_of, loss, 9, most=0), 'most must be None or an integer of at least 1'),
    (lambda m: what_fits(m, ids_of, loss, 9, most={'hidden': 3}), 'most of a model may name batch and steps'),
    (lambda m: max_batch(nn.Tanh(), ids_of, loss, 9), 'no parameter that requires a gradient'),
    (lambda m: max_batch(Still(), lambda b, t: b, loss, 10**6, 1), 'do not grow .*: give `most`'),
    (lambda m: max_batch(3, 9, 9), 'a spec such as GRUSpec, or an nn.Module, got int'),
    (lambda m: max_length('x', 9, 9), 'a spec such as GRUSpec, or an nn.Module, got str'),
    (lambda m: what_fits(None, 9), 'a spec such as GRUSpec, or an nn.Module, got NoneType')])
def test_wrong_questions_are_one_line(ask, said):
    with pytest.raises(ValueError, match=said) as e: ask(Small())
    assert '\n' not in str(e.value)


def test_a_spec_has_a_longest_window_too():
    spec = GRUSpec(vocab_size=30, hidden=16)
    n = max_length(spec, 2, '1MiB')
    assert n == what_fits(spec, '1MiB', 2, 8)['any cut']['steps'] and max_length(spec, 2, '1MiB', most=7) == 7
    assert fit(spec, 2, n, '1MiB')
    with pytest.raises(ValueError, match='no plan'): fit(spec, 2, n + 1, '1MiB')
