"""Fake quantization: a training with and without recomputation. As a script, this file is a rank of two.

QAT_STEPS=10 trains every model, tier and backend for ten steps where two stand here: about ten times as long.
"""
import copy
import csv
import json
import os
import sys
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from processes import ranks
from torch import nn

from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.charlm.text import Batch, TokenStream
from gruckpt.commands.cli import main
from gruckpt.engine.recurrent import GRU, LSTM, Recurrent
from gruckpt.engine.scan import plain
from gruckpt.plan.segment import Plan
from gruckpt.quant.fake_quant import FakeQuant, refresh, scales_of
from gruckpt.quant.integers import float_bytes, load_integers, save_integers, to_integers
from gruckpt.quant.prepare import after_step, calibrate, prepare_qat, ready, set_mode
from gruckpt.tft.forecaster import Forecaster
from gruckpt.tft.model import TFT, TFTSpec, Tier
from gruckpt.tft.tiers import empty_batch
from gruckpt.training.config import TrainConfig
from gruckpt.training.parallel import World, every_rank, joined, wrap
from gruckpt.training.trainer import Trainer

SPEC = TFTSpec(static=2, observed=3, known=2, hidden=8, heads=2, lookback=16, horizon=3, dropout=.2,
               observed_cats=(4,))


# ---- ten steps of a model ----

STEPS = int(os.environ.get('QAT_STEPS', 2))

def windows(n, seed):
    "A batch of a TFT, float64."
    draw = torch.Generator().manual_seed(seed)
    def fill(t): return torch.randn(t.shape, generator=draw, dtype=t.dtype) if t.is_floating_point() else t
    batch = empty_batch(SPEC, n, torch.float64, 'cpu')
    return batch._replace(**{k: fill(t) for k, t in batch._asdict().items() if torch.is_tensor(t)})


class Layers(nn.Module):
    "A recurrent layer and a head"
    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size, 1)

    def loss(self, x, state=None, plan=None):
        if hasattr(self.rnn, 'seg_len'): self.rnn.seg_len = plan.seg_len
        return self.head(self.rnn(x)[0]).pow(2).mean(), None


def sequences(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 4, generator=draw, dtype=torch.float64)


def tokens(seed):
    ids = torch.randint(12, (3, 17), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1], ids[:, 1:], fresh=True)


MODELS = {
    'GRU': (lambda: Layers(GRU(4, 5, 2, dropout=.2)), sequences),
    'LSTM': (lambda: Layers(LSTM(4, 5, 2)), sequences),
    'LSTM both ways': (lambda: Layers(LSTM(4, 5, 2, bidirectional=True, proj_size=0)), sequences),
    'minGRU by scan': (lambda: Layers(Recurrent('mingru', 4, 5, 2, backend='scan')), sequences),
    'GRU-L3': (lambda: GRULM(GRUSpec(12, 8, 3, dropout=.2, norm='state', reset='before')), tokens),
    'normed output': (lambda: GRULM(GRUSpec(12, 8, 2, norm='output')), tokens),
    'TFT': (lambda: TFT(SPEC), lambda seed: windows(2, seed))}


def trained(name, plan, recompute=True, accumulate=1, evaluate=False, n_steps=10, **options):
    "Losses, gradients and ranges of all steps, in one tensor; `options` of the recurrent layers"
    torch.manual_seed(0)
    make, batch_of = MODELS[name]
    model, found = make().double(), []
    for rnn in (m for m in model.modules() if hasattr(m, 'cell')): vars(rnn).update(options)
    if name == 'LSTM both ways': model.head = nn.Linear(10, 1).double()
    prepare_qat(model)
    optimizer = torch.optim.SGD(model.parameters(), .05)
    for i in range(n_steps):
        optimizer.zero_grad()
        for j in range(accumulate):
            torch.manual_seed(i)                        # dropout; evaluations draw nothing
            with nullcontext() if recompute else plain():
                loss, _ = model.loss(batch_of(10 * i + j), plan=plan)
                loss.backward()
        found += [loss.detach()[None], *[p.grad.flatten() for p in model.parameters()]]
        optimizer.step()
        if evaluate:
            with torch.no_grad(): model.eval().loss(batch_of(-1), plan=plan)
            model.train()
        refresh(model)
        found += [b.double().flatten() for b in model.buffers()]
    return torch.cat(found)


