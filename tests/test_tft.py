"""The Temporal Fusion Transformer: against an independent one, tier against tier, and trouble people had."""
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gruckpt.plan import budget
from gruckpt.plan.budget import DoesNotFit
from gruckpt.engine.certify import certify, gradient_flow
from gruckpt.measure.meter import Meter, nbytes
from gruckpt.measure.shadow import shadow
from gruckpt.engine.scan import plain
from gruckpt.tft.batch import WindowBatch
from gruckpt.tft.model import LAYERS, TFT, TFTSpec, Tier, coverage, q_risk, quantile_loss, to_neuralforecast
from gruckpt.tft import tiers
from gruckpt.tft.tiers import empty_batch, fit_tier, largest_batch, layer_costs, score_bytes, tier_ledger
from gruckpt.tft.vsn import VSN, Select, again

NAMED = [Tier.off, Tier.aggressive, Tier.vsn, Tier.full]
TIERS = [*NAMED, Tier(LAYERS, n_groups=3, seg_len=2), *map(Tier, LAYERS)]
PEER = TFTSpec(static=2, observed=3, known=2, hidden=8, heads=2, lookback=7, horizon=4)
MIXED = replace(PEER, static_cats=(3,), observed_cats=(4,), known_cats=(5, 2), dropout=.2)
every_tier = pytest.mark.parametrize('tier', TIERS, ids=str)


def noise(spec, B=3, seed=0, dtype=torch.float64, **more):
    g = torch.Generator().manual_seed(seed)
    batch = empty_batch(spec, B, dtype, 'cpu')
    def reals(t): return torch.randn(t.shape, generator=g, dtype=torch.float64).to(dtype)
    def codes(t, sizes):
        return torch.stack([torch.randint(n, t.shape[:-1], generator=g) for n in sizes], -1) if sizes else t
    names = 'static_reals', 'past_reals', 'known_reals', 'target_past', 'target'
    found = {n: reals(getattr(batch, n)) for n in names}
    found |= dict(static_cats=codes(batch.static_cats, spec.static_cats),
                  past_cats=codes(batch.past_cats, spec.observed_cats),
                  known_cats=codes(batch.known_cats, spec.known_cats))
    return batch._replace(**found | more)


def made(spec=MIXED, **more):
    torch.manual_seed(0)
    return TFT(spec, dtype=torch.float64, **more)


def loss_of(model, batch): return model.loss(batch)[0]


def grads(model, batch, tier=None, seed=1):
    torch.manual_seed(seed)
    loss = model.loss(batch, plan=tier)[0]
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))


def apart(a, b): return ((a - b).norm() / b.norm()).item()


# ---------------------------------------------------------------------- an independent implementation

@pytest.fixture(scope='module')
def oracle():
    return {k: torch.from_numpy(v) for k, v in np.load(Path(__file__).parent/'data'/'tft_oracle.npz').items()}


def part(oracle, kind): return {k.removeprefix(kind): v for k, v in oracle.items() if k.startswith(kind)}


@every_tier
@pytest.mark.parametrize('fold', [True, False], ids=['folded', 'unfolded'])
def test_equals_the_independent_file(oracle, tier, fold):
    model = TFT.from_neuralforecast(part(oracle, 'param/'), PEER, tier=tier, fold=fold).eval()
    out = model(noise(PEER, static_reals=oracle['static'], past_reals=oracle['observed'],
                      known_reals=oracle['known'], target_past=oracle['target_history'][..., 0]))
    assert apart(out.quantiles, oracle['output']) < 1e-10
    assert apart(out.past_weights, oracle['history_vsn_weights']) < 1e-10
    assert apart(out.attention, oracle['attention'][:, :, PEER.lookback:]) < 1e-10
    loss = (out.quantiles - oracle['loss_target']).square().sum()
    assert apart(loss, oracle['loss']) < 1e-12
    loss.backward()
    mine = to_neuralforecast(model, {n: p.grad for n, p in model.named_parameters()})
    theirs = part(oracle, 'grad/')
    assert mine.keys() == theirs.keys()
    worst = max(theirs, key=lambda n: apart(mine[n], theirs[n]))
    assert apart(mine[worst], theirs[worst]) < 1e-10, worst


