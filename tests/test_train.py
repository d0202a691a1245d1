"""Training: one curve whatever the plan, files that outlive any death, steps that do no harm."""
import math
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
import torch

from gruckpt.lm import GRULM, GRUSpec
from gruckpt.scan import plain
from gruckpt.segment import Plan
from gruckpt.text import EvalStream, TokenStream
from gruckpt.train import (StepRecord, Telemetry, TrainConfig, Trainer, load_checkpoint, random_state,
                           save_checkpoint, session, set_random_state, write_whole)

ROOT = Path(__file__).parent.parent
IDS = (torch.arange(700) * 7 // 3) % 11


def trainer(max_steps=20, n_segments=4, dtype=torch.float32, seed=0, dropout=0.3, valid=False, **config):
    torch.manual_seed(seed)
    model = GRULM(GRUSpec(11, hidden=12, n_layers=2, dropout=dropout)).to(dtype)
    config = TrainConfig(max_steps, **{'lr': 1e-2, 'warmup': 3, 'decay_steps': 50, **config})
    valid = EvalStream(IDS[:101], 3, 16) if valid else None
    return Trainer(model, TokenStream(IDS, 4, 22), config, Plan.split(22, n_segments), valid)


def losses(o, mode=nullcontext):
    with mode(): return [r.loss for r in o.steps()]


@pytest.mark.parametrize('dropout', [0., 0.3])
@pytest.mark.parametrize('n_segments', [1, 4, 7, 22])
def test_same_loss_curve_as_plain_autograd(n_segments, dropout):
    "Twenty steps in float64, state carried, three epochs: relative difference below 1e-10."
    o = trainer(dtype=torch.float64, n_segments=n_segments, dropout=dropout)
    cut, reference = losses(o), losses(trainer(dtype=torch.float64, n_segments=1, dropout=dropout), plain)
    assert len(cut) == 20 and o.stream.epoch >= 2 and reference[-1] < 0.95 * reference[0]
    assert max(abs(a / b - 1) for a, b in zip(cut, reference, strict=True)) < 1e-10


def test_neither_evaluation_nor_measuring_changes_a_step():
    "Dropout draws from the same generator throughout: whoever draws in between would show."
    watched = list(trainer(valid=True, eval_every=3, measure_every=2).steps())
    assert [r.loss for r in watched] == losses(trainer())
    assert [r.step for r in watched if r.eval_loss is not None] == [3, 6, 9, 12, 15, 18, 20]
    assert all((r.peak_measured is not None) == (r.step % 2 == 0) for r in watched)


@pytest.mark.parametrize('stop', [1, 7, 13, 19])
def test_resume_is_exact_wherever_it_stops(stop, tmp_path):
    "Through a file, with another plan object, and with the generators elsewhere in between."
    straight = [(r.step, r.epoch, r.loss, r.grad_norm, r.lr) for r in trainer().steps()]
    first = trainer(stop)
    before = [(r.step, r.epoch, r.loss, r.grad_norm, r.lr) for r in first.steps()]
    save_checkpoint(tmp_path, first.state_dict())
    torch.rand(3)
    second = trainer(seed=9)
    second.load_state_dict(load_checkpoint(tmp_path).state)
    assert before + [(r.step, r.epoch, r.loss, r.grad_norm, r.lr) for r in second.steps()] == straight


def test_a_checkpoint_holds_plain_values_only(tmp_path):
    "R04: torch's default load reads it; random states stay on the processor, as bytes."
    o = trainer(3)
    list(o.steps())
    state = torch.load(save_checkpoint(tmp_path, o.state_dict()))
    assert state['random']['torch'].dtype == torch.uint8 and state['random']['torch'].device.type == 'cpu'
    def kinds(tree):
        if isinstance(tree, dict): return set().union(*map(kinds, tree.values()), *map(kinds, tree))
        return set().union(*map(kinds, tree)) if isinstance(tree, (list, tuple)) else {type(tree)}
    assert kinds(state) == {str, int, float, bool, type(None), torch.Tensor}


def test_random_states_of_devices_that_are_not_here_are_left_out():
    "X08: a file from a machine with more GPUs loads."
    state = random_state()
    set_random_state({**state, 'cuda': [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
                      if not torch.cuda.is_available() else state['cuda']})
    assert torch.equal(torch.get_rng_state(), state['torch'])


# ---- steps that do no harm ----

BAD = {'inf': [1., math.inf, 2.], 'nan': [1., math.nan, 2.], 'overflow of the norm': [1e25, 1e25, 0.]}


def spoiled(o, grad):
    "The trainer, with `grad` among the gradients of its third step."
    def spoil(g):
        g = g.clone()
        if o.step == 2: g.view(-1)[:3] = torch.tensor(grad)
        return g
    o.model.head.weight.register_hook(spoil)
    return o


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('grad', BAD.values(), ids=BAD)
def test_a_step_without_a_finite_norm_changes_nothing(grad, dtype, tmp_path):
    "R07, through a session: weights, moments, their step counts, the carried state; counted in telemetry."
    o, kept = spoiled(trainer(6, dtype=dtype), grad), []
    for _ in session(o, tmp_path):
        state = o.state_dict()
        kept.append([t.clone() for k in ('model', 'optimizer', 'carried')
                     for t in torch.utils._pytree.tree_leaves(state[k]) if torch.is_tensor(t)])
    rows = pd.read_csv(tmp_path/'telemetry.csv', keep_default_na=False)
    assert rows.skipped.tolist() == ['', '', 'gradient norm not finite', '', '', '']
    assert rows.n_skipped.tolist() == [0, 0, 1, 1, 1, 1] and rows.clip_scale[2] == 0
    assert all(map(torch.equal, kept[1], kept[2])) and not all(map(torch.equal, kept[2], kept[3]))
    assert all(t.isfinite().all() for t in kept[-1])


def test_the_rate_counts_updates_and_not_where_a_run_ends():
    "R08: a skipped third step makes the fourth one the third update, also across a resume."
    rates = [r.lr for r in trainer(20).steps()]
    assert len(set(rates)) > 15 and [r.lr for r in trainer(12).steps()] == rates[:12]
    first = spoiled(trainer(7), BAD['nan'])
    assert [r.lr for r in first.steps()] == [*rates[:3], *rates[2:6]]
    second = trainer(12)
    second.load_state_dict(first.state_dict())
    assert [(r.lr, r.n_skipped) for r in second.steps()] == [(lr, 1) for lr in rates[6:11]]


def test_state_starts_anew_with_an_epoch():
    "G12: what is carried into an epoch's first window is nothing."
    o, seen = trainer(), []
    usual = o.model.loss
    def loss(batch, state, plan):
        seen.append((batch.fresh, state is None))
        return usual(batch, state, plan=plan)
    o.model.loss = loss
    list(o.steps())
    assert len(seen) == 20 and all(fresh == empty for fresh, empty in seen)
    assert sum(fresh for fresh, _ in seen) > 1


# ---- files ----

@pytest.mark.parametrize('moment', ['write', 'fsync', 'replace', 'after'])
def test_killed_inside_a_save(moment, tmp_path):
    "R03: SIGKILL while a checkpoint is written, before it is forced out, before and after it gets its name."
    code = '''
import os, signal, sys, torch
from pathlib import Path
from gruckpt import train
folder, moment = Path(sys.argv[1]), sys.argv[2]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
state = {'step': 1, 'weight': torch.arange(5000.)}
train.save_checkpoint(folder, state)
usual = os.replace
if moment == 'write': train.torch.save = lambda state, f: (f.write(b'PK' + bytes(5000)), f.flush(), die())
if moment == 'fsync': os.fsync = die
if moment == 'replace': os.replace = die
if moment == 'after': os.replace = lambda a, b: (usual(a, b), die())
train.save_checkpoint(folder, {**state, 'step': 2})
'''
    done = subprocess.run([sys.executable, '-c', code, str(tmp_path), moment], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    loaded = load_checkpoint(tmp_path)
    assert loaded.damaged == () and loaded.state['step'] == (2 if moment == 'after' else 1)
    assert torch.equal(loaded.state['weight'], torch.arange(5000.))
    save_checkpoint(tmp_path, {**loaded.state, 'step': 3})
    assert [o.name for o in tmp_path.glob('*') if not o.name.endswith('.pt')] == []


def full(f):
    f.write(b'PK')
    raise OSError('disk full')


def test_a_save_that_raises_leaves_nothing(tmp_path):
    save_checkpoint(tmp_path, {'step': 1})
    with pytest.raises(OSError, match='disk full'): write_whole(tmp_path/'step-00000002.pt', full)
    assert [o.name for o in tmp_path.iterdir()] == ['step-00000001.pt']
    assert load_checkpoint(tmp_path).state['step'] == 1


def test_a_file_cut_anywhere_is_passed_over(tmp_path):
    for step in 1, 2: path = save_checkpoint(tmp_path, {'step': step, 'weight': torch.arange(300.)})
    whole = path.read_bytes()
    for n in range(0, len(whole), 97):
        path.write_bytes(whole[:n])
        loaded = load_checkpoint(tmp_path)
        assert (loaded.state['step'], loaded.damaged) == (1, (path,))


def test_telemetry_cut_anywhere_never_gets_a_gap(tmp_path):
    "Whatever a death left of the file: it is continued to one row a step, or refused."
    path, record = tmp_path/'telemetry.csv', lambda step: StepRecord(step, 0, 1/3, 0.5, 1., 1., 1e-3, 1e4)
    log = Telemetry(path)
    for step in range(1, 8): log.write(record(step))
    log.file.close()
    whole, continued = path.read_bytes(), 0
    for n in range(whole.index(b'\n') + 1, len(whole) + 1):
        path.write_bytes(whole[:n])
        n_rows = whole[:n].count(b'\n') - 1
        try: log = Telemetry(path, 5)
        except ValueError: assert 0 < n_rows < 5
        else:
            log.write(record(6))
            log.file.close()
            first = 1 if n_rows else 6
            assert pd.read_csv(path).step.tolist() == list(range(first, 7))
            continued += 1
    assert continued > 100


def test_telemetry_of_another_form_is_refused(tmp_path):
    (tmp_path/'telemetry.csv').write_text('step,loss\n1,2.0\n')
    with pytest.raises(ValueError, match='has other columns'): Telemetry(tmp_path/'telemetry.csv', 1)
    assert (tmp_path/'telemetry.csv').read_text() == 'step,loss\n1,2.0\n'


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
