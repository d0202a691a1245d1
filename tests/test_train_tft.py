"""train-tft, forecast and backtest: killed runs, several ranks, 300 columns in 2 GiB, wrong input."""
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from processes import Process, ranks

from gruckpt.commands.cli import main

SMALL = tuple('--hidden 16 --heads 2 --lookback 24 --horizon 6 --lr 1e-2 --seed 3'.split())
HERE = ('--device', 'cpu', '--threads', '1')
ROLES = ('--target', 'load', '--ids', 'site', '--static', 'site')
DATA = ('--parquet-file', 'load.parquet')


def table(n=200, sites=('a', 'b')):
    "Two sites with a daily wave."
    rng, times = np.random.default_rng(0), pd.date_range('2024-01-01', periods=n, freq='h')
    wave = np.sin(times.hour / 24 * 2 * np.pi) + .2 * rng.normal(size=n)
    one = pd.DataFrame({'when': times, 'load': wave, 'wind': rng.normal(size=n),
                        'sky': np.where(times.hour < 12, 'clear', 'cloud')})
    return pd.concat([one.assign(site=s, load=one.load + i) for i, s in enumerate(sites)], ignore_index=True)


def starter(folder):
    "A function that starts a command in a folder, and waits for it unless told otherwise."
    table().to_parquet(folder/'load.parquet')
    table().to_csv(folder/'load.csv', index=False)
    def start(*args, wait=True, **kw):
        p = Process('-m', 'gruckpt.commands.cli', *args, cwd=folder, **kw)
        if not wait: return p
        out, err = p.communicate(timeout=300)
        return p.returncode, out, err
    start.folder = folder
    return start


@pytest.fixture
def run(tmp_path): return starter(tmp_path)


def train(run, out, *args, file='load.parquet', **kw):
    given = ('--parquet-file', file, *ROLES, *SMALL, *HERE, '--batch-size', '32', '--out', out)
    return run('train-tft', *given, *args, **kw)


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    "A function that runs a command in this process, in a folder with the table."
    monkeypatch.chdir(tmp_path)
    table().to_parquet('load.parquet')
    def start(*args):
        code = main([*map(str, args)])
        return code, *capsys.readouterr()
    return start


def telemetry(folder):
    "What no repetition changes: every column but the speed."
    rows = pd.read_csv(folder/'telemetry.csv', keep_default_na=False)
    return rows.drop(columns=['tokens_per_s', 'seconds'])


def weights(folder, step): return torch.load(folder/f'step-{step:08}.pt', weights_only=True)['model']


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    "Three epochs of six steps that nothing interrupted."
    run = starter(tmp_path_factory.mktemp('straight'))
    code, out, err = train(run, 'a', '--epochs', 3)
    assert (code, err) == (0, ''), err
    return run.folder/'a', out


def wait_for(folder, step, p):
    "Wait until the run has written the row of a step."
    for _ in range(6000):
        file = folder/'telemetry.csv'
        if file.exists() and file.read_text().count('\n') > step: return
        assert p.poll() is None, p.said()
        time.sleep(0.05)
    pytest.fail(f'step {step} was not reached')


# ---- runs ----

def test_roles_are_said_and_files_written(straight):
    folder, out = straight
    for line in ('time    when, step h', 'target  load', 'static  1 categorical: site',
                 'observed 1 real: wind', 'observed 1 categorical: sky',
                 'calendar 2 categorical: hour, weekday'): assert line in out, line
    for name in ('tft', 'last value', 'seasonal naive'): assert f'\n{name}' in out
    assert 'no seasonal naive of 168 rows: ' in out                     # what is not in the table is said
    files = {'best.pt', 'telemetry.csv', 'history.csv', 'step-00000018.pt'}
    assert {o.name for o in folder.iterdir()} >= files
    history = pd.read_csv(folder/'history.csv')
    assert history.step.tolist() == [6, 12, 18]
    assert {'quantile_loss', 'q_risk', 'coverage_0.1', 'coverage_0.5', 'coverage_0.9'} <= set(history)


