"""Plans of any form: their bytes against the meter, their search against all there are, what they compute."""
import random
from itertools import product
from math import inf, isclose

import numpy as np
import pytest
import torch
from test_budget import MAKE, PRECISIONS, V3A, batch_of, subject, train_step

from gruckpt.budget import DoesNotFit, Rates, estimate, fit, seconds_of
from gruckpt.lm import GRULM, GRUSpec
from gruckpt.meter import Meter
from gruckpt.recurrent import GRU, LSTM
from gruckpt.scan import plain
from gruckpt.segment import Plan, Stretch

WORDS = 'hidden', 'gates'


def any_plan(coin, n_layers):
    "Up to five segments of unlike lengths; words a layer, others in the last segment"
    lens = [coin.choice((1, 2, 3, 5, 8, 12, 20)) for _ in range(coin.choice((1, 2, 2, 3, 4, 5)))]
    if coin.random() < .5: lens[-1] = coin.choice((10, 20, 30))
    def keep(): return coin.choice((*WORDS, *(tuple(coin.choices(WORDS, k=n_layers + 1)) for _ in 'ab')))
    return Plan.of(*lens, keep=keep(), keep_last=coin.choice((None, keep())))


def uneven(n, seed):
    coin = random.Random(seed)
    for i in range(n):
        norm, reset, L = coin.choice((None, 'state', 'output')), coin.choice(('after', 'before')), i % 3 + 1
        spec = GRUSpec(coin.choice((2, 30, 500)), coin.choice((4, 16)), L, norm=norm, reset=reset,
                       dropout=coin.choice((0., .3)) if L > 1 else 0., tied=coin.random() < .3)
        yield spec, coin.choice((1, 2, 7, 20, 64)), any_plan(coin, L), list(MAKE)[i % 6], PRECISIONS[i % 5]


@pytest.mark.parametrize('config', uneven(36, 1), ids=lambda o: f'{o[0]} B={o[1]} {o[2]} {o[3]} {o[4]}')
def test_any_plan_is_counted_to_the_byte(config):
    spec, B, plan, optimizer, precision = config
    model, opt, state = subject(spec, B, optimizer, precision)
    batch = batch_of(spec, B, plan.n_steps)
    with Meter(model, opt, batch, state) as meter: train_step(model, opt, batch, state, plan, precision)
    assert meter.phases == estimate(spec, B, plan, optimizer=optimizer, precision=precision, first=True).phases


def gradients(model, batch, plan):
    torch.manual_seed(1)
    model.zero_grad()
    model.loss(batch, plan=plan)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize('seed', range(8))
