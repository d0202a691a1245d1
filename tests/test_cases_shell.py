"""What users do to runs, one test a case of the trouble list: files, disks, pipes, signals, sessions, ranks.

Run as a script, this file is one of two ranks.
"""
import contextlib
import io
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import gruckpt.training.checkpoint_files
from gruckpt.plan.budget import DoesNotFit, fit
from gruckpt.commands.cli import main
from gruckpt.training.checkpoint_files import FolderLock, Telemetry, load_checkpoint
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.plan.segment import Plan
from gruckpt.charlm.text import TokenStream, Vocab
from gruckpt.training.config import TrainConfig
from gruckpt.training.trainer import Trainer
from gruckpt.training.sessions import session

TEXT = ''.join(f'{i % 100:02} ' for i in range(400))
TRAIN = ('train-lm --text text.txt --out a --hidden 16 --layers 1 --batch-size 4 --steps 16 --lr 1e-2 '
         '--threads 1 --device cpu').split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    "A folder with a text, and the process in it."
    monkeypatch.chdir(tmp_path)
    (tmp_path/'text.txt').write_text(TEXT)
    return tmp_path


def said(capsys, *args):
    "A command in this process: exit code, stdout, stderr."
    return main([*map(str, args)]), *capsys.readouterr()


def at_step(monkeypatch, step, act):
    "From now on `act` is called when the row of a step has been written."
    usual = Telemetry.write
    def write(self, record):
        usual(self, record)
        if record.step == step: act()
    monkeypatch.setattr(Telemetry, 'write', write)


@contextlib.contextmanager
def no_file_above(n_bytes):
    """Inside, the system lets no file of this process grow larger, as if the disk were full. Python would
    write compiled modules in part, and read them later"""
    before, compiled = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    sys.dont_write_bytecode = True
    try: yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiled


def trainer(max_steps):
    ids = Vocab.from_text(TEXT).encode(TEXT)
    model, stream = GRULM(GRUSpec(11, 8, 1)), TokenStream(ids, 4, 16)
    return Trainer(model, stream, TrainConfig(max_steps), Plan.split(16, 2))


# ---- N22: a run touches only files that it wrote ----

def test_N22_other_peoples_files_stay(here, capsys):
    "Names that begin as a checkpoint's do; the run saves at every step."
    own = {'step-by-step.md': 'how', 'step-notes.txt': 'what', 'step-00000000.pt.bak': 'a copy',
           'step-7.pt': 'mine', 'step-1-data/x': 'rows', 'step-99999999.pt/x': 'a folder'}
    for name, text in own.items():
        (here/'a'/name).parent.mkdir(parents=True, exist_ok=True)
        (here/'a'/name).write_text(text)
    assert said(capsys, *TRAIN, '--quiet', '--max-steps', 3, '--save-every', 1) == (0, '', '')
    assert {name: (here/'a'/name).read_text() for name in own} == own
    assert load_checkpoint(here/'a').state['step'] == 3
    assert said(capsys, *TRAIN, '--quiet', '--max-steps', 5, '--resume') == (0, '', '')
    assert {name: (here/'a'/name).read_text() for name in own} == own


@pytest.mark.parametrize('name', ['history.csv', 'best.pt'])
def test_N22_a_new_run_takes_no_file_for_its_own(name, here):
    "A folder without a run that has a file of such a name: a session used to remove or replace it."
    (here/name).write_text('of the peloponnesian war')
    with pytest.raises(ValueError, match=f'has no run, but a {name}'): session(trainer(2), here)
    assert sorted(o.name for o in here.iterdir()) == sorted([name, 'text.txt'])
    assert (here/name).read_text() == 'of the peloponnesian war'


def test_N22_a_later_checkpoint_is_not_removed(here):
    "A trainer that was loaded before another session went on would remove what that one saved."
    for _ in session(trainer(2), here/'a'): pass
    late, further = trainer(9), trainer(4)
    for o in late, further: o.load_state_dict(load_checkpoint(here/'a').state)
    for _ in session(further, here/'a'): pass
    with pytest.raises(ValueError, match='a later checkpoint than the step 2 that is loaded, of step 4'):
        session(late, here/'a')
    assert load_checkpoint(here/'a').state['step'] == 4


