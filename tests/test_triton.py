"""The kernels by Triton's interpreter against the eager walks; compiled for absent GPUs; their launches."""
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gruckpt
from gruckpt.engine import graph
from gruckpt.engine.cells import GRUCell, LSTMCell
from gruckpt.engine.layer import DropoutMask
from gruckpt.engine.layer_bytes import LayerBytes
from gruckpt.engine.recurrent import layers_of
from gruckpt.measure.meter import Launches

pytest.importorskip('triton', reason="Triton is not installed; pip install 'gruckpt[triton]'")

CELLS = [*(GRUCell(reset, norm) for reset in ('after', 'before') for norm in (None, 'rms')), LSTMCell()]
every_cell = pytest.mark.parametrize('cell', CELLS, ids=lambda c: c.form)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def page():
    "The page of the kernels, loaded after the interpreter is asked for."
    return importlib.import_module('gruckpt.engine.triton')


def values(rnn, x):
    "Outputs, states and all gradients, flat."
    x = x.detach().clone().requires_grad_()
    out, state = rnn(x)
    tensors = [out, *([state] if torch.is_tensor(state) else state)]
    total = sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in tensors)
    return [*tensors, *torch.autograd.grad(total, [x, *rnn.parameters()])]


def same(found, oracle, eps):
    for a, b in zip(found, oracle, strict=True): assert (a - b).norm() <= eps * b.norm()


@every_cell
@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
def test_gradients_are_the_eager_ones(cell, dtype):
    torch.manual_seed(0)
    x, rnn = torch.randn(3, 2, 3, dtype=dtype), layers_of(cell, 3, 5, chunk_len=2, dtype=dtype)
    ways = ((None, 'hidden', 'triton'), (2, 'gates', 'graph+triton'))
    for rnn.seg_len, rnn.keep, backend in ways if dtype is torch.float64 else ways[:1]:
        rnn.backend = 'eager'
        oracle, rnn.backend = values(rnn, x), backend
        same(values(rnn, x), oracle, TOLERANCE[dtype])


@every_cell
@pytest.mark.parametrize('dtype, most', [(torch.float16, 1.5), (torch.bfloat16, 3)], ids=str)
def test_half_precision_is_no_worse_than_the_eager_walk(cell, dtype, most):
    """Both against float64: the kernels round once where the walk rounds after every operation. The
    interpreter cuts off what does not fit into bfloat16 where a GPU rounds, which is twice the error."""
    torch.manual_seed(0)
    x, rnn = torch.randn(3, 1, 3).to(dtype), layers_of(cell, 3, 5, dtype=dtype)
    exact = values(layers_double(rnn, cell), x.double())
    errors = {}
    for rnn.backend in ('eager', 'triton'):
        pairs = [(a.detach().double(), b.detach()) for a, b in zip(values(rnn, x), exact)]
        errors[rnn.backend] = [float((a - b).norm() / b.norm()) for a, b in pairs]
    assert sum(errors['triton']) <= most * sum(errors['eager'])


def layers_double(rnn, cell):
    "The same layer in float64."
    twin = layers_of(cell, rnn.input_size, rnn.hidden_size, dtype=torch.float64)
    twin.load_state_dict(rnn.state_dict())
    return twin


@pytest.mark.parametrize('make, options', [
    (gruckpt.GRU, dict(bidirectional=True)), (gruckpt.LSTM, dict(proj_size=2, seg_len=2)),
    (gruckpt.GRU, dict(bias=False, norm='state', reset='before')), (gruckpt.LSTM, dict(bidirectional=True))])
def test_options(make, options):
    torch.manual_seed(0)
    x, rnn = torch.randn(3, 1, 3).double(), make(3, 4, chunk_len=2, **options).double()
    oracle, rnn.backend = values(rnn, x), 'triton'
    same(values(rnn, x), oracle, 1e-10)


def test_a_gradient_that_is_not_contiguous():
    "`sum` hands an expanded one over."
    torch.manual_seed(0)
    x, rnn, found = torch.randn(3, 2, 3).double(), gruckpt.GRU(3, 4).double(), []
    for rnn.backend in ('eager', 'triton', 'graph+triton'):
        found.append(torch.autograd.grad(rnn(x)[0].sum(), [*rnn.parameters()]))
    for other in found[1:]: same(other, found[0], 1e-10)


@every_cell
def test_a_gradient_at_the_state_that_lies_otherwise(cell):
    "One that came through a transpose: it was read row after row, and the gradients were others."
    torch.manual_seed(0)
    x, m = torch.randn(3, 2, 3).double(), torch.randn(cell.n_states, 1, 4, 2).double()
    rnn, found = layers_of(cell, 3, 4, chunk_len=2, dtype=torch.float64), []
    for rnn.backend in ('eager', 'triton', 'graph+triton'):
        states = rnn(x)[1]
        states = [states] if torch.is_tensor(states) else states
        loss = sum((s.transpose(1, 2) * k).sum() for s, k in zip(states, m))
        found.append(torch.autograd.grad(loss, [*rnn.parameters()]))
    for other in found[1:]: same(other, found[0], 1e-10)


