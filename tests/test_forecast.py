"""Forecasts against the model by hand, naive ones against a loop, no look ahead, a run resumed elsewhere."""
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from processes import python

from gruckpt.tft.table import SeriesSpec, read_series
from gruckpt.training.checkpoint_files import load_checkpoint
from gruckpt.tft.forecast import (Run, Setup, backtest, explain, forecast, load_run, measures, naive, predict,
                                  scores, setup_of, tft_spec, trainer_of)
from gruckpt.tft.model import TFT, TFTSpec, Tier
from gruckpt.training.config import TrainConfig
from gruckpt.training.sessions import session

ROOT = Path(__file__).parent.parent
SPEC = SeriesSpec('time', 'y', ids=('id',), static_cats=('id',), observed_reals=('x',),
                  known_reals=('price',), calendar_cats=('hour',), calendar_reals=('weekday',))
LEVELS = (.05, .5, .8, .95)
MODEL = {'hidden': 8, 'heads': 2, 'dropout': .2, 'quantiles': LEVELS}
CONFIG = TrainConfig(max_steps=20, lr=1e-2, decay_steps=100)


def frame(n=120, ids=(1, 2), seed=0):
    "Noise around a wave, one series after the other"
    rng, hour = np.random.default_rng(seed), np.arange(n)
    return pd.concat([pd.DataFrame({
        'time': pd.date_range('2024-03-01', periods=n, freq='h'), 'id': i, 'x': rng.normal(size=n),
        'y': np.sin(hour / 24 * 2 * np.pi) + .3 * rng.normal(size=n) + 10 * i,
        'price': rng.normal(size=n)}) for i in ids], ignore_index=True)


def made(rows=None, spec=SPEC, lookback=12, horizon=3, seed=0, **more):
    "An untrained run of a small model, its series and its setup"
    series = read_series(frame() if rows is None else rows, spec)
    setup = setup_of(series, lookback, horizon, **more)
    torch.manual_seed(seed)
    return Run(TFT(tft_spec(setup, **MODEL)).eval(), setup, 0), series, setup


def with_future(rows, n=3):
    "Rows after the last ones, of which only the price is known"
    more = [g.assign(time=g.time + pd.Timedelta(hours=n), y=np.nan, x=np.nan) for _, g in
            rows.groupby('id').tail(n).groupby('id')]
    return pd.concat([rows, *more], ignore_index=True)


# ---- R02 ----

RESUME = """
import json, sys, torch
from gruckpt.training.checkpoint_files import load_checkpoint
from gruckpt.tft.forecast import Setup, trainer_of
from gruckpt.tft.table import read_series
from gruckpt.tft.model import TFTSpec, Tier
from gruckpt.training.config import TrainConfig
folder, path = sys.argv[1:]
state = load_checkpoint(folder).state
setup, spec = Setup.from_dict(state['about']['setup']), TFTSpec.from_dict(state['about']['tft'])
trainer = trainer_of(setup, read_series(path, setup.coding.spec), spec, TrainConfig(**state['config']), 16, 3)
trainer.load_state_dict(state)
print(json.dumps([[r.step, r.epoch, r.loss, r.grad_norm, r.lr] for r in trainer.steps()]))
"""


@pytest.mark.parametrize('stop, precision', [(7, 'float32')])
def test_a_fresh_process_goes_on_to_the_bit(tmp_path, stop, precision):
    "Dropout, shuffle, own quantiles; the cut lies inside an epoch."
    frame().to_parquet(tmp_path/'a.parquet')
    config = replace(CONFIG, precision=precision)
    def begin(config):
        _, series, setup = made(pd.read_parquet(tmp_path/'a.parquet'))
        return trainer_of(setup, series, tft_spec(setup, **MODEL), config, 16, 3)
    whole = [[r.step, r.epoch, r.loss, r.grad_norm, r.lr] for r in begin(config).steps()]
    first = begin(config)
    assert stop % len(first.stream) and whole[-1][1] > whole[stop][1]        # an epoch's middle, and another
    list(session(first_until(first, stop), tmp_path/'run'))
    code, out, err = python('-c', RESUME, tmp_path/'run', tmp_path/'a.parquet', cwd=ROOT)
    assert code == 0, err
    assert json.loads(out) == whole[stop:]


def first_until(trainer, stop):
    "A trainer that is told to stop after so many steps"
    steps = trainer.steps
    def some(*args):
        for record in steps(*args):
            if record.step == stop: trainer.stop()
            yield record
    trainer.steps = some
    return trainer


def test_another_loss_or_coding_is_refused():
    _, series, setup = made()
    begun = trainer_of(setup, series, tft_spec(setup, **MODEL), CONFIG, 16)
    next(iter(begun.steps()))
    state = begun.state_dict()
    def resume(model=MODEL, setup=setup, **kw):
        trainer_of(setup, series, tft_spec(setup, **model), CONFIG, 16, **kw).load_state_dict(state)
    resume()
    resume(tier=Tier.full)                                   # memory is not the run's
    for changed, why in (({'model': {**MODEL, 'quantiles': (.1, .5, .8, .95)}}, 'quantiles was'),
                         ({'model': {**MODEL, 'dropout': .1}}, 'dropout was 0.2, is 0.1'),
                         ({'seed': 1}, 'seed was 0'),
                         ({'setup': replace(setup, min_past=3)}, 'min_past was 12, is 3'),
                         ({'setup': setup_of(series, 12, 3, valid=.3)}, 'valid_from was')):
        with pytest.raises(ValueError, match=f'cannot resume: .*{why}'): resume(**changed)