def test_a_moved_model_goes_back(oracle):
    params = {k: v for k, v in part(oracle, 'param/').items()
              if k != 'loss.quantiles' and 'static_encoder.vsn.joint_grn.lin_c' not in k}
    back = to_neuralforecast(TFT.from_neuralforecast(part(oracle, 'param/'), PEER))
    assert back.keys() == params.keys() and all(torch.equal(back[k], v) for k, v in params.items())


def test_a_model_of_the_library_itself_moves():
    models, losses = map(pytest.importorskip, ('neuralforecast.models', 'neuralforecast.losses.pytorch'))
    spec = replace(PEER, dropout=.1)
    columns = {f'{kind}_exog_list': [f'{kind}{i}' for i in range(n)] for kind, n in
               (('stat', spec.static), ('hist', spec.observed), ('futr', spec.known))}
    model = models.TFT(h=spec.horizon, input_size=spec.lookback, hidden_size=spec.hidden, n_head=spec.heads,
                       dropout=spec.dropout, loss=losses.MQLoss(quantiles=list(spec.quantiles)), **columns)
    model.eval()
    b = noise(spec, dtype=torch.float32)
    theirs = model(dict(insample_y=b.target_past[..., None], futr_exog=b.known_reals, hist_exog=b.past_reals,
                        stat_exog=b.static_reals))
    ours = TFT.from_neuralforecast(model.state_dict(), spec).eval()
    assert apart(ours(b).quantiles, theirs) < 1e-5


def test_what_does_not_belong_is_named(oracle):
    params = part(oracle, 'param/')
    with pytest.raises(ValueError, match='params has more than this spec: something'):
        TFT.from_neuralforecast(params | {'something': torch.ones(1)}, PEER)
    with pytest.raises(ValueError, match='no categories'): TFT.from_neuralforecast(params, MIXED)
    del params['output_adapter.bias']
    with pytest.raises(ValueError, match='output_adapter.bias is missing'):
        TFT.from_neuralforecast(params, PEER)


# ---------------------------------------------------------------------- tiers

@every_tier
def test_every_tier_has_the_gradients_of_tier_off(tier):
    model, batch = made(), noise(MIXED)
    off, on = grads(model, batch, Tier.off), grads(model, batch, tier)
    for name in off:
        assert off[name].any(), name
        assert apart(on[name], off[name]) < 1e-10, name


@pytest.mark.parametrize('tier, fold', [*((o, True) for o in TIERS), (Tier.off, False), (Tier.full, False)],
                         ids=str)
def test_every_tier_is_certified(tier, fold):
    model, batch = made(tier=tier, fold=fold), noise(MIXED, 5)
    def reference(model, batch):
        with plain(): return loss_of(model, batch)
    found = certify(model, batch, loss_of, reference=reference)
    assert found.passed and not found.none and not found.zero, found
    assert gradient_flow(model, batch, loss_of).passed


@every_tier
def test_the_callers_random_numbers_do_not_depend_on_the_tier(tier):
    model, batch, drawn = made(), noise(MIXED), []
    for t in (Tier.off, tier):
        torch.manual_seed(3)
        loss = model.loss(batch, plan=t)[0]
        after_forward = torch.rand(3)
        loss.backward()
        drawn.append((after_forward, torch.rand(3)))
    assert all(map(torch.equal, *drawn))


@pytest.mark.parametrize('tier', [Tier.off, Tier.vsn, Tier.full], ids=str)
@pytest.mark.parametrize('name', ['historical_vsn.second', 'historical_vsn.joint.skip',
                                  'temporal.gate.lin.weight'])
def test_a_weight_changed_before_backward_raises(tier, name):
    model = made()
    loss = model.loss(noise(MIXED), plan=tier)[0]
    with torch.no_grad(): model.get_parameter(name).mul_(1.5)
    with pytest.raises(RuntimeError, match='modified (by an inplace operation|inplace)'): loss.backward()


@pytest.mark.parametrize('tier', NAMED, ids=str)
def test_second_backward_and_second_derivatives(tier):
    model, batch = made(), noise(MIXED)
    loss = model.loss(batch, plan=tier)[0]
    with pytest.raises(RuntimeError, match='second derivatives'):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss = model.loss(batch, plan=tier)[0]
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match='a second time'): loss.backward()


