"""The commands as processes: exit codes, one line on stderr, killed runs that go on to the bit."""
import importlib.util
import os
import signal
import time

import pandas as pd
import pytest
import torch
import typer
from processes import Process, ranks

from gruckpt.commands.cli import app, main

TEXT = ''.join(f'{i % 100:02} ' for i in range(1334))[:4000]
MODEL = ('--hidden', '24', '--layers', '2', '--dropout', '0.1', '--batch-size', '8', '--steps', '32',
         '--lr', '1e-2', '--teacher-forcing', '0.5')
HERE = ('--threads', '1', '--device', 'cpu', '--quiet')
TRAIN = ('train-lm', '--text', 'text.txt', *HERE)


def starter(folder):
    "A function that starts a command in a folder, and waits for it unless told otherwise."
    (folder/'text.txt').write_text(TEXT)
    def start(*args, wait=True, code=None, **kw):
        p = Process(*(('-c', code) if code else ('-m', 'gruckpt.commands.cli')), *args, cwd=folder, **kw)
        if not wait: return p
        out, err = p.communicate(timeout=300)
        return p.returncode, out, err
    start.folder = folder
    return start


@pytest.fixture
def run(tmp_path): return starter(tmp_path)


def train(run, out, *args, **kw): return run(*TRAIN, *MODEL, '--out', out, *args, **kw)


def telemetry(run, out='a'):
    "What no repetition changes: every column but the speed, and evaluations, which come where a run ends."
    seen = pd.read_csv(run.folder/out/'telemetry.csv', keep_default_na=False)
    return seen.drop(columns=['tokens_per_s', 'seconds', 'seconds_predicted', 'judged'])


def history(run, out='a'): return pd.read_csv(run.folder/out/'history.csv')


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    "Sixty steps that nothing interrupted: telemetry and last weights."
    run = starter(tmp_path_factory.mktemp('straight'))
    assert train(run, 'a', '--max-steps', 60, '--save-every', 20) == (0, '', '')
    return telemetry(run), *(torch.load(run.folder/'a'/f'step-{n:08}.pt')['model'] for n in (40, 60))


def wait_for(run, out, step, p):
    "Wait until the run has written the row of a step."
    path = run.folder/out/'telemetry.csv'
    for _ in range(6000):                                          # a machine may be busy
        if path.exists() and path.read_text().count('\n') > step: return
        assert p.poll() is None, p.said()
        time.sleep(0.05)
    pytest.fail(f'step {step} was not reached')


# ---- what is wrong ----

@pytest.mark.parametrize('data, option, said', [
    (b'abc', (), '32 steps need 33'),
    ('hello'.encode('utf-16') * 900, (), 'is not UTF-8: byte 0xff at offset 0'),
    (TEXT.encode(), ('--segments', '0'), '--segments must be in 1..32 (--steps), got 0'),
    (TEXT.encode(), ('--lr', '-1'), 'lr must be a number above 0, got -1')])
def test_wrong_input_is_one_line(run, data, option, said):
    "In processes of their own; the page of the command line has the long list."
    (run.folder/'text.txt').write_bytes(data)
    code, out, err = train(run, 'new/run', *option)
    assert (code, out, err.count('\n')) == (2, '', 1) and said in err and 'Traceback' not in err
    assert not (run.folder/'new').exists()


def test_a_run_is_neither_overwritten_nor_continued_as_another(run, capsys, monkeypatch):
    assert train(run, 'a', '--max-steps', 3) == (0, '', '')
    monkeypatch.chdir(run.folder)
    before = {o.name: o.read_bytes() for o in (run.folder/'a').iterdir()}
    (run.folder/'other.txt').write_text(TEXT.replace('7', 'x'))
    for args, said in (((), 'has a run already'), (('--resume', '--hidden', '32'), 'hidden was 24, is 32'),
                       (('--resume', '--batch-size', '9'), '--batch-size was 8, is 9'),
                       (('--resume', '--text', 'other.txt'), "only known: '7' (U+0037 DIGIT SEVEN)")):
        assert main([*TRAIN, '--out', 'a', *args]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count('\n')) == ('', 1) and said in err
        assert {o.name: o.read_bytes() for o in (run.folder/'a').iterdir()} == before