@pytest.mark.parametrize('name', [o for o in MODELS if o != 'TFT'])
def test_recomputation_changes_nothing(name):
    "Loss, all gradients and all observer state after each of ten steps, K = 1, 4, 16, with accumulation"
    n = 10 if name in ('GRU', 'LSTM', 'GRU-L3') else max(STEPS, 3)
    want = trained(name, Plan.split(16, 1), False, n_steps=n)
    for k in 1, 4, 16:
        assert (trained(name, Plan.split(16, k), n_steps=n) - want).abs().max() <= 1e-10
    both = trained(name, Plan.split(16, 1), False, accumulate=2, n_steps=2)
    assert (trained(name, Plan.split(16, 4), accumulate=2, n_steps=2) - both).abs().max() <= 1e-10
    assert (both[:20] - want[:20]).abs().max() > 0


@pytest.mark.parametrize('name, backend', [('GRU', 'torch'), ('LSTM both ways', 'torch'), ('GRU', 'graph'),
                                           ('LSTM', 'graph'), ('GRU-L3', 'graph')])
def test_backends_change_nothing(name, backend):
    "The same with every backend, K = 1, 4, 16, whatever is kept; ten steps by torch's op"
    n = 10 if (name, backend) == ('GRU', 'torch') else STEPS
    want = trained(name, Plan.split(16, 1), False, n_steps=n)
    for k, keep in (1, 'gates'), (4, 'gates'), (16, 'hidden'):
        found = trained(name, Plan.split(16, k), n_steps=n, backend=backend, keep=keep)
        assert (found - want).abs().max() <= 1e-10
    both = trained(name, Plan.split(16, 4), accumulate=2, n_steps=2, backend=backend)
    assert (both - trained(name, Plan.split(16, 1), False, accumulate=2, n_steps=2)).abs().max() <= 1e-10


@pytest.mark.parametrize('backend', ['eager', 'torch'])
@pytest.mark.parametrize('kind', [GRU, LSTM])
def test_one_call_of_torchs_op_rounds_between_layers(kind, backend):
    "An uncut layer that keeps gates, where torch's op could run all layers at once"
    torch.manual_seed(0)
    rnn = kind(4, 5, 2, keep='gates', backend=backend).double()
    prepare_qat(rnn)
    rnn(sequences(0))
    refresh(rnn)
    assert [o.facts[0].item() for o in rnn.incoming] == [1, 1]


def test_kernels_change_nothing():
    "The same by the kernels of Triton, under its interpreter"
    pytest.importorskip('triton', reason="Triton is not installed; pip install 'gruckpt[triton]'")
    found = []
    for backend, seg_len in ('eager', None), ('triton', 2), ('graph+triton', 2):
        torch.manual_seed(0)
        rnn = GRU(4, 5, 2, norm='state', reset='before', backend=backend, seg_len=seg_len).double()
        prepare_qat(rnn)
        for _ in range(STEPS):
            rnn(sequences(0)[:3])[0].pow(2).mean().backward()
            refresh(rnn)
        found.append(torch.cat([t.double().flatten() for t in (*(p.grad for p in rnn.parameters()),
                                                               *rnn.buffers())]))
    for o in found[1:]: assert (o - found[0]).abs().max() <= 1e-10


def test_tiers_change_nothing():
    want = trained('TFT', Tier.off, recompute=False, n_steps=STEPS)
    tiers = Tier.off, Tier.vsn, Tier.aggressive, Tier.full, Tier(Tier.full.layers, n_groups=3, seg_len=5)
    for tier in tiers: assert (trained('TFT', tier, n_steps=STEPS) - want).abs().max() <= 1e-10
    ten = trained('TFT', Tier.off, recompute=False)
    assert (trained('TFT', Tier.full) - ten).abs().max() <= 1e-10


