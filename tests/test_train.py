"""Training: one curve whatever the plan, runs that go on to the bit, several ranks as one process.

Run as a script, this file is one of the processes that its tests start.
"""
import hashlib
import json
import math
import os
import random
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from processes import python, ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._pytree import tree_leaves

from gruckpt.training.checkpoint_files import load_checkpoint, save_checkpoint
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.training.parallel import World, joined
from gruckpt.engine.scan import plain
from gruckpt.training.schedule import linear_decay
from gruckpt.plan.budget import estimate
from gruckpt.plan.segment import Plan
from gruckpt.charlm.text import EvalStream, TokenStream, Vocab
from gruckpt.training.trainer import Diverged, Trainer
from gruckpt.training.config import TrainConfig
from gruckpt.training.optimizer_step import OPTIMIZERS
from gruckpt.training.evaluation import evaluate, is_best
from gruckpt.training.sessions import session
from gruckpt.training.trainer import random_state, set_random_state

IDS = (torch.arange(700) * 7 // 3 + torch.arange(700) // 97) % 11
SAME = {'tokens_per_s': 0, 'seconds': 0}    # what differs each time
VALID = EvalStream(IDS[:101], 3, 16)


class Noisy(nn.Module):
    "A language model whose inputs are true with the probability `teacher_forcing`, else drawn by four ways."
    def __init__(self, **spec):
        super().__init__()
        self.lm, self.seen = GRULM(GRUSpec(11, hidden=12, n_layers=2, **spec)), []

    def init_state(self, n_rows): return self.lm.init_state(n_rows)
    def score(self, *args): return self.lm.score(*args)

    def loss(self, batch, state=None, *, plan=None, teacher_forcing=1.):
        self.seen.append(hashlib.sha256(batch.inputs.numpy().tobytes()).hexdigest()[:12])
        x_BT = batch.inputs
        if teacher_forcing < 1:
            true_BT, drawn_BT = torch.rand(x_BT.shape) < teacher_forcing, torch.randint_like(x_BT, 11)
            drawn_BT = (drawn_BT + random.randrange(11) + np.random.randint(11)) % 11
            x_BT = torch.where(true_BT, x_BT, drawn_BT)
        return self.lm.loss(batch._replace(inputs=x_BT), state, plan=plan)


def judge(model): return evaluate(model, VALID).numbers()


def trainer(max_steps=20, n_segments=4, dtype=torch.float32, seed=0, dropout=0.3, p=None, judge=None, rows=4,
            world=None, **config):
    for seeds in torch.manual_seed, random.seed, np.random.seed: seeds(seed)
    model = Noisy(dropout=dropout).to(dtype)
    precision = {torch.float64: 'float64', torch.bfloat16: 'pure bfloat16'}.get(dtype, 'float32')
    config = TrainConfig(max_steps, **{'lr': 1e-2, 'warmup': 3, 'decay_steps': 50, 'precision': precision,
                                       **config})
    world = world or World()
    stream = TokenStream(IDS, rows // world.size, 22, rank=world.rank, world_size=world.size)
    knobs = None if p is None else lambda epoch, n_updates: {'teacher_forcing': p}
    return Trainer(model, stream, config, Plan.split(22, n_segments), judge, knobs=knobs, world=world)


def losses(o, mode=nullcontext):
    with mode(): return [r.loss for r in o.steps()]


def facts(records): return [(r.step, r.epoch, r.loss, r.grad_norm, r.lr) for r in records]


def fingerprint(model):
    "Of the weights, to the bit."
    return hashlib.sha256(b''.join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


# ---- one curve ----

@pytest.mark.parametrize('dropout', [0., 0.3])
@pytest.mark.parametrize('n_segments', [1, 4, 7, 22])
def test_same_loss_curve_as_plain_autograd(n_segments, dropout):
    "Twenty steps in float64, state carried, three epochs: relative difference below 1e-10."
    o = trainer(dtype=torch.float64, n_segments=n_segments, dropout=dropout)
    cut, reference = losses(o), losses(trainer(dtype=torch.float64, n_segments=1, dropout=dropout), plain)
    assert len(cut) == 20 and o.stream.epoch >= 2 and reference[-1] < 0.95 * reference[0]
    assert max(abs(a / b - 1) for a, b in zip(cut, reference, strict=True)) < 1e-10


def drawing(model):
    "A judge that draws numbers from every generator."
    torch.rand(3), random.random()
    return judge(model)


def test_neither_evaluation_nor_measuring_changes_a_step():
    "Dropout draws from the same generator throughout: whoever draws in between would show."
    watched = list(trainer(judge=drawing, eval_every=3, measure_every=2).steps())
    assert [r.loss for r in watched] == losses(trainer())
    assert [r.step for r in watched if r.judged is not None] == [3, 6, 9, 12, 15, 18, 20]
    assert all((r.peak_measured is not None) == (r.step % 2 == 0) for r in watched)


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


def test_g12_a_carried_state_is_a_leaf():
    "Fifty batches, no second backward; the gradient is that of a fresh copy of the state."
    o = trainer(50, dropout=0., clip=None, n_segments=1)
    usual, expected = o.model.loss, []
    def loss(batch, state, plan):
        copy = None if state is None else state.detach().clone()
        expected[:] = torch.autograd.grad(usual(batch, copy, plan=plan)[0], [*o.model.parameters()])
        return usual(batch, state, plan=plan)
    o.model.loss = loss
    for _ in o.steps(): assert all(map(torch.equal, expected, [p.grad for p in o.model.parameters()]))
    assert o.step == 50


# ---- optimizers: what is chosen is what is counted ----

@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_is_counted_as_it_is(name, caplog):
    "The peak is the ledger's to the byte; by the ledger of another optimizer it is an error in the log."
    spec, plan, rows = GRUSpec(11, hidden=12, n_layers=2), Plan.split(22, 4), 4
    config = TrainConfig(5, lr=1e-2, optimizer=name, measure_every=1)
    def peaks(ledger):
        torch.manual_seed(0)
        o = Trainer(GRULM(spec), TokenStream(IDS, rows, 22), config, plan, peak_predicted=int(ledger.total))
        return [r.peak_measured for r in o.steps()]
    ledger = estimate(spec, rows, plan, optimizer=name)
    seen = peaks(ledger)
    assert max(seen) == seen[-1] == ledger.total and not caplog.records
    if name == 'sgd': return
    peaks(estimate(spec, rows, plan, optimizer='sgd'))
    [said] = caplog.records[-1:]
    assert said.levelname == 'ERROR' and 'please report it with' in said.getMessage()


def test_the_names_of_optimizers_are_those_of_the_ledger():
    with pytest.raises(ValueError, match='optimizer must be one of') as e:
        estimate(GRUSpec(11), 1, Plan(2, 2), optimizer='')
    said = str(e.value)
    assert all(name in said for name in OPTIMIZERS) and said.count(',') == len(OPTIMIZERS)
    one, two = (trainer(9, optimizer=name) for name in ('sgd', 'adamw'))
    with pytest.raises(ValueError, match="optimizer was 'sgd', is 'adamw'"):
        two.load_state_dict(one.state_dict())


@pytest.mark.parametrize('name', ['sgd', 'momentum', 'amsgrad'])
def test_other_optimizers_go_on_to_the_bit(name):
    straight = facts(trainer(8, optimizer=name).steps())
    first = trainer(3, optimizer=name)
    before, state = facts(first.steps()), first.state_dict()
    second = trainer(8, optimizer=name, seed=5)
    second.load_state_dict(state)
    assert before + facts(second.steps()) == straight


# ---- R01, R02: a run that goes on ----

@pytest.mark.parametrize('stop, accumulate', [(1, 3), (7, 1), (13, 3)])
def test_resume_is_exact_wherever_it_stops(stop, accumulate, tmp_path):
    "Through a file, with another plan object, and with the generators elsewhere in between."
    straight = facts(trainer(accumulate=accumulate, p=0.5).steps())
    first = trainer(stop, accumulate=accumulate, p=0.5)
    before = facts(first.steps())
    save_checkpoint(tmp_path, first.state_dict())
    torch.rand(3)
    second = trainer(seed=9, accumulate=accumulate, p=0.5)
    second.load_state_dict(load_checkpoint(tmp_path).state)
    assert before + facts(second.steps()) == straight


def go(folder, max_steps):
    "A process of a run in a folder; it prints what every step read."
    o = trainer(int(max_steps), p=0.5, judge=judge, rows=5)
    if Path(folder).exists(): o.load_state_dict(load_checkpoint(folder).state)
    for _ in session(o, folder, save_every=5): pass
    print(json.dumps(o.model.seen))


def process(*args):
    "What this file prints as a script."
    code, out, err = python(__file__, *args, env={'OMP_NUM_THREADS': '1'})
    assert code == 0, err
    return json.loads(out)


def telemetry(folder, *without):
    return pd.read_csv(folder/'telemetry.csv').drop(columns=['tokens_per_s', 'seconds', *without])


def test_r01_twenty_steps_straight_or_in_two_processes(tmp_path):
    "Stopped after 7, in the middle of epoch 1; dropout, half the inputs drawn: every number identical."
    straight = process('go', tmp_path/'straight', 20)
    first, second = process('go', tmp_path/'two', 7), process('go', tmp_path/'two', 20)
    assert (len(first), len(second), first + second) == (7, 13, straight)
    assert len({tuple(straight[i:i + 6]) for i in (0, 6, 12)}) == 3             # epochs are cut differently
    whole, two = telemetry(tmp_path/'straight', 'judged'), telemetry(tmp_path/'two', 'judged')
    assert two.step.tolist() == list(range(1, 21)) and two.epoch[6] == two.epoch[7] == 1
    assert two.equals(whole) and set(two.teacher_forcing) == {0.5}
    states = [load_checkpoint(tmp_path/name).state for name in ('straight', 'two')]
    assert states[0]['stream'] == states[1]['stream'] and states[0]['step'] == states[1]['step'] == 20
    assert all(map(torch.equal, *(tree_leaves(state['model']) for state in states)))


class Quantiles(nn.Module):
    "Quantiles of the next value; like a fake-quantised layer it keeps the range that it has seen."
    def __init__(self, quantiles, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.quantiles, self.net = quantiles, nn.Linear(4, len(quantiles))
        self.register_buffer('range', torch.zeros(2))

    def init_state(self, n_rows): return self.net.weight.new_zeros(n_rows)

    def loss(self, batch, state=None, *, plan=None, teacher_forcing=1.):
        x_BT, y_BT = batch.inputs.float() / 10, batch.targets.float() / 10
        state = self.init_state(len(x_BT)) if state is None else state
        self.range.lerp_(torch.stack([x_BT.min(), x_BT.max()]), 0.1)
        x_BT = torch.nn.functional.dropout(x_BT, 0.2) / (1 + self.range.sum())
        noise = torch.rand(()) * (1 - teacher_forcing)
        out_BQ = self.net(x_BT[:, -4:] + noise + state[:, None]).float()
        error_BQ = y_BT[:, -1:] - out_BQ
        q_Q = torch.tensor(self.quantiles)
        return torch.maximum(q_Q * error_BQ, (q_Q - 1) * error_BQ).mean(), out_BQ.mean(1)


def quantile_run(max_steps, quantiles=(0.1, 0.5, 0.9), seed=0):
    schedule = linear_decay(step=0.25)
    config = TrainConfig(max_steps, lr=1e-2, warmup=5, precision='float16')
    return Trainer(Quantiles(quantiles, seed), TokenStream(IDS, 8, 11), config,
                   about={'quantiles': list(quantiles), 'schedule': asdict(schedule)},
                   knobs=lambda epoch, n: {'teacher_forcing': schedule(epoch, n)})


def test_r02_a_quantile_loss_its_ranges_and_a_loss_scale_go_on(tmp_path):
    "Loss scale, schedule, ranges, carried state; other quantiles or another schedule are refused by name."
    straight = quantile_run(20)
    whole = [asdict(r) | SAME for r in straight.steps()]
    first = quantile_run(7)
    before = [asdict(r) | SAME for r in first.steps()]
    state = load_checkpoint(save_checkpoint(tmp_path, first.state_dict()).parent).state
    assert state['loss_scale']['n_good'] > 0 and state['model']['range'].abs().sum() > 0
    second = quantile_run(20, seed=3)
    second.load_state_dict(state)
    assert before + [asdict(r) | SAME for r in second.steps()] == whole
    weights = [tree_leaves(o.model.state_dict()) for o in (second, straight)]
    assert all(map(torch.equal, *weights))
    assert len({r['teacher_forcing'] for r in whole}) == 3 and second.loss_scale == straight.loss_scale
    with pytest.raises(ValueError, match=r"quantiles was \[0.1, 0.5, 0.9\], is \[0.2, 0.5, 0.8\]"):
        quantile_run(20, (0.2, 0.5, 0.8)).load_state_dict(state)
    state['about']['schedule']['rate'] = 0.05
    with pytest.raises(ValueError, match='rate was 0.05, is 0.25'): quantile_run(20).load_state_dict(state)


def test_r04_a_checkpoint_holds_plain_values_only(tmp_path):
    "torch's default load reads it; random states stay on the processor, as bytes."
    o = trainer(8, judge=judge, p=0.5)
    for _ in session(o, tmp_path): pass
    state = torch.load(tmp_path/'step-00000008.pt')
    assert state['random']['torch'].dtype == torch.uint8 and state['random']['torch'].device.type == 'cpu'
    def kinds(tree):
        if isinstance(tree, dict): return set().union(*map(kinds, tree.values()), *map(kinds, tree))
        return set().union(*map(kinds, tree)) if isinstance(tree, (list, tuple)) else {type(tree)}
    assert kinds(state) == {str, int, float, bool, type(None), torch.Tensor}


def test_x08_random_states_of_devices_that_are_not_here_are_left_out():
    "A file from a machine with more GPUs loads."
    state = random_state()
    set_random_state({**state, 'cuda': [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
                      if not torch.cuda.is_available() else state['cuda']})
    assert torch.equal(torch.get_rng_state(), state['torch'])


@pytest.mark.parametrize('text, said', [('abcd', "only in the text: 'd'"), ('abd', "only known: 'c'"),
                                        ('cab', None)])
def test_d03_another_vocabulary_is_refused(text, said):
    "Trained on abc: by the vocabulary, which names the characters, and by the trainer, were that forgotten."
    def run(text, seed=0):
        vocab = Vocab.from_text(text)
        torch.manual_seed(seed)
        ids = vocab.encode(text * 40)
        return vocab, Trainer(GRULM(GRUSpec(len(vocab), 8, 1)), TokenStream(ids, 2, 5),
                              TrainConfig(3), about={'symbols': vocab.symbols})
    (vocab, first), (other, second) = run('abc'), run(text, 1)
    list(first.steps())
    if said is None:
        vocab.check_same(other)
        assert other.encode('abc').tolist() == vocab.encode('abc').tolist()
        second.load_state_dict(first.state_dict(), new_data=True)
        assert (second.step, second.stream.window) == (3, 0)
        return
    with pytest.raises(ValueError, match=said): vocab.check_same(other)
    with pytest.raises(ValueError, match=f"symbols was 'abc', is '{other.symbols}'"):
        second.load_state_dict(first.state_dict(), new_data=True)
    assert second.step == 0


# ---- R03: killed ----

def live(folder, max_steps):
    "One life of a run that saves every step; it is told from outside when to end."
    o = trainer(max_steps, p=0.5, n_segments=1, judge=judge, eval_every=10)
    if list(Path(folder).glob('step-*.pt')): o.load_state_dict(load_checkpoint(folder).state)
    for _ in session(o, folder, save_every=1): pass


def kills(folder, n_kills, seed):
    "Start a run, kill it at a random moment, again and again; then let it end. Prints where each life began."
    chance, began = random.Random(int(seed)), []
    trainer(1)                                                    # imports what all lives need, once
    def saved(): return max((int(o.stem[5:]) for o in Path(folder).glob('step-*.pt')), default=0)
    def fork(n_more):
        began.append(saved())
        if (pid := os.fork()): return pid
        live(folder, began[-1] + n_more)
        os._exit(0)
    start, longest = time.perf_counter(), 0.
    for _ in range(int(n_kills)):
        pid = fork(10**6)
        goal = began[-1] + (chance.randrange(3) if longest else 2)   # some lives save nothing
        while saved() < goal: time.sleep(0.001)
        longest = longest or time.perf_counter() - start             # as long as to the second step
        time.sleep(chance.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]): sys.exit('it ended before it could be killed')
    if os.waitpid(fork(10), 0)[1]: sys.exit('the last life failed')
    print(json.dumps(began))


def test_r03_killed_at_thirty_random_moments(tmp_path):
    "SIGKILL in a run that checkpoints every step: every restart resumes, the end is the unbroken run's."
    began = process('kills', tmp_path/'killed', 30, random.randrange(10**6))
    assert len(began) == 31 and began == sorted(began) and len(set(began)) > 5, began
    live(tmp_path/'whole', n := began[-1] + 10)
    assert telemetry(tmp_path/'killed').equals(telemetry(tmp_path/'whole'))
    for name in 'history.csv', 'telemetry.csv': assert (tmp_path/'killed'/name).exists()
    assert pd.read_csv(tmp_path/'killed'/'history.csv').equals(pd.read_csv(tmp_path/'whole'/'history.csv'))
    names = [sorted(o.name for o in (tmp_path/run).iterdir()) for run in ('killed', 'whole')]
    assert names[0] == names[1] and f'step-{n:08}.pt' in names[0]
    killed, whole = (load_checkpoint(tmp_path/run).state for run in ('killed', 'whole'))
    assert all(map(torch.equal, tree_leaves(killed['model']), tree_leaves(whole['model'])))


# ---- R07, R08: steps that do no harm, and what counts ----

BAD = {'inf': [1., math.inf, 2.], 'nan': [1., math.nan, 2.], 'overflow of the norm': [1e25, 1e25, 0.]}


def spoiled(o, grad, steps=(2,)):
    "The trainer, with `grad` among the gradients of its third step."
    def spoil(g):
        g = g.clone()
        if o.step in steps: g.view(-1)[:3] = torch.tensor(grad)
        return g
    o.model.lm.head.weight.register_hook(spoil)
    return o


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('grad', BAD.values(), ids=BAD)
def test_r07_a_step_without_a_finite_norm_changes_nothing(grad, dtype, tmp_path):
    "Through a session: weights, moments, their step counts, the carried state; counted in telemetry."
    o, kept = spoiled(trainer(6, dtype=dtype), grad), []
    for _ in session(o, tmp_path):
        state = o.state_dict()
        kept.append([t.clone() for k in ('model', 'optimizer', 'carried')
                     for t in tree_leaves(state[k]) if torch.is_tensor(t)])
    rows = pd.read_csv(tmp_path/'telemetry.csv', keep_default_na=False)
    assert rows.skipped.tolist() == ['', '', 'gradient norm not finite', '', '', '']
    assert o.n_skipped == 1 and rows.clip_scale[2] == 0
    assert all(map(torch.equal, kept[1], kept[2])) and not all(map(torch.equal, kept[2], kept[3]))
    assert all(t.isfinite().all() for t in kept[-1])


def test_r07_too_many_in_a_row_end_the_run_and_name_the_good_checkpoint(tmp_path):
    "Also across a resume; skips that are not in a row do not add up."
    o = spoiled(trainer(20, max_skipped=3), BAD['inf'], steps=(2, 3, 6, 7, 9, 10, 11))
    with pytest.raises(Diverged, match='3 steps in a row.*12, for: gradient norm not.*step-00000010.pt'):
        for _ in session(o, tmp_path, save_every=5): pass
    weights = load_checkpoint(tmp_path).state['model']
    assert all(map(torch.equal, tree_leaves(weights), tree_leaves(o.model.state_dict())))
    again = spoiled(trainer(20, max_skipped=3), BAD['inf'], steps=(9, 10, 11))
    again.load_state_dict(load_checkpoint(tmp_path).state)
    with pytest.raises(Diverged, match='3 steps in a row'):
        for _ in session(again, tmp_path): pass
    assert telemetry(tmp_path).step.tolist() == list(range(1, 13))
    healed = trainer(20, max_skipped=3)
    healed.load_state_dict(load_checkpoint(tmp_path).state)
    assert [r.step for r in session(healed, tmp_path)] == list(range(11, 21))


def test_r08_the_rate_counts_updates_and_not_where_a_run_ends():
    "A skipped third step makes the fourth one the third update, also across a resume."
    rates = [r.lr for r in trainer(20).steps()]
    assert len(set(rates)) > 15 and [r.lr for r in trainer(12).steps()] == rates[:12]
    first = spoiled(trainer(7), BAD['nan'])
    assert [r.lr for r in first.steps()] == [*rates[:3], *rates[2:6]]
    second = trainer(12)
    second.load_state_dict(first.state_dict())
    assert [(r.lr, second.n_skipped) for r in second.steps()] == [(lr, 1) for lr in rates[6:11]]


def test_g14_knobs_see_epochs_and_updates():
    "Counted in optimizer steps, not in micro-batches nor in skipped steps; logged; told again on resume."
    def run(max_steps):
        o, asked = spoiled(trainer(max_steps, accumulate=2), BAD['nan']), []
        def knobs(epoch, n_updates):
            asked.append((epoch, n_updates))
            return {'teacher_forcing': linear_decay(step=0.1, per=2)(epoch, n_updates)}
        o.knobs = knobs
        return o, asked
    (whole, asked), (first, _), (second, asked_again) = run(12), run(6), run(12)
    logged = [r.teacher_forcing for r in whole.steps()]
    assert [n for _, n in asked] == [0, 1, 2, *range(2, 11)]
    assert logged == [pytest.approx(1 - 0.05 * n) for _, n in asked]
    list(first.steps())
    second.load_state_dict(first.state_dict())
    assert [r.teacher_forcing for r in second.steps()] == logged[6:] and asked_again == asked[6:]


# ---- sessions ----

def test_one_epoch_a_session_is_one_run(tmp_path):
    "Three calls of one epoch each; the fourth has nothing to do. Files, history and weights are one run's."
    def call(folder, **kw):
        o = trainer(None, max_epochs=3, judge=judge, p=0.5)
        if (tmp_path/folder).exists(): o.load_state_dict(load_checkpoint(tmp_path/folder).state)
        return [r.step for r in session(o, tmp_path/folder, **kw)]
    calls = [call('sessions', one_epoch=True) for _ in range(4)]
    assert [len(o) for o in calls] == [7, 7, 7, 0] and sum(calls, []) == call('whole')
    assert telemetry(tmp_path/'sessions').equals(telemetry(tmp_path/'whole'))
    history = pd.read_csv(tmp_path/'sessions'/'history.csv')
    assert history.equals(pd.read_csv(tmp_path/'whole'/'history.csv'))
    assert (history.step.tolist(), history.epoch.tolist()) == ([7, 14, 21], [0, 1, 2])
    assert history.columns.tolist() == ['step', 'epoch', 'teacher_forcing', 'loss', 'bpb', 'top1']


def test_an_evaluation_after_the_last_checkpoint_is_forgotten(tmp_path):
    "The process died between the two: telemetry and history lead up to the checkpoint, and no further."
    for record in session(trainer(20, judge=judge, eval_every=3), tmp_path, save_every=5):
        if record.step == 4: break
    assert pd.read_csv(tmp_path/'history.csv').step.tolist() == [3]
    o = trainer(20, judge=judge, eval_every=3)
    o.load_state_dict(load_checkpoint(tmp_path).state)
    records = session(o, tmp_path, save_every=5)
    assert not (tmp_path/'history.csv').exists() and len(telemetry(tmp_path)) == 0
    assert [r.step for r in records if r.judged is not None] == [3, 6, 9, 12, 15, 18, 20]
    assert pd.read_csv(tmp_path/'history.csv').step.tolist() == [3, 6, 9, 12, 15, 18, 20]


def test_a_run_halts_when_evaluation_falls_and_keeps_the_best(tmp_path):
    "Best in epoch 2, then worse: it stops after two, says so, and stays stopped; patience may be raised."
    scores = {2: 0.26, 4: 0.25, 6: 0.2505, 8: 0.27, 10: 0.24}
    def run(**kw):
        o = trainer(12, eval_every=2, **kw)
        o.judge = lambda model: {'loss': scores.get(o.step, 0.3), 'at': o.step}
        if list(tmp_path.glob('step-*.pt')): o.load_state_dict(load_checkpoint(tmp_path).state)
        return o, [r.step for r in session(o, tmp_path)]
    o, steps = run(halt_after=2)
    assert steps[-1] == 8 and load_checkpoint(tmp_path, best=True).state['step'] == 4
    assert o.halted == ('evaluation did not get better 2 times in a row: loss was 0.2500 at step 4, '
                        'then 0.2505, 0.2700')
    assert run(halt_after=2)[1] == []
    o, steps = run(halt_after=3)
    assert steps == [9, 10, 11, 12] and o.halted == '' and is_best(o.history[:5])
    assert load_checkpoint(tmp_path, best=True).state['step'] == 10
    assert pd.read_csv(tmp_path/'history.csv').loss.tolist() == [0.26, 0.25, 0.2505, 0.27, 0.24, 0.3]


def test_a_judge_may_learn_new_numbers(tmp_path):
    "Best and halting go by the first number, wherever it is known."
    o = trainer(4, eval_every=2, judge=lambda model: {'loss': 1.})
    list(o.steps())
    more = trainer(8, eval_every=2, judge=lambda model: {'free_loss': 3., 'loss': 1.}, halt_after=1)
    more.load_state_dict(o.state_dict())
    assert [r.step for r in more.steps()] == [] and more.halted.startswith('evaluation did not get better 1')
    more.history[-1] = {**more.history[-1], 'loss': 0.5}
    assert [r.step for r in more.steps()] == [5, 6, 7, 8] and 'free_loss was 3.0000 at step 6' in more.halted


def test_tensorboard_is_asked_for_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    with pytest.raises(ValueError, match='need the package tensorboard'):
        session(trainer(), tmp_path/'run', tensorboard=True)
    assert not (tmp_path/'run').exists()


def test_tensorboard_gets_every_number_once(tmp_path, monkeypatch):
    "A stand-in for torch's writer; after a resume the curves go on at the next step."
    points, purged = [], []
    class Writer:
        def __init__(self, folder, purge_step): purged.append((Path(folder).name, purge_step))
        def add_scalar(self, name, value, step): points.append((name, step))
        def close(self): points.append('closed')
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', SimpleNamespace(SummaryWriter=Writer))
    o = trainer(3, p=0.5)
    for _ in session(o, tmp_path, tensorboard=True): pass
    more = trainer(4, p=0.5)
    more.load_state_dict(load_checkpoint(tmp_path).state)
    for _ in session(more, tmp_path, tensorboard=True): pass
    assert purged == [('tensorboard', 1), ('tensorboard', 4)] and points.count('closed') == 2
    assert [o[1] for o in points if o[0] == 'loss'] == [1, 2, 3, 4]
    assert {'grad_norm', 'lr', 'teacher_forcing'} <= {o[0] for o in points}


def test_out_of_memory_in_a_later_update_is_passed_on():
    "From the second update on the optimizer has changed something: then nothing is tried again."
    o = trainer(5)
    o.replan = lambda plan: pytest.fail('asked for another plan')
    steps = o.steps()
    next(steps)
    usual = o.optimizer.step
    def step():
        usual()
        raise torch.OutOfMemoryError('too late')
    o.optimizer.step = step
    with pytest.raises(torch.OutOfMemoryError, match='too late'): next(steps)


# ---- several ranks ----

def work(folder, max_steps, accumulate, stop_at=0):
    "What one process of a run sees; the last of them asks to stop at a step."
    with joined(World.from_env()) as world:
        o = trainer(int(max_steps), dropout=0., world=world, accumulate=int(accumulate), judge=judge)
        rounds, steps = [], []
        def hook(group, bucket):
            rounds.append(bucket.index())
            return allreduce_hook(group, bucket)
        if o.wrapped is not None: o.wrapped.register_comm_hook(None, hook)
        if list(Path(folder).glob('step-*.pt')): o.load_state_dict(load_checkpoint(folder).state)
        for r in session(o, folder):
            steps.append([r.step, r.loss, r.grad_norm, len(rounds), fingerprint(o.model)])
            if r.step == int(stop_at) and world.rank == world.size - 1: o.stop()
        return {'steps': steps, 'draws': torch.rand(2).tolist()}


def two_ranks(*args):
    "What each of two processes sees."
    running = ranks(2, __file__, 'work', *args)
    said = [p.communicate(timeout=200) for p in running]
    assert [p.returncode for p in running] == [0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]   # after what gloo says


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "Eight steps of two ranks, an epoch and one more, and of one process on the joined batch."
    folder = tmp_path_factory.mktemp('runs')
    return folder, work(folder/'one', 8, 1), two_ranks(folder/'two', 8, 1)


def near(steps, reference):
    "Same steps; losses and norms within 1e-5."
    assert [s[0] for s in steps] == [s[0] for s in reference]
    for a, b in zip(steps, reference, strict=True): assert a[1:3] == pytest.approx(b[1:3], rel=1e-5)


def test_x02_two_ranks_are_one_process(runs):
    "Joined losses and norms within 1e-5; both ranks have the same weights and random state, to the bit."
    folder, one, (first, second) = runs
    near(first['steps'], one['steps'])
    assert first == second
    tables = [telemetry(folder/name) for name in ('one', 'two')]
    assert tables[0].step.tolist() == tables[1].step.tolist() == list(range(1, 9))
    states = [load_checkpoint(folder/name).state for name in ('one', 'two')]
    assert states[0]['stream'] == states[1]['stream']
    torch.testing.assert_close(states[0]['carried'], states[1]['carried'], rtol=1e-4, atol=1e-5)
    names = [sorted(o.name for o in (folder/name).iterdir()) for name in ('one', 'two')]
    assert names[0] == names[1] and 'best.pt' in names[0]


def test_x03_accumulation_talks_once_a_step(tmp_path):
    "Three micro-batches on each of two ranks: one all-reduce round, the gradient of all six."
    first, second = two_ranks(tmp_path/'two', 4, 3)
    near(first['steps'], work(tmp_path/'one', 4, 3)['steps'])
    assert first == second
    assert [s[3] for s in first['steps']] == [1, 2, 3, 4]                # the model is one bucket


def test_x07_checkpoints_move_between_world_sizes(runs, tmp_path):
    "Three steps on two ranks, two more on one, the rest on two: near the run of one process throughout."
    parts = two_ranks(tmp_path, 3, 1)[0]['steps'] + work(tmp_path, 5, 1)['steps']
    near(parts + two_ranks(tmp_path, 8, 1)[0]['steps'], runs[1]['steps'])
    assert telemetry(tmp_path).step.tolist() == list(range(1, 9))


def test_two_ranks_stop_together_and_go_on_to_the_bit(runs, tmp_path):
    "The last rank alone is told to stop."
    first, second = two_ranks(tmp_path, 8, 1, 5)
    assert len(first['steps']) == len(second['steps']) == 5
    parts = first['steps'] + two_ranks(tmp_path, 8, 1)[0]['steps']
    assert [s[:3] + s[4:] for s in parts] == [s[:3] + s[4:] for s in runs[2][0]['steps']]


def test_replan_with_several_ranks_is_refused():
    model = GRULM(GRUSpec(11, 8, 1))
    with pytest.raises(ValueError, match='replan works in one process'):
        Trainer(model, None, TrainConfig(1), replan=lambda plan: plan, world=World(0, 2, 0))


def main(what, *args):
    "A process of a test."
    if what == 'work': print(json.dumps(work(*args)))
    else: {'go': go, 'kills': kills}[what](*args)


if __name__ == '__main__': main(*sys.argv[1:])