def test_N22_steps_of_nine_digits_are_in_order(tmp_path):
    for step in 99_999_999, 100_000_000, 100_000_001:
        gruckpt.training.checkpoint_files.save_checkpoint(tmp_path, {'step': step})
    assert load_checkpoint(tmp_path).state['step'] == 100_000_001
    assert sorted(o.name for o in tmp_path.iterdir()) == ['step-100000000.pt', 'step-100000001.pt']


# ---- N24: full disks and closed pipes ----

def test_N24_a_full_disk_is_one_line_and_the_run_goes_on_later(here, capsys):
    "No file may be larger than a checkpoint without moments, a limit that the system itself keeps."
    with no_file_above(36_000): found = said(capsys, *TRAIN, '--quiet', '--max-steps', 9, '--save-every', 4)
    assert found == (1, '', 'gruckpt: a/step-00000004.pt: File too large; step 0 is saved: make room, and go '
                              'on with --resume\n')
    assert sorted(o.name for o in (here/'a').iterdir()) == ['step-00000000.pt', 'telemetry.csv']
    assert said(capsys, *TRAIN, '--quiet', '--max-steps', 9, '--resume') == (0, '', '')
    assert pd.read_csv(here/'a'/'telemetry.csv').step.tolist() == [*range(1, 10)]


@dataclass(frozen=True)
class Row:
    "What a step of nothing did."
    step: int
    why: str = 'a reason of some length'


def test_N24_no_half_of_a_row(tmp_path):
    "The disk has room for some rows and a part of the next, down to the byte."
    def write(room):
        path = tmp_path/f'{room}.csv'
        log = Telemetry(path, Row)
        with no_file_above(path.stat().st_size + room):
            with pytest.raises(OSError, match=f'File too large.*{room}.csv'):
                for step in range(1, 9): log.write(Row(step))
        log.close()
        return path.read_text()
    for room in (1, 25, 26, 27, 60):
        text = write(room)
        n_rows = room // len('1,a reason of some length\n')
        assert text.endswith('\n') and len(text.splitlines()) == 1 + n_rows


def test_N24_an_answer_to_a_full_disk(here):
    "A process of its own: what a buffer still holds when Python ends counts."
    with open('/dev/full', 'w') as full:
        command = [sys.executable, '-m', 'gruckpt.commands.cli', 'budget', '--memory-limit', '1GiB']
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, 'gruckpt: standard output: No space left on device\n')


@contextlib.contextmanager
def nobody_reads():
    "Inside, standard output is a pipe whose reader has gone."
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, 'w') as out, contextlib.redirect_stdout(out): yield


def test_N24_a_closed_pipe_does_not_stop_a_training(here, capsys):
    with nobody_reads(): code = main([*TRAIN, '--max-steps', '3'])
    line = 'gruckpt: standard output: Broken pipe; the training goes on\n'
    assert (code, capsys.readouterr().err) == (0, line)
    assert load_checkpoint(here/'a').state['step'] == 3 and (here/'a'/'loss.png').exists()


def test_N24_a_closed_pipe_ends_an_answer_in_silence(capsys):
    with nobody_reads(): code = main(['budget', '--memory-limit', '1GiB'])
    assert (code, capsys.readouterr().err) == (141, '')


# ---- N25: two sessions in one folder ----

def test_N25_a_second_session_is_refused(here, capsys):
    first = session(trainer(4), here/'a', save_every=1)
    assert next(first).step == 1
    before = {o.name: o.read_bytes() for o in (here/'a').iterdir()}
    for args in (), ('--resume',):
        code, out, err = said(capsys, *TRAIN, '--quiet', '--max-steps', 9, *args)
        assert (code, out, err.count('\n')) == (2, '', 1) and "another session trains in 'a' (process " in err
    assert {o.name: o.read_bytes() for o in (here/'a').iterdir()} == before
    assert [o.step for o in first] == [2, 3, 4]
    late = trainer(6)
    late.load_state_dict(load_checkpoint(here/'a').state)
    assert [o.step for o in session(late, here/'a')] == [5, 6]
    assert not list((here/'a').glob('.*'))


