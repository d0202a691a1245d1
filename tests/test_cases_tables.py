"""Tables that lost their weekday, their scale, their columns or their rows without a word: N15 to N33."""
import json
from dataclasses import FrozenInstanceError, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from gruckpt.commands import train_tft
from gruckpt.commands.cli import main
from gruckpt.tft.encoding import encode, fit_coding
from gruckpt.tft.table import SeriesSpec, column_kinds, read_series
from gruckpt.tft.forecast import (Run, backtest, forecast, plot_importance, plot_over_time, predict, scores,
                                  setup_of, tft_spec)
from gruckpt.measure.meter import Meter, nbytes
from gruckpt.tft.windows import Windows, extended
from gruckpt.tft.model import TFT

PLAIN = SeriesSpec('time', 'y')
ZONES = (None, 'Europe/Berlin', 'America/New_York')


def counting(times, **columns):
    "A table of one series that counts"
    return pd.DataFrame({'time': times, 'y': np.arange(len(times), dtype=float), **columns})


def made(rows, spec=PLAIN, lookback=8, horizon=3, seed=0, **how):
    "An untrained run of a small model, and its series"
    series = read_series(rows, spec)
    setup = setup_of(series, lookback, horizon, **how)
    torch.manual_seed(seed)
    return Run(TFT(tft_spec(setup, hidden=8, heads=2)).eval(), setup, 0), series


def roles(path, **named):
    "The roles that train-tft gives the columns of a file under these options, as a specification"
    options = dict.fromkeys(('time', 'target', *train_tft._ROLES)) | named
    return SeriesSpec.from_dict(train_tft._roles(SimpleNamespace(**options), column_kinds(path)))


def one_line(error): return '\n' not in str(error.value)


# ---- N15: a step is the calendar's ----

@pytest.mark.parametrize('zone', ZONES)
@pytest.mark.parametrize('freq, step, calendar', [
    ('D', 'D', ('weekday', 'month')), ('B', 'B', ('weekday', 'month')), ('W-MON', '7D', ('month',)),
    ('MS', 'MS', ('month',)), ('ME', 'ME', ('month',)), ('QS', '3MS', ('month',)), ('YS', '12MS', ()),
    ('h', 'h', ('hour', 'weekday'))])
def test_N15_calendar_steps_over_both_clock_changes(zone, freq, step, calendar):
    "One stretch; weekday and month as pandas shows them; the future as pandas goes on."
    n = {'YS': 6, 'QS': 12}.get(freq, 400 if freq != 'h' else 24 * 300)
    times = pd.date_range('2024-01-01', periods=n + 5, freq=freq, tz=zone).as_unit('ns')
    spec = replace(PLAIN, calendar_cats=('weekday', 'month', 'day'))
    series = read_series(counting(times[:n]), spec)
    assert series.spec.step == step
    table = encode(series, fit_coding(series))
    assert not table.run_start.any()
    assert (table.known_cats - 1).tolist() == [[o.weekday(), o.month - 1, o.day - 1] for o in times[:n]]
    assert np.array_equal(extended(series, 5).stamps, times.asi8)
    plain = read_series(counting(times[:n]), PLAIN)
    assert train_tft._with_calendar(plain, 'auto').spec.calendar_cats == calendar


@pytest.mark.parametrize('day', ['2024-03-28', '2024-10-24'])
@pytest.mark.parametrize('freq', ['D', 'B', 'W', 'MS'])
def test_N15_the_future_stays_at_midnight(day, freq):
    "Steps that cross the change in spring and in autumn, one by one."
    begin = pd.Timestamp(day) - 9 * pd.tseries.frequencies.to_offset(freq)
    times = pd.date_range(begin, periods=16, freq=freq, tz='Europe/Berlin')
    run, series = made(counting(times[:12]), lookback=3, horizon=4, valid=.2, test=0.)
    rows = forecast(run, series)
    assert rows.time.tolist() == times[12:].tolist() and (rows.time.dt.hour == 0).all()


def test_N15_a_skipped_midnight_is_no_gap():
    "In Cairo clocks are put forward at midnight: the day begins at one."
    days = pd.date_range('2024-04-20', periods=14, freq='D')
    days = days.tz_localize('Africa/Cairo', nonexistent='shift_forward')
    series = read_series(counting(days), PLAIN)
    assert series.spec.step == 'D' and not encode(series, fit_coding(series)).run_start.any()
    assert extended(read_series(counting(days[:5]), replace(PLAIN, step='D')), 4).stamps.tolist() == \
        days[:9].as_unit('ns').asi8.tolist()