# ---- the model by hand ----

@pytest.mark.parametrize('scale', ['all', 'series'])
def test_a_forecast_is_the_model_on_the_last_rows(scale):
    run, series, setup = made(spec=replace(SPEC, scale=scale))
    rows = forecast(run, with_future(frame()))
    assert rows.columns.tolist() == ['id', 'time', 'ahead', 'q0.05', 'q0.5', 'q0.8', 'q0.95']
    assert rows.id.tolist() == [1] * 3 + [2] * 3 and rows.ahead.tolist() == [1, 2, 3] * 2
    assert str(rows.time[0]) == '2024-03-06 00:00:00'
    ended = with_future(frame())
    ended.loc[ended.y.isna(), ['x', 'y']] = 0.                # their values do not matter
    known = read_series(ended, SPEC)
    table = setup.windows(known, 'all').table
    for i in (0, 1):
        last = int(known.first[i + 1]) - 3
        windows = setup.windows(known, 'all')
        batch = windows.batch(torch.tensor([int((windows.origins == last).nonzero())]))
        with torch.no_grad(): q = run.model(batch).quantiles[0].double()
        group = i if scale == 'series' else 0
        q = q.sort(-1).values                                 # an untrained model's quantiles cross
        q = q * setup.coding.scales[group][0] + setup.coding.means[group][0]
        got = rows[rows.id == i + 1][[f'q{o:g}' for o in LEVELS]].to_numpy()
        assert np.allclose(got, q.numpy(), atol=1e-5)
    assert table.coding is setup.coding


def test_known_columns_of_the_horizon_are_read_and_asked_for():
    run, *_ = made()
    rows = with_future(frame())
    other = rows.assign(price=rows.price + (rows.time == rows.time.max()))
    a, b = forecast(run, rows), forecast(run, other)
    last = a.ahead == 3
    assert not np.allclose(a['q0.5'][last], b['q0.5'][last])
    assert np.array_equal(a['q0.5'][~last], b['q0.5'][~last])
    with pytest.raises(ValueError, match="the known column 'price', 3 are missing"):
        forecast(run, frame())
    with pytest.raises(ValueError, match="column 'price' is empty in 2 rows"):
        forecast(run, rows.assign(price=rows.price.where(rows.time != rows.time.max())))


def test_tiers_forecast_the_same():
    run, *_ = made()
    rows = with_future(frame())
    want = forecast(run, rows)
    for tier in (Tier.vsn, Tier.full, Tier.aggressive):
        run.model.tier = tier
        assert np.allclose(forecast(run, rows)['q0.5'], want['q0.5'], atol=1e-5)


@pytest.mark.parametrize('column', ['y', 'x'])
def test_nothing_looks_ahead(column):
    "What comes after an instant changes no forecast from before it, of the model or of a naive one."
    run, *_ = made()
    rows, when = frame(), pd.Timestamp('2024-03-05 12:00')
    changed = rows.assign(**{column: rows[column].where(rows.time < when, 99.)})
    a, b = (backtest(run, o, season=3) for o in (rows, changed))
    begun = a.groupby(['model', 'window']).time.transform('min') <= when
    names = [f'q{o:g}' for o in LEVELS]
    assert begun.any() and not begun.all() and set(a.model) == {'tft', 'last value', 'seasonal naive'}
    assert np.array_equal(a[begun][names], b[begun][names])
    late = a[(~begun) & (a.model == 'tft')].index
    assert not np.array_equal(a.loc[late, names], b.loc[late, names])


def test_a_new_series_is_forecast_as_unknown():
    run, *_ = made()
    rows = with_future(frame())
    a, b = forecast(run, rows.assign(id=rows.id + 7)), forecast(run, rows.assign(id=rows.id + 70))
    assert a.id.tolist() == [8] * 3 + [9] * 3 and np.array_equal(a['q0.5'], b['q0.5'])


def test_series_of_one_row_and_constant_series():
    "T07: finite scales, finite forecasts."
    short, flat = frame(1, ids=(3,)).assign(y=3.), frame(ids=(4,)).assign(y=.1)
    run, *_ = made(pd.concat([frame(), short, flat]), min_past=1)
    one = frame(4, ids=(3,)).assign(y=[3., np.nan, np.nan, np.nan], x=[1., np.nan, np.nan, np.nan])
    rows = forecast(run, pd.concat([one, with_future(flat)]))
    assert rows.id.tolist() == [3] * 3 + [4] * 3 and np.isfinite(rows.filter(like='q0').to_numpy()).all()


# ---- judges ----