@pytest.mark.parametrize('how, code', [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_what_was_killed_goes_on_to_the_bit(run, straight, how, code):
    "By a signal that nobody can catch, and by one that is: dropout is on, the cut lies inside an epoch."
    p = train(run, 'a', '--epochs', 3, '--save-every', 2, wait=False)
    wait_for(run.folder/'a', 9, p)
    p.send_signal(how)
    out, err = p.communicate(timeout=300)
    assert p.returncode == code, err
    assert code == -9 or 'go on with --resume' in err and err.count('\n') == 1
    got, out, err = run('train-tft', '--parquet-file', 'load.parquet', '--out', 'a', '--resume', *HERE)
    assert (got, err) == (0, ''), err
    pd.testing.assert_frame_equal(telemetry(run.folder/'a'), telemetry(straight[0]))
    a, b = weights(run.folder/'a', 18), weights(straight[0], 18)
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_csv_and_json_and_memory_change_nothing(run, straight):
    "The same table as text, the roles in a file; a tier changes gradients by rounding only."
    roles = {'time': 'when', 'target': 'load', 'ids': ['site'], 'static_cats': ['site'],
             'observed_reals': ['wind'], 'observed_cats': ['sky']}
    (run.folder/'roles.json').write_text(json.dumps(roles))
    code, out, err = run('train-tft', '--parquet-file', 'load.csv', '--spec', 'roles.json', *SMALL, *HERE,
                         '--batch-size', 32, '--epochs', 3, '--out', 'b', '--quiet')
    assert (code, out, err) == (0, '', '')
    pd.testing.assert_frame_equal(telemetry(run.folder/'b'), telemetry(straight[0]))
    assert train(run, 'c', '--epochs', 3, '--quiet', '--use-gradient-checkpointing') == (0, '', '')
    assert np.allclose(telemetry(run.folder/'c').loss, telemetry(straight[0]).loss, rtol=1e-4)
    tier = torch.load(run.folder/'c'/'step-00000018.pt', weights_only=True)['plan']
    assert tier['layers'] == ('static_vsn', 'historical_vsn', 'future_vsn')


@pytest.mark.slow
def test_two_processes_are_one(run):
    "Half a batch each gives the losses of a whole one, and recomputation changes nothing about it."
    same = ('--dropout', '0', '--epochs', '2', '--quiet')
    assert train(run, 'one', *same) == (0, '', '')
    two = ranks(2, '-m', 'gruckpt.commands.cli', 'train-tft', *DATA, *ROLES, *SMALL, *HERE,
                '--batch-size', '16', '--out', 'two', '--tier', 'vsn', *same, cwd=run.folder)
    said = [p.communicate(timeout=300) for p in two]
    assert [p.returncode for p in two] == [0, 0], said
    a, b = telemetry(run.folder/'one'), telemetry(run.folder/'two')
    assert len(a) == len(b) and np.allclose(a.loss, b.loss, rtol=1e-4)


@pytest.mark.slow
def test_300_columns_train_within_2_gib(run):
    "A model of full width; what was predicted is enough, and without recomputation it would not be."
    from gruckpt.tft.forecast import load_run
    from gruckpt.tft.model import Tier
    from gruckpt.tft.tiers import tier_ledger
    rng = np.random.default_rng(0)
    wide = pd.DataFrame(rng.normal(size=(200, 299)), columns=[f'c{i:03}' for i in range(299)])
    wide.assign(time=pd.date_range('2024', periods=200, freq='h')).to_parquet(run.folder/'wide.parquet')
    code, out, err = run('train-tft', '--parquet-file', 'wide.parquet', '--target', 'c000', '--device', 'cpu',
                         '--memory-limit', '2GiB', '--batch-size', 40, '--epochs', 1, '--measure-every', 1)
    assert (code, err) == (0, ''), err
    assert 'observed 298 real: c001' in out
    rows = telemetry(run.folder/'runs'/'wide')
    assert rows.peak_measured.max() == rows.peak_predicted.max() <= 2 * 2**30      # to the byte
    spec = load_run(run.folder/'runs'/'wide').model.spec
    assert tier_ledger(spec, 40, Tier.off).total > 2 * 2**30


# ---- forecasts ----

def test_forecasts_have_stamps(here, straight):
    for out in 'f.csv', 'f.parquet':
        code, said, err = here('forecast', straight[0], *DATA, '--out', out, '--device', 'cpu')
        assert (code, err) == (0, '') and said.startswith(f'{out}: 12 rows, 2 series, the weights of step ')
    a, b = pd.read_csv('f.csv', parse_dates=['when']), pd.read_parquet('f.parquet')
    assert a.columns.tolist() == ['site', 'when', 'ahead', 'q0.1', 'q0.5', 'q0.9']
    assert a.when.min() == table().when.max() + pd.Timedelta('1h') and np.allclose(a['q0.9'], b['q0.9'])
    table().assign(site='new').drop_duplicates('when').to_csv('new.csv', index=False)
    code, out, err = here('forecast', straight[0], '--parquet-file', 'new.csv', '--out', 'n.csv', '--quiet')
    assert (code, out) == (0, '')
    assert err == "gruckpt: never trained on, forecast as unknown: column 'site': 'new'\n"


def test_a_backtest_is_judged_and_drawn(here, straight):
    code, out, err = here('backtest', straight[0], *DATA, '--stride', 6, '--out', 'walk.parquet',
                          '--plots', 'seen', '--device', 'cpu')
    assert (code, err) == (0, '')
    for name in ('tft', 'last value', 'seasonal naive'): assert name in out
    assert out.startswith('no seasonal naive of 168 rows: ') or 'sorted\nno seasonal naive of 168' in out
    rows = pd.read_parquet('walk.parquet')
    assert set(rows.model) == {'tft', 'last value', 'seasonal naive'} and rows.load.notna().all()
    for name in ('bands', 'importance', 'attention'):
        assert Path(f'seen/{name}.png').read_bytes()[:4] == b'\x89PNG'


# ---- what is wrong ----

def test_wrong_input_is_one_line(run):
    "In a process of its own; the others are called in this one."
    code, out, err = run('train-tft', *DATA, '--target', 'load', '--out', 'new/run')
    assert (code, out, err.count('\n')) == (2, '', 1) and 'repeats 200 of its stamps' in err
    assert not (run.folder/'new').exists()


@pytest.mark.parametrize('args, said', [
    (('--parquet-file', 'none.parquet', '--target', 'load'), 'none.parquet'),
    (DATA, '--target must name a column, and none is given; it could be load, wind'),
    ((*DATA, '--ignore', 'when'), '--time must name a column, and none is given; none of these'),
    ((*DATA, '--target', 'lood'), "--target: column 'lood' is not in the data, which has when"),
    ((*DATA, '--target', 'sky', '--ids', 'site'), "column 'sky' holds 'clear' in row 0"),
    ((*DATA, *ROLES, '--known', 'sun'), "--known: column 'sun' is not in the data"),
    ((*DATA, *ROLES, '--known', 'wind', '--observed', 'wind'), "'wind' has two roles"),
    pytest.param((*DATA, *ROLES, '--memory-limit', '1MiB'), 'would fit: batch', marks=pytest.mark.slow),
    ((*DATA, *ROLES, '--memory-limit', 'much'), 'much'),
    ((*DATA, *ROLES, '--lookback', '900'), 'the longest stretch without a gap has 200 rows'),
    ((*DATA, *ROLES, '--precision', 'int8'), 'int8')])
def test_wrong_options_are_one_line(here, args, said):
    code, out, err = here('train-tft', *args, *(() if '--lookback' in args else SMALL), '--out', 'new/run')
    assert (code, out, err.count('\n')) == (2, '', 1) and said in err
    assert not Path('new').exists()


def test_another_run_is_refused(here, straight):
    before = {o.name: o.stat().st_mtime_ns for o in straight[0].iterdir()}
    resume = ('train-tft', *DATA, '--out', straight[0], '--resume')
    for args, said in (((*resume, '--hidden', 32), 'hidden was 16, is 32'),
                       (resume[:-1], 'has a run already'),
                       ((*resume, '--quantiles', '0.2,0.8'), 'quantiles was'),
                       ((*resume, '--lookback', 12), '--lookback was 24, is 12')):
        code, out, err = here(*args)
        assert (code, out, err.count('\n')) == (2, '', 1) and said in err
    table(220).to_parquet('load.parquet')
    code, out, err = here(*resume, '--epochs', 4)
    assert code == 2 and 'cannot resume: checksum was' in err
    assert {o.name: o.stat().st_mtime_ns for o in straight[0].iterdir()} == before


def test_help_does_not_wait_for_torch():
    code = "import sys, gruckpt.commands.train_tft as m; sys.exit({'torch', 'pandas'} & {*sys.modules} or 0)"
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_a_run_remembers_its_table_and_compares_values(here, straight, tmp_path):
    "A goal in steps, a folder elsewhere, roles given again: what is the same is no reason to stop."
    given = ('train-tft', *DATA, *ROLES, *SMALL, *HERE, '--batch-size', 32, '--out', 'b')
    code, out, err = here(*given, '--max-steps', 2, '--tier', 'vsn', '--clip', 'auto', '--eval-every', 1)
    assert (code, err) == (0, '') and 'from step 1 to step 2; 6 batches are an epoch' in out
    begun = torch.load('b/step-00000002.pt')
    Path('elsewhere').mkdir()
    os.chdir('elsewhere')
    again = ('train-tft', '--out', '../b', '--resume', *HERE, '--max-steps', 3)
    code, out, err = here(*again, *ROLES, '--lookback', 24, '--clip', 'auto')
    assert (code, err) == (0, ''), err
    assert 'changed --max-steps was 2, is 3' in out and 'tier    vsn' in out and out.count('changed') == 1
    now = torch.load('../b/step-00000003.pt')
    assert now['plan'] == begun['plan'] and now['config'] == begun['config'] | {'max_steps': 3}
    assert pd.read_csv('../b/history.csv').step.tolist() == [1, 2, 3]
    for typed, said in (('--ids wind', '--ids was site, is wind'), ('--seed 4', '--seed was 3, is 4'),
                        ('--optimizer sgd', '--optimizer was adamw, is sgd')):
        code, out, err = here(*again, *typed.split())
        assert (code, out, err.count('\n')) == (2, '', 1) and f'cannot resume: {said}; leave it out' in err
    code, out, err = here(*again)
    assert code == 0 and 'at step 3, where it ends' in out and 'nothing left to do' in out


def test_a_tensorboard_is_written_or_refused(here):
    given = ('train-tft', *DATA, *ROLES, *SMALL, *HERE, '--batch-size', 32, '--out', 'b', '--max-steps', 1)
    code, out, err = here(*given, '--tensorboard')
    if importlib.util.find_spec('tensorboard'): assert code == 0 and Path('b/tensorboard').is_dir()
    else: assert (code, out) == (2, '') and 'pip install tensorboard' in err
