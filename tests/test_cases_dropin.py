"""A drop-in that is one: cases N03, N08 (what the report says), N11, N12, N13."""
import copy
import pickle
import warnings
from abc import ABC, abstractmethod

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gruckpt.engine.convert import Conversion, convert, revert
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.engine.recurrent import GRU, LSTM
from gruckpt.measure.meter import Meter
from gruckpt.plan.segment import Plan
from gruckpt.charlm.text import Batch

F64 = torch.float64
KINDS = [(nn.GRU, GRU), (nn.LSTM, LSTM)]
both_kinds = pytest.mark.parametrize('torchs,ours', KINDS, ids=['gru', 'lstm'])


def close(a, b, eps=1e-10):
    for x, y in zip(a, b, strict=True): assert x.shape == y.shape and (x - y).norm() <= eps * (1 + y.norm())


def results(model, *args):
    "The outputs and the gradients of all parameters"
    torch.manual_seed(0)
    flat = torch.utils._pytree.tree_leaves(model(*args))
    total = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in flat)
    return flat + list(torch.autograd.grad(total, list(model.parameters())))


def same_after_convert(model, *args, **options):
    want = results(model, *args)
    report = convert(model, **options)
    close(results(model, *args), want)
    return report


# N03: weights that are plain attributes

class WeightDrop(nn.Module):
    "AWD-LSTM's old wrapper: the raw weight is a parameter of its own, the layer's is a plain tensor"
    def __init__(self, module, name):
        super().__init__()
        self.module, self.name = module, name
        raw = getattr(module, name)
        del module._parameters[name]
        self.register_parameter(name + '_raw', nn.Parameter(raw.data))
        self.put()

    def put(self):
        raw = getattr(self, self.name + '_raw')
        setattr(self.module, self.name, nn.functional.dropout(raw, .5))
    def forward(self, *args):
        self.put()
        return self.module(*args)


@both_kinds
def test_N03_plain_attribute_weights_are_followed(torchs, ours):
    torch.manual_seed(0)
    model, x = WeightDrop(torchs(3, 4), 'weight_hh_l0').double(), torch.randn(7, 2, 3, dtype=F64)
    report = same_after_convert(model, x)
    assert isinstance(model.module, ours) and 'weight_hh_l0' not in dict(model.module.named_parameters())
    assert report.layers[0].carried == ('weights set from outside: weight_hh_l0',)


def test_N03_a_missing_weight_is_refused_and_nothing_is_changed():
    model = nn.ModuleList([nn.GRU(2, 2), nn.LSTM(2, 2)])
    del model[1].weight_hh_l0
    with pytest.raises(ValueError, match='1: weight_hh_l0 is None, it must be a tensor'): convert(model)
    assert [type(m) for m in model] == [nn.GRU, nn.LSTM]


# N08: what the report says

def test_N08_the_report_says_where_cutting_saves_little():
    both = nn.GRU(8, 8, 2, bidirectional=True)
    model = nn.ModuleDict(dict(one=nn.GRU(8, 8), both=both, deep=nn.GRU(8, 8, 8)))
    report = convert(model, seg_len=32, batch=4, steps=1024)
    assert [o.split(':')[0] for o in report.notes] == ['one', 'both']
    assert '128.00 KiB are the output itself' in report.notes[0] and 'both directions' in report.notes[1]
    assert report.at(8, 1024).before == 2 * report.before and not convert(nn.GRU(8, 8)).notes
    for text in (repr(report), report._repr_markdown_()): assert 'little to save' in text and 'saves' in text


def alive(rnn, batch, steps):
    "Bytes alive after the forward pass"
    shape = (batch, steps, 5) if rnn.batch_first else (steps, batch, 5)
    x = torch.randn(shape, dtype=F64).requires_grad_()
    with Meter() as meter:
        held = rnn(x)
        return meter.live if held else 0


@both_kinds
@pytest.mark.parametrize('options', [{}, {'num_layers': 3},
                                     {'num_layers': 2, 'bidirectional': True, 'batch_first': True}])
def test_N08_the_report_counts_what_is_measured(torchs, ours, options):
    for more in ({}, {'keep': 'gates'}, {'seg_len': 6}, {'seg_len': 7, 'keep': 'gates'}):
        rnn = torchs(5, 8, **options).double()
        before = alive(rnn, 3, 20)
        report = convert(rnn, batch=3, steps=20, **more)
        assert (report.before, report.after) == (before, alive(rnn, 3, 20))