def test_an_evaluation_changes_nothing():
    for name, plan in ('GRU-L3', Plan.split(16, 4)), ('TFT', Tier.full):
        assert trained(name, plan, n_steps=3).equal(trained(name, plan, n_steps=3, evaluate=True))


# ---- Q01-Q07 ----

def test_Q01_a_range_moves_once_a_step():
    "c = 0.01 that sees a constant 1 from 0 on: 0.01 after a step, 0.634 after 100, however often it passes"
    quant = FakeQuant(pace=.01)
    quant.set_bounds(0., 0.)
    for n in range(1, 101):
        for _ in range(1 + n % 3): quant(torch.ones(2))
        refresh(quant)
        if n == 1: assert abs(quant.bounds[1].item() - .01) < 1e-8
    assert abs(quant.bounds[1].item() - (1 - .99**100)) < 1e-5


def test_Q02_the_second_run_rounds_as_the_first():
    "One shared quantizer in a cell under torch's own checkpointing"
    from torch.utils.checkpoint import checkpoint
    def gradients(quant, recompute):
        torch.manual_seed(0)
        cell, h, x = nn.GRUCell(3, 4), torch.zeros(2, 4), torch.randn(6, 2, 3)
        def piece(x, h):
            for step in x: h = cell(quant(step), quant(h))
            return h
        for part in x.chunk(3):
            for re in (False,) if recompute else ():
                h = checkpoint(piece, part, h, use_reentrant=re)
            if not recompute: h = piece(part, h)
        h.pow(2).sum().backward()
        return torch.cat([p.grad.flatten() for p in cell.parameters()])
    quant = FakeQuant()
    quant.set_bounds(-.5, .5)
    twin = copy.deepcopy(quant)
    assert gradients(quant, True).equal(gradients(twin, False))
    for o in quant, twin: refresh(o)
    assert quant.bounds.equal(twin.bounds) and quant.facts.equal(twin.facts)


def test_Q04_saved_and_loaded():
    torch.manual_seed(0)
    model, x = Layers(GRU(4, 5, 2)), sequences(1).float()
    prepare_qat(model, weight_bits=4)
    model.rnn(x)
    refresh(model)
    set_mode(model, 'frozen')
    twin = Layers(GRU(4, 5, 2))
    prepare_qat(twin, weight_bits=4)
    twin.load_state_dict(model.state_dict())
    assert twin.rnn(x)[0].equal(model.rnn(x)[0])
    refresh(twin)
    for o in twin.rnn.incoming: assert o.mode == 'frozen' and tuple(o.bounds.shape) == (2,)
    with pytest.raises(ValueError, match='was not prepared; load it first'):
        twin.load_state_dict(Layers(GRU(4, 5, 2)).state_dict())
    other = Layers(GRU(4, 5, 2))
    prepare_qat(other)
    with pytest.raises(ValueError, match='prepare the model with the same'):
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize('values', [[0., 0.], [2., 2.], [1., 3.], [-3., -1.], [1e-30, 0.], [3e38, -3e38]])
def test_Q05_any_range_has_a_scale(values):
    quant = FakeQuant()
    quant(torch.tensor(values))
    refresh(quant)
    assert 0 < quant.scale < float('inf') and quant(torch.zeros(1)).item() == 0


def test_Q05_what_is_not_finite_is_said_and_not_kept():
    quant = FakeQuant()
    quant(torch.tensor([-1., 1.]))
    refresh(quant)
    before = quant.bounds.clone()
    for bad in float('nan'), float('inf'), -float('inf'):
        assert quant(torch.tensor([bad, .5])).isnan().tolist() == [True, False]
        refresh(quant)
    assert quant(torch.empty(0, 3)).shape == (0, 3) and quant.bounds.equal(before)
    quant = FakeQuant()
    quant(torch.tensor([1., float('nan')]))
    refresh(quant)
    assert quant.grid is None                                # nothing was seen


