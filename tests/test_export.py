"""A model out of Python: torch's layers, torch.export, and ONNX Runtime beside torch."""
import copy
import json

import pytest
import torch
from torch import nn

from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.engine.recurrent import GRU, LSTM, Recurrent
from gruckpt.quant.export import Served, export_onnx, export_program, servable
from gruckpt.quant.integers import to_integers
from gruckpt.quant.prepare import calibrate, prepare_qat
from gruckpt.tft.model import TFT, TFTSpec

SPEC = TFTSpec(static=2, observed=3, known=2, hidden=8, heads=2, lookback=6, horizon=3, observed_cats=(4,))


def inputs(served, B, T, seed=0):
    "Random inputs of these sizes"
    draw = torch.Generator().manual_seed(seed)
    n = 4 if served.tft else 12
    return tuple(torch.randn(t.shape, generator=draw) if t.is_floating_point()
                 else torch.randint(n, t.shape, generator=draw) for t in served.example(B, T))


def made(name, rounded):
    "A model, with integers if asked"
    torch.manual_seed(0)
    model = TFT(SPEC) if name == 'TFT' else GRULM(GRUSpec(12, 8, 2))
    if not rounded: return model.eval()
    like = Served(model)
    prepare_qat(model)
    names = ('static_reals', 'static_cats', 'past_reals', 'past_cats', 'known_reals', 'known_cats',
             'target_past')
    def run(m, given):
        if name != 'TFT': return m(given[0].t(), given[1])
        from gruckpt.tft.batch import WindowBatch
        named = dict(zip(like.inputs, given))
        return m(WindowBatch(*[named.get(o) for o in names], None, None, None, None))
    calibrate(model, [inputs(like, 8, 9, seed) for seed in range(3)], run)
    to_integers(model)
    return model.eval()


@pytest.mark.parametrize('rounded', [False, True])
@pytest.mark.parametrize('name', ['GRULM', 'TFT'])
def test_onnx_runtime_says_the_same(name, rounded, tmp_path):
    onnx, ort = pytest.importorskip('onnx'), pytest.importorskip('onnxruntime')
    model = made(name, rounded)
    served, path = Served(model), tmp_path/'m.onnx'
    nodes = export_onnx(model, path, {'spec': model.spec.to_dict(), 'symbols': 'añ'})
    assert nodes['LSTM' if name == 'TFT' else 'GRU'] == 2
    assert ('QuantizeLinear' in nodes) == ('DequantizeLinear' in nodes) == rounded
    assert [o.name for o in tmp_path.iterdir()] == ['m.onnx']
    kept = {o.key: json.loads(o.value) for o in onnx.load(str(path)).metadata_props}
    assert kept['symbols'] == 'añ' and kept['spec']['hidden'] == 8
    session = ort.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    assert [o.name for o in session.get_inputs()] == [*served.inputs]
    assert session.get_inputs()[0].shape[0] == 'batch'
    for B, T in (1, 1), (2, 9), (5, 30):
        given = inputs(served, B, T, B)
        with torch.no_grad(): want = served(*given)
        want = want if isinstance(want, tuple) else (want,)
        found = session.run(None, {k: t.numpy() for k, t in zip(served.inputs, given)})
        for a, b in zip(found, want):
            error = (torch.from_numpy(a) - b).norm() / b.norm()
            assert error <= (2e-2 if rounded else 1e-5)            # a runtime may multiply integers itself


FOUR_D = pytest.mark.skipif(
    torch.__version__.startswith('2.10.'),
    reason='an nn.LSTM given a state is exported by torch 2.10 with final states of four dimensions')


@pytest.mark.parametrize('name, rounded', [('GRULM', False), ('GRULM', True),
                                           pytest.param('TFT', True, marks=FOUR_D)])
def test_torch_export_says_the_same(name, rounded):
    model = made(name, rounded)
    served, program = Served(model), export_program(model, 2).module()
    for B in 2, 4:
        given = inputs(served, B, 2, B)
        with torch.no_grad(): want, got = served(*given), program(*given)
        for a, b in zip(*[o if isinstance(o, tuple) else (o,) for o in (got, want)]):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_the_model_stays_as_it_is():
    model = made('TFT', False)
    state, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    servable(model)
    assert [type(m) for m in model.modules()] == kinds and type(model.lstm_encoder) is LSTM
    assert all(model.state_dict()[k].equal(v) for k, v in state.items())


def test_what_has_no_node_is_refused_in_one_line(tmp_path):
    layers = {"cell 'gru after rms' and norm='state'": GRU(3, 4, norm='state'),
              "cell 'gru before'": GRU(3, 4, reset='before'), "cell 'mingru'": Recurrent('mingru', 3, 4),
              "cell 'gru after' and norm='output'": GRU(3, 4, norm='output')}
    for what, layer in layers.items():
        wrong = f'0: ONNX has no node for a recurrent layer with the {what}; train a GRU with reset after'
        with pytest.raises(ValueError, match=wrong) as e: servable(nn.Sequential(layer))
        assert '\n' not in str(e.value)
    lm = GRULM(GRUSpec(12, 8, 2, norm='state', reset='before'))
    with pytest.raises(ValueError, match='no node'): Served(lm)


def test_without_onnx_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'onnx', None)
    with pytest.raises(ValueError, match=r"pip install 'gruckpt\[onnx\]'"):
        export_onnx(made('GRULM', False), tmp_path/'a', {})
    assert not [*tmp_path.iterdir()]
