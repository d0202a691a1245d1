"""Random training steps, counted and measured: `python tests/fuzz_bytes.py 0 2000` tries seeds 0..1999."""
import random
import sys
import time
from dataclasses import dataclass

import torch

from gruckpt.plan.budget import estimate
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.measure.meter import Meter
from gruckpt.charlm.sampling import Sampling
from gruckpt.plan.segment import Plan
from gruckpt.charlm.text import Batch
from gruckpt.training.optimizer_step import PRECISIONS, accumulate, update

MAKE = {'sgd': lambda ps: torch.optim.SGD(ps, lr=.1),
        'momentum': lambda ps: torch.optim.SGD(ps, lr=.1, momentum=.9),
        'adamw': lambda ps: torch.optim.AdamW(ps, fused=True),
        'amsgrad': lambda ps: torch.optim.AdamW(ps, fused=True, amsgrad=True),
        'adamw foreach': lambda ps: torch.optim.AdamW(ps, foreach=True),
        'adamw loop': lambda ps: torch.optim.AdamW(ps, foreach=False)}


@dataclass(frozen=True)
class Case:
    "A step: the model, where time is cut, and every keyword of `estimate`"
    seed:int
    spec:GRUSpec
    batch:int
    plan:Plan
    how:dict


def _sizes(coin) -> tuple:
    "(batch, steps, segment length): few rows and many steps, or many rows and few"
    B = coin.choice([1, 2, 3, coin.randint(1, 40),
                     coin.choice([2**k + d for k in range(3, 10) for d in (-1, 0, 1)]),
                     512 // coin.randint(1, 32) + coin.randint(0, 1), coin.randint(1, 600)])
    T = coin.choice([1, 2, 3, coin.randint(1, 5), coin.randint(1, 40 if coin.random() < .25 else 9)])
    while B * T > 1000: T = max(1, T // 2)
    S = coin.choice([1, 2, T, T, max(1, T // 2), max(1, T - 1), -(-T // 3), coin.randint(1, T)])
    return B, T, max(min(S, T), -(-T // 8))


def case_of(seed:int) -> Case:
    "The case of a seed"
    coin = random.Random(seed)
    L, (B, T, S) = coin.choice((1, 1, 2, 3, 4)), _sizes(coin)
    V = coin.choice((1, 2, 30, 95, coin.randint(1, 300), 1500, 2500))
    D = coin.choice((1, 4, 16, 32, coin.randint(1, 48)))
    spec = GRUSpec(V, D, L, coin.choice((0., .3)) if L > 1 else 0., coin.choice((None, 'state', 'output')),
                   coin.choice(('after', 'before')), coin.random() < .3)
    plan = Plan(T, min(S, T), coin.choice(('hidden', 'gates')))
    parts = list(spec.parts)
    frozen = coin.sample(parts, coin.randint(1, len(parts) - 1)) if coin.random() < .3 else []
    if {'embedding', 'layer 0'} <= set(frozen): frozen.remove(coin.choice(('embedding', 'layer 0')))
    how = dict(optimizer=coin.choice(list(MAKE)), precision=coin.choice(list(PRECISIONS)),
               frozen=tuple(frozen), first=coin.random() < .3, clip=coin.random() < .7,
               carried=coin.random() < .6, accumulate=coin.choice((1, 1, 1, 1, 2, 3, 4)))
    if coin.random() < .25:
        two_pass = coin.random() < .4
        how |= dict(teacher_forcing=coin.choice((0., .5)), sampling=Sampling(
            coin.choice((0., .7)), two_pass, coin.choice((1, 2)) if two_pass else 1))
    return Case(seed, spec, B, _any_form(coin, plan, L) if coin.random() < .5 else plan, how)


def _any_form(coin, plan:Plan, n_layers:int) -> Plan:
    "A plan of as many segments, of unlike lengths, with a word a layer and others for the last segment"
    T, words = plan.n_steps, ('hidden', 'gates')
    at = [0, *sorted(coin.sample(range(1, T), plan.n_segments - 1)), T]
    def keep(): return coin.choice((*words, tuple(coin.choices(words, k=n_layers + 1))))
    return Plan.of(*(b - a for a, b in zip(at, at[1:])), keep=keep(), keep_last=coin.choice((None, keep())))


def _freeze(model, frozen):
    "Switch off the gradients of the parts named"
    for part in frozen:
        module = model.rnn if part.startswith('layer') else model.embed if part == 'embedding' else model.head
        tied = part == 'head' and model.spec.tied
        end = f'_l{part.split()[1]}' if part.startswith('layer') else 'bias' * tied
        for name, p in module.named_parameters():
            if name.endswith(end): p.requires_grad_(False)


def _step(model, opt, window, state, case:Case):
    "A step by the trainer's own functions, in phases"
    how, plan = case.how, case.plan
    knobs = {k: how[k] for k in ('teacher_forcing', 'sampling') if k in how}
    def loss_of(batch, state):
        with Meter.phase('forward'), PRECISIONS[how['precision']].arithmetic(torch.device('cpu')):
            return model.loss(batch, state, plan=plan, **knobs)
    scale = 128. if PRECISIONS[how['precision']].scaled else 1.
    with Meter.phase('passes'):
        loss, state = accumulate(loss_of, window, [b.n_targets for b in window], state, scale=scale)
    with Meter.phase('update'):
        if how['clip']: update(opt, loss, .1, 1., scale)
        else: opt.step()


def measured(case:Case) -> dict:
    "What a meter says of the passes and the update, in bytes"
    torch.manual_seed(case.seed)
    spec, B, T, how = case.spec, case.batch, case.plan.n_steps, case.how
    model = GRULM(spec).to(PRECISIONS[how['precision']].weights)
    _freeze(model, how['frozen'])
    opt = MAKE[how['optimizer']]([p for p in model.parameters() if p.requires_grad])
    drawn = how.get('teacher_forcing', 1) < 1
    def window(n):
        rows = [Batch(*(torch.randint(spec.vocab_size, (B, T)) for _ in 'xy'), fresh=False) for _ in range(n)]
        return [rows[0]._replace(fresh=not how['carried']), *rows[1:]]
    def came_in():
        if not how['carried']: return None
        return (model.init_state(B), torch.zeros(B, dtype=torch.int64)) if drawn else model.init_state(B)
    if not how['first']: _step(model, opt, window(1), came_in(), case)
    opt.zero_grad()
    batches, state = window(how['accumulate']), came_in()
    with Meter(model, opt, batches, state) as meter: _step(model, opt, batches, state, case)
    return meter.phases | {'peak': meter.peak}


def counted(case:Case) -> dict:
    "The same from `estimate`"
    ledger = estimate(case.spec, case.batch, case.plan, **case.how)
    phases = {k: int(v) for k, v in ledger.phases.items()}
    return {'forward': phases['forward'], 'passes': max(phases['forward'], phases['backward']),
            'update': phases['update'], 'peak': int(ledger.peak)}


def main(start:int, stop:int):
    "Try the seeds from `start` up to `stop`; exit code 1 if one differs"
    bad, begun = [], time.perf_counter()
    for seed in range(start, stop):
        case = case_of(seed)
        saw, said = measured(case), counted(case)
        if saw == said: continue
        bad.append(seed)
        print(seed, case.spec, f'B={case.batch}', case.plan, case.how, flush=True)
        print('   measured - counted:', {k: saw[k] - said[k] for k in saw}, saw['peak'], flush=True)
    n = stop - start
    print(f'{n - len(bad)} of {n} equal to the byte, {time.perf_counter() - begun:.0f} s')
    sys.exit(bool(bad))


if __name__ == '__main__': main(*map(int, sys.argv[1:3]))