# N11: torch's layer by class and by call

@both_kinds
@pytest.mark.parametrize('seg_len', [None, 3])
def test_N11_torchs_names_and_calls(torchs, ours, seg_len):
    torch.manual_seed(0)
    theirs, mine = torchs(3, 4, 2), ours(3, 4, 2, seg_len=seg_len)
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    assert isinstance(mine, torchs) and isinstance(mine, nn.RNNBase) and mine.mode == theirs.mode
    assert mine._all_weights == theirs._all_weights and mine._flat_weights_names == theirs._flat_weights_names
    assert all(a is b for a, b in zip(mine._flat_weights, mine.parameters(), strict=True))
    assert [[tuple(w.shape) for w in ws] for ws in mine.all_weights] == \
        [[tuple(w.shape) for w in ws] for ws in theirs.all_weights]
    x, h = torch.randn(7, 2, 3), torch.randn(2, 2, 4)
    h = (h, h * 2) if torchs is nn.LSTM else h
    want = theirs(x, h)[0]
    for out in (mine(x, hx=h), mine(input=x, hx=h), mine(x, h)): close([out[0]], [want], 1e-5)


@both_kinds
def test_N11_flat_weights_are_those_of_now(torchs, ours):
    rnn = ours(3, 4)
    rnn.weight_hh_l0 = nn.Parameter(torch.zeros_like(rnn.weight_hh_l0))
    assert rnn._flat_weights[1] is rnn.weight_hh_l0
    assert rnn.to(F64)._flat_weights[1].dtype == F64
    rnn.flatten_parameters()
    prune.l1_unstructured(rnn, 'weight_ih_l0', .5)
    rnn(torch.randn(5, 2, 3, dtype=F64))
    assert rnn._flat_weights[0] is rnn.weight_ih_l0 and not isinstance(rnn.weight_ih_l0, nn.Parameter)
    replica = rnn._replicate_for_data_parallel()
    assert type(replica) is ours and len(replica._flat_weights_names) == 4


