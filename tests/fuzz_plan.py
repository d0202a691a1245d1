"""The fastest plan, searched and by brute force: `python tests/fuzz_plan.py 0 500` tries seeds 0..499."""
import random
import sys
import time
from dataclasses import dataclass
from itertools import product
from math import inf, isclose

import numpy as np

from gruckpt.plan.budget import DoesNotFit, Rates, estimate, fit, seconds_of
from gruckpt.charlm.model import GRUSpec
from gruckpt.plan.segment import Plan, Stretch

WORDS = 'hidden', 'gates'


@dataclass(frozen=True)
class Question:
    "What `fit` is asked"
    seed:int
    spec:GRUSpec
    batch:int
    n_steps:int
    limit:int
    rates:Rates
    how:dict


def words(n_layers:int) -> list: return list(product(WORDS, repeat=n_layers + 1))


def some_rates(coin) -> Rates:
    return Rates(*(10**coin.uniform(8, 11) for _ in range(3)), 10**coin.uniform(-8, -4))


def question_of(seed:int) -> Question:
    "Of a seed: up to 24 steps, and a limit from just below the fewest bytes to the most that help"
    coin = random.Random(seed)
    L, T = coin.choice((1, 2, 3)), coin.randint(1, 24)
    spec = GRUSpec(coin.choice((2, 30, 300)), coin.choice((4, 16)), L,
                   norm=coin.choice((None, 'state', 'output')), reset=coin.choice(('after', 'before')),
                   dropout=.3 * (L > 1) * coin.choice((0, 1)), tied=coin.random() < .3)
    B = coin.choice((1, 3, 20, 64, 128, 200, 600))
    how = dict(precision=coin.choice(('float32', 'float32', 'bfloat16', 'float64', 'pure bfloat16')))
    if coin.random() < .3:
        how |= dict(optimizer='sgd', accumulate=coin.choice((1, 2)), carried=coin.random() < .5)
    if coin.random() < .2: how['frozen'] = (coin.choice(list(spec.parts)),)
    if coin.random() < .2: how['teacher_forcing'] = .5
    if coin.random() < .2 and T <= 9: how['device'] = 'cuda'
    if coin.random() < .2 and T <= 9: how['backend'] = coin.choice(('eager', 'graph', 'graph+triton'))
    least = min(estimate(spec, B, Plan(T, s), **how).total for s in {1, T//6 + 1, T//3 + 1, T})
    most = estimate(spec, B, Plan(T, T, 'gates'), **how).total
    limit = int(least + (most - least) * coin.uniform(-.1, 1))
    return Question(seed, spec, B, T, limit, coin.choice((Rates(), some_rates(coin))), how)


def price(q:Question, plan) -> float:
    kw = {k: v for k, v in q.how.items() if k in ('precision', 'frozen', 'device', 'backend')}
    return seconds_of(q.spec, q.batch, plan, q.rates, **kw)


def least_of_cuts(q:Question, counts, beside:int, longest:int, pairs) -> float:
    """Fewest seconds of a plan with one of these counts of segments, segment by segment, one length at a
    time up to the longest, that keeps one of these pairs of words, early and late"""
    T, best = q.n_steps, inf
    lens, before = np.arange(1, T + 1), np.arange(T)[:, None]
    def fits(role, keep):
        peak = estimate(q.spec, q.batch, Stretch(T, role, lens, before, keep), **q.how).peak
        return np.broadcast_to((peak + beside <= q.limit) & (lens <= longest), (T, T))
    def cost(role, keep): return [price(q, Stretch(T, role, n, 1, keep)) for n in range(1, T + 1)]
    lasts = {keep: (fits('last', keep), np.array(cost('last', keep))) for keep in {late for _, late in pairs}}
    for keep in {early for early, _ in pairs}:
        each, ok = cost('middle', keep), np.concatenate([fits('first', keep)[:1], fits('middle', keep)[1:]])
        done = np.where(np.arange(T + 1) == 0, 0., inf)          # seconds of the first j segments, by steps
        for j in range(T - 1):
            after = np.full(T + 1, inf)
            for n in range(1, T):
                if ok[j, n - 1]: after[n:] = np.minimum(after[n:], done[:-n] + each[n - 1])
            done = after
            if j + 2 in counts: best = min([best, *(
                np.where(fine[j + 1], seconds + done[T - lens], inf).min()
                for late, (fine, seconds) in lasts.items() if (keep, late) in pairs)])
    return best


def least_seconds(q:Question) -> float:
    "Of all plans that fit: every cut, and every word of each layer in the last segment and in the others"
    def beside(n): return sum(estimate(q.spec, q.batch, Plan(n, 1), **q.how).beside.values())
    whole = [Plan(q.n_steps, q.n_steps, keep) for keep in words(q.spec.n_layers)]
    found = [price(q, p) for p in whole if estimate(q.spec, q.batch, p, **q.how).total <= q.limit]
    groups = {}
    for k in range(2, q.n_steps + 1): groups.setdefault(beside(k), []).append(k)
    static = {n: static_bytes(q, n) for n in range(1, q.n_steps + 1)}
    longest = {held: n for n, held in static.items()}        # of equal buffers the longest segment
    pairs = {*product(words(q.spec.n_layers), repeat=2)}
    alone = {p for p in pairs if 'hidden' not in p[0][:-1] + p[1][:-1]}
    if static_bytes(q, q.n_steps, 'gates'): alone = set()    # of those that need no buffers
    return min([inf, *found, *(least_of_cuts(q, counts, n, q.n_steps, alone) for n, counts in groups.items()),
                *(least_of_cuts(q, counts, n + held, most, pairs - alone)
                  for n, counts in groups.items() for held, most in longest.items())])


def static_bytes(q:Question, longest:int, keep='hidden') -> int:
    "Held from step to step by a backend that records, where the longest segment has so many steps"
    first, *_ = estimate(q.spec, q.batch, Plan(q.n_steps, longest, keep), **q.how).moments.values()
    return int(first['static buffers'])


def agrees(q:Question) -> bool:
    "Does `fit` find a plan that fits and takes as long as the best, or none where there is none?"
    best = least_seconds(q)
    try: plan = fit(q.spec, q.batch, q.n_steps, q.limit, q.rates, **q.how)
    except DoesNotFit: return best == inf
    fits = estimate(q.spec, q.batch, plan, **q.how).total <= q.limit
    return bool(fits and isclose(price(q, plan), best, rel_tol=1e-9))


def main(start:int, stop:int):
    "Try the seeds from `start` up to `stop`; exit code 1 if one differs"
    bad, begun = [], time.perf_counter()
    for seed in range(start, stop):
        q = question_of(seed)
        if agrees(q): continue
        bad.append(seed)
        print(q, flush=True)
    n = stop - start
    print(f'{n - len(bad)} of {n} as fast as brute force, {time.perf_counter() - begun:.0f} s')
    sys.exit(bool(bad))


if __name__ == '__main__': main(*map(int, sys.argv[1:3]))
