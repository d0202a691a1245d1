"""Byte counts against meter and shadow over a grid that does not fit a page, plans against a full search."""
import gc
import itertools
import math
import random
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_bytes import case_of  # noqa: E402
from fuzz_plan import Question, least_seconds  # noqa: E402
from processes import group_of_one  # noqa: E402
from test_fuzz_bytes import SEEDS  # noqa: E402

from gruckpt.plan.budget import (GPUS, DoesNotFit, Explorer, Ledger, Rates, _Planner, estimate,  # noqa: E402
                            estimate_any, fit, max_batch, seconds_of, what_fits)
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.measure.meter import Meter, human, nbytes, parse_bytes
from gruckpt.measure.shadow import shadow
from gruckpt.engine.recurrent import GRU, LSTM
from gruckpt.plan.segment import Plan
from gruckpt.charlm.text import Batch
from gruckpt.training.config import TrainConfig
from gruckpt.training.trainer import Trainer
from gruckpt.training.optimizer_step import grad_norm

MAKE = {'sgd': lambda ps: torch.optim.SGD(ps, lr=.1),
        'momentum': lambda ps: torch.optim.SGD(ps, lr=.1, momentum=.9),
        'adamw': lambda ps: torch.optim.AdamW(ps, fused=True),
        'amsgrad': lambda ps: torch.optim.AdamW(ps, fused=True, amsgrad=True),
        'adamw foreach': lambda ps: torch.optim.AdamW(ps, foreach=True),
        'adamw loop': lambda ps: torch.optim.AdamW(ps, foreach=False)}
DTYPES = {'pure bfloat16': torch.bfloat16, 'float64': torch.float64}
PRECISIONS = ['float32', 'bfloat16', 'pure bfloat16', 'float64', 'float16']
AUTOCAST = {'bfloat16': torch.bfloat16, 'float16': torch.float16}
V3A = GRUSpec(vocab_size=100, hidden=2048, norm='state', reset='before')