def hold_lock(folder, go):
    lock = FolderLock(folder)
    os.write(go, b'x')
    time.sleep(60)
    lock.release()


def test_N25_the_lock_ends_with_its_process(tmp_path):
    "Killed, it leaves a file that locks nothing."
    ready, go = os.pipe()
    holder = multiprocessing.get_context('fork').Process(target=hold_lock, args=(tmp_path, go), daemon=True)
    holder.start()
    try:
        os.read(ready, 1)
        with pytest.raises(ValueError, match=f'process {holder.pid} on '): FolderLock(tmp_path)
    finally:
        holder.kill()
        holder.join()
    FolderLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


# ---- N26: signals ----

@pytest.mark.parametrize('name', ['SIGHUP', 'SIGINT', 'SIGTERM', 'SIGUSR1', 'SIGUSR2', 'SIGXCPU'])
def test_N26_a_warning_saves_and_stops(name, here, capsys, monkeypatch):
    "All but Ctrl-C come twice, as from a scheduler that tells the starter and its children."
    number = getattr(signal, name)
    def act():
        for _ in range(1 if name == 'SIGINT' else 2): os.kill(os.getpid(), number)
    at_step(monkeypatch, 3, act)
    code, out, err = said(capsys, *TRAIN, '--quiet', '--max-steps', 9)
    assert (code, out) == (128 + number, '')
    assert err == 'gruckpt: stopped after step 3, a/step-00000003.pt is saved; go on with --resume\n'
    assert load_checkpoint(here/'a').state['step'] == 3


def test_N26_nohup_is_kept(here, capsys, monkeypatch):
    at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGHUP))
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try: assert said(capsys, *TRAIN, '--quiet', '--max-steps', 5) == (0, '', '')
    finally: signal.signal(signal.SIGHUP, usual)
    assert load_checkpoint(here/'a').state['step'] == 5


# ---- N27: zero is not "not given" ----

TFT = ('train-tft --parquet-file load.csv --target load --out t --hidden 8 --heads 1 --lookback 4 '
       '--horizon 2 --epochs 1 --batch-size 8 --device cpu --threads 1 --quiet').split()


@pytest.fixture
def table(here):
    rng = np.random.default_rng(0)
    pd.DataFrame({'when': pd.date_range('2024-01-01', periods=80, freq='h'),
                  'load': rng.normal(size=80)}).to_csv('load.csv', index=False)


@pytest.mark.parametrize('args, contains', [
    ((*TFT, '--min-past', 0), '--min-past must be at least 1, got 0'),
    ((*TFT, '--decay-steps', 0), '--decay-steps must be at least 1, got 0'),
    ((*TFT, '--save-every', 0), '--save-every must be at least 1, got 0'),
    ((*TFT, '--halt-after', 0), '--halt-after must be an integer from 1 on, got 0'),
    ((*TFT, '--measure-every', 0), '--measure-every must be an integer from 1 on, got 0'),
    ((*TFT, '--memory-limit', 0), "--memory-limit must be above 0 bytes, got '0'"),
    ((*TRAIN, '--memory-limit', '0GiB'), "--memory-limit must be above 0 bytes, got '0GiB'"),
    (('budget', '--memory-limit', 0), "--memory-limit must be above 0 bytes, got '0'"),
    (('budget', '--hidden', 0), '--hidden must be an integer of at least 1, got 0'),
    (('budget', '--batch-size', 0), '--batch-size must be at least 1, got 0'),
    (('budget', '--norm', 'all'), "--norm must be one of none, state, output, got 'all'"),
    (('budget', '--segments', 4, '--keep', 'all'), '--keep must be hidden or gates'),
    (('budget', '--segments', 4, '--keep', 'gates,hidden'), '--keep must have 4 words'),
    ((*TRAIN, '--clip', 0), '--clip must be a number above 0, or none for never, got 0.0'),
    ((*TFT, '--clip', 0), '--clip must be a number above 0, or none for never, got 0.0'),
    ((*TFT, '--missing', 'all'), "--missing must be one of none, last, mean, got 'all'"),
    (('bench', 'lm', '--norm', 'all'), "--norm must be one of none, state, output, got 'all'"),
    (('bench', 'rnn', '--batch-size', 0), '--batch-size must be an integer of at least 1, got 0')])
