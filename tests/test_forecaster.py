"""Forecaster: three lines on every kind of table, saved and loaded, walked; scores equal to a library's."""
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from gruckpt.commands import train_tft
from gruckpt.tft.forecast import backtest, forecast, naive_error, scores, seasons_of
from gruckpt.tft.forecaster import Forecaster, roles_of
from gruckpt.tft.model import Tier
from gruckpt.tft.table import SeriesSpec, column_kinds, read_series
from gruckpt.training.sessions import session

SMALL = dict(horizon=4, lookback=8, hidden=4, heads=2, max_steps=6, batch_size=16, device='cpu')


def nixtla(n=120, ids=('a', 'b'), freq='h', seed=0):
    "A wave of a day and noise, by Nixtla's names"
    rng, steps = np.random.default_rng(seed), np.arange(n)
    return pd.concat([pd.DataFrame({
        'unique_id': i, 'ds': pd.date_range('2024-03-01', periods=n, freq=freq),
        'y': 5 + np.sin(2 * np.pi * steps / 24) + .1 * rng.normal(size=n) + 10 * k,
        'wind': rng.normal(size=n)})
        for k, i in enumerate(ids)], ignore_index=True)


def numbers(rows): return rows[[o for o in rows if o[0] == 'q']].to_numpy()


@pytest.fixture(scope='module')
def fitted(): return Forecaster(**SMALL).fit(nixtla())


def source_of(kind, folder):
    "The table in another form"
    rows = nixtla()
    if kind == 'arrow': return pa.Table.from_pandas(rows, preserve_index=False)
    if kind == 'polars': return pytest.importorskip('polars').from_pandas(rows)
    if kind == 'dict': return rows.to_dict('list')
    if kind == 'rows': return rows.to_dict('records')
    if kind == 'index': return rows.set_index(['unique_id', 'ds'])
    if kind == 'shuffled': return rows.sample(frac=1, random_state=0)
    path = folder/f'rows.{kind}'
    rows.to_csv(path, index=False) if kind == 'csv' else rows.to_parquet(path)
    return str(path) if kind == 'csv' else path


# ---- three lines ----

@pytest.mark.parametrize('kind', ['arrow', 'polars', 'dict', 'rows', 'index', 'shuffled', 'csv', 'parquet'])
def test_every_kind_of_table_gives_the_same(fitted, kind, tmp_path):
    "Nixtla's names are recognised; numbers, names and stamps come out as they went in."
    source, want = source_of(kind, tmp_path), fitted.predict()
    assert want.columns.tolist() == ['unique_id', 'ds', 'ahead', 'q0.1', 'q0.5', 'q0.9'] and len(want) == 8
    spec = Forecaster(**SMALL).trainer(source).stream.windows.table.series.spec
    assert spec == fitted.run.setup.coding.spec
    assert (spec.time, spec.target, spec.ids, spec.observed_reals) == ('ds', 'y', ('unique_id',), ('wind',))
    assert np.allclose(numbers(fitted.predict(source)), numbers(want), atol=1e-5)


def test_a_fit_is_its_seed_and_leaves_the_generators(fitted):
    state = torch.get_rng_state()
    again = Forecaster(**SMALL).fit(nixtla())
    assert torch.equal(torch.get_rng_state(), state)
    pd.testing.assert_frame_equal(again.predict(), fitted.predict())
    other = Forecaster(**SMALL, seed=1).fit(nixtla())
    assert not np.allclose(numbers(other.predict()), numbers(fitted.predict()))


def test_fit_is_trainer_and_session(fitted, tmp_path):
    "The pieces by hand: the same records, and forecasts through the functions below."
    by_hand = Forecaster(**SMALL)
    torch.manual_seed(7)
    records = list(session(by_hand.trainer(nixtla()), tmp_path/'run'))
    by_hand.adopt(tmp_path/'run')
    assert len(records) == 6
    pd.testing.assert_frame_equal(by_hand.predict(), fitted.predict())
    pd.testing.assert_frame_equal(forecast(by_hand.run, nixtla()), fitted.predict())


