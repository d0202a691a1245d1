"""What bench does around an optional peer: a machine without JAX, and one with it."""
import importlib.util
import subprocess
import sys

import pandas as pd
import pytest

from gruckpt.bench.plans import agreement
from gruckpt.bench.rnn import bench_rnn
from gruckpt.commands.cli import main

TINY = dict(batch=2, n_steps=6, hidden=4, n_layers=2, n_segments=3, dtype='float64', repeats=1, naive=False)


def test_without_jax_its_rows_say_so(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'jax' else find(name))
    table = bench_rnn(**TINY)
    assert [row.note for row in table.rows] == [None] * 11 + ['not installed'] * 2
    assert str(table).count('not installed') == 2
    assert len(bench_rnn(**TINY, jax=False).rows) == 11


def test_with_jax_its_switch_is_put_back():
    jax = pytest.importorskip('jax', reason='the extra `bench` is not installed')
    before = jax.config.jax_enable_x64
    table = bench_rnn(**TINY)
    assert all(row.timing for row in table.rows[-2:])
    assert jax.config.jax_enable_x64 == before


def test_importing_bench_loads_no_jax():
    code = 'import sys, gruckpt.bench.rnn; sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_plans_are_set_beside_their_count(tmp_path, capsys):
    sizes = '--batch-size 2 --steps 6 --hidden 4 --layers 1 --vocab-size 9 --repeats 1'
    assert not main(['bench', 'plans', *sizes.split(), '--out', str(tmp_path)])
    shown, table = capsys.readouterr().out, pd.read_csv(tmp_path/'bench_plans.csv')
    assert len(table) > 4
    assert 'rank correlation' in shown and all(plan in shown for plan in table.plan)
    alike = table.assign(measured_ratio=table.predicted_ratio)
    assert agreement(alike)['rank correlation'] == pytest.approx(1)


def test_rounding_is_set_beside_float(tmp_path, capsys):
    hours = pd.date_range('2024-01-01', periods=400, freq='h')
    pd.DataFrame({'time': hours, 'load': hours.hour % 7, 'day': hours.day}).to_parquet(tmp_path/'t.parquet')
    (tmp_path/'t.txt').write_text('to be or not to be, that is the question. ' * 90)
    few = '--early 2 --late 1 --hidden 4 --batch-size 2 --seeds 2'.split()
    both = ['--text', tmp_path/'t.txt', '--parquet-file', tmp_path/'t.parquet', '--target', 'load']
    assert not main(['bench', 'quant', *map(str, both), *few, '--out', str(tmp_path)])
    shown, table = capsys.readouterr().out, pd.read_csv(tmp_path/'bench_quant.csv')
    assert table.data.tolist() == ['t.txt'] * 4 + ['t.parquet'] * 4
    assert table.bits.tolist() == [8, 4] * 4 and table.seed.tolist() == [0, 0, 1, 1] * 2
    assert 'changes in percent' in shown and set(table.steps) == {3}
    assert (table.groupby(['data', 'seed']).float32.nunique() == 1).all()
    assert main(['bench', 'quant', *few]) == 2 and 'give --text' in capsys.readouterr().err