def test_N15_the_clock_is_kept_where_it_is_the_step():
    "Every 24 hours in UTC is an hour later in summer time; gaps on weekends make no business days of a week."
    times = pd.date_range('2024-03-01', periods=90, freq='D', tz='UTC').tz_convert('Europe/Berlin')
    assert read_series(counting(times), PLAIN).spec.step == '24h'
    days = pd.date_range('2024-01-01', periods=60, freq='D')
    assert read_series(counting(days.delete([5, 6])), PLAIN).spec.step == 'D'
    fifteenth = pd.date_range('2024-01-01', periods=8, freq='MS', tz='Europe/Berlin') + pd.Timedelta(days=14)
    series = read_series(counting(fifteenth.normalize()), PLAIN)
    assert series.spec.step == 'months=1' and not encode(series, fit_coding(series)).run_start.any()


@pytest.mark.parametrize('step', ['0D', '-1h', ''])
def test_N15_a_step_goes_forward(step):
    with pytest.raises(ValueError, match='step must be as pandas writes it') as e: replace(PLAIN, step=step)
    assert one_line(e)


# ---- N16: a series that begins after the training cut ----

@pytest.mark.parametrize('min_past', [None, 1])
def test_N16_a_late_series_is_forecast_in_its_size(min_past):
    rng, spec = np.random.default_rng(0), replace(PLAIN, ids=('id',), scale='series')
    def rows(id, level, start, n):
        return counting(pd.date_range(start, periods=n, freq='h'), id=id).assign(y=level + rng.normal(size=n))
    table = pd.concat([rows('a', 3, '2024-01-01', 400), rows('b', 970, '2024-01-15', 64)])
    run, series = made(table, spec, min_past=min_past)
    first = series.reals['y'][series.first[1]:][:min_past or 8]
    assert run.setup.parts.valid_from < series.stamps[series.first[1]]
    assert run.setup.coding.means[1][0] == pytest.approx(first.mean())     # nothing that is forecast is in it
    got = forecast(run, series)
    for id, level in ('a', 3), ('b', 970): assert (got['q0.5'][got.id == id] - level).abs().max() < 15


# ---- N17: names of result columns ----

@pytest.mark.parametrize('role', ['time', 'target', 'ids'])
@pytest.mark.parametrize('name', ['model', 'ahead', 'window', 'q1', 'q0.5', 'q.5', 'q1e-05'])
def test_N17_reserved_column_names(role, name):
    with pytest.raises(ValueError, match=f"{role}: column '{name}' is called like .* rename it") as e:
        SeriesSpec.from_dict({'time': 'time', 'target': 'y', role: [name] if role == 'ids' else name})
    assert one_line(e)


def test_N17_the_command_refuses_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    counting(pd.date_range('2024', periods=100, freq='h')).rename(columns={'y': 'q1'}).to_parquet('a.parquet')
    assert main(['train-tft', '--parquet-file', 'a.parquet', '--target', 'q1', '--out', 'run']) == 2
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and "column 'q1'" in err and not Path('run').exists()


def test_N17_other_columns_keep_their_names_and_so_does_the_calendar():
    "Inputs may be called like results; a column `hour` beside the calendar's has its own codes."
    times = pd.date_range('2024', periods=120, freq='h')
    spec = replace(PLAIN, observed_reals=('model', 'q0.5'), known_cats=('hour',), calendar_cats=('hour',))
    rows = counting(times, model=1., hour=np.where(times.hour < 12, 'am', 'pm')).assign(**{'q0.5': 2.})
    run, series = made(rows, spec)
    assert run.setup.coding.sizes['known'] == (3, 25)
    assert run.setup.coding.names['known_cats'] == ('hour', 'hour (calendar)')
    assert np.isfinite(scores(backtest(run, series), 'y').to_numpy()).all()


# ---- N18: one reader for kind and value ----