def test_defaults_come_from_the_data():
    "Horizon and past from the period of the step; a batch that the windows fill; a scale for each series."
    made = {freq: Forecaster(hidden=4, heads=2).trainer(nixtla(n, freq=freq))
            for freq, n in (('h', 200), ('D', 120), ('MS', 100))}
    assert {k: (o.model.spec.horizon, o.model.spec.lookback) for k, o in made.items()} == {
        'h': (24, 48), 'D': (7, 14), 'MS': (12, 24)}
    assert len(made['MS'].stream) == 1 and made['h'].stream.n_rows == 64
    assert all(o.stream.windows.table.coding.spec.scale == 'series' for o in made.values())


def test_columns_as_strings_lists_and_tables():
    rows = nixtla().assign(price=1., holiday=lambda o: o.ds.dt.hour % 2, kind=lambda o: o.unique_id)
    later = rows[['unique_id', 'ds', 'price', 'holiday']]
    for known in ['price', 'holiday'], ('price', 'holiday'), later, pa.Table.from_pandas(later):
        o = Forecaster(known=known, static='kind', observed=[], categorical='holiday', **SMALL)
        spec = o.trainer(rows).stream.windows.table.series.spec
        assert (spec.known_reals, spec.known_cats, spec.static_cats) == (('price',), ('holiday',), ('kind',))
        assert spec.observed_reals == () and o.notes == ('left out: wind',)