def test_a_full_disk_is_one_line_and_keeps_the_run(run):
    code = '''
import sys
from gruckpt.training import checkpoint_files as files
from gruckpt.commands.cli import main
def full(state, f):
    f.write(b'PK')
    raise OSError(28, 'No space left on device')
usual = files.torch.save
files.torch.save = lambda state, f: (full if state['step'] == 4 else usual)(state, f)
sys.exit(main(sys.argv[1:]))
'''
    args = ('--max-steps', 6, '--save-every', 2)
    line = ('gruckpt: a/step-00000004.pt: No space left on device; step 2 is saved: make room, and go on '
            'with --resume\n')
    assert train(run, 'a', *args, code=code) == (1, '', line)
    assert sorted(o.name for o in (run.folder/'a').glob('step-*')) == ['step-00000000.pt', 'step-00000002.pt']
    assert train(run, 'a', *args, '--resume') == (0, '', '')
    assert telemetry(run).step.tolist() == [1, 2, 3, 4, 5, 6]


def test_every_help_ends_well(run, capsys):
    "C02, for every command there is, however deep."
    def paths(command, *path):
        yield path
        for name, sub in getattr(command, 'commands', {}).items(): yield from paths(sub, *path, name)
    known = list(paths(typer.main.get_command(app)))
    assert {(), ('train-lm',), ('generate',), ('report',), ('bench', 'lm')} <= set(known)
    for path in known: assert main([*path, '--help']) == 0 and 'Usage: gruckpt' in capsys.readouterr().out
    code, out, err = run('--help', fresh=True)
    assert (code, err) == (0, '') and 'train-lm' in out


# ---- a run that ends early goes on to the bit ----

def test_straight_or_in_two_processes(run, straight):
    """R01: stopped in mid-epoch, dropout on, half of the inputs drawn; the second process is told nothing but
    where and how far. Losses, positions, and weights are equal to the bit; no row is missing or repeated."""
    assert train(run, 'a', '--max-steps', 7) == (0, '', '')
    assert run(*TRAIN, '--out', 'a', '--max-steps', 40, '--resume', fresh=True) == (0, '', '')
    seen, (rows, weights, _) = telemetry(run), straight
    assert seen.equals(rows.head(40)) and seen.epoch[6] == seen.epoch[7] < seen.epoch[39]
    now = torch.load(run.folder/'a'/'step-00000040.pt')['model']
    assert all(torch.equal(now[k], w) for k, w in weights.items())