def configs(n=96, seed=7):
    "Spec, batch, plan, optimizer, precision: every value of each, T not a multiple of S, 1 to T segments"
    coin = random.Random(seed)
    forms = itertools.cycle(itertools.product((None, 'state', 'output'), ('after', 'before')))
    for i in range(n):
        norm, reset = next(forms)
        L, T = coin.choice((1, 2, 3, 4)), coin.choice((1, 2, 5, 9, 19, 38))
        spec = GRUSpec(coin.choice((2, 30, 500)), coin.choice((4, 16, 40)), L, norm=norm, reset=reset,
                       dropout=coin.choice((0., .3)) if L > 1 else 0., tied=coin.random() < .3)
        S = coin.choice([s for s in (1, 2, 3, 5, 17, T//2, T - 1, T) if 1 <= s <= T and T/s <= 24])
        plan = Plan(T, S, ('hidden', 'gates')[i % 2])
        yield spec, coin.choice((1, 2, 7, 20, 48)), plan, list(MAKE)[i % 6], PRECISIONS[i // 6 % 5]


def half_frozen(n=40, seed=3):
    "The same with some parts not trained, but never all, nor both the embedding and the lowest layer"
    coin = random.Random(seed)
    for config in configs(n, seed):
        parts = list(config[0].parts)
        frozen = coin.sample(parts, coin.randint(1, len(parts) - 1))
        if {'embedding', 'layer 0'} <= set(frozen): frozen.remove(coin.choice(('embedding', 'layer 0')))
        yield *config, tuple(frozen)


def freeze(model, frozen):
    for part, sizes in model.spec.parts.items():
        module, k = (model.rnn, part.split()[1]) if part.startswith('layer') else (
            model.embed if part == 'embedding' else model.head, '')
        named = [(n, p) for n, p in module.named_parameters() if not k or n.endswith(f'_l{k}')]
        if part == 'head' and model.spec.tied: named = [(n, p) for n, p in named if n == 'bias']
        assert sum(p.numel() for _, p in named) == sum(sizes)
        for _, p in named: p.requires_grad_(part not in frozen)


def train_step(model, opt, batch, state, plan, precision, run=None):
    half = AUTOCAST.get(precision)
    with Meter.phase('forward'), torch.autocast('cpu', half, enabled=half is not None):
        loss, state = (run or model.loss)(batch, state, plan=plan)
    with Meter.phase('backward'): (loss * 128. if precision == 'float16' else loss).backward()
    with Meter.phase('update'):
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        norm = grad_norm(grads)
        torch.stack([loss.detach().to(norm.dtype), norm])                # as the trainer reads them, in one
        del norm
        torch._foreach_mul_(grads, .5)
        opt.step()
    return loss, state


def batch_of(spec, B, T): return Batch(*(torch.randint(spec.vocab_size, (B, T)) for _ in 'xy'), fresh=True)


def subject(spec, B, optimizer, precision, frozen=()):
    torch.manual_seed(0)
    model = GRULM(spec).to(DTYPES.get(precision, torch.float32))
    freeze(model, frozen)
    return model, MAKE[optimizer]([p for p in model.parameters() if p.requires_grad]), model.init_state(B)


@pytest.mark.parametrize('config', [*configs(12), *half_frozen(4)],
                         ids=lambda o: f'{o[0]} B={o[1]} {o[2]} {o[3]} {o[4]} {o[5:]}')
def test_count_is_meter(config):
    "Every phase of the first and of a later step, to the byte"
    spec, B, plan, optimizer, precision, *frozen = config
    frozen = frozen[0] if frozen else ()
    model, opt, state = subject(spec, B, optimizer, precision, frozen)
    for first in (True, False):
        batch = batch_of(spec, B, plan.n_steps)
        opt.zero_grad()
        with Meter(model, opt, batch, state) as meter:
            _, after = train_step(model, opt, batch, state, plan, precision)
        ledger = estimate(spec, B, plan, optimizer=optimizer, precision=precision, first=first, frozen=frozen)
        assert meter.phases == ledger.phases and meter.peak == ledger.peak
        state, after = after, None


SMALL = [c for c in configs(30) if c[2].n_segments <= 3 and c[2].n_steps <= 9]


@pytest.mark.parametrize('config', SMALL,
                         ids=lambda o: f'{o[0]} B={o[1]} {o[2]} {o[3]} {o[4]}')
def test_count_is_shadow(config):
    spec, B, plan, optimizer, precision = config
    model, opt, state = subject(spec, B, optimizer, precision)
    batch = batch_of(spec, B, plan.n_steps)
    held = nbytes((model, batch, state))
    dark = shadow(train_step, model, opt, batch, state, plan, precision)
    ledger = estimate(spec, B, plan, optimizer=optimizer, precision=precision, first=True)
    assert {p: n + held for p, n in dark.phases.items()} == ledger.phases


def test_the_grids_are_large_enough():
    "Each optimizer with each precision by the meter, here or in test_fuzz_bytes.py; each once by the shadow"
    fuzzed = [case_of(seed).how for seed in SEEDS]
    both = {c[3:] for c in configs(12)} | {(o['optimizer'], o['precision']) for o in fuzzed}
    assert len(both & {c[3:] for c in configs(30)}) == 30
    assert {c[3] for c in SMALL} == {c[3] for c in configs(30)}
    assert {c[4] for c in SMALL} == {c[4] for c in configs(30)}
    assert {c[2].n_segments for c in configs(12)} >= {1, 2, 3}
    assert any(c[2].n_steps % c[2].seg_len for c in configs(12))


class Same:
    "A stream of one batch with storage of its own, for ever"
    epoch = 0
    def __init__(self, batch): self.batch = batch
    def __iter__(self):
        while True: yield self.batch


@pytest.mark.parametrize('plan', [Plan(13, 13), Plan(13, 5), Plan(13, 4, 'gates')], ids=str)
def test_the_trainer_steps_as_counted(plan):
    spec = GRUSpec(30, 16, 2)
    torch.manual_seed(0)
    batch = Batch(*batch_of(spec, 3, 13)[:2], fresh=False)
    trainer = Trainer(GRULM(spec), Same(batch), TrainConfig(max_steps=3, measure_every=1), plan)
    _, second, third = (o.peak_measured for o in trainer.steps())
    assert second == third == estimate(spec, 3, plan).peak                                      # B15 too


def test_never_below_with_a_state_made_inside():
    "The first batch of a row brings no state: what is made inside is what is counted"
    spec, plan = GRUSpec(30, 16, 2), Plan(13, 5)
    model, opt, _ = subject(spec, 3, 'adamw', 'float32')
    batch = batch_of(spec, 3, 13)
    with Meter(model, opt, batch) as meter: train_step(model, opt, batch, None, plan, 'float32')
    counted = estimate(spec, 3, plan, first=True).peak
    assert counted * .99 <= meter.peak <= counted


@pytest.mark.parametrize('spec', [GRUSpec(40, 24, 2), GRUSpec(500, 8, 1, norm='state')], ids=str)
@pytest.mark.parametrize('n_steps, how', [(1, {}), (9, {}), (24, {}), (2, dict(optimizer='sgd')),
                                          (9, dict(precision='bfloat16', device='cuda'))], ids=str)
def test_no_equal_cut_within_the_limit_is_faster(spec, n_steps, how):
    "All plans, of any form, are looked at in test_plan.py"
    def cost(plan): return seconds_of(spec, 5, plan, **how)
    def size(plan): return int(estimate(spec, 5, plan, **how).total)
    every = [Plan(n_steps, s, k) for s in range(1, n_steps + 1) for k in ('hidden', 'gates')]
    low, high = min(map(size, every)), max(map(size, every))
    for limit in sorted({low, *(low + (high - low)*i//7 for i in range(8))}):
        found = fit(spec, 5, n_steps, limit, **how)
        assert size(found) <= limit
        assert cost(found) <= min(cost(p) for p in every if size(p) <= limit) * (1 + 1e-12)
    with pytest.raises(DoesNotFit) as e: fit(spec, 5, n_steps, 1, **how)
    assert size(e.value.plan) <= low and fit(spec, 5, n_steps, size(e.value.plan), **how) == e.value.plan
    with pytest.raises(DoesNotFit): fit(spec, 5, n_steps, size(e.value.plan) - 1, **how)


@pytest.mark.parametrize('plan', [None, Plan(64, 64), Plan(64, 10, 'gates')], ids=str)
@pytest.mark.parametrize('limit', ['600KB', '1MiB', '10MiB', '100MiB'])
def test_one_more_does_not_fit(plan, limit):
    spec, n = GRUSpec(40, 32, 2), parse_bytes(limit)
    b = max_batch(spec, 64, limit, plan)
    def fits(b):
        if plan is not None: return estimate(spec, b, plan).total <= n
        return least_seconds(Question(0, spec, b, 64, n, Rates(), {})) < math.inf
    assert (b == 0 or fits(b)) and not fits(b + 1)


def test_B01_units():
    assert parse_bytes('16GiB') == 17179869184 != parse_bytes('16GB') == 16_000_000_000
    assert parse_bytes('16384MiB') == parse_bytes('16G') == parse_bytes('16GiB')
    assert GPUS['T4'].total == 17179869184 > GPUS['T4'].usable
    assert parse_bytes(human(GPUS['T4'].total)) == GPUS['T4'].total


def test_B02_bytes_a_parameter():
    def persistent(**how):
        terms = estimate(V3A, 1, Plan(2, 1), **how).moments['update: optimizer']
        return (terms['weights'] + terms['gradients'] + terms.get('optimizer', 0)) / V3A.n_params
    for how, n in ((dict(), 16), (dict(precision='bfloat16'), 16), (dict(precision='pure bfloat16'), 8),
                   (dict(optimizer='sgd'), 8), (dict(optimizer='amsgrad'), 20)):
        assert abs(persistent(**how) - n) < 1e-5


def test_B03_foreach_copies_the_parameters():
    peaks = {o: estimate(V3A, 1, Plan(2, 1), optimizer=o).phases['update']
             for o in ('adamw', 'adamw loop', 'adamw foreach')}
    assert abs(peaks['adamw foreach'] / (peaks['adamw'] + 4*V3A.n_params) - 1) < 1e-4
    assert peaks['adamw'] < peaks['adamw loop'] < peaks['adamw foreach']


def test_B04_the_peak_is_a_maximum():
    spec = GRUSpec(100, 256, 1)
    peaks = [estimate(spec, B, Plan(1, 1), optimizer='adamw foreach') for B in (1, 2, 4, 512)]
    assert [o.at.split(':')[0] for o in peaks] == ['update'] * 3 + ['backward']
    assert len({o.peak - 3 * 1024 * B for o, B in zip(peaks[:3], (1, 2, 4), strict=True)}) <= 3
    first = estimate(spec, 1, Plan(1, 1), first=True)
    assert not any('optimizer' in t for m, t in first.moments.items() if not m.startswith('update'))
    assert 0 <= estimate(spec, 1, Plan(1, 1)).phases['update'] - first.phases['update'] <= 8*len(spec.sizes)


def test_B05_B06_what_a_device_adds_stands_apart():
    plan = Plan(4096, 32)      # short enough for one chunk on either device
    spec = GRUSpec(50, 8, norm='state')
    cpu, cuda = (estimate(spec, 8, plan, device=d, backend='eager') for d in ('cpu', 'cuda'))
    assert cpu.peak == cuda.peak and cpu.total == cpu.peak
    assert set(cuda.beside) == {'allocator rounding', 'allocator slack', 'library workspace',
                                'allocator reserve'}
    assert cuda.total == cuda.peak + sum(cuda.beside.values())
    assert cuda.on_card - cuda.total == cuda.context > 2**28 and cpu.context == 0       # in no limit's sum
    assert str(cuda).splitlines()[-1].startswith('context, not in the sum')
    assert cuda.beside['allocator rounding'] >= 511 * (4*len(spec.sizes) + plan.n_segments)


def test_B08_half_is_not_half():
    spec = GRUSpec(100, 1024)
    whole, half = (estimate(spec, 1, Plan(2, 2), precision=p).peak for p in ('float32', 'bfloat16'))
    assert half > whole                                           # weight copies, and little to halve


def test_B09_counts_are_parameters():
    for spec in (V3A, GRUSpec(30, 8, 4), GRUSpec(30, 8, 2, norm='output')):
        assert sum(spec.sizes) == spec.n_params
    tied = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    tied[1].weight = tied[0].weight
    ledger = estimate_any(tied, torch.zeros(3, dtype=torch.long), lambda model, ids: model(ids).sum())
    assert ledger.terms['weights and buffers'] == 4 * sum(p.numel() for p in tied.parameters())


@pytest.mark.parametrize('norm', [None, 'output'])
def test_B09_tied_and_frozen_are_counted_once(norm):
    spec = GRUSpec(30, 8, 2, norm=norm, tied=True)
    model = GRULM(spec)
    assert spec.n_params == sum(p.numel() for p in model.parameters()) == sum(spec.sizes)
    assert spec.n_params == replace(spec, tied=False).n_params - 30*8
    assert nbytes(model) == estimate(spec, 2, Plan(4, 2)).moments['update: optimizer']['weights']
    layer = 3*8*(8 + 8) + 6*8 + 8*(norm is not None)
    assert sum(spec.parts['layer 0']) == layer
    terms = estimate(spec, 2, Plan(4, 2), frozen=('layer 0',), first=True).moments['update: optimizer']
    assert terms['weights'] - terms['gradients'] == 4*layer                     # frozen: 4 bytes and no more
    assert terms['optimizer'] == 2*terms['gradients'] + 4*(len(spec.sizes) - len(spec.parts['layer 0']))


@pytest.fixture
def a_world_of_one(tmp_path):
    with group_of_one(tmp_path/'meet'): yield


class Whole(nn.Module):
    "Its forward is the model's loss, as DDP wants it"
    def __init__(self, model): super().__init__(); self.model = model
    def forward(self, *args, **kw): return self.model.loss(*args, **kw)


@pytest.mark.parametrize('spec', [GRUSpec(30, 16, 2), GRUSpec(300, 16, 1, tied=True)], ids=str)
@pytest.mark.parametrize('plan', [Plan(12, 12), Plan(12, 5, 'gates'), Plan(12, 12, 'gates')], ids=str)
@pytest.mark.parametrize('view', [True, False])
def test_B10_buckets(a_world_of_one, spec, plan, view):
    "What torch's DDP allocates, with the gradients in its buckets and beside them, step by step"
    model, opt, state = subject(spec, 3, 'adamw', 'float32')
    before, batch, end = nbytes(model), batch_of(spec, 3, 12), time.monotonic() + 10
    with Meter(model) as meter:
        wrapped = DistributedDataParallel(Whole(model), gradient_as_bucket_view=view)
        while meter.live - before > 4 * spec.n_params and time.monotonic() < end: time.sleep(.01)
        assert meter.live - before == 4 * spec.n_params     # made beforehand; what was sent goes later
    for _ in range(2):                                                          # then built anew, once
        train_step(model, opt, batch, state, plan, 'float32', run=wrapped)
        opt.zero_grad()
    with Meter(model, opt, batch, state) as meter:
        train_step(model, opt, batch, state, plan, 'float32', run=wrapped)
    ledger = estimate(spec, 3, plan, world_size=2, bucket_view=view)
    assert {p: n + 4*spec.n_params for p, n in meter.phases.items()} == ledger.phases


def test_B07_bytes_follow_the_states_not_the_parameters():
    "A layer keeps rows of states: the input's width changes its parameters, and not what it keeps"
    def kept(kind, n_in, keep, T=20, B=3, D=16):
        layer, x = kind(n_in, D, keep=keep), torch.randn(T, B, n_in)
        with Meter(layer, x) as meter: out = layer(x)[0].sum()
        return meter.live - nbytes((layer, x, out)), sum(p.numel() for p in layer.parameters())
    row = 3*16*4
    for keep, gru, lstm in (('hidden', 21, 2*21), ('gates', 21 + 4*20, 2*21 + 4*20)):
        for n_in in (8, 64):
            (n, n_params), (m, m_params) = kept(GRU, n_in, keep), kept(LSTM, n_in, keep)
            assert (n, m) == (gru*row, lstm*row) and m_params / n_params == 4/3


def test_teacher_forcing_adds_its_tape():
    spec, plan = GRUSpec(84, 16, 2), Plan(64, 16)
    more = estimate(spec, 6, plan, teacher_forcing=.5).peak - estimate(spec, 6, plan).peak
    assert more == spec.tape_bytes(6, plan) > 0


def test_B11_logits():
    spec = GRUSpec(vocab_size=20_000, hidden=64)
    kept, rebuilt = (estimate(spec, 8, Plan(512, 512, keep)) for keep in ('gates', 'hidden'))
    assert kept.at == rebuilt.at == 'backward: loss, the only segment'
    assert 327_680_000 < kept.terms['logits'] < 1.1 * 327_680_000            # one copy, of torch's three
    assert rebuilt.terms['logits'] < 1.1 * 128 * 20_000 * 4                  # 128 rows at a time
    peaks = [estimate(spec, 8, Plan.split(512, k)).peak for k in (8, 16, 32)]
    assert max(peaks) < 1.02 * min(peaks)                                    # flat: weights and sums are left
    with pytest.raises(DoesNotFit, match='more segments do not help'): fit(spec, 8, 512, '40MB')


def test_B13_out_of_memory_leaves_nothing_behind():
    "The failed try's error and tensors are gone before the retry; model, optimizer, random state as before"
    spec, seen, fails = GRUSpec(30, 16, 2, dropout=.5), [], [1]
    class Tight(GRULM):
        def loss(self, batch, state=None, *, plan=None):
            if len(seen) == 1 and fails:
                fails.pop()
                lost = torch.ones(1000)
                error = torch.OutOfMemoryError('no room')
                refs.extend([weakref.ref(lost), weakref.ref(error)])
                torch.rand(3)
                raise error
            return super().loss(batch, state, plan=plan)
    def snapshot(o):
        numbers = [*o.model.parameters(), *(v for s in o.optimizer.state.values() for v in s.values())]
        return [t.detach().clone() for t in numbers] + [torch.get_rng_state()]
    def smaller(plan):
        gc.collect()
        assert [r() for r in refs] == [None, None]
        assert all(p.grad is None for p in trainer.model.parameters())
        assert all(map(torch.equal, snapshot(trainer), before))
        return Plan.split(13, 2*plan.n_segments), 0
    refs, before, curves = [], None, []
    for fails in ([1], []):
        torch.manual_seed(0)
        seen.clear()
        batch = Batch(*batch_of(spec, 3, 13)[:2], fresh=False)
        plan = Plan.split(13, 2)
        trainer = Trainer(Tight(spec), Same(batch), TrainConfig(max_steps=3), plan, replan=smaller)
        for record in trainer.steps():
            seen.append(record.loss)
            before = snapshot(trainer)
        curves.append([list(seen), trainer.plan.n_segments])
    assert [k for _, k in curves] == [4, 2] and len(refs) == 2
    assert curves[0][0] == pytest.approx(curves[1][0], rel=1e-5)


def test_B13_nothing_is_kept_of_a_failed_probe():
    model = nn.Linear(4, 4)
    before = [p.clone() for p in model.parameters()]
    def fails(model, x):
        raise RuntimeError('out of memory')
    x = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match='out of memory'): estimate_any(model, x, fails)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None and all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_what_does_not_fit_says_so():
    with pytest.raises(DoesNotFit) as e: fit(V3A, 64, 512, '1.2GiB')
    assert 'fits in 1.20 GiB' in str(e.value) and '\n' not in str(e.value)
    for name, value in e.value.changes.items():
        how = {name: value} if name in ('precision', 'optimizer') else {}
        spec = replace(V3A, **{name: value}) if name in ('hidden', 'n_layers') else V3A
        B, T = (value if name == 'batch' else 64), (value if name == 'steps' else 512)
        assert fit(spec, B, T, '1.2GiB', **how)


def test_what_fits_looks_at_128_layers_unless_told_more():
    def deepest(**how): return what_fits(GRUSpec(9, 2, 1), '64MiB', 1, 2, **how).loc['n_layers', 'any cut']
    assert (deepest(), deepest(most={'n_layers': 130})) == (128, 130)


def test_what_fits_grows_with_the_limit():
    spec = GRUSpec(40, 32, 2)
    small, large = (what_fits(spec, n, batch=4, n_steps=32) for n in ('1MiB', '4MiB'))
    families = small.columns.drop("times")
    assert (small[families] < large[families]).all(None)


@pytest.mark.parametrize('wrong, says', [
    (dict(optimizer='adam'), 'optimizer must be one of'), (dict(device='tpu'), 'device must be one of'),
    (dict(batch=0), 'batch must be an integer of at least 1, got 0'), (dict(precision='int8'), 'one of'),
    (dict(frozen=('embedding', 'layer 0')), 'use estimate_any'), (dict(frozen=('tail',)), "got 'tail'")],
    ids=str)
def test_wrong_questions(wrong, says):
    with pytest.raises(ValueError, match=says): estimate(**dict(spec=V3A, batch=2, plan=Plan(4, 2)) | wrong)


def test_an_explorer_without_ipywidgets_is_a_table(monkeypatch):
    "With it both: the table is what a page without sliders shows."
    explorer = Explorer(GRUSpec(20, 16, 2), batch=4, n_steps=12, n_segments=3)
    assert {'text/html', 'application/vnd.jupyter.widget-view+json'} <= explorer._repr_mimebundle_().keys()
    monkeypatch.setattr('gruckpt.plan.budget.find_spec', lambda name: None)
    assert explorer.widget() is None and explorer._repr_mimebundle_().keys() == {'text/html', 'text/plain'}
    total = human(estimate(GRUSpec(20, 16, 2), 4, Plan.split(12, 3)).total)
    assert f'4 rows, 12 steps in 3 segments of 4, keep hidden: {total}; ' in explorer.html
    assert explorer.html.count('<tr>') > 8


def test_a_ledger_prints():
    ledger = Ledger({'forward: x': {'weights': 2**20, 'logits': 1}}, {'context': 512})
    assert [line.split() for line in str(ledger).splitlines()] == [
        ['forward:', 'x'], ['weights', '1.00', 'MiB'], ['logits', '1', 'B'], ['sum', '1.00', 'MiB'],
        ['context', '512', 'B']]
    assert ledger._repr_markdown_().splitlines()[1] == '|---|---:|'


@pytest.mark.parametrize('spec, batch, how', [
    (GRUSpec(30, 300, 2), 1, {}),
    (GRUSpec(300, 16, 3, norm='output', dropout=.3), 2, {'precision': 'bfloat16'}),
    (GRUSpec(2, 16, 1, tied=True), 3, {'precision': 'pure bfloat16', 'teacher_forcing': .5}),
    (GRUSpec(300, 16, 2), 1, {'frozen': ('head',), 'precision': 'float64'})])
def test_few_lengths_tell_the_longest_segment_of_all(spec, batch, how):
    "Bytes are counted at some lengths only: the caps are those of a count of every length"
    o, every = (_Planner(spec, batch, 4000, **how) for _ in 'ab')
    every.__dict__['lens'] = np.arange(1, min(4000, spec.rhythm(batch, 'cpu')[1] + 2) + 1)
    assert len(o.lens) < len(every.lens) / 4
    coin = np.random.default_rng(0)
    for role in 'first', 'middle', 'last':
        for keep in o.of[role]:
            few, all_ = o.caps(role, keep), every.caps(role, keep)
            rooms = all_.bytes(coin.integers(1, 4001, 200), 2)
            rooms, before = np.concatenate([rooms, rooms - 1, [0]]), coin.integers(1, 9, 401)
            assert (few(rooms, before) == all_(rooms, before)).all()