def test_memory_limit_takes_a_tier_and_predicts_as_without(fitted, monkeypatch):
    "Which tier fits is asked of `fit_tier`, at the batch, the precision and the device of the run."
    asked = []
    def fit_tier(spec, batch, limit, **how):
        asked.append((batch, limit, how))
        return Tier.vsn
    monkeypatch.setattr('gruckpt.tft.forecaster.fit_tier', fit_tier)
    trainer = Forecaster(**SMALL, memory_limit='128KiB', precision='bfloat16').trainer(nixtla(n=60))
    how = {'optimizer': 'adamw', 'precision': 'bfloat16', 'device': 'cpu', 'accumulate': 1}
    assert trainer.plan == Tier.vsn and asked == [(16, '128KiB', how)]
    assert trainer.replan(Tier.vsn) == (Tier.vsn, trainer.peak_predicted)
    assert asked[1] == (16, 9 * trainer.peak_predicted // 10, how)
    a, b = (Forecaster(**SMALL, tier=o).fit(nixtla()).predict() for o in ('vsn', Tier.full))
    for rows in a, b: assert np.allclose(numbers(rows), numbers(fitted.predict()), atol=1e-4)


# ---- folders ----

MORE = {'missing': 'last', 'tier': 'vsn', 'known': 'price', 'quantiles': (.2, .5)}


@pytest.mark.parametrize('more', [{}, MORE])
def test_load_is_as_before(tmp_path, more):
    "Zoned stamps, integer ids, a number that is missing where the kept rows begin."
    rows = nixtla().assign(price=1, unique_id=lambda o: (o.unique_id == 'b') + 10)
    rows['ds'] = rows.ds.dt.tz_localize('Asia/Tokyo')
    if more: rows.loc[rows.index % 120 > 100, 'wind'] = np.nan
    o = Forecaster(**SMALL, **more).fit(rows)
    later = rows.assign(ds=rows.ds + pd.Timedelta('120h'))[['unique_id', 'ds', 'price']] if more else None
    o.save(tmp_path/'kept')
    again = Forecaster.load(tmp_path/'kept', 'cpu')
    want = o.predict(future=later)
    assert want.unique_id.tolist() == [10] * 4 + [11] * 4 and str(want.ds.dt.tz) == 'Asia/Tokyo'
    pd.testing.assert_frame_equal(again.predict(future=later), want)
    pd.testing.assert_frame_equal(again.predict(rows, future=later), want)
    assert again.options == o.options and again.history.equals(o.history) and repr(again) == repr(o)
    again.save(tmp_path/'twice')
    pd.testing.assert_frame_equal(Forecaster.load(tmp_path/'twice', 'cpu').predict(future=later), want)


def test_a_folder_is_a_run_that_the_commands_read(fitted, tmp_path):
    from gruckpt.commands.cli import main
    nixtla().to_parquet(tmp_path/'rows.parquet')
    fitted.save(tmp_path/'run')
    rows, ahead = tmp_path/'rows.parquet', tmp_path/'ahead.parquet'
    options = {'--parquet-file': rows, '--out': ahead, '--device': 'cpu'}
    assert main(['forecast', str(tmp_path/'run'), *(str(o) for pair in options.items() for o in pair)]) == 0
    assert np.array_equal(numbers(pd.read_parquet(tmp_path/'ahead.parquet')), numbers(fitted.predict()))


def test_a_run_of_the_command_is_loaded(tmp_path, monkeypatch, capsys):
    from gruckpt.commands.cli import main
    monkeypatch.chdir(tmp_path)
    nixtla().to_parquet('rows.parquet')
    args = ('--parquet-file rows.parquet --ids unique_id --hidden 4 --heads 2 --lookback 8 --horizon 4 '
            '--epochs 1 --batch-size 16 --out run --device cpu --quiet').split()
    assert main(['train-tft', *args]) == 0, capsys.readouterr().err
    o = Forecaster.load('run', 'cpu')
    assert len(o.predict(nixtla())) == 8 and o.options['ids'] == ('unique_id',) and o.options['epochs'] == 1
    walked = o.cross_validation(nixtla(240), 1)
    assert len(walked) == 8 * 4 and walked.model.nunique() == 4
    with pytest.raises(ValueError, match='the run has no rows to begin from; give them'): o.predict()


def test_a_failed_fit_changes_nothing(fitted, tmp_path):
    before = fitted.predict()
    with pytest.raises(ValueError, match='the train part has no window'): fitted.fit(nixtla(9))
    pd.testing.assert_frame_equal(fitted.predict(), before)
    (tmp_path/'file').touch()
    with pytest.raises(ValueError, match='is a file; give a folder'): fitted.save(tmp_path/'file')
    fitted.save(tmp_path/'run')
    (tmp_path/'run'/'forecaster.pt').write_bytes(b'PK')
    with pytest.raises(ValueError, match='forecaster.pt.* is damaged'): Forecaster.load(tmp_path/'run')


# ---- ahead ----

@pytest.mark.parametrize('horizon', [5, 0, 2.])
def test_another_horizon_is_refused(fitted, horizon):
    with pytest.raises(ValueError, match=rf'horizon must be in 1..4 .*, got {horizon}; for more') as e:
        fitted.predict(horizon=horizon)
    assert '\n' not in str(e.value)


def test_unseen_series_are_said_or_refused(fitted):
    new = nixtla(ids=('a', 'c', 'd'))
    with warnings.catch_warnings(), pytest.raises(ValueError, match="='c' was not trained on.*scale='all'"):
        warnings.simplefilter('error')
        fitted.predict(new)
    shared = Forecaster(**SMALL, scale='all').fit(nixtla())
    said = r"^2 of 3 series were not trained on, the first unique_id='c': "
    with pytest.warns(UserWarning, match=said) as said:
        assert len(shared.predict(new)) == 12
    assert len(said) == 1 and said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        shared.predict(nixtla())


def test_quantiles_never_cross_and_how_many_did_is_said(fitted):
    "The head of a model that was hardly trained, turned upside down, crosses everywhere."
    o = Forecaster(**SMALL, quantiles=(.1, .3, .5, .7, .9)).fit(nixtla())
    def rows(out): return out.filter(like='q0').to_numpy()
    with torch.no_grad():
        for p in o.run.model.head.parameters(): p.copy_(p.flip(0))
        o.run.model.head.bias.copy_(torch.arange(5.).flip(0))
    out = o.predict()
    assert (np.diff(rows(out)) >= 0).all() and out.attrs['crossed'] == len(out) == 8


# ---- cross-validation ----

def test_nothing_that_comes_later_changes_a_window():
    "Training and forecasts of a window are those of a table that ends before it."
    rows = nixtla()
    when = rows.ds.max() - pd.Timedelta('3h')
    changed = rows.assign(y=rows.y.where(rows.ds < when, 99.), wind=rows.wind.where(rows.ds < when, -9.))
    a, b = (Forecaster(**SMALL).cross_validation(o, n_windows=1) for o in (rows, changed))
    assert a.ds.min() == when and np.array_equal(numbers(a), numbers(b)) and not np.array_equal(a.y, b.y)
    direct = Forecaster(**SMALL).fit(rows[rows.ds < when]).predict()
    assert np.allclose(numbers(a[a.model == 'tft']), numbers(direct), atol=1e-5)


def test_windows_are_the_newest_by_steps():
    rows = Forecaster(**SMALL).cross_validation(nixtla(), n_windows=3, step=2)
    begin = rows.groupby('window').ds.min()
    assert begin.diff().dropna().eq(pd.Timedelta('2h')).all() and begin.index.tolist() == [0, 1, 2]
    assert rows.ds.max() == nixtla().ds.max() and set(rows.ahead) == {1, 2, 3, 4}
    assert rows.y.notna().all() and rows.groupby(['model', 'window', 'unique_id']).size().eq(4).all()


def test_refit_trains_before_each():
    o = Forecaster(**SMALL)
    once, each = (o.cross_validation(nixtla(), 2, refit=r) for r in (False, True))
    assert once[once.window == 0].equals(each[each.window == 0]) and o.run is None
    assert not np.allclose(numbers(once[once.window == 1]), numbers(each[each.window == 1]))
    last = Forecaster(**SMALL).fit(nixtla()[lambda o: o.ds < o.ds.max() - pd.Timedelta('3h')]).predict()
    assert np.allclose(numbers(each[(each.window == 1) & (each.model == 'tft')]), numbers(last), atol=1e-5)


def test_what_is_not_there_is_said():
    "A weekly naive without a week before the windows; a series with a gap; neither drops out without a word."
    gap = nixtla().drop(236)
    with pytest.warns(UserWarning) as said: rows = Forecaster(**SMALL).cross_validation(gap, n_windows=1)
    lines = [str(o.message) for o in said]
    assert lines == rows.attrs['notes'] and all('\n' not in o for o in lines)
    assert lines[0].startswith('no seasonal naive of 168 rows: 1 of 1 windows have no 168 rows')
    assert lines[1].startswith('window 0: 1 of 2 series have a gap in it or before it') and len(lines) == 2
    assert set(rows.model) == {'tft', 'last value', 'seasonal naive'} and set(rows.unique_id) == {'a'}
    said = r'n_windows must be in 1..\d+ \(windows of 4 rows after 8, 4 apart\), got 99'
    with pytest.raises(ValueError, match=said): Forecaster(**SMALL).cross_validation(nixtla(), 99)


def test_json_can_hold_what_rows_say(tmp_path):
    "`attrs` goes into parquet, with the rows."
    rows = Forecaster(**SMALL).cross_validation(nixtla(240), n_windows=1)
    assert set(rows.model) == {'tft', 'last value', 'seasonal naive', 'seasonal naive 168'}
    rows.to_parquet(tmp_path/'rows.parquet')
    assert pd.read_parquet(tmp_path/'rows.parquet').attrs == json.loads(json.dumps(rows.attrs)) == rows.attrs


# ---- seasons and scores ----

@pytest.mark.parametrize('step, want', [('h', (24, 168)), ('15min', (96, 672)), ('24h', (7,)), ('D', (7,)),
                                        ('B', (5,)), ('7D', (52,)), ('14D', (26,)), ('MS', (12,)),
                                        ('BME', (12,)), ('3MS', (4,)), ('months=1', (12,)), ('12MS', ()),
                                        ('120MS', ()), ('5h', ()), ('7h', (24,))])
def test_seasons_come_from_the_step(step, want): assert seasons_of(step) == want


def some_rows(n=40, seed=0):
    "A backtest's rows of two series of different size, with rows of training before"
    rng, frames = np.random.default_rng(seed), []
    for k, i in enumerate('ab'):
        y = 3 + k + rng.normal(size=n * (k + 1))
        q = np.sort(y[:, None] + rng.normal(size=(len(y), 3)), 1)
        frames.append(pd.DataFrame({'unique_id': i, 'ds': np.arange(len(y)), 'y': y, 'q0.1': q[:, 0],
                                    'q0.5': q[:, 1], 'q0.9': q[:, 2], 'model': 'tft'}))
    train = nixtla(100, seed=seed)[['unique_id', 'ds', 'y']]
    return pd.concat(frames, ignore_index=True), train


def test_scores_by_hand():
    rows, train = some_rows()
    unit = naive_error(train, 'y', ('unique_id',), 24)
    got = scores(rows, 'y', ids=('unique_id',), unit=unit).loc['tft']
    each = {i: g for i, g in rows.groupby('unique_id')}
    error = {i: (g.y - g['q0.5']).abs() for i, g in each.items()}
    assert got.mae == pytest.approx(np.mean([e.mean() for e in error.values()]))
    assert got.rmse == pytest.approx(np.mean([(e ** 2).mean() ** .5 for e in error.values()]))
    y = {i: g.y.to_numpy() for i, g in train.groupby('unique_id')}
    scaled = [error[i].mean() / np.abs(y[i][24:] - y[i][:-24]).mean() for i in y]
    assert got.mase == pytest.approx(np.mean(scaled))
    alone = scores(each['a'], 'y').loc['tft']
    assert alone.scrps == pytest.approx(alone.q_risk) and 'mase' not in alone
    assert alone['coverage_0.9'] == (each['a'].y <= each['a']['q0.9']).mean()
    without = scores(rows.drop(columns='q0.5'), 'y')
    assert 'mae' not in without and without.scrps['tft'] > 0


def test_scores_are_utilsforecasts():
    "By series, and as the mean over series that its `evaluate` reports."
    losses = pytest.importorskip('utilsforecast.losses')
    rows, train = some_rows()
    ids, quantiles = ('unique_id',), {'q0.5': ['q0.1', 'q0.5', 'q0.9']}
    unit = naive_error(train, 'y', ids, 24)
    ours = scores(rows, 'y', 'unique_id', ids, unit)
    theirs = {'mae': losses.mae(rows, ['q0.5']), 'rmse': losses.rmse(rows, ['q0.5']),
              'mase': losses.mase(rows, ['q0.5'], 24, train),
              'scrps': losses.scaled_crps(rows, quantiles, np.array([.1, .5, .9])),
              **{f'coverage_{o:g}': losses.calibration(rows, {f'q{o:g}': f'q{o:g}'}) for o in (.1, .5, .9)}}
    overall = scores(rows, 'y', ids=ids, unit=unit).loc['tft']
    for name, table in theirs.items():
        want = table.set_index('unique_id').iloc[:, 0]
        assert np.allclose(ours[name], want[ours.index], rtol=1e-10), name
        if not name.startswith('coverage'): assert overall[name] == pytest.approx(want.mean(), rel=1e-10)


def test_the_mase_of_a_walk_is_in_units_of_the_rows_before_it():
    o, rows = Forecaster(**SMALL), nixtla()
    walked = o.cross_validation(rows, n_windows=2)
    before = rows[rows.ds < walked.ds.min()]
    unit = before.groupby('unique_id').y.apply(lambda y: y.diff(24).abs().mean())
    naive = walked[walked.model == 'seasonal naive']
    error = (naive.y - naive['q0.5']).abs() / naive.unique_id.map(unit)
    want = error.groupby(naive.unique_id).mean().mean()
    assert o.scores(walked, rows).mase['seasonal naive'] == pytest.approx(want)


def test_a_season_longer_than_the_models_past(fitted):
    rows = nixtla(400)
    walked = backtest(Forecaster(**SMALL).fit(rows).run, rows, 'valid', stride=8)
    naive = walked[walked.model == 'seasonal naive 168'].set_index(['unique_id', 'ds'])
    series = read_series(rows, SeriesSpec('ds', 'y', ids=('unique_id',)))
    index = pd.MultiIndex.from_frame(rows[['unique_id', 'ds']])
    ago = pd.Series(series.reals['y'], index).groupby(level=0).shift(168)
    width = naive['q0.5'] - ago[naive.index]
    assert width.groupby(naive.ahead).std().max() < 1e-4 and 'notes' not in walked.attrs


# ---- input ----

@pytest.mark.parametrize('options, said', [
    (dict(horizon=-1), 'horizon must be an integer from 1 on'),
    (dict(target='z'), "target: column 'z' is not in"),
    (dict(time='when'), "time: column 'when' is not in the data, which has unique_id, ds, y"),
    (dict(known=3), 'known must be a column, a list of columns, or a table that has them, got 3'),
    (dict(known='wind', observed='wind'), "'wind' has two roles"), (dict(step='1 parsec'), 'step must be as'),
    (dict(max_epochs=3), 'there is no option max_epochs; it is called epochs here'),
    (dict(clipp=3), 'there is no option clipp; it is called clip here'),
    (dict(valid=1.), 'valid and test must be shares'),
    (dict(precision='half'), 'precision must be one of'), (dict(memory_limit='lots'), 'lots'),
    (dict(batch_size=9999), 'windows, a batch needs 9999'), (dict(missing='zero'), 'missing must be one of')])
def test_wrong_options_are_one_line(options, said):
    with pytest.raises(ValueError, match='(?s).*') as e: Forecaster(**{**SMALL, **options}).fit(nixtla())
    assert said in str(e.value) and '\n' not in str(e.value)


def test_a_target_by_name_is_the_target_whatever_it_holds():
    kinds = {'ds': 'time', 'y': 'name', 'x': 'number'}
    assert roles_of(kinds)[0]['target'] == 'y'
    with pytest.raises(ValueError, match="column 'y' holds 'a' in row 0"):
        Forecaster(**SMALL).fit(nixtla().assign(y='a'))


# ---- the command is this class ----

def test_the_command_gives_columns_the_roles_that_the_class_gives(tmp_path):
    "Nixtla's names, an index without a name, and a second column of stamps."
    rows = nixtla().assign(until=pd.Timestamp('2024-06-01'), sky='clear')
    rows.to_csv(tmp_path/'rows.csv')
    kinds = column_kinds(tmp_path/'rows.csv')
    for named in ({}, {'known': 'sky'}, {'observed': 'wind'}, {'categorical': 'wind', 'static': 'sky'}):
        o = SimpleNamespace(**dict.fromkeys(('time', 'target', *train_tft._ROLES)) | named)
        found = train_tft._roles(o, kinds)
        named.pop('observed', None)         # beside what is named there, a command takes all others, too
        assert (found, o.left_out) == roles_of(kinds, **named) and o.left_out == ('Unnamed: 0', 'until')
    with pytest.raises(ValueError, match="^--ignore: column 'x' is not in the data"):
        train_tft._roles(SimpleNamespace(**vars(o) | {'ignore': 'x'}), kinds)