@pytest.mark.parametrize('frozen', ['inputs', 'historical_vsn.first', 'historical_vsn.second',
                                    'lstm_encoder'])
def test_frozen_parts(frozen):
    model, batch = made(), noise(MIXED)
    want = grads(model, batch, Tier.off)
    for n, p in model.named_parameters(): p.requires_grad_(not n.startswith(frozen))
    for tier in (Tier.off, Tier.full):
        torch.manual_seed(1)
        model.zero_grad()
        model.loss(batch, plan=tier)[0].backward()
        for n, p in model.named_parameters():
            assert (p.grad is None) == (not p.requires_grad), n
            if p.grad is not None: assert apart(p.grad, want[n]) < 1e-10, n


def test_mode_changed_before_backward():
    model, batch = made(), noise(MIXED)
    want = grads(model, batch, Tier.full)
    torch.manual_seed(1)
    loss = model.loss(batch, plan=Tier.full)[0]
    model.eval()
    model.tier, model.fold = Tier.off, False
    assert all(map(torch.equal, want.values(), torch.autograd.grad(loss, list(model.parameters()))))


def test_no_grad_keeps_nothing_and_recomputes_nothing():
    model, batch = made(PEER), noise(PEER)
    with torch.no_grad(), Meter() as m: out = model(batch, tier=Tier.full)
    assert m.live == nbytes(list(out)) and not out.quantiles.requires_grad


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_and_narrow_tiers_agree(dtype):
    narrow = dtype != torch.float32
    model, batch = made().float(), noise(MIXED, dtype=torch.float32)
    found = []
    for tier in (Tier.off, Tier(LAYERS, n_groups=2)):
        torch.manual_seed(1)
        with torch.autocast('cpu', dtype, enabled=narrow): loss = model.loss(batch, plan=tier)[0]
        assert loss.dtype == torch.float32
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for a, b in zip(*found):
        assert a.dtype == torch.float32 and a.isfinite().all()
        assert apart(a.double(), b.double()) < (.05 if narrow else 1e-5)


def test_names_of_tiers():
    names = ['off', 'aggressive', 'vsn', 'full']
    assert [str(Tier.named(n)) for n in names] == names
    assert Tier.aggressive.layers == ('static_encoder', 'lstm_encoder', 'lstm_decoder', 'historical_encoder',
                                      'future_encoder', 'temporal_attention')
    for bad in ('', 'medium', 'quantile_head'):
        with pytest.raises(ValueError, match='a tier is one of off, aggressive'): Tier.named(bad)
    with pytest.raises(ValueError, match='n_groups must be'): Tier(n_groups=0)


# ---------------------------------------------------------------------- TFT-225: what must be shown

@pytest.fixture(scope='module')
def wide():
    torch.manual_seed(0)
    return TFT(TFTSpec())


def kept(model, B, tier):
    batch = empty_batch(model.spec, B, device='cpu')
    with Meter() as m: loss = model.loss(batch, plan=tier)[0]
    return m.live - nbytes(loss)


def test_tft_225_keeps_at_most_52_mib(wide): assert kept(wide, 1, Tier.off) <= 52 * 2**20


def test_tft_225_vsn_keeps_at_most_1_mib_a_sample(wide):
    one, two, three, five = (kept(wide, B, Tier.vsn) for B in (1, 2, 3, 5))
    assert two - one <= 2**20 and 2*one - two <= 45 * 2**20
    assert five - three == 2 * (three - two)       # linear; one row is less: a transpose needs no copy


def test_tft_225_parameters(wide): assert sum(p.numel() for p in wide.parameters()) == 26_803_743


# ---------------------------------------------------------------------- cases

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_t01_attention_in_half_precision(dtype):
    model = made().to(dtype)
    short = torch.arange(7) >= torch.tensor([[0], [3], [7]])
    out = model(noise(MIXED, dtype=dtype, past_mask=short))
    assert out.attention.isfinite().all() and out.quantiles.isfinite().all()
    assert torch.allclose(out.attention.float().sum(-1), torch.ones(3, 2, 4), atol=.02)