def test_N18_a_column_that_is_empty_for_its_first_megabyte(tmp_path):
    n = 60_000
    rows = counting(pd.date_range('2024', periods=n, freq='min'), late=np.nan)
    rows.loc[n - 9:, 'late'] = 1.5
    rows.to_csv(tmp_path/'a.csv', index=False)
    assert rows[:n - 9].to_csv(index=False).__len__() > 2**20
    assert column_kinds(tmp_path/'a.csv')['late'] == 'number'
    spec = replace(roles(tmp_path/'a.csv', target='y'), missing='mean')
    assert spec.observed_reals == ('late',)
    assert np.nansum(read_series(tmp_path/'a.csv', spec).reals['late']) == 9 * 1.5


def test_N18_what_is_missing_is_missing_to_both(tmp_path):
    "Kinds and values of one text file and of the parquet file of the same table."
    words = ['1.5', 'NA', 'N/A', 'null', '', 'NaN', '#N/A', '<NA>', 'None', '-2e3']
    rows = counting(pd.date_range('2024', periods=10, freq='h'), x=words, on=['True', 'False'] * 5,
                    off=['true', 'NA', 'false', '', 'true'] * 2, land=['NA', 'DE'] * 5, code=['007'] * 10)
    rows.to_csv(tmp_path/'a.csv', index=False)
    x = np.array([1.5, *[np.nan] * 8, -2000])
    off = pd.array([True, None, False, None, True] * 2, dtype='boolean')
    rows.assign(x=x, on=rows.on == 'True', off=off, code=7).to_parquet(tmp_path/'a.parquet')
    assert column_kinds(tmp_path/'a.csv') == column_kinds(tmp_path/'a.parquet')
    for file in 'a.csv', 'a.parquet':
        spec = replace(roles(tmp_path/file, target='y'), missing='mean')
        assert spec.observed_reals == ('x', 'on', 'off', 'code') and spec.observed_cats == ('land',)
        got = read_series(tmp_path/file, spec)
        assert np.array_equal(got.reals['x'], x, equal_nan=True)
        assert got.reals['on'].tolist() == [1, 0] * 5 and got.reals['code'].tolist() == [7] * 10
        assert np.array_equal(got.reals['off'], off.to_numpy(float, na_value=np.nan), equal_nan=True)
        assert got.cats['land'][1] == ['DE', 'NA']                     # Namibia
    names = replace(PLAIN, observed_cats=('on', 'code'))
    got = read_series(tmp_path/'a.csv', names)
    assert got.cats['on'][1] == read_series(tmp_path/'a.parquet', names).cats['on'][1] == ['false', 'true']
    assert got.cats['code'][1] == ['007']


def test_N18_integers_with_a_gap_are_the_same_names_in_both(tmp_path):
    "pandas writes them with a point."
    rows = counting(pd.date_range('2024', periods=3, freq='h'), id=[1, np.nan, 12])
    rows.to_csv(tmp_path/'a.csv', index=False)
    rows.to_parquet(tmp_path/'a.parquet')
    spec = replace(PLAIN, observed_cats=('id',))
    a, b = (read_series(tmp_path/o, spec).cats['id'] for o in ('a.csv', 'a.parquet'))
    assert a[1] == b[1] == ['1', '12'] and a[0].tolist() == b[0].tolist() == [0, -1, 1]


def test_N18_what_is_no_number_is_still_named(tmp_path):
    (tmp_path/'a.csv').write_text('time,y,x\n2024-01-01,1,NA\n2024-01-02,2,many\n2024-01-03,3,1\n')
    assert column_kinds(tmp_path/'a.csv')['x'] == 'name'
    with pytest.raises(ValueError, match="column 'x' holds 'many' in row 1, which is not a number"):
        read_series(tmp_path/'a.csv', replace(PLAIN, observed_reals=('x',)))
    (tmp_path/'b.csv').write_text('time,y\n2024-01-01,1\nNaT,2\n')
    with pytest.raises(ValueError, match="time column 'time' is empty in row 1"):
        read_series(tmp_path/'b.csv', PLAIN)
    (tmp_path/'c.csv').write_text('time,y,y\n2024-01-01,1,2\n')
    with pytest.raises(ValueError, match="column 'y' is there 2 times; rename"):
        read_series(tmp_path/'c.csv', PLAIN)


# ---- N19: an index without a name ----

