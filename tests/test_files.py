"""Files that outlive any death: written as a whole, passed over when damaged, continued without a gap."""
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch
from processes import python

from gruckpt.training.checkpoint_files import (Telemetry, load_checkpoint, save_checkpoint, write_history,
                                               write_whole)

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    "What a step of nothing did."
    step: int
    loss: float = 1 / 3
    skipped: str = ''
    peak: int | None = None


# ---- checkpoints ----

@pytest.mark.parametrize('moment', ['write', 'fsync', 'replace', 'after'])
def test_r03_killed_inside_a_save(moment, tmp_path):
    "SIGKILL while a checkpoint is written, before it is forced out, before and after it gets its name."
    code = '''
import os, signal, sys, torch
from pathlib import Path
from gruckpt.training import checkpoint_files as files
folder, moment = Path(sys.argv[1]), sys.argv[2]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
state = {'step': 1, 'weight': torch.arange(5000.)}
files.save_checkpoint(folder, state)
usual = os.replace
if moment == 'write': files.torch.save = lambda state, f: (f.write(b'PK' + bytes(5000)), f.flush(), die())
if moment == 'fsync': os.fsync = die
if moment == 'replace': os.replace = die
if moment == 'after': os.replace = lambda a, b: (usual(a, b), die())
files.save_checkpoint(folder, {**state, 'step': 2})
'''
    ended, _, err = python('-c', code, tmp_path, moment, cwd=ROOT)
    assert ended == -signal.SIGKILL, err
    loaded = load_checkpoint(tmp_path)
    assert loaded.damaged == () and loaded.state['step'] == (2 if moment == 'after' else 1)
    assert torch.equal(loaded.state['weight'], torch.arange(5000.))
    save_checkpoint(tmp_path, {**loaded.state, 'step': 3})
    assert [o.name for o in tmp_path.glob('*') if not o.name.endswith('.pt')] == []


def full(f):
    f.write(b'PK')
    raise OSError('disk full')


def test_r03_a_save_that_raises_leaves_nothing(tmp_path):
    save_checkpoint(tmp_path, {'step': 1})
    with pytest.raises(OSError, match='disk full'): write_whole(tmp_path/'step-00000002.pt', full)
    assert [o.name for o in tmp_path.iterdir()] == ['step-00000001.pt']
    assert load_checkpoint(tmp_path).state['step'] == 1


@pytest.mark.parametrize('best', [False, True])
def test_r03_a_file_cut_anywhere_is_reported_and_never_loaded(best, tmp_path):
    "The one before is used; of the best there is only one."
    weight = torch.arange(300.)
    for step in 1, 2: path = save_checkpoint(tmp_path, {'step': step, 'weight': weight}, best=best)
    whole = path.read_bytes()
    for n in range(0, len(whole), 97):
        path.write_bytes(whole[:n])
        if best:
            with pytest.raises(ValueError, match='only damaged ones: best'): load_checkpoint(tmp_path, True)
        else:
            loaded = load_checkpoint(tmp_path)
            assert (loaded.state['step'], loaded.damaged) == (1, (path,))


@pytest.mark.parametrize('keep', [1, 2, 3])
def test_the_best_and_the_newest_stay(keep, tmp_path):
    for step in range(7):
        save_checkpoint(tmp_path, {'step': step}, keep)
        if step == 2: save_checkpoint(tmp_path, {'step': step}, best=True)
    newest = [f'step-{step:08}.pt' for step in range(7 - keep, 7)]
    assert sorted(o.name for o in tmp_path.iterdir()) == ['best.pt', *newest]
    assert load_checkpoint(tmp_path, best=True).state['step'] == 2
    assert load_checkpoint(tmp_path).state['step'] == 6


def test_r04_no_code_in_a_checkpoint_runs(tmp_path):
    "Plain values only: anything else is refused by torch's own reader."
    class Trap:
        def __reduce__(self): return os.mkdir, (str(tmp_path/'ran'),)
    save_checkpoint(tmp_path, {'step': 1, 'trap': Trap()})
    with pytest.raises(Exception, match='[Ww]eights.only'): load_checkpoint(tmp_path)
    assert not (tmp_path/'ran').exists()


def test_write_whole_replaces_at_once(tmp_path):
    "While the new file is written the old one stands there."
    path = tmp_path/'a'
    path.write_bytes(b'old')
    def write(f):
        f.write(b'new')
        f.flush()
        assert path.read_bytes() == b'old'
    write_whole(path, write)
    assert path.read_bytes() == b'new' and len(list(tmp_path.iterdir())) == 1


# ---- tables ----

def test_telemetry_cut_anywhere_never_gets_a_gap(tmp_path):
    "Whatever a death left of the file: it is continued to one row a step, or refused."
    path = tmp_path/'telemetry.csv'
    log = Telemetry(path, Row)
    for step in range(1, 8): log.write(Row(step))
    log.close()
    whole, continued = path.read_bytes(), 0
    for n in range(whole.index(b'\n') + 1, len(whole) + 1):
        path.write_bytes(whole[:n])
        n_rows = whole[:n].count(b'\n') - 1
        try: log = Telemetry(path, Row, 5)
        except ValueError: assert 0 < n_rows < 5
        else:
            log.write(Row(6))
            log.close()
            first = 1 if n_rows else 6
            assert pd.read_csv(path).step.tolist() == list(range(first, 7))
            continued += 1
    assert continued > 50


def test_telemetry_of_another_form_is_refused(tmp_path):
    (tmp_path/'telemetry.csv').write_text('step,loss\n1,2.0\n')
    with pytest.raises(ValueError, match='has other columns'): Telemetry(tmp_path/'telemetry.csv', Row, 1)
    assert (tmp_path/'telemetry.csv').read_text() == 'step,loss\n1,2.0\n'


def test_telemetry_keeps_every_digit_and_every_word(tmp_path):
    "A reader gets back the floats to the bit; a comma or a quote in a reason breaks no row."
    rows = [Row(1, 0.1 + 0.2), Row(2, float('inf'), 'loss not finite'), Row(3, 1e-300, 'a, "b"', 2**40)]
    log = Telemetry(tmp_path/'t.csv', Row)
    for row in rows: log.write(row)
    log.close()
    Telemetry(tmp_path/'t.csv', Row, 3).close()
    seen = pd.read_csv(tmp_path/'t.csv', keep_default_na=False, float_precision='round_trip')
    assert seen.loss.tolist() == [row.loss for row in rows]
    assert seen.skipped.tolist() == [row.skipped for row in rows]


def test_history_is_written_anew(tmp_path):
    "Fewer rows than before leave none of those behind."
    write_history(tmp_path/'h.csv', [{'step': n, 'loss': 1 / n} for n in (1, 2, 3)])
    write_history(tmp_path/'h.csv', [{'step': 1, 'loss': 1., 'free': 2.}])
    assert (tmp_path/'h.csv').read_text() == 'step,loss,free\n1,1.0,2.0\n'