@both_kinds
def test_N11_copies_and_pickles_old_ones_too(torchs, ours):
    rnn, x = ours(3, 4, 2, bidirectional=True, seg_len=2), torch.randn(5, 2, 3)
    for twin in (copy.copy(rnn), copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert torch.equal(twin(x)[0], rnn(x)[0]) and twin.mode == rnn.mode
    now = rnn.__getstate__()
    old = {k: v for k, v in now.items() if k not in ('mode', '_all_weights', '_flat_weights_names')}
    read = ours.__new__(ours)
    read.__setstate__(old)                       # a pickle of a layer that was not torch's by class
    assert read._all_weights == rnn._all_weights and torch.equal(read(x)[0], rnn(x)[0])
    assert read.mode == rnn.mode and read.double().weight_hh_l0.dtype == F64


# N12: convert and revert

class Hooked(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.seen = rnn, []
        rnn.register_buffer('scale', torch.ones(2))
        rnn.label = 'kept'
        rnn.register_forward_hook(lambda *o: self.seen.append('forward'))
        rnn.register_forward_pre_hook(lambda *o: self.seen.append('pre'))
        rnn.register_full_backward_hook(lambda *o: self.seen.append('backward'))
        rnn.register_full_backward_pre_hook(lambda *o: self.seen.append('backward pre'))
        rnn.register_state_dict_post_hook(lambda *o: self.seen.append('state_dict'))
        rnn.register_load_state_dict_post_hook(lambda *o: self.seen.append('load'))
    def forward(self, x): return self.rnn(x)


@both_kinds
def test_N12_everything_is_carried_and_comes_back(torchs, ours):
    torch.manual_seed(0)
    model, x = Hooked(torchs(3, 4).double()).eval(), torch.randn(5, 2, 3, dtype=F64, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters())
    object_, params, keys = model.rnn, dict(model.named_parameters()), list(model.state_dict())
    model.rnn.weight_hh_l0.requires_grad_(False)
    attributes = {k for k in vars(model.rnn)}
    report = convert(model, seg_len=2)
    assert model.rnn is object_ and isinstance(object_, ours) and not object_.training
    assert list(report) == ['rnn'] and 'rnn' in report and len(report) == 1
    said = ', '.join(report.layers[0].carried)
    for word in ('buffers scale', 'attributes label', '1 forward hook', '1 forward pre-hook',
                 '1 backward hook', '1 backward pre-hook', '1 state_dict hook',
                 '1 load_state_dict post-hook'):
        assert word in said
    for _ in range(2):
        del model.seen[:]
        model(x)[0].sum().backward()
        model.load_state_dict(model.state_dict())
        assert model.seen == ['pre', 'forward', 'backward pre', 'backward', 'state_dict', 'load']
        assert list(model.state_dict()) == keys and object_.label == 'kept'
        assert all(params[n] is p for n, p in model.named_parameters())
        assert all(a is b for a, b in zip(optimizer.param_groups[0]['params'], model.parameters()))
        assert not object_.weight_hh_l0.requires_grad
        if isinstance(object_, ours): assert revert(model) == ('rnn',)
    assert type(object_) is torchs and {k for k in vars(object_)} == attributes


def test_N12_what_is_left_is_named():
    class Own(nn.GRU):
        def forward(self, input, hx=None): return input, hx
    class Checked(nn.GRU):
        def check_input(self, *args): pass
    model = nn.ModuleDict(dict(rnn=nn.RNN(2, 2), cell=nn.LSTMCell(2, 2), own=Own(2, 2),
                               checked=Checked(2, 2), scripted=torch.jit.script(nn.GRU(2, 2)),
                               good=nn.GRU(2, 2)))
    model.more = [nn.LSTM(2, 2)]
    report = convert(model)
    assert report.converted == ('good',)
    assert {o.name: o.why.split(' ')[0] for o in report.left} == {
        'rnn': 'neither', 'cell': 'called', 'own': 'forward', 'checked': 'check_input',
        'scripted': 'compiled',
        'more[0]': 'in'}
    for o in report.left: assert o.name in repr(report) and o.why in report._repr_markdown_()


def test_N12_refusal_changes_nothing():
    model = nn.Sequential(nn.GRU(2, 2), nn.GRU(2, 2))
    model[1].forward = model[1].forward
    for options, said in [({}, '1: its forward was replaced on the object'),
                          (dict(seg_len=0), 'seg_len must be'), (dict(keep='x'), 'keep must be'),
                          (dict(batch=0), 'batch must be an int of at least 1')]:
        with pytest.raises(ValueError, match=said): convert(model, **options)
        assert [type(m) for m in model] == [nn.GRU, nn.GRU] and 'seg_len' not in vars(model[0])
    with pytest.raises(ValueError, match='it holds Linear'): convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r'nothing to convert; 0 \(GRUCell\): called'):
        convert(nn.ModuleList([nn.GRUCell(2, 2)]))
    with pytest.raises(ValueError, match='must be an nn.Module'): convert('gru')
    normed = nn.ModuleList([GRU(2, 2), GRU(2, 2, norm='state')])
    with pytest.raises(ValueError, match="1: torch has no layer with norm='state'"): revert(normed)
    assert type(normed[0]) is GRU


def test_N12_models_that_are_a_layer_or_share_one_or_come_twice():
    layer = nn.LSTM(2, 2)
    assert convert(layer).converted == ('',) and type(layer) is LSTM
    model = nn.ModuleDict(dict(a=nn.Sequential(nn.GRU(2, 2))))
    model['b'] = model['a']
    assert convert(model['a']).converted == ('0',)                                  # a part of a model
    again = convert(model, seg_len=4)
    assert isinstance(again, Conversion) and len(again) == 0 and again.told == ('a.0', 'b.0')
    assert model['b'][0].seg_len == 4 and "gruckpt's before" in repr(again)
    assert revert(model) == ('a.0', 'b.0') and type(model['a'][0]) is nn.GRU
    with pytest.raises(ValueError, match='no layer of gruckpt'): revert(model)


class Doubled(nn.Module):
    def forward(self, w): return 2 * w


@both_kinds
def test_N12_parametrized_layers_and_back(torchs, ours):
    torch.manual_seed(0)
    rnn, x = torchs(3, 4).double(), torch.randn(5, 2, 3, dtype=F64)
    parametrize.register_parametrization(rnn, 'weight_hh_l0', Doubled())
    names, report = list(rnn.state_dict()), same_after_convert(rnn, x)
    assert report.layers[0].carried == ('parametrizations of weight_hh_l0',) and isinstance(rnn, ours)
    want, twin = rnn(x)[0], copy.deepcopy(rnn)
    close([twin(x)[0]], [want])
    revert(rnn)
    assert list(rnn.state_dict()) == names and not isinstance(rnn, ours)
    close([rnn(x)[0]], [want])
    parametrize.remove_parametrizations(rnn, 'weight_hh_l0')
    parametrize.remove_parametrizations(twin, 'weight_hh_l0')
    assert type(rnn) is torchs and type(twin) is ours


WRAPS = {'prune': lambda r: prune.random_unstructured(r, 'weight_hh_l0', .5),
         'weight_norm': lambda r: torch.nn.utils.weight_norm(r, 'weight_hh_l0')}


@pytest.mark.parametrize('wrap', WRAPS.values(), ids=WRAPS)
def test_N12_hooks_that_compute_weights(wrap):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)
        rnn = nn.GRU(3, 4).double()
        wrap(rnn)
    same_after_convert(rnn, torch.randn(5, 2, 3, dtype=F64))