@every_tier
def test_t02_a_window_without_past_among_others(tier):
    model = made().eval()
    short = torch.arange(7) >= torch.tensor([[0], [3], [7]])
    batch = noise(MIXED, past_mask=short, mask=torch.tensor([True, True, False])[:, None].expand(3, 4))
    for name in ('past_reals', 'target_past'):
        t = getattr(batch, name)
        batch = batch._replace(**{name: t.masked_fill(~short.view(3, 7, *[1] * (t.dim() - 2)), torch.nan)})
    without = WindowBatch(*[t[:2] if torch.is_tensor(t) else t for t in batch])
    out, healthy = model(batch, tier=tier), model(without, tier=tier)
    assert out.quantiles.isfinite().all()
    assert apart(out.quantiles[:2], healthy.quantiles) < 1e-10
    assert not out.attention[2, :, :, :7].any() and not out.attention[1, :, :, :3].any()
    mine, theirs = grads(model, batch, tier), grads(model, without, tier)
    for n in mine:
        assert mine[n].isfinite().all() and (mine[n] - theirs[n]).norm() <= 1e-10 * (1 + theirs[n].norm()), n


def test_t02_a_short_history_is_that_of_its_steps():
    "With one row, and its last four steps only"
    spec, model = replace(MIXED, lookback=4), made().eval()
    batch = noise(MIXED, 1, past_mask=torch.arange(7)[None] >= 3)
    short = TFT(spec, dtype=torch.float64).eval()
    short.load_state_dict(model.state_dict())
    tail = batch._replace(past_mask=None, **{n: getattr(batch, n)[:, 3:] for n in (
        'past_reals', 'past_cats', 'known_reals', 'known_cats', 'target_past')})
    assert apart(model(batch).quantiles, short(tail).quantiles) < 1e-10


def test_t02_a_hole_in_the_past_is_refused():
    with pytest.raises(ValueError, match='it has a hole'):
        made()(noise(MIXED, 1, past_mask=torch.tensor([[True, False, True, True, True, True, True]])))


def test_t04_horizon_of_one():
    spec = replace(MIXED, horizon=1)
    out = TFT(spec, dtype=torch.float64)(noise(spec))
    assert out.quantiles.shape == (3, 1, 3) and out.attention.shape == (3, 2, 1, 8)


@pytest.mark.parametrize('what', [
    dict(known=0, known_cats=()), dict(static=0, static_cats=()), dict(observed=0), dict(static=0, known=0),
    dict(static=0, observed=0, known=0, static_cats=(), observed_cats=(), known_cats=())], ids=str)
@pytest.mark.parametrize('tier', [Tier.off, Tier.full], ids=str)
def test_t05_kinds_that_are_not_there(what, tier):
    spec = replace(MIXED, **what)
    model, batch = made(spec), noise(spec)
    out = model(batch, tier=tier)
    assert out.quantiles.shape == (3, 4, 3) and (out.future_weights is None) == (spec.n_future == 0)
    assert (out.static_weights is None) == (spec.n_static == 0)
    for n, g in grads(model, batch, tier).items(): assert g.isfinite().all(), n


def test_t05_one_variable_has_weight_one():
    spec = TFTSpec(0, 0, 0, hidden=8, heads=2, lookback=5, horizon=2)
    assert torch.equal(TFT(spec)(noise(spec, dtype=torch.float32)).past_weights, torch.ones(3, 5, 1))


def test_t06_the_future_of_the_target_is_not_read():
    model, batch = made().eval(), noise(MIXED)
    changed = batch._replace(target=batch.target * torch.nan)
    assert torch.equal(model(batch).quantiles, model(changed).quantiles)


@pytest.mark.parametrize('at', range(4))
def test_t06_a_known_column_changes_nothing_before_it(at):
    model, batch = made().eval(), noise(MIXED)
    later = batch.known_reals.clone()
    later[:, 7 + at] += 1
    changed = (model(batch).quantiles != model(batch._replace(known_reals=later)).quantiles).any(-1).any(0)
    assert changed.tolist() == [i >= at for i in range(4)]           # the step itself sees it


