"""Models of other packages: `make test-real`, in an environment of its own (requirements.txt here).

    pytest tests/real -k flair      # the rows of these models in results.csv are written anew
"""
import gc
import pickle
from contextlib import nullcontext

import pytest
import torch
from measure import build, loss_of, made, numbers, row, write
from models import REAL
from torch import nn

from gruckpt.plan.budget import estimate_any
from gruckpt.engine.certify import certify
from gruckpt.engine.recurrent import GRU, LSTM
from gruckpt.measure.meter import Meter
from gruckpt.measure.shadow import without_onednn

every = pytest.mark.parametrize('real', REAL, ids=lambda o: o.id)
cuts = pytest.mark.parametrize('cut', [False, True], ids=['uncut', 'cut'])


def step(model, batch, run, seed=3):
    "Outputs and gradients of one step"
    torch.manual_seed(seed)
    model.zero_grad()
    out = numbers(run(model, batch))
    sum(t.square().mean() for t in out).backward()
    return [t.detach() for t in out], {n: p.grad for n, p in model.named_parameters()}


# their own code makes float32 tensors, so that they do not run in float64, converted or not
FLOAT32 = {'neuralforecast: TFT', 'sb3-contrib: RecurrentActorCriticPolicy'}
def dtype_of(real): return torch.float32 if real.id in FLOAT32 else torch.float64


def close(got, want, scale=0.):
    "By norm, relative to what is wanted, or to `scale` where that is zero in exact arithmetic"
    tol = 1e-10 if want.dtype == torch.float64 else 1e-5
    return (got - want).norm() <= tol * max(want.norm(), 1e-3*scale)


@every
@cuts
def test_forward_and_gradients(real, cut):
    want, right = step(*build(real, dtype_of(real)))
    got, grads = step(*made(real, real.seg_len if cut else None, dtype_of(real)))
    assert all(close(a, b) for a, b in zip(got, want, strict=True))
    assert grads.keys() == right.keys()
    largest = max(g.norm() for g in right.values() if g is not None)
    for name, g in right.items():
        assert (g is None) == (grads[name] is None), name
        assert g is None or close(grads[name], g, largest), name


@every
def test_layers_are_replaced_and_the_rest_is_not(real):
    before, *_ = build(real)
    after, *_ = made(real)
    ours = {n for n, m in after.named_modules() if isinstance(m, GRU | LSTM)}
    assert ours == set(real.layers)
    assert {n: type(m).__name__ for n, m in before.named_modules() if n not in ours} == {
        n: type(m).__name__ for n, m in after.named_modules() if n not in ours}
    assert all(isinstance(after.get_submodule(n), type(before.get_submodule(n))) or isinstance(
        after.get_submodule(n), nn.GRU | nn.LSTM) for n in ours)


@every
def test_state_dict_both_ways(real):
    before, batch, run = build(real)
    after, *_ = made(real)
    with torch.no_grad():
        for p in after.parameters(): p.add_(0.01)
    before.load_state_dict(after.state_dict())
    fresh, *_ = made(real)
    fresh.load_state_dict(before.state_dict())
    assert all(torch.equal(t, fresh.state_dict()[n]) for n, t in after.state_dict().items())
    assert list(before.state_dict()) == list(after.state_dict())


@every
def test_optimizer_made_before(real):
    from gruckpt.engine.convert import convert
    moved = []
    for ours in (False, True):
        model, batch, run = build(real, dtype_of(real))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours: convert(model, seg_len=real.seg_len)
        step(model, batch, run)
        opt.step()
        moved.append(dict(model.named_parameters()))
    assert moved[0].keys() == moved[1].keys()
    largest = max(p.norm() for p in moved[0].values())
    assert all(close(moved[1][n], p, largest) for n, p in moved[0].items())


@every
def test_pickle(real):
    def outputs(model, batch, run):
        torch.manual_seed(0)
        return numbers(run(model, batch))

    def again(model, batch, run): return pickle.loads(pickle.dumps(model)), batch, run
    original = build(real)
    try: twin = again(*original)
    except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as e:
        pytest.skip(f'the package\'s own model cannot be pickled: {e}')
    if not all(close(a, b) for a, b in zip(outputs(*twin), outputs(*original), strict=True)):
        pytest.skip('the package\'s own pickle gives a model of other outputs')
    model = made(real, real.seg_len)
    assert all(torch.equal(a, b) for a, b in zip(outputs(*again(*model)), outputs(*model), strict=True))


@every
def test_certify_with_both_oracles(real):
    original, batch, run = build(real, dtype_of(real))
    model, *_ = made(real, real.seg_len, dtype_of(real))
    cert = certify(model, batch, loss_of(run), original=original)
    assert cert.passed, cert
    assert cert.original.passed


@pytest.fixture
def no_collector():
    "Objects in cycles, as flair's sentences are, keep tensors until Python's collector runs, at any time"
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@every
@pytest.mark.parametrize('ours', [False, True], ids=['original', 'converted'])
def test_estimate_any_is_what_a_step_holds(real, ours, no_collector):
    "To the byte, of each phase of the second of two steps"
    def make(): return made(real, real.seg_len) if ours else build(real)
    model, batch, run = make()
    ledger = estimate_any(model, batch, loss_of(run), torch.optim.SGD)
    model, batch, run = make()
    gc.collect()
    with without_onednn(), Meter(model, batch) as meter:
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
        for phase in (nullcontext, Meter.phase):
            opt.zero_grad()
            with phase('forward'): loss = loss_of(run)(model, batch)
            with phase('backward'): loss.backward()
            with phase('update'): opt.step()
            del loss
    assert ledger.phases == meter.phases, ledger.note


@pytest.mark.parametrize('dynamo', [True, False], ids=['export', 'trace'])
@pytest.mark.parametrize('more', [{}, dict(num_layers=2, bidirectional=True, batch_first=True)])
@pytest.mark.parametrize('kind', [nn.GRU, nn.LSTM])
def test_onnx_of_a_converted_model(kind, more, dynamo, tmp_path):
    "Both of torch's exporters, run by ONNX Runtime."
    from onnxruntime import InferenceSession

    from gruckpt.engine.convert import convert

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 4, **more)
        def forward(self, x): return self.rnn(x)[0]

    model, x = First().eval(), torch.randn(5, 2, 3)
    want = model(x).detach()
    convert(model, seg_len=2)
    torch.onnx.export(model, (x,), str(tmp_path/'rnn.onnx'), dynamo=dynamo)
    runs = InferenceSession(str(tmp_path/'rnn.onnx'), providers=['CPUExecutionProvider'])
    got, = runs.run(None, {runs.get_inputs()[0].name: x.numpy()})[:1]
    assert (torch.from_numpy(got) - want).abs().max() <= 1e-5


@pytest.fixture(scope='module')
def rows():
    "Measured rows; written to results.csv at the end"
    found = []
    yield found
    write(found)


@every
def test_bytes_before_and_after(real, rows):
    rows.append(row(real))
    assert rows[-1]['kept, seg_len=None'] <= 1.02*rows[-1]['kept before']
    assert rows[-1]['kept, cut'] <= 1.02*rows[-1]['kept before']