# wrappers of packages, in little

class SpeechBrainLSTM(nn.Module):
    "speechbrain.nnet.RNN.LSTM: hx= by name, relative lengths, flatten_parameters at each call"
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(input_size=3, hidden_size=4, num_layers=2, dropout=0., bidirectional=True,
                           bias=True, batch_first=True)
        for name, p in self.rnn.named_parameters():
            if 'weight_hh' in name: nn.init.orthogonal_(p)
    def forward(self, x, hx, lengths):
        self.rnn.flatten_parameters()
        x = pack_padded_sequence(x, (lengths * x.size(1)).cpu(), batch_first=True, enforce_sorted=False)
        output, hn = self.rnn(x, hx=hx)
        return pad_packed_sequence(output, batch_first=True)[0], hn


class FlairRNN(nn.Module):
    "flair's DocumentRNNEmbeddings and LanguageModel: all_weights, an _apply of its own, isinstance"
    def __init__(self):
        super().__init__()
        self.rnn, self.state_count = nn.LSTM(3, 4, 2), 2
    def _apply(self, fn):
        for child in self.children():
            if isinstance(child, nn.RNNBase): assert hasattr(child, '_flat_weights_names')
            child._apply(fn)
        return self
    def forward(self, x):
        if hasattr(self.rnn, 'flatten_parameters'): self.rnn.flatten_parameters()
        zero = torch.zeros(2, x.shape[1], 4, dtype=self.rnn.all_weights[0][0].dtype)
        return self.rnn(x, (zero, zero))


class FlexibleRNN(ABC, nn.RNNBase):
    "pytorch_forecasting.models.nn.rnn.RNN: a forward that hands on, and rows without a step"
    @abstractmethod
    def init_hidden_state(self, x): pass
    def forward(self, x, hx=None, lengths=None, enforce_sorted=True):
        if lengths is None: return super().forward(x, hx=hx)
        packed = pack_padded_sequence(x, lengths.clamp(min=1), batch_first=True,
                                      enforce_sorted=enforce_sorted)
        out, (h, c) = super().forward(packed, hx=hx)
        empty, (h_0, c_0) = (lengths == 0)[None, :, None], self.init_hidden_state(x)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return out, (torch.where(empty, h_0, h), torch.where(empty, c_0, c))


class FlexibleLSTM(FlexibleRNN, nn.LSTM):
    def init_hidden_state(self, x):
        zero = torch.zeros(self.num_layers, x.size(0), self.hidden_size, dtype=x.dtype)
        return zero, zero


class NeuralForecastRNN(nn.Module):
    "neuralforecast.models: an encoder that carries its state between calls"
    def __init__(self):
        super().__init__()
        self.hist_encoder = nn.GRU(3, 4, num_layers=2, bias=True, dropout=0., batch_first=True)
        self.rnn_state = None
    def forward(self, x):
        first, state = self.hist_encoder(x, self.rnn_state)
        return torch.cat([first, self.hist_encoder(x[:, :1], state)[0]], 1)


@pytest.mark.parametrize('seg_len', [None, 3])
@pytest.mark.parametrize('name', ['speechbrain', 'flair', 'pytorch_forecasting', 'neuralforecast'])
def test_N11_N12_wrappers_of_packages(name, seg_len):
    torch.manual_seed(0)
    x, hx = torch.randn(2, 7, 3, dtype=F64), torch.randn(4, 2, 4, dtype=F64)
    make, args = {'speechbrain': (SpeechBrainLSTM, (x, (hx, hx), torch.tensor([.6, 1.]))),
                  'flair': (FlairRNN, (x.transpose(0, 1),)),
                  'pytorch_forecasting': (lambda: FlexibleLSTM(3, 4, 2, batch_first=True),
                                          (x, None, torch.tensor([7, 0]))),
                  'neuralforecast': (NeuralForecastRNN, (x,))}[name]
    model = make().double()
    assert len(same_after_convert(model, *args, seg_len=seg_len)) == 1
    model.double()
    twin = pickle.loads(pickle.dumps(model))
    close(results(twin, *args), results(model, *args))
    revert(model)
    close(results(model, *args), results(twin, *args))