def test_t09_code_0_is_unknown():
    model = made()
    for kind in ('static', 'observed', 'known'):
        for table in model.inputs.cats[kind]:
            assert not table.weight[0].any() and table.weight[1:].any(-1).all()


@pytest.mark.parametrize('odd', [torch.nan, torch.inf, -torch.inf])
def test_t10_what_is_masked_does_not_count(odd):
    q = torch.tensor([[.3], [.2]], requires_grad=True)
    loss = quantile_loss(q, torch.tensor([odd, 1.]), (.9,), torch.tensor([False, True]))
    loss.backward()
    assert loss.item() == pytest.approx(.9 * .8) and q.grad.flatten().tolist() == pytest.approx([0, -.9])
    model, mask = made().eval(), torch.tensor([True, False, True, True])[None].expand(3, 4)
    batch = noise(MIXED, mask=mask)
    bad = batch._replace(target=batch.target.masked_fill(~mask, odd))
    for a, b in zip(grads(model, batch).values(), grads(model, bad).values()): assert torch.equal(a, b)


def test_t11_mean_over_valid_elements():
    valid = torch.arange(10) < torch.tensor([[10], [2]])
    target = torch.tensor([[2.], [6.]]).expand(2, 10)                 # losses of 1 and 3 at quantile .5
    loss = quantile_loss(torch.zeros(2, 10, 1), target, (.5,), valid)
    assert loss.item() == pytest.approx(16 / 12)
    for dtype in (torch.bfloat16, torch.float16):
        loss = quantile_loss(torch.zeros(2, 10, 1, dtype=dtype), target.to(dtype), (.5,), valid)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(16 / 12)


def test_t13_heads_must_divide_hidden():
    with pytest.raises(ValueError, match='hidden=10 and heads=4'): TFTSpec(hidden=10, heads=4)


YEAR = TFTSpec(0, 0, 1, hidden=4, heads=1, lookback=30, horizon=8760)


def test_t14_a_year_of_hours_does_not_fit_and_nothing_is_allocated():
    assert score_bytes(YEAR, 128) == 39_424_204_800
    assert score_bytes(replace(YEAR, heads=4), 128) == 4 * 39_424_204_800
    with Meter() as m, pytest.raises(DoesNotFit, match='attention over 8760 steps does not fit') as e:
        fit_tier(YEAR, 128, '48GB')
    assert m.peak == 0
    assert e.value.changes['batch'] * 3 * score_bytes(YEAR, 1, 2) <= 48e9


@pytest.mark.parametrize('heads', [1, 2])
def test_t14_scores_in_the_backward_pass_are_three_times_that(heads):
    spec = replace(YEAR, lookback=4, heads=heads)
    def peak(H):
        found = replace(spec, horizon=H)
        model, batch = TFT(found), empty_batch(found, 64, device='cpu')
        loss = model.loss(batch)[0]
        with Meter(loss) as m: loss.backward()
        return m.peak
    second = (peak(224) - 2*peak(192) + peak(160)) / (2 * 32**2)
    assert second == pytest.approx(2 * 64 * heads * 4, abs=2)         # beside the kept one, which came before


# ---------------------------------------------------------------------- bytes, and a tier that fits

TINY = TFTSpec(0, 20, 1, hidden=16, heads=1, lookback=4, horizon=1)


def measured(spec, batch, tier, dtype):
    model, batch = TFT(spec, dtype=dtype), empty_batch(spec, batch, dtype, 'cpu')
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with Meter(model, batch[:-1], optimizer) as meter:
            model.loss(batch, plan=tier)[0].backward()
            optimizer.step()
        optimizer.zero_grad()
    return meter.peak


@pytest.mark.parametrize('tier', [*NAMED, Tier(LAYERS, n_groups=20)], ids=str)
@pytest.mark.parametrize('batch', [1, 48])
@pytest.mark.parametrize('precision', ['float32', 'float64'])
def test_predicted_bytes_are_measured_bytes(tier, batch, precision):
    predicted = tier_ledger(TINY, batch, tier, clip=False, precision=precision).peak
    assert predicted == measured(TINY, batch, tier, getattr(torch, precision))