def test_N27_zero_is_refused(args, contains, table, capsys):
    code, out, err = said(capsys, *args)
    assert (code, out, err.count('\n')) == (2, '', 1) and contains in err
    assert sorted(os.listdir()) == ['load.csv', 'text.txt']


def test_N27_zero_in_a_backtest_and_in_the_library(table, capsys):
    from gruckpt.tft.table import SeriesSpec, read_series
    from gruckpt.tft.forecast import setup_of
    assert said(capsys, *TFT) == (0, '', '')
    args = 'backtest', 't', '--parquet-file', 'load.csv', '--season', 0, '--device', 'cpu'
    code, out, err = said(capsys, *args)
    assert (code, out, err) == (2, '', 'gruckpt: --season must be in 1..4 (past steps that exist), got 0\n')
    series = read_series('load.csv', SeriesSpec('when', 'load'))
    with pytest.raises(ValueError, match='min_past must be'):
        setup_of(series, 4, 2, min_past=0).windows(series, 'train')


# ---- N30: threads ----

@pytest.mark.parametrize('n', [0, 1025, 100_000])
def test_N30_threads_have_a_range(n, table, capsys):
    for args in (TRAIN, TFT, *((f'bench {o} --repeats 1').split() for o in ('rnn', 'lm', 'tft'))):
        code, out, err = said(capsys, *args, '--threads', n)
        assert (code, out, err.count('\n')) == (2, '', 1)
        assert '--threads must be' in err and (n == 0 or f'--threads must be in 1..1024, got {n}' in err)


# ---- N34, N35: two ranks ----

def rank(port, folder, what):
    "What a case does in one of two ranks: exit code, stderr."
    os.environ['MASTER_PORT'] = str(port)
    me, out, more = int(os.environ['RANK']), Path(folder)/what, ['--max-steps', '100000']
    text, usual = Path('text.txt'), Telemetry.write
    if me and what in ('shorter', 'other', 'missing'): text = Path(f'{what}.txt')
    if what == 'signal' and me: threading.Thread(target=kill_after, args=(out, 5)).start()
    if what == 'full': Telemetry.write = lambda self, record: full_at(usual, self, record)
    if what == 'one resumes' and me: more = ['--max-steps', '100000', '--resume']
    err = io.StringIO()
    args = [*TRAIN, '--text', text, '--out', out, '--quiet', *more]
    if what in ('table', 'no table'):
        mine = ('b.csv' if what == 'table' else 'none.csv') if me else 'load.csv'
        args = [*TFT, '--parquet-file', mine, '--out', out]
    with contextlib.redirect_stderr(err): code = main([*map(str, args)])
    Telemetry.write = usual
    return code, err.getvalue()


def kill_after(out, step):
    "SIGTERM to this process once rank 0 has written the row of a step."
    while not (out/'telemetry.csv').exists() or (out/'telemetry.csv').read_text().count('\n') <= step:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def full_at(usual, log, record):
    "The disk is full at step 4."
    if record.step == 4: raise OSError(28, 'No space left on device', 'telemetry.csv')
    usual(log, record)