@pytest.mark.parametrize('bits', [8, 4])
@pytest.mark.parametrize('name', ['GRU', 'LSTM', 'GRU-L3', 'TFT'])
def test_Q06_integers_say_what_the_prepared_model_said(name, bits):
    torch.manual_seed(0)
    make, batch_of = MODELS[name]
    model = make()
    prepare_qat(model, weight_bits=bits)
    def run(m):
        if name == 'TFT':
            given = {k: t.float() if torch.is_tensor(t) and t.is_floating_point() else t
                     for k, t in batch_of(1)._asdict().items()}
            return m(batch_of(1)._replace(**given)).quantiles
        if name == 'GRU-L3': return m(batch_of(1).inputs.t(), m.init_state(3))[0]
        return m.rnn(batch_of(1).float())[0]
    calibrate(model, [None], lambda m, _: run(m))
    model.eval()
    want = run(model).detach()
    to_integers(model)
    assert (run(model) - want).norm() <= 1e-5 * want.norm()
    assert not [n for n, p in model.named_parameters() if p.requires_grad]


def large_tft(): return TFT(TFTSpec(static=5, observed=10, known=5, hidden=64))


@pytest.mark.parametrize('kind, make', [
    ('spec', lambda: GRULM(GRUSpec(84, 256, 3, norm='state', reset='before'))), ('tft', large_tft)])
def test_a_file_of_integers_takes_at_most_three_tenths(kind, make, tmp_path):
    torch.manual_seed(0)
    model = make()
    floats = float_bytes(model)
    ready(model)
    to_integers(model)
    about = {kind: model.spec.to_dict(), 'quant': {'weight_bits': 8}}
    assert save_integers(model, about, tmp_path/'int8.pt') <= .3 * floats
    again, found = load_integers(tmp_path/'int8.pt')
    assert found == about and all(again.state_dict()[n].equal(t) for n, t in model.state_dict().items())


def test_Q07_under_autocast_ranges_stay_float32():
    torch.manual_seed(0)
    model = GRULM(GRUSpec(12, 8, 2))
    prepare_qat(model)
    for _ in range(3):
        with torch.autocast('cpu', torch.bfloat16): loss, _ = model.loss(tokens(1), plan=Plan.split(16, 4))
        loss.backward()
        refresh(model)
    assert {b.dtype for b in model.buffers()} == {torch.float32, torch.int64} and loss.isfinite()
    found = model.to(torch.bfloat16).rnn.incoming[1]
    assert found.bounds.dtype == torch.float32 and found.grid is not None
    scale, *_ = scales_of(model.rnn._parameters['weight_hh_l0'])         # of a weight that is bfloat16 itself
    assert scale.dtype == torch.float32


# ---- a run ----

def run_of(state=None, n=6, accumulate=1):
    "A trainer after some steps"
    torch.manual_seed(0)
    model = GRULM(GRUSpec(12, 8, 2, dropout=.2))
    prepare_qat(model)
    ids = torch.randint(12, (600,), generator=torch.Generator().manual_seed(1))
    config = TrainConfig(max_steps=n, accumulate=accumulate)
    trainer = Trainer(model, TokenStream(ids, 3, 16), config, Plan.split(16, 4), after=after_step)
    if state is not None: trainer.load_state_dict(state)
    for _ in trainer.steps(): pass
    return trainer


@pytest.mark.parametrize('accumulate', [1, 2])
def test_a_run_goes_on_to_the_bit(accumulate):
    whole, half = run_of(accumulate=accumulate), run_of(n=3, accumulate=accumulate)
    later = run_of(copy.deepcopy(half.state_dict()), accumulate=accumulate)
    for name, t in whole.model.state_dict().items(): assert later.model.state_dict()[name].equal(t), name
    assert whole.model.rnn.incoming[0].facts[0] == 6