def by_shadow(spec, batch, tier, how):
    "Peaks of both passes and what is kept between them, on torch's own fake tensors"
    def step(model, batch):
        joined = 0.
        for _ in range(1 + how.later):
            with Meter.phase('forward'), torch.autocast('cpu', torch.bfloat16, enabled=how.narrow):
                loss, _ = model.loss(batch, plan=tier)
            with Meter.phase('kept'): pass
            with Meter.phase('backward'): loss.backward()
            joined = joined + loss.detach()
    model = TFT(spec, device='meta', dtype=how.dtype)
    for name, part in model.named_children(): part.requires_grad_(name not in how.frozen)
    found = shadow(step, model, empty_batch(spec, batch, how.dtype)).phases
    return found['forward'], found['kept'], found['backward']


def drawn(seed):
    "A small question with everything that may change bytes"
    rng = random.Random(seed)
    heads, one_of = rng.choice([1, 2, 3]), rng.choice
    def cats(): return tuple(rng.randint(1, 9) for _ in range(one_of([0, 0, 1, 2])))
    spec = TFTSpec(one_of([0, 1, 3]), one_of([0, 1, 2, 7]), one_of([0, 1, 3]), heads * one_of([1, 2, 4]),
                   heads, one_of([1, 2, 3, 5]), one_of([1, 2, 4]), one_of([(.5,), (.1, .5, .9)]),
                   one_of([0., .1]), cats(), cats(), cats())
    dtype, narrow = rng.choice([(torch.float32, False), (torch.float32, True), (torch.bfloat16, False),
                                (torch.float64, False)])
    parts = ('inputs',), ('historical_vsn',), ('lstm_encoder', 'temporal'), ('head',)
    frozen = rng.choice([()] * 3 + list(parts))
    tier = Tier(tuple(n for n in LAYERS if rng.random() < .5), rng.choice([None, None, 1, 2, 3, 7]),
                rng.choice([None] * 5 + [1, 2]))
    return spec, rng.choice([1, 2, 3, 5, 17, 300]), tier, tiers._How(dtype, narrow, rng.random() < .3, frozen)


@pytest.mark.parametrize('seed', range(5))
def test_the_count_is_the_shadows(seed):
    spec, batch, tier, how = drawn(seed)
    found = tiers._peaks(tiers._rows(spec, batch, tier, how))
    assert tuple(map(int, found)) == by_shadow(spec, batch, tier, how)


@pytest.mark.parametrize('seed', range(100, 106))
def test_all_tiers_come_from_a_few_steps(seed, monkeypatch):
    "Of each stretch by arithmetic what a step of the tier's own finds; no tier is counted by itself for it"
    monkeypatch.setattr(tiers, '_one_by_one', None)
    spec, batch, tier, how = drawn(seed)
    how = how._replace(frozen=())
    subsets, _ = tiers._subsets(tiers._layers_of(spec))
    every = tiers._every(spec, batch, tier.n_groups, how)
    for i in random.Random(seed).sample(range(len(subsets)), 3):
        own = tiers._peaks(tiers._rows(spec, batch, Tier(subsets[i].layers, tier.n_groups), how))
        assert [int(np.broadcast_to(o, len(subsets))[i]) for o in every] == list(map(int, own)), subsets[i]


def test_where_a_few_steps_do_not_tell_each_tier_is_counted(monkeypatch):
    spec, how = TFTSpec(0, 1, 0, 2, 1, 2, 2), tiers._How(torch.float32, False, False, ())
    want = tiers._every(spec, 2, None, how)
    monkeypatch.setattr(tiers, '_meets', lambda *_: ('historical_vsn',))
    tiers._every.cache_clear()
    assert all(map(np.array_equal, tiers._every(spec, 2, None, how), want))
    tiers._every.cache_clear()


SIX = TFTSpec(0, 1, 0, hidden=4, heads=2, lookback=4, horizon=2)


def test_auto_asks_the_device_that_is_meant(monkeypatch):
    asked = []
    def free(device): asked.append(device); return 2**34
    monkeypatch.setattr(budget, '_free_on_gpu', free)
    assert fit_tier(SIX, 2, 'auto', device='cuda') == Tier.off
    assert largest_batch(SIX, Tier.off, 'auto', device='cuda', most=4) == 4
    assert asked == 2 * ['cuda']