CASES = ('signal', 'shorter', 'other', 'missing', 'one resumes', 'table', 'no table', 'full')


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    "Exit code and stderr of two ranks, by case; and the folder."
    folder, sockets = tmp_path_factory.mktemp('ranks'), [socket.socket() for _ in CASES]
    for name, text in ('text', TEXT), ('shorter', TEXT[:900]), ('other', TEXT.replace('90', '19')):
        (folder/f'{name}.txt').write_text(text)
    for name, seed in ('load', 0), ('b', 1):
        hours, load = pd.date_range('2024-01-01', periods=80, freq='h'), np.random.default_rng(seed)
        frame = pd.DataFrame({'when': hours, 'load': load.normal(size=80)})
        frame.to_csv(folder/f'{name}.csv', index=False)
    for o in sockets: o.bind(('127.0.0.1', 0))
    ports = [o.getsockname()[1] for o in sockets]
    for o in sockets: o.close()
    env = {**os.environ, 'MASTER_ADDR': '127.0.0.1', 'WORLD_SIZE': '2', 'OMP_NUM_THREADS': '1'}
    running = [subprocess.Popen([sys.executable, __file__, *map(str, ports)], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, cwd=folder,
                                env={**env, 'RANK': str(n), 'LOCAL_RANK': str(n)}) for n in range(2)]
    try: found = [p.communicate(timeout=200) for p in running]
    finally:
        for p in running: p.kill()
    assert [p.returncode for p in running] == [0, 0], found
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in found)    # after what gloo says
    return folder, {name: (first[name], second[name]) for name in CASES}


def test_N34_all_ranks_know_why_they_stopped(ranks):
    "SIGTERM to the second alone."
    folder, found = ranks
    (code, err), (other_code, other_err) = found['signal']
    step = load_checkpoint(folder/'signal').state['step']
    line = f'stopped after step {step}, signal/step-{step:08}.pt is saved; go on with --resume\n'
    assert (code, other_code) == (143, 143)
    assert (err, other_err) == (f'gruckpt: {line}', f'gruckpt (rank 1): {line}')


@pytest.mark.parametrize('case, code, contains', [
    ('shorter', 2, 'do not train the same: characters is '), ('other', 2, 'do not train the same: '),
    ('missing', 2, 'missing.txt'), ('one resumes', 2, 'has no checkpoint'),
    ('table', 2, 'do not train the same: checksum is '), ('no table', 2, 'none.csv'),
    ('full', 1, 'telemetry.csv: No space left on device; step 0 is saved: make room')])
def test_N35_all_ranks_end_alike(case, code, contains, ranks):
    "Other texts and tables, files that one rank lacks, a disk that is full on the rank that writes."
    folder, found = ranks
    assert [o[0] for o in found[case]] == [code, code], found[case]
    for _, err in found[case]: assert contains in err and err.count('\n') == 1, err
    assert (folder/case).exists() == (case == 'full')


# ---- N37: what a smaller batch changes ----

def test_N37_a_smaller_batch_is_said_to_be_another_training():
    with pytest.raises(DoesNotFit) as e: fit(GRUSpec(40, 24, 2), 48, 30, 200_000)
    most = e.value.changes['batch']
    part = max(n for n in range(1, most + 1) if 48 % n == 0)
    assert (f'batch {most} (an update then has fewer rows, as batch times accumulation shrinks; {part} with '
            f'{48 // part} times the accumulation keeps them)') in str(e.value)


def test_N37_also_of_a_tier():
    from gruckpt.tft.model import TFTSpec
    from gruckpt.tft.tiers import TierDoesNotFit, fit_tier
    year = TFTSpec(static=1, observed=2, known=1, lookback=512, horizon=512, hidden=8, heads=4)
    wanted = 'take batch 21 .* accumulation shrinks; 16 with 4 times the accumul'
    with pytest.raises(TierDoesNotFit, match=wanted): fit_tier(year, 64, '256MiB')
    with pytest.raises(TierDoesNotFit) as e: fit_tier(year, 64, 1)
    assert 'batch 0' not in str(e.value) and e.value.changes == {} and 'a larger limit' in str(e.value)


def test_help_says_nothing_in_the_words_of_python(capsys):
    "None cannot be typed, nor the name of a field."
    for command in 'train-lm', 'train-tft', 'budget':
        code, out, err = said(capsys, command, '--help')
        assert (code, err) == (0, '') and not [o for o in ('None', 'lr_floor', 'decay_steps') if o in out]


if __name__ == '__main__':
    print(json.dumps({name: rank(port, '.', name) for name, port in zip(CASES, sys.argv[1:], strict=True)}))