def test_a_skipped_step_leaves_the_ranges():
    trainer = run_of(n=2)
    before = [b.clone() for b in trainer.model.buffers()]
    with torch.no_grad(): trainer.model.embed.weight[:] = torch.nan
    trainer.config = TrainConfig(max_steps=3)
    assert [r.skipped for r in trainer.steps()] == ['loss not finite']
    assert all(b.equal(old) for b, old in zip(trainer.model.buffers(), before))


def sh(*args): return main([*map(str, args)])


def test_commands(tmp_path, capsys):
    "A table and a text with --use-qat: bytes as predicted, integers, and what is refused"
    n, r = 260, np.random.RandomState(0)
    stamps = pd.date_range('2024-01-01', periods=n, freq='h')
    frame = pd.DataFrame({'t': stamps, 'y': r.randn(n), 'x': r.randn(n)})
    frame.to_parquet(tmp_path/'t.parquet')
    (tmp_path/'t.txt').write_text('to be or not to be, that is the question. ' * 60)
    both = ['--use-qat', '--device', 'cpu', '--quiet', '--decay-steps', 50]
    tft = [*both, '--target', 'y', '--hidden', 4, '--heads', 2, '--lookback', 8, '--horizon', 2, '--tier',
           'full', '--parquet-file', tmp_path/'t.parquet', '--calendar', 'none']
    def begin(name, options, out, steps):
        assert sh(name, *options, '--out', tmp_path/out, '--max-steps', steps) == 0
    for out, steps in ('a', 3), ('b', 2): begin('train-tft', tft, out, steps)
    assert sh('train-tft', '--out', tmp_path/'b', '--resume', '--max-steps', 3, '--quiet') == 0
    a, b = (torch.load(tmp_path/o/'step-00000003.pt', weights_only=True)['model'] for o in 'ab')
    assert all(a[k].equal(b[k]) for k in a)
    lm = [*both, '--hidden', 8, '--layers', 2, '--steps', 16, '--segments', 4, '--batch-size', 3,
          '--measure-every', 1, '--text', tmp_path/'t.txt']
    for out, steps in ('c', 3), ('d', 2): begin('train-lm', lm, out, steps)
    assert sh('train-lm', '--out', tmp_path/'d', '--resume', '--max-steps', 3, '--quiet') == 0
    c, d = (torch.load(tmp_path/o/'step-00000003.pt', weights_only=True)['model'] for o in 'cd')
    assert all(c[k].equal(d[k]) for k in c)
    rows = [*csv.DictReader(open(tmp_path/'c'/'telemetry.csv'))][1:]
    assert {r['peak_predicted'] for r in rows} == {r['peak_measured'] for r in rows}
    capsys.readouterr()
    for out in 'ac': assert sh('quantize', tmp_path/out, '--batches', 2) == 0
    assert 'of the' in capsys.readouterr().out and (tmp_path/'a'/'int8.pt').exists()
    table, out = tmp_path/'t.parquet', tmp_path/'f.csv'
    assert sh('forecast', tmp_path/'a', '--parquet-file', table, '--out', out, '--quiet') == 0
    free = [*both, '--hidden', 8, '--layers', 2, '--steps', 16, '--batch-size', 3, '--text', tmp_path/'t.txt']
    limit = ['--memory-limit', rows[0]['peak_predicted'], '--measure-every', 1, '--max-steps', 3]
    assert sh('train-lm', *free, *limit, '--out', tmp_path/'e') == 0
    found = [*csv.DictReader(open(tmp_path/'e'/'telemetry.csv'))][1:]
    assert {r['peak_predicted'] for r in found} == {r['peak_measured'] for r in found}
    assert int(found[0]['peak_measured']) <= int(rows[0]['peak_predicted'])
    assert sh('train-lm', *free, *limit, '--precision', 'float16', '--out', tmp_path/'f') == 2
    assert 'give --segments' in capsys.readouterr().err
    assert sh('export', tmp_path/'c', '--format', 'pt2', '--int8') == 0