def test_any_plan_has_the_same_gradients(seed):
    coin = random.Random(seed)
    plan = any_plan(coin, 2)
    torch.manual_seed(0)
    model = GRULM(GRUSpec(20, 8, 2, dropout=.3, norm=coin.choice((None, 'state', 'output')))).double()
    batch = batch_of(model.spec, 3, plan.n_steps)
    with plain(): exact = gradients(model, batch, Plan(plan.n_steps, plan.n_steps))
    torch.testing.assert_close(gradients(model, batch, plan), exact, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize('kind', [GRU, LSTM])
@pytest.mark.parametrize('seg_len', [None, 3])
def test_a_layer_keeps_what_it_is_told(kind, seg_len):
    torch.manual_seed(0)
    rnn = kind(3, 4, 2, keep=('gates', 'hidden'), seg_len=seg_len).double()
    x = torch.randn(8, 2, 3, dtype=torch.float64)
    def grads():
        rnn.zero_grad()
        rnn(x)[0].square().sum().backward()
        return torch.cat([p.grad.flatten() for p in rnn.parameters()])
    with plain(): exact = grads()
    torch.testing.assert_close(grads(), exact, rtol=1e-10, atol=1e-14)
    with pytest.raises(ValueError, match='keep must have 2 words'): kind(3, 4, 2, keep=('gates',) * 2 + ('hidden',))


def test_words_must_be_as_many_as_the_model_has_parts():
    model = GRULM(GRUSpec(9, 4, 2))
    for kept in (dict(keep=('gates', 'hidden')), dict(keep_last=('gates', 'hidden'))):
        with pytest.raises(ValueError, match='keep must have 3 words'):
            model.loss(batch_of(model.spec, 2, 6), plan=Plan(6, 3, **kept))


def cuts_of(n_steps):
    "Every way to cut"
    for cut in product((0, 1), repeat=n_steps - 1):
        at = [0, *(t for t, c in enumerate(cut, 1) if c), n_steps]
        yield [b - a for a, b in zip(at, at[1:])]


def words(n_layers): return list(product(WORDS, repeat=n_layers + 1))


def some_rates(coin):
    return Rates(*(10**coin.uniform(8, 11) for _ in range(3)), 10**coin.uniform(-8, -4))


@pytest.mark.parametrize('L,n_steps,B', [(1, 1, 3), (1, 5, 3), (1, 5, 300), (2, 4, 128), (2, 3, 600)])
def test_fit_is_the_best_of_all_plans(L, n_steps, B):
    "Every cut, every word of every layer, twice; of equal seconds fewest bytes"
    spec, coin = GRUSpec(9, 8, L, norm='state' if B > 128 else None), random.Random(n_steps)
    plans = {Plan.of(*lens, keep=keep, keep_last=last)
             for lens in cuts_of(n_steps) for keep in words(L) for last in words(L)}
    size = {p: int(estimate(spec, B, p).total) for p in plans}
    rates = [Rates(), Rates(1e12, 1e12, 1e12, 1e-3), some_rates(coin)]
    sizes = sorted(set(size.values()))
    for rate in rates:
        cost = {p: seconds_of(spec, B, p, rate) for p in plans}
        for limit in (sizes[0] - 1, *sizes[::len(sizes)//12 + 1], sizes[-1]):
            least = min((cost[p] for p in plans if size[p] <= limit), default=inf)
            if least == inf:
                with pytest.raises(DoesNotFit): fit(spec, B, n_steps, limit, rate)
                continue
            found = fit(spec, B, n_steps, limit, rate)
            assert isclose(cost[found], least, rel_tol=1e-9)
            same = [size[p] for p in plans if cost[p] <= least*(1 + 1e-12) and size[p] <= limit]
            assert size[found] == min(same)


def least_seconds(spec, B, n_steps, limit, rates, **how):
    "The same by dynamic programming over cuts, segment by segment, one length at a time"
    lens, before = np.arange(1, n_steps + 1), np.arange(n_steps)[:, None]
    kw = {k: v for k, v in how.items() if k == 'precision'}
    def fits(role, keep, before=before):
        return estimate(spec, B, Stretch(n_steps, role, lens, before, keep), **how).total <= limit
    def cost(role, keep): return [seconds_of(spec, B, Stretch(n_steps, role, n, 1, keep), rates, **kw)
                                  for n in range(1, n_steps + 1)]
    whole = [Plan(n_steps, n_steps, keep) for keep in words(spec.n_layers)]
    best = min((seconds_of(spec, B, p, rates, **kw) for p in whole
                if estimate(spec, B, p, **how).total <= limit), default=inf)
    lasts = [(fits('last', keep), np.array(cost('last', keep))) for keep in words(spec.n_layers)]
    for keep in words(spec.n_layers):
        price, first, middle = cost('middle', keep), fits('first', keep, 0), fits('middle', keep)
        done = np.full(n_steps + 1, inf)                         # seconds of the first j segments, by steps
        done[0] = 0
        for j in range(n_steps - 1):
            after = np.full(n_steps + 1, inf)
            for n in range(1, n_steps):
                if (middle[j] if j else np.broadcast_to(first, n_steps))[n - 1]:
                    after[n:] = np.minimum(after[n:], done[:-n] + price[n - 1])
            done = after
            for ok, seconds in lasts:
                total = np.where(ok[j + 1], seconds + done[n_steps - lens], inf)
                best = min(best, total.min())
    return best


def questions(n, seed):
    "Spec, batch, length, limit, rates"
    coin = random.Random(seed)
    for _ in range(n):
        L, T = coin.choice((1, 2, 3)), coin.randint(1, 24)
        spec = GRUSpec(coin.choice((2, 30, 300)), coin.choice((4, 16)), L, norm=coin.choice((None, 'state', 'output')),
                       reset=coin.choice(('after', 'before')), dropout=.3 * (L > 1) * coin.choice((0, 1)),
                       tied=coin.random() < .3)
        B = coin.choice((1, 3, 20, 64, 128, 200, 600))
        how = dict(precision=coin.choice(('float32', 'float32', 'bfloat16', 'float64')))
        least = min(estimate(spec, B, Plan(T, s), **how).total for s in {1, T//6 + 1, T//3 + 1, T})
        most = estimate(spec, B, Plan(T, T, 'gates'), **how).total
        limit = int(least + (most - least) * coin.uniform(-.1, 1))
        yield spec, B, T, limit, coin.choice((Rates(), some_rates(coin))), how


def agrees(spec, B, T, limit, rates, how):
    best = least_seconds(spec, B, T, limit, rates, **how)
    try: plan = fit(spec, B, T, limit, rates, **how)
    except DoesNotFit: return best == inf
    return (estimate(spec, B, plan, **how).total <= limit
            and isclose(seconds_of(spec, B, plan, rates, precision=how['precision']), best, rel_tol=1e-9))


@pytest.mark.parametrize('question', questions(24, 12), ids=lambda o: f'{o[0]} B={o[1]} T={o[2]} {o[3]}')
def test_fit_is_the_best_by_dynamic_programming(question): assert agrees(*question)


if __name__ == '__main__':    # the 500 questions: python tests/test_plan.py
    wrong = [q for q in questions(500, 500) if not agrees(*q)]
    print(f'{500 - len(wrong)} of 500', *wrong[:9], sep='\n')