@pytest.mark.parametrize('number, code', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends(run, straight, number, code):
    p = train(run, 'a', '--max-steps', 10**6, wait=False)
    wait_for(run, 'a', 5, p)
    p.send_signal(number)
    out, err = p.communicate(timeout=300)
    seen = telemetry(run)
    file = os.path.join('a', f'step-{len(seen):08}.pt')
    assert (p.returncode, out) == (code, '') and (run.folder/file).exists()
    assert err == f'gruckpt: stopped after step {len(seen)}, {file} is saved; go on with --resume\n'
    assert seen.head(60).equals(straight[0].head(len(seen)))


def test_killed_at_any_moment_it_goes_on(run, straight):
    "SIGKILL, three times, in a run that saves every step: no file is lost, the end is the unbroken run's."
    for step in 2, 15, 30:
        resume = ['--resume'] if step > 2 else []
        p = train(run, 'a', '--save-every', 1, '--max-steps', 60, *resume, wait=False, fresh=True)
        wait_for(run, 'a', step, p)
        p.kill()
        p.communicate()
        assert p.returncode == -signal.SIGKILL
    assert train(run, 'a', '--save-every', 1, '--max-steps', 60, '--resume') == (0, '', '')
    assert telemetry(run).equals(straight[0])
    assert sorted(o.name for o in (run.folder/'a').iterdir()) == [
        'best.pt', 'history.csv', 'loss.png', 'step-00000059.pt', 'step-00000060.pt', 'telemetry.csv']


@pytest.mark.parametrize('moment', ['write', 'replace'])
def test_killed_in_the_middle_of_a_save(run, straight, moment):
    "R03 through the command: the file before is intact, nothing half-written has a checkpoint's name."
    code = '''
import os, signal, sys
from gruckpt.training import checkpoint_files as files
from gruckpt.commands.cli import main
moment, *args = sys.argv[1:]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
save, replace = files.torch.save, os.replace
def stop(state, f):
    if moment == 'write' and state['step'] == 6:
        f.write(b'PK' + bytes(9000))
        f.flush()
        die()
    save(state, f)
def rename(a, b):
    if moment == 'replace' and str(b).endswith('6.pt'): die()
    replace(a, b)
files.torch.save, os.replace = stop, rename
sys.exit(main(args))
'''
    args = (*TRAIN, *MODEL, '--out', 'a', '--max-steps', 9, '--save-every', 3)
    assert run(moment, *args, code=code)[0] == -signal.SIGKILL
    left = sorted(o.name for o in (run.folder/'a').glob('step-*'))
    assert left == ['step-00000000.pt', 'step-00000003.pt', 'step-00000006.pt.part']
    assert run(*args, '--resume') == (0, '', '')
    assert telemetry(run).equals(straight[0].head(9))
    assert sorted(o.name for o in (run.folder/'a').glob('step-*')) == ['step-00000006.pt', 'step-00000009.pt']


# ---- sessions ----

def test_three_sessions_of_an_epoch(run):
    "One command, called three times: the rows, the history and the weights are those of one call."
    args = (*TRAIN, *MODEL[:-2], '--tf-decay', 'linear', '--epochs', 3)
    assert run(*args, '--out', 'whole') == (0, '', '')
    for n in range(3):
        resume = ['--resume'] if n else []
        assert run(*args, '--out', 'a', '--one-epoch-per-session', *resume) == (0, '', '')
        assert len(history(run)) == n + 1
    assert telemetry(run).equals(telemetry(run, 'whole')) and history(run).equals(history(run, 'whole'))
    assert history(run).teacher_forcing.tolist() == pytest.approx([1, .95, .9])
    assert history(run).epoch.tolist() == list(range(3))
    now, then = (torch.load(sorted((run.folder/o).glob('step-*'))[-1])['model'] for o in ('a', 'whole'))
    assert all(torch.equal(now[k], w) for k, w in then.items())
    best = torch.load(run.folder/'a'/'best.pt')
    assert best['step'] == history(run).step[history(run).loss.idxmin()]
    code, out, err = run('train-lm', '--text', 'text.txt', '--out', 'a', '--resume', '--threads', 1)
    assert (code, err) == (0, '') and 'nothing left to do' in out


def test_it_halts_when_evaluations_get_worse(run):
    "Random characters can be learned by heart only: a plain message, exit code 0, and no more steps later."
    (run.folder/'noise.txt').write_text(''.join(map(chr, torch.randint(97, 117, (700,)).tolist())))
    args = ('train-lm', '--text', 'noise.txt', '--out', 'a', '--hidden', 48, '--layers', 1, '--batch-size', 4,
            '--steps', 16, '--lr', '3e-2', '--epochs', 60, '--halt-after', 3, '--valid-share', .2,
            '--threads', 1, '--no-free-running')
    code, out, err = run(*args)
    assert (code, err) == (0, '') and 'halted  evaluation did not get better 3 times in a row: loss' in out
    n = len(telemetry(run))
    assert n < 60 * 8 and history(run).loss.idxmin() == len(history(run)) - 4
    code, out, err = run(*args, '--resume')
    assert (code, err, len(telemetry(run))) == (0, '', n) and 'halted' in out and 'nothing left' in out


@pytest.mark.parametrize('precision', ['float16', 'pure-bfloat16'])
def test_precisions_go_on_to_the_bit(run, precision):
    "With accumulation: three batches a step, and a stop in the middle of an epoch."
    args = ('--precision', precision, '--accumulate', 3, '--clip', 'auto')
    assert train(run, 'whole', *args, '--max-steps', 8) == (0, '', '')
    assert train(run, 'a', *args, '--max-steps', 3) == (0, '', '')
    assert run(*TRAIN, '--out', 'a', '--max-steps', 8, '--resume') == (0, '', '')
    seen = telemetry(run)
    assert seen.equals(telemetry(run, 'whole')) and not seen.skipped.any() and seen.peak_predicted[0]
    assert (seen.loss_scale.astype(str).str.len() > 0).all() == (precision == 'float16')


def test_a_run_that_is_lost_says_where_it_was_good(run):
    code, out, err = train(run, 'a', '--lr', '1e38', '--max-steps', 100, '--save-every', 1)
    assert (code, out, err.count('\n')) == (1, '', 1)
    assert '20 steps in a row were skipped' in err and 'the last good checkpoint is a/step-' in err


def test_tensorboard_is_written_or_refused(run):
    code, out, err = train(run, 'a', '--max-steps', 2, '--tensorboard')
    if importlib.util.find_spec('tensorboard'): assert code == 0 and (run.folder/'a'/'tensorboard').is_dir()
    else: assert (code, out, err.count('\n')) == (2, '', 1) and 'pip install tensorboard' in err


# ---- what a run remembers ----

def test_a_run_remembers_text_plan_and_intervals(run, capsys, monkeypatch):
    "Only where and how far is told, from another folder; uneven cuts and what they keep stay."
    args = ('--memory-limit', '300KiB', '--eval-every', 3, '--measure-every', 2, '--optimizer', 'momentum')
    assert train(run, 'a', *args, '--max-steps', 3) == (0, '', '')
    begun = torch.load(run.folder/'a'/'step-00000003.pt')['plan']
    assert begun['cuts'] or begun['keep_last'] or begun['keep'] != 'hidden'
    elsewhere = run.folder/'elsewhere'
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(['train-lm', '--out', '../a', '--resume', '--max-steps', '9']) == 0
    out, err = capsys.readouterr()
    assert err == '' and 'changed --max-steps was 3, is 9' in out and 'changed plan' not in out
    state, rows = torch.load(run.folder/'a'/'step-00000009.pt'), telemetry(run)
    assert state['plan'] == begun and state['config']['optimizer'] == 'momentum'
    assert history(run).step.tolist() == [3, 6, 9]
    assert (rows.peak_measured != '').tolist() == [n % 2 == 0 for n in range(1, 10)]
    full = pd.read_csv(run.folder/'a'/'telemetry.csv')
    assert (full.peak_measured.dropna() <= full.peak_predicted[1]).all() and (full.seconds > 0).all()
    assert (full.seconds_predicted > 0).all()


def test_a_resumed_run_is_refused_or_changed_field_by_field(run, capsys, monkeypatch):
    assert train(run, 'a', '--max-steps', 2) == (0, '', '')
    monkeypatch.chdir(run.folder)
    resume = [*TRAIN, '--out', 'a', '--resume', '--max-steps', '2']
    said = {'--hidden 32 --norm state': '--hidden was 24, is 32; --norm was none, is state; leave it out',
            '--optimizer sgd': '--optimizer was adamw, is sgd', '--two-pass': '--two-pass was False, is True',
            '--valid-share 0.1': '--valid-share was 0.05, is 0.1', '--clip 2': '--clip was 1.0, is 2'}
    for typed, line in said.items():
        assert main([*resume, *typed.split()]) == 2
        out, err = capsys.readouterr()
        assert err.startswith('gruckpt: cannot resume: ') and line in err and err.count('\n') == 1
    same = '--hidden 24 --clip 1 --norm none --segments 4 --keep gates --eval-every 5 --save-every 7'.split()
    assert main([o for o in resume if o != '--quiet'] + same) == 0
    out = capsys.readouterr().out
    for line in ('changed --eval-every was None, is 5', 'changed --save-every was 100, is 7',
                 'changed plan was ', 'at step 2, where it ends'): assert line in out
    (run.folder/'text.txt').unlink()
    assert main(['train-lm', *resume[3:]]) == 2
    assert 'text.txt, the text of this run, is not there' in capsys.readouterr().err


@pytest.mark.parametrize('typed, line', [
    ('train-lm --batch 3', '--batch; it is called --batch-size'), ('budget --limit 1', '--memory-limit'),
    ('bench rnn --dtype float32', 'called --precision'), ('train-tft --patience 3', 'called --halt-after'),
    ('train-lm --tf-step 1', 'called --tf-rate'), ('certify a --rows 3', 'called --batch-size'),
    ('budget --vocab 9', 'called --vocab-size'), ('generate --batch 1', 'No such option: --batch')])
def test_a_former_word_is_told_its_new_one(typed, line, capsys):
    assert main(typed.split()) == 2
    err = capsys.readouterr().err
    assert line in err and err.count('\n') == 1


def test_help_and_version_load_no_torch_and_a_budget_little_more():
    "Of the program and of each command; a bare call is help, too. A budget draws and tabulates nothing."
    code = """
import io, sys, contextlib
from gruckpt.commands.cli import main
for args in '', '--help', '--version', 'train-lm --help', 'train-tft --help', 'budget --help', 'bench --help':
    args = args.split()
    with contextlib.redirect_stdout(io.StringIO()) as out: assert main(args) == 0 and out.getvalue()
if early := {'torch', 'pandas', 'numpy', 'matplotlib'} & {*sys.modules}: sys.exit(f'help loads {early}')
budget = 'budget --hidden 16 --layers 1 --batch-size 2 --steps 8 --memory-limit 64MiB'.split()
loaded = []                                                    # torch, when a line is printed?
class Out(io.StringIO):
    def write(self, text):
        loaded.append('torch' in sys.modules)
        return super().write(text)
with contextlib.redirect_stdout(Out()) as out: assert main(budget) == 0 and 'fits' in out.getvalue()
assert out.getvalue().startswith('asked   layers 1, width 16, symbols 100; rows 2, steps 8\\n')
assert (loaded[0], loaded[-1]) == (False, True)
slow = {'pandas', 'pyarrow', 'matplotlib', 'torch._dynamo'} & {*sys.modules}
if slow: sys.exit(f'budget loads {slow}')
"""
    p = Process('-c', code, fresh=True)
    assert p.communicate(60)[1] == '' and p.returncode == 0


def test_help_tells_what_the_dataclasses_tell(capsys):
    from gruckpt.charlm.model import GRUSpec
    from gruckpt.training.config import TrainConfig
    assert main(['train-lm', '--help']) == 0
    shown = ' '.join(capsys.readouterr().out.split())
    for cls, field, name in ((TrainConfig, 'lr', '--lr'), (GRUSpec, 'n_layers', '--layers'),
                             (TrainConfig, 'weight_decay', '--weight-decay')):
        assert f'{name} ' in shown and f'[default: {cls.__dataclass_fields__[field].default}]' in shown
    assert 'nothing else depends on it. Default: --epochs says where' in shown


@pytest.mark.parametrize('typed, code, line', [
    ('--memory-limit 64MiB', 0, 'counted a step on a CPU; --device cuda or --gpu counts one on a GPU'),
    ('--memory-limit auto', 0, 'and what this machine has free'),
    ('--gpu 3060ti', 0, 'counted a step on RTX 3060 Ti'),
    ('--memory-limit rtx3080 --device cuda', 0, 'counted a step on a GPU'),
    ('--gpu v100', 0, 'on V100: of 16.00 GiB'), ('--gpu auto', 2, "torch sees none here; give a card")])
def test_a_budget_says_whose_step_it_counted(typed, code, line, capsys):
    if 'auto' in typed and torch.cuda.is_available(): pytest.skip('there is a GPU to ask')
    small = 'budget --hidden 16 --layers 1 --batch-size 2 --steps 8'.split()
    assert main([*small, *typed.split()]) == code
    assert line in ''.join(capsys.readouterr())


def test_completion_is_offered():
    env = {'_GRUCKPT_COMPLETE': 'complete_bash', 'COMP_WORDS': 'gruckpt train', 'COMP_CWORD': '1'}
    p = Process('-c', 'from gruckpt.commands.cli import main; main()', fresh=True, env=env)
    assert p.communicate(60)[0].split() == ['train-lm', 'train-tft']


# ---- several processes ----

def torchrun(run, n, *args):
    "A command in `n` processes, as a user starts it."
    code = 'import sys; from torch.distributed.run import main; main(sys.argv[1:])'
    return run('--standalone', '--nproc-per-node', n, '-m', 'gruckpt.commands.cli', *args, code=code,
               fresh=True)


def grouped(run, n, *args):
    "The same without torchrun: the first exit code, and what all said on stderr."
    started = ranks(n, '-m', 'gruckpt.commands.cli', *args, cwd=run.folder)
    errors = [p.communicate(timeout=300)[1] for p in started]
    return started[0].returncode, ''.join(errors)


def test_two_processes_are_one_with_all_rows(run):
    """X07: two processes, one, two again, against one process from start to end; each takes its rows, the
    first one speaks and writes. Sums in another order differ in the last digits, and nothing else does."""
    model = ('--hidden', 24, '--layers', 2, '--steps', 32, '--lr', '1e-2', '--save-every', 2)
    rest = ('--text', 'text.txt', '--threads', 1, '--device', 'cpu')
    begin = ('train-lm', *model, *rest, '--batch-size')
    assert run(*begin, 8, '--out', 'whole', '--max-steps', 9, '--quiet')[0] == 0
    code, out, err = torchrun(run, 2, *begin, 4, '--out', 'a', '--max-steps', 3)
    assert code == 0 and out.count('done') == 1 and '2 processes' in out, err
    assert run('train-lm', *rest, '--out', 'a', '--max-steps', 6, '--resume', '--quiet') == (0, '', '')
    code, err = grouped(run, 2, 'train-lm', *rest, '--out', 'a', '--max-steps', 9, '--resume')
    assert code == 0, err
    seen, whole = telemetry(run), telemetry(run, 'whole')
    assert seen.step.tolist() == list(range(1, 10)) and seen.epoch.equals(whole.epoch)
    for name in 'loss', 'grad_norm':
        assert seen[name].tolist() == pytest.approx(whole[name].tolist(), rel=1e-4)
    code, err = grouped(run, 3, 'train-lm', *rest, '--out', 'a', '--max-steps', 12, '--resume')
    assert code and 'gruckpt: the 8 rows of this run cannot be shared evenly by 3 processes' in err


# ---- the page of a run ----

def test_report_of_a_run_and_of_one_that_has_just_begun(run):
    assert train(run, 'a', '--max-steps', 1, '--valid-share', 0) == (0, '', '')
    code, out, err = run('report', 'a')
    assert (code, err) == (0, '') and 'a/report.html' in out
    assert train(run, 'a', '--max-steps', 40, '--resume', '--valid-share', 0) == (0, '', '')
    page = (run.folder/'a'/'report.html').read_bytes()
    assert run('report', 'a')[0] == 0 and (run.folder/'a'/'report.html').read_bytes() != page
    code, out, err = run('report', 'nowhere')
    assert (code, out, err.count('\n')) == (2, '', 1) and 'has no telemetry.csv' in err