def test_fit_tier_is_brute_force():
    "Six layers, every subset in every number of groups: the tier given costs least of all that fit"
    batch, found = 700, []
    for n_groups in tiers._groups_asked(SIX, batch):
        names = tiers._layers_of(SIX)
        for tier, seconds in zip(tiers._subsets(names)[0], tiers._seconds(SIX, batch, n_groups, 'cpu')):
            tier = Tier(tier.layers, n_groups)
            found.append((seconds, int(tier_ledger(SIX, batch, tier, clip=False).total), tier))
    assert len(found) >= 128                                     # of two groups or one
    sizes = sorted({n for _, n, _ in found})
    for limit in sizes[::len(sizes) // 12] + [sizes[-1]]:
        least = min((o for o in found if o[1] <= limit), key=lambda o: o[:2])
        tier = fit_tier(SIX, batch, limit, clip=False)
        given = next(o for o in found if o[2] == tier)
        assert given[:2] == pytest.approx(least[:2], rel=1e-12)
        assert not any(o[0] < given[0] and o[1] <= given[1] for o in found)              # dominated by none
    with pytest.raises(DoesNotFit, match='no tier'): fit_tier(SIX, batch, sizes[0] - 1, clip=False)
    how = tiers._How(torch.float32, False, False, ())
    for _, _, tier in random.Random(0).sample(found, 3):
        found = tiers._peaks(tiers._rows(SIX, batch, tier, how))
        assert tuple(map(int, found)) == by_shadow(SIX, batch, tier, how)


def test_the_largest_batch_is_brute_force():
    "A group of variables gets shorter as the batch grows by one: bytes fall, and what did not fit does again"
    spec, tier = TFTSpec(0, 3, 0, hidden=512, heads=1, lookback=16, horizon=2), Tier(LAYERS)
    sizes = [int(tier_ledger(spec, b, tier).total) for b in range(1, 24)]
    assert any(a > b for a, b in zip(sizes, sizes[1:]))
    for limit in {*sizes[4:18:3], *(n - 1 for n in sizes[4:18:3])}:
        want = max(b for b, n in enumerate(sizes, 1) if n <= limit)
        assert largest_batch(spec, tier, limit, most=23) == want


@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_300_columns_are_refused_at_once(device):
    wide = TFTSpec(0, 298, 0)
    with pytest.raises(DoesNotFit, match='no tier for batch 40 fits in 500.00 MiB') as e:
        fit_tier(wide, 40, '500MiB', device=device)
    assert e.value.ledger.total > 500 * 2**20 and e.value.plan != Tier.off


def test_the_table_finds_the_vsn():
    costs = {r.name: r for r in layer_costs(TINY)}
    assert 'static_vsn' not in costs and max(costs.values(), key=lambda r: r.saved).name == 'historical_vsn'
    assert sum(r.work for r in costs.values()) < .34


def test_fit_tier_climbs():
    off, full = (int(tier_ledger(TINY, 64, t).total) for t in (Tier.off, Tier.full))
    assert fit_tier(TINY, 64, off) == Tier.off
    tier = fit_tier(TINY, 64, (off + full) // 2)
    assert tier != Tier.off and tier_ledger(TINY, 64, tier).total <= (off + full) // 2
    with pytest.raises(DoesNotFit, match='no tier for batch 64 fits in 1.00 MiB'): fit_tier(TINY, 64, '1MiB')
    with pytest.raises(ValueError, match='batch must be an integer'): fit_tier(TINY, 0, off)
    b = largest_batch(TINY, Tier.full, off)
    assert tier_ledger(TINY, b, Tier.full).total <= off < tier_ledger(TINY, b + 1, Tier.full).total


# ---------------------------------------------------------------------- pieces

def test_again_passes_what_needs_no_gradient_and_tuples():
    def fn(x, i): return x[i].sin(), i + 1
    x, i = torch.randn(4, requires_grad=True), torch.tensor([0, 0, 2])
    a, j = again(fn, x, i)
    assert torch.equal(j, i + 1) and a.requires_grad and not j.requires_grad
    assert torch.equal(torch.autograd.grad(a.sum(), x)[0], torch.autograd.grad(x[i].sin().sum(), x)[0])


def test_a_rollout_without_gradient_inside_autocast():
    "The casts of a pass without gradient must not be used by the one with"
    model, batch = made().float(), noise(MIXED, dtype=torch.float32)
    found = []
    for rollout in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast('cpu', torch.bfloat16):
            if rollout:
                with torch.no_grad(): model.eval()(batch)
            loss = model.train().loss(batch, plan=Tier.full)[0]
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(g is not None for g in found[1]) and all(map(torch.equal, *found))


@pytest.mark.parametrize('again_', [False, True])
def test_vsn_gradient_of_its_inputs(again_):
    torch.manual_seed(0)
    vsn, f64 = VSN(5, 4, dtype=torch.float64), dict(dtype=torch.float64)
    reals = [torch.randn(2, 3, 3, **f64), torch.randn(3, 4, **f64), torch.randn(3, 4, **f64)]
    leaves = [t.requires_grad_() for t in (*reals, torch.randn(2, 3, 2, 4, **f64), torch.randn(2, 4, **f64))]
    def out(how): return vsn(tuple(leaves[:3]), leaves[3], leaves[4], how)[0].square().sum()
    mine = torch.autograd.grad(out(Select(again=again_, group_len=2)), leaves)
    with plain(): theirs = torch.autograd.grad(out(Select()), leaves)
    for a, b in zip(mine, theirs): assert apart(a, b) < 1e-10


def test_q_risk_and_coverage():
    target, mask = torch.tensor([1., -3., torch.nan]), torch.tensor([True, True, False])
    predicted = torch.tensor([[0., 2.], [-4., -2.], [0., 0.]])
    assert q_risk(predicted, target, (.1, .9), mask).tolist() == pytest.approx([2 * .2 / 4, 2 * .2 / 4])
    assert coverage(predicted, target, mask).tolist() == [0, 1]


def measured_late(spec, batch, tier, precision, n_real):
    "Most bytes of a step whose pasts have so many steps"
    dtype = {'pure bfloat16': torch.bfloat16, 'float64': torch.float64}.get(precision, torch.float32)
    model, windows = TFT(spec, dtype=dtype), empty_batch(spec, batch, dtype, 'cpu')
    windows = windows._replace(past_mask=torch.arange(spec.lookback) >= spec.lookback - n_real[:, None])
    optimizer = torch.optim.SGD(model.parameters(), lr=.1)
    with Meter(model, optimizer, windows[:-1]) as meter:
        with torch.autocast('cpu', torch.bfloat16, enabled=precision == 'bfloat16'):
            loss = model.loss(windows, plan=tier)[0]
        loss.backward()
        del loss
        optimizer.step()
    return meter.peak


@pytest.mark.parametrize('batch, tier, precision, exact', [
    (16, Tier.off, 'float32', True), (16, Tier(('lstm_encoder',)), 'bfloat16', True),
    (40, Tier(('historical_vsn', 'lstm_encoder')), 'float64', True), (2, Tier.off, 'pure bfloat16', False)])
def test_pasts_that_begin_late_never_take_more_than_is_counted(batch, tier, precision, exact):
    "Reported: 64 bytes over the count. Most is taken where one begins a step late, another two, and so on"
    spec = TFTSpec(0, 2, 1, hidden=16, heads=2, lookback=5, horizon=4, dropout=.1)
    most = tier_ledger(spec, batch, tier, packed=True, clip=False, optimizer='sgd', precision=precision).total
    late = (torch.arange(batch) - batch + 1 + k for k in range(min(batch, 5)))
    stairs = [measured_late(spec, batch, tier, precision, 5 - n.clamp(0, 4)) for n in late]
    coin = torch.Generator().manual_seed(0)
    others = [torch.randint(1, 6, (batch,), generator=coin), torch.ones(batch, dtype=int)]
    seen = stairs + [measured_late(spec, batch, tier, precision, n_real) for n_real in others]
    assert max(seen) == most if exact else max(seen) <= most