def test_a_forecaster_that_rounds_within_a_limit(tmp_path):
    "train-tft --use-qat: the tier that a limit finds needs what was predicted, as all do"
    stamps, x = pd.date_range('2024-01-01', periods=200, freq='h'), np.random.RandomState(0).randn(2, 200)
    pd.DataFrame({'t': stamps, 'y': x[0], 'x': x[1]}).to_parquet(tmp_path/'t.parquet')
    tft = ['--use-qat', '--device', 'cpu', '--quiet', '--decay-steps', 50, '--target', 'y', '--hidden', 4,
           '--heads', 2, '--lookback', 8, '--horizon', 2, '--calendar', 'none', '--max-steps', 2,
           '--measure-every', 1, '--parquet-file', tmp_path/'t.parquet']
    def peaks(out, *options):
        assert sh('train-tft', *tft, *options, '--out', tmp_path/out) == 0
        row = [*csv.DictReader(open(tmp_path/out/'telemetry.csv'))][1]
        assert row['peak_measured'] == row['peak_predicted']
        return int(row['peak_measured'])
    off, full = (peaks(tier, '--tier', tier) for tier in ('off', 'full'))
    assert full <= peaks('limited', '--memory-limit', (off + full) // 2) <= (off + full) // 2 < off


def test_a_forecaster_that_was_saved(tmp_path, capsys):
    "`gruckpt quantize` of its folder, which knows of no rows"
    frame = pd.DataFrame({'t': pd.date_range('2024-01-01', periods=120, freq='h'), 'y': np.arange(120) % 5.})
    frame.to_parquet(tmp_path/'t.parquet')
    options = dict(target='y', horizon=2, lookback=8, hidden=4, heads=2, max_steps=1, device='cpu')
    Forecaster(**options).fit(frame).save(tmp_path/'run')
    assert sh('quantize', tmp_path/'run') == 2
    assert '--parquet-file must name rows' in capsys.readouterr().err
    assert sh('quantize', tmp_path/'run', '--parquet-file', tmp_path/'t.parquet', '--batches', 1) == 0
    assert (tmp_path/'run'/'int8.pt').exists()


# ---- two ranks ----

def case(world, n_steps=4):
    "Ranges and weights after some steps on a rank's own rows"
    torch.manual_seed(0)
    model = GRULM(GRUSpec(12, 8, 2)).double()
    prepare_qat(model)
    wrapped, optimizer = wrap(model, world), torch.optim.SGD(model.parameters(), .1)
    own = iter(TokenStream(IDS, 4 // world.size, 16, rank=world.rank, world_size=world.size))
    for _ in range(n_steps):
        optimizer.zero_grad()
        wrapped(next(own), None, plan=Plan.split(16, 4))[0].backward()
        optimizer.step()
        refresh(model)
    return {n: t.double().flatten().tolist() for n, t in model.state_dict().items()}


IDS = torch.randint(12, (2000,), generator=torch.Generator().manual_seed(1))

if __name__ == '__main__':
    torch.set_num_threads(1)
    with joined(World.from_env(), timeout_s=60) as here:
        result = case(here)
        every_rank(None)                                              # nobody leaves before all are done
    with open(f'{sys.argv[1]}-{here.rank}', 'w') as f: f.write(json.dumps(result))


def test_two_ranks_have_the_ranges_of_one(tmp_path):
    running = ranks(2, __file__, tmp_path/'r')
    errors = [p.communicate(timeout=200)[1] for p in running]
    assert [p.returncode for p in running] == [0, 0], errors
    one, two = (json.loads((tmp_path/f'r-{rank}').read_text()) for rank in (0, 1))
    assert one == two
    for name, values in case(World()).items():
        np.testing.assert_allclose(one[name], values, 0, 1e-10, err_msg=name)