def test_naive_against_a_loop():
    run, series, setup = made()
    test, train = (setup.windows(series, o) for o in ('test', 'train'))
    y = series.reals['y']
    for season in (None, 2, 12):
        def point(r, h, season=season):
            if season is None: return y[r - 1]
            return y[r + h - season * (h // season + 1)]
        errors = [[y[r + h] - point(r, h) for h in range(3)] for r in train.origins.tolist()]
        band = np.quantile(errors, LEVELS, axis=0)
        want = [[point(r, h) + band[:, h] for h in range(3)] for r in test.origins.tolist()]
        assert np.allclose(naive(test, train, LEVELS, season), want, atol=1e-5)


def test_scores_are_the_measures_of_the_model():
    run, series, setup = made()
    windows = setup.windows(series, 'test')
    want = measures(predict(run.model, windows), windows, LEVELS)
    got = scores(backtest(run, series), 'y').loc['tft']
    for name in ('q_risk', *(f'coverage_{o:g}' for o in LEVELS)):
        assert got[name] == pytest.approx(want[name], abs=1e-5)


def test_missing_targets_are_not_judged():
    rows = frame()
    rows.loc[rows.index % 4 == 0, 'y'] = np.nan
    run, series, setup = made(rows, replace(SPEC, missing='last'))
    windows = setup.windows(series, 'test')
    assert windows.targets().isnan().any()
    want = measures(predict(run.model, windows), windows, LEVELS)
    got = scores(backtest(run, series, season=3), 'y').loc['tft']
    assert all(np.isfinite(list(want.values()))) and got.q_risk == pytest.approx(want['q_risk'], abs=1e-5)


def test_the_best_weights_come_back(tmp_path):
    "A rate that ruins the model after its first epochs: the run ends early, and what is loaded is the best."
    _, series, setup = made(lookback=6)
    config = TrainConfig(max_epochs=30, lr=.3, decay_steps=1000, clip=None, halt_after=2)
    trainer = trainer_of(setup, series, tft_spec(setup, **MODEL), config, 16)
    list(session(trainer, tmp_path/'run'))
    history = pd.DataFrame(trainer.history)
    assert trainer.halted and len(history) < 30 and history.quantile_loss.idxmin() == len(history) - 3
    run, windows = load_run(tmp_path/'run'), setup.windows(series, 'valid')
    best = measures(predict(run.model, windows), windows, LEVELS)['quantile_loss']
    assert best == pytest.approx(history.quantile_loss.min(), abs=1e-5) and run.step == history.step.iloc[-3]
    assert not run.model.training and run.setup == setup and run.levels == LEVELS


def test_without_a_validation_part_the_last_weights_count(tmp_path):
    _, series, setup = made(valid=0., test=.2)
    trainer = trainer_of(setup, series, tft_spec(setup, **MODEL), CONFIG, 16)
    list(session(trainer, tmp_path/'run'))
    assert trainer.judge is None and load_run(tmp_path/'run').step == 20


@pytest.mark.parametrize('precision', ['bfloat16', 'pure bfloat16', 'float64', 'float16'])
def test_precisions(tmp_path, precision):
    _, series, setup = made()
    config = replace(CONFIG, max_steps=6, precision=precision)
    trainer = trainer_of(setup, series, tft_spec(setup, **MODEL), config, 16, tier=Tier.vsn)
    records = list(session(trainer, tmp_path/'run'))
    assert all(np.isfinite(r.loss) for r in records) and np.isfinite(trainer.history[-1]['q_risk'])
    rows = forecast(load_run(tmp_path/'run'), with_future(frame()))
    assert np.isfinite(rows['q0.5']).all()


def test_what_a_checkpoint_holds_is_plain(tmp_path):
    "It loads with weights_only, and its setup survives JSON."
    _, series, setup = made()
    config = replace(CONFIG, max_steps=2)
    trainer = trainer_of(setup, series, tft_spec(setup, **MODEL), config, 16, tier=Tier.vsn)
    list(session(trainer, tmp_path/'run'))
    state = load_checkpoint(tmp_path/'run').state
    assert Setup.from_dict(json.loads(json.dumps(state['about']['setup']))) == setup
    assert TFTSpec.from_dict(state['about']['tft']) == tft_spec(setup, **MODEL)
    assert Tier(**state['plan']) == Tier.vsn


def test_explanations_have_names_and_sum_to_one():
    run, series, setup = made()
    o = explain(run, setup.windows(series, 'test'), batch_size=7)
    assert o.static.index.tolist() == ['id'] and o.static.sum() == pytest.approx(1, abs=1e-5)
    assert o.past.columns.tolist() == ['x', 'price', 'weekday_sin', 'weekday_cos', 'y', 'hour']
    assert o.future.columns.tolist() == ['price', 'weekday_sin', 'weekday_cos', 'hour']
    for part in (o.past, o.future, o.attention): assert np.allclose(part.sum(axis=1), 1, atol=1e-5)
    assert o.attention.shape == (3, 15)
    bare, bare_series, bare_setup = made(spec=SeriesSpec('time', 'y', ids=('id',)))
    o = explain(bare, bare_setup.windows(bare_series, 'test'))
    assert not len(o.static) and not len(o.future.columns) and o.past.columns.tolist() == ['y']