def test_rows_wider_than_a_block():
    torch.manual_seed(0)
    x, rnn = torch.randn(2, 2, 3).double(), gruckpt.GRU(3, 1100).double()
    oracle, rnn.backend = values(rnn, x), 'triton'
    same(values(rnn, x), oracle, 1e-10)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16], ids=str)
def test_masks_are_the_same_bits(dtype):
    for mask, t, sizes in ((DropoutMask(.3, 2**62 + 12345, 2, 7), 5, (2, 2, 21)),
                           (DropoutMask(.5, 3, 0, 2**32 - 1), 0, (2, 1, 2, 8)),
                           (DropoutMask(.5, 2**64 - 3, 1, 0), 0, (2, 2, 8)),
                           (DropoutMask(.5, -3, 1, 0), 1, (2, 2, 8))):
        assert torch.equal(page().draw_mask(mask, t, torch.empty(sizes, dtype=dtype)),
                           mask.scale(t, torch.empty(sizes, dtype=dtype)))


@every_cell
def test_bytes_are_the_meters(cell, monkeypatch):
    "No kernel runs: they allocate nothing, but the interpreter holds on to its arguments."
    monkeypatch.setattr(page(), '_launch', lambda *args, **constants: None)
    B, D = 4, 16
    for n, backend in ((1, 'triton'), (40, 'triton'), (40, 'graph+triton')):
        graph.release_buffers()
        rnn, x = layers_of(cell, D, D, backend=backend), torch.randn(n, B, D, requires_grad=True)
        rnn._read_only_output, o = True, LayerBytes(cell, D, D, B, backend=backend)
        state = torch.zeros(cell.n_states, 1, B, D).unbind()
        with gruckpt.Meter() as meter:
            with gruckpt.Meter.phase('forward'): loss = rnn(x, state if len(state) > 1 else state[0])[0].sum()
            with gruckpt.Meter.phase('backward'): loss.backward()
        held = o.held(n)
        assert meter.phases == {
            'forward': held[0] + o.record(n) + max(o.forward(n), 2 * cell.n_states * o.row),
            'backward': held[1] + o.record(n) + 4 * (o.numbers + n*B*D) + 8 + o.backward(n)}


@pytest.mark.parametrize('cell, forward, back', [
    (GRUCell('after'), 2, 2), (GRUCell('after', 'rms'), 2, 2), (GRUCell('before'), 4, 4),
    (GRUCell('before', 'rms'), 4, 4), (LSTMCell(), 2, 2)], ids=str)
def test_launches_a_step(cell, forward, back):
    "The slope over the steps of one chunk: at most 2 + 2, and for GRU-L3 4 + 5."
    def launches(T):
        rnn, out = layers_of(cell, 3, 4, backend='triton', chunk_len=9), []
        x = torch.randn(T, 1, 3, requires_grad=True)
        with Launches() as there: out.append(rnn(x)[0].sum())
        with Launches() as back: out[0].backward()
        return there.n, back.n
    (a, b), (c, d) = launches(2), launches(4)
    assert ((c - a) / 2, (d - b) / 2) == (forward, back)


def test_compiled_for_gpus_that_are_not_here():
    "Registers and spills by ptxas, in a process of its own: here the kernels are interpreted."
    env = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    run = subprocess.run([sys.executable, Path(__file__).with_name('compile_triton.py')], env=env, text=True,
                         capture_output=True)
    assert not run.returncode, run.stderr[-2000:]
    found = [line.split() for line in run.stdout.splitlines()]
    assert {int(cap) for _, cap, *_ in found} == {80, 86, 90, 100}
    for name, cap, dtype, registers, *spills in found:
        assert int(registers) <= 128 and not any(map(int, spills)), (name, cap, dtype, registers, spills)


def test_kernels_start_where_their_tensors_lie(monkeypatch):
    "Triton takes the current device, which need not be that of the tensors."
    at, triton = [], page()
    class device_of:
        def __init__(self, t): self.t = t
        def __enter__(self): at.append(self.t)
        def __exit__(self, *error): at.append('back')
    class Kernel:
        arg_names = []
        def __getitem__(self, grid): return lambda *args, **options: at.append((grid, options['num_warps']))
    monkeypatch.setattr(torch.cuda, 'device_of', device_of)
    for D, warps in ((16, 1), (256, 1), (600, 4), (2048, 8), (9000, 8)):
        x = torch.empty(2, D)
        triton._launch(Kernel(), 2, x, D, True)
        assert at[0] is x and at[1:] == [((2, 1), warps), 'back']
        at.clear()


def test_what_lies_otherwise_is_refused():
    gates, h = torch.zeros(2, 12), torch.zeros(4, 2).t()
    with pytest.raises(RuntimeError, match=r"got H of shape \(2, 4\) with strides \(1, 2\)"):
        page().OPS['gru_reset'](gates, h, torch.empty(2, 4))


def test_a_seed_builds_no_kernel():
    "Triton would build one for a number that 16 divides, one for 1, and one for all others."
    env = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    asked = ('from gruckpt.engine.triton import _mask\n'
             'print([p.name for p in _mask.params if p.do_not_specialize])')
    run = subprocess.run([sys.executable, '-c', asked], env=env, text=True, capture_output=True)
    assert run.stdout.strip() == "['seed', 'start', 'layer', 'cut']", run.stderr