def test_N19_an_index_that_was_written_along_is_no_input(tmp_path):
    rows = counting(pd.date_range('2024', periods=20, freq='h'), x=1.)
    rows.to_csv(tmp_path/'a.csv')
    pd.concat([rows[10:], rows[:10]]).to_parquet(tmp_path/'a.parquet')
    for file, index in ('a.csv', 'Unnamed: 0'), ('a.parquet', '__index_level_0__'):
        assert index in column_kinds(tmp_path/file)
        spec = roles(tmp_path/file, target='y')
        assert spec.observed_reals == ('x',) and spec.time == 'time'
        assert np.array_equal(read_series(tmp_path/file, spec).reals['y'], rows.y)
        assert index in roles(tmp_path/file, target='y', observed=index).reals      # if a person wants it
    rows.set_index('time').rename_axis(None).to_csv(tmp_path/'b.csv')               # and stamps are the time
    assert roles(tmp_path/'b.csv', target='y').time == 'Unnamed: 0'
    assert len(read_series(tmp_path/'b.csv', SeriesSpec('Unnamed: 0', 'y'))) == 20


# ---- N20, N32: offsets ----

def test_N20_differing_offsets_are_utc(tmp_path):
    "As pandas itself writes a zone."
    times = pd.date_range('2024-03-30', periods=72, freq='h', tz='Europe/Berlin')
    counting(times).to_csv(tmp_path/'a.csv', index=False)
    assert roles(tmp_path/'a.csv', target='y').time == 'time'
    series = read_series(tmp_path/'a.csv', PLAIN)
    assert series.zone == 'UTC' and series.spec.step == 'h'
    assert np.array_equal(series.stamps, times.as_unit('ns').asi8)
    own = replace(PLAIN, time_format='%Y-%m-%d %H:%M:%S%z')
    assert np.array_equal(read_series(tmp_path/'a.csv', own).stamps, series.stamps)
    offsets = [o.to_pydatetime().astimezone(timezone(timedelta(hours=i % 3))) for i, o in enumerate(times)]
    series = read_series(counting(pd.Series(offsets, dtype=object)), PLAIN)
    assert series.zone == 'UTC' and np.array_equal(series.stamps, times.as_unit('ns').asi8)


def test_N20_forecasts_are_in_the_zone_of_the_training(tmp_path):
    "Trained on zoned days, asked with texts: local midnights go on."
    times = pd.date_range('2024-02-20', periods=60, freq='D', tz='Europe/Berlin')
    run, _ = made(counting(times[:50]))
    counting(times[20:57]).to_csv(tmp_path/'a.csv', index=False)
    assert forecast(run, tmp_path/'a.csv').time.tolist() == times[57:].tolist()


@pytest.mark.parametrize('turned', [False, True])
def test_N32_naive_and_zoned_stamps_do_not_mix(tmp_path, turned):
    stamps = [datetime(2024, 3, 1), datetime(2024, 3, 1, 1, tzinfo=timezone(timedelta(hours=2)))]
    if turned: stamps.reverse()
    rows = counting(pd.Series(stamps, dtype=object))
    rows.assign(time=[o.isoformat() for o in stamps]).to_csv(tmp_path/'a.csv', index=False)
    for source in rows, tmp_path/'a.csv':
        with pytest.raises(ValueError, match="'time' mixes stamps with an offset .* and without one") as e:
            read_series(source, PLAIN)
        assert one_line(e)


# ---- N21: dollars ----

def test_N21_a_dollar_begins_no_formula():
    "Two of them would; the labels are drawn letter by letter."
    names = ['US$ of $x_{', 'A$', 'plain']
    figure = Figure()
    a, b = figure.subplots(1, 2)
    plot_importance(pd.Series([.2, .3, .5], names), a)
    plot_over_time(pd.DataFrame(np.ones((2, 3)), columns=names), b)
    figure.canvas.draw()
    texts = [*a.get_yticklabels(), *b.get_legend().get_texts()]
    assert {o.get_text().replace('\\', '') for o in texts} >= set(names)
    assert not any(o._preprocess_math(o.get_text())[1] for o in texts)


# ---- N23: gaps ----