# N13: compiled, exported, traced, without numbers

class Around(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(3, 3), rnn, nn.Linear(4, 2)
    def forward(self, x): return self.last(self.rnn(self.first(x).relu())[0]).sum()


def breaks(fn, *args):
    "Graph breaks where the code of `fn` itself is compiled, the result, and the plain one"
    graphs = []
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):      # else no function that calls an nn.GRU is compiled
        return torch.compile(fn, backend=backend)(*args), torch._dynamo.explain(fn)(*args).graph_break_count


@pytest.mark.parametrize('make', [lambda: GRU(3, 4, seg_len=3), lambda: LSTM(3, 4, keep='gates'),
                                  lambda: GRU(3, 4, norm='state', seg_len=3)],
                         ids=['seg_len', 'gates', 'norm'])
def test_N13_compile_around_a_layer(make):
    torch.manual_seed(0)
    model, x = Around(make()), torch.randn(7, 2, 3)
    loss, n = breaks(model, x)
    assert n == 1
    found = torch.autograd.grad(loss, list(model.parameters()))
    close([loss, *found], [model(x), *torch.autograd.grad(model(x), list(model.parameters()))], 1e-5)


def test_N13_compile_around_a_loss():
    torch.manual_seed(0)
    model, ids = GRULM(GRUSpec(vocab_size=9, hidden=4, n_layers=2)), torch.randint(9, (2, 13))
    def loss(ids): return model.loss(Batch(ids[:, :-1], ids[:, 1:], True), plan=Plan.split(12, 3))[0].exp()
    got, n = breaks(loss, ids)
    assert n == 1
    close(torch.autograd.grad(got, list(model.parameters())),
          torch.autograd.grad(loss(ids), list(model.parameters())), 1e-5)


@both_kinds
def test_N13_export_and_trace_hold_torchs_operator(torchs, ours):
    torch.manual_seed(0)
    rnn, x = ours(3, 4, 2, seg_len=3), torch.randn(7, 2, 3)
    want, word = rnn(x)[0], torchs.__name__.lower()
    with torch.no_grad():
        exported, traced = torch.export.export(rnn, (x,)), torch.jit.trace(rnn, (x,))
    assert any(word in str(node.target) for node in exported.graph.nodes)
    close([exported.module()(x)[0], traced(x)[0]], [want, want], 1e-5)
    longer = torch.randn(11, 2, 3)
    close([traced(longer)[0]], [rnn(longer)[0]], 1e-5)                       # no step is unrolled


def test_N13_a_layer_that_torch_has_not_is_exported_as_a_loop():
    rnn, x = GRU(3, 4, norm='state', reset='before', seg_len=3), torch.randn(7, 2, 3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore', torch.jit.TracerWarning)
        exported, traced = torch.export.export(rnn, (x,)), torch.jit.trace(rnn, (x,))
    close([exported.module()(x)[0], traced(x)[0]], [rnn(x)[0]] * 2, 1e-5)


@pytest.mark.parametrize('make', [lambda **kw: GRU(3, 4, 2, seg_len=3, **kw),
                                  lambda **kw: LSTM(3, 4, keep='gates', **kw),
                                  lambda **kw: GRU(3, 4, norm='state', **kw)], ids=['gru', 'lstm', 'norm'])
def test_N13_meta(make):
    rnn, x = make(device='meta'), torch.empty(7, 2, 3, device='meta')
    out, _ = rnn(x)
    assert out.shape == (7, 2, 4) and out.device.type == 'meta'
    out.sum().backward()
    packed, _ = rnn(pack_padded_sequence(x, torch.tensor([7, 7])))
    assert packed.data.shape == (14, 4)


def test_N13_torchscript_is_told_what_to_do():
    model = nn.Sequential(nn.GRU(2, 2))
    convert(model)
    with pytest.raises(RuntimeError, match=r'gruckpt.engine.convert.revert\(model\)'): torch.jit.script(model)
    revert(model)
    torch.jit.script(model[0])