def test_N23_gaps_are_told_with_their_cost():
    from gruckpt.tft.windows import gaps_of
    rows = pd.concat([counting(pd.date_range('2024-01-01', periods=60, freq='h')).assign(id=o) for o in 'ab'])
    holed = rows.reset_index(drop=True).drop([10, 11, 30, 100])
    spec = replace(PLAIN, ids=('id',))
    series = read_series(holed, spec)
    gaps = gaps_of(series, 6, 3)
    when = pd.Timestamp('2024-01-01')
    assert [(o.series, (o.after - when).total_seconds() / 3600, (o.until - when).total_seconds() / 3600)
            for o in gaps.found] == [("id='a'", 9, 12), ("id='a'", 29, 31), ("id='b'", 39, 41)]
    windows = Windows(encode(series, fit_coding(series)), 6, 3)
    assert gaps.n_windows == len(windows)
    blind = read_series(holed, replace(spec, step='row'))
    assert gaps.n_windows + gaps.n_lost == len(Windows(encode(blind, fit_coding(blind)), 6, 3))
    assert [o.n_windows for o in gaps.found] == [8, 8, 8] and gaps.n_lost == 24
    assert str(gaps).startswith("3 at a step of h cost 24 of 100 windows: id='a', 2024-01-01 09:00:00 to 20")
    assert len(gaps_of(read_series(rows, spec), 6, 3)) == 0 == len(gaps_of(blind, 6, 3))
    with pytest.raises(FrozenInstanceError): gaps.step = 'row'


def test_N19_N23_the_command_says_both(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    counting(pd.date_range('2024', periods=120, freq='h')).drop(index=40).to_csv('a.csv')
    code = main('train-tft --parquet-file a.csv --target y --lookback 6 --horizon 2 --hidden 8 --heads 2 '
                '--epochs 1 --batch-size 16 --device cpu --out run'.split())
    out = capsys.readouterr().out
    assert code == 0 and 'left    Unnamed: 0: an index without a name' in out
    assert 'gaps    1 at a step of h cost 7 of 112 windows: the series, 2024-01-02 15:00:00 to ' in out


# ---- N27: zero is not "not given" ----

def test_N27_zero_is_refused():
    times = pd.date_range('2024', periods=120, freq='h')
    run, series = made(counting(times))
    with pytest.raises(ValueError, match='min_past .*got 0') as e: setup_of(series, 8, 3, min_past=0)
    assert one_line(e)
    with pytest.raises(ValueError, match='season must be in 1..8 .*got 0'): backtest(run, series, season=0)


# ---- N28: quantiles do not cross ----

def test_N28_quantiles_do_not_cross_and_it_is_said():
    rng = np.random.default_rng(0)
    run, series = made(counting(pd.date_range('2024', periods=200, freq='h')).assign(y=rng.normal(size=200)))
    windows, names = run.setup.windows(series, 'test'), ['q0.1', 'q0.5', 'q0.9']
    with torch.no_grad(): raw = torch.cat([run.model(b).quantiles for b in windows.batches(64)])
    crossed = int((raw.diff(dim=-1) < 0).any(-1).sum())
    assert crossed                                                  # an untrained model's do
    assert torch.equal(predict(run.model, windows), raw.sort(-1).values)
    walked, ahead = backtest(run, series, season=4), forecast(run, series)
    for rows in walked, ahead: assert (np.diff(rows[names], axis=1) >= 0).all()
    assert walked.attrs == {'crossed': crossed} and 0 <= ahead.attrs['crossed'] <= len(ahead)
    json.dumps(walked.attrs)                                        # parquet files keep them


# ---- N33: what predict holds ----

class Flat(torch.nn.Module):
    "A model that holds next to nothing."
    spec = SimpleNamespace(quantiles=(.1, .5, .9))

    def __init__(self):
        super().__init__()
        self.level = torch.nn.Parameter(torch.tensor([.3, .1, .2]))

    def forward(self, batch): return SimpleNamespace(quantiles=self.level.expand(*batch.target.shape, 3) * 1)


def test_N33_bytes_beyond_the_result_do_not_grow():
    "Eight times as many windows, the same number of bytes beside their quantiles."
    run, series = made(counting(pd.date_range('2024', periods=413, freq='h')))
    model, beyond = Flat(), []
    for stride in 8, 1:
        windows = Windows(run.setup.windows(series, 'all').table, 8, 3, stride=stride)
        held = [o for o in vars(windows.table).values() if torch.is_tensor(o)]
        with Meter(model, held, windows.origins) as meter: out = predict(model, windows, 16)
        assert len(windows) % 16                                    # the last batch is a smaller one
        assert out.shape == (len(windows), 3, 3)
        beyond.append(meter.peak - meter.start - nbytes(out))
    assert beyond[0] == beyond[1] < nbytes(out)
