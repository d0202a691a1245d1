"""Plans of any form: their bytes against the meter, their search against all there are, what they compute."""
import random
import sys
from dataclasses import astuple
from itertools import product
from math import inf, isclose
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_plan import WORDS, agrees, question_of, some_rates, words  # noqa: E402
from test_budget import MAKE, PRECISIONS, V3A, batch_of, subject, train_step  # noqa: E402

from gruckpt.plan.budget import DoesNotFit, Rates, estimate, fit, frontier, seconds_of  # noqa: E402
from gruckpt.charlm.model import GRULM, GRUSpec  # noqa: E402
from gruckpt.measure.meter import Meter  # noqa: E402
from gruckpt.engine.recurrent import GRU, LSTM  # noqa: E402
from gruckpt.engine.scan import plain  # noqa: E402
from gruckpt.plan.segment import Plan, Stretch  # noqa: E402


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
    ledger = estimate(spec, B, plan, optimizer=optimizer, precision=precision, first=True)
    assert meter.phases == ledger.phases


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
    with pytest.raises(ValueError, match='keep must have 2 words'):
        kind(3, 4, 2, keep=('gates',) * 2 + ('hidden',))


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


@pytest.mark.parametrize('rates', [Rates(), Rates(1e9, 1e30, 1e30, 0, 0, 0)], ids=['seconds', 'steps'])
@pytest.mark.parametrize('L,n_steps,B', [(1, 5, 20), (1, 5, 300), (2, 3, 128)])
def test_the_chosen_plan_is_never_dominated(L, n_steps, B, rates):
    "None needs fewer bytes and no more seconds, or fewer seconds; steps instead where they alone take time"
    spec = GRUSpec(30, 64, L)
    plans = [Plan.of(*lens, keep=keep, keep_last=last)
             for lens in cuts_of(n_steps) for keep in words(L) for last in words(L)]
    size = np.array([int(estimate(spec, B, p).total) for p in plans])
    cost = np.array([seconds_of(spec, B, p, rates) for p in plans])
    for limit in sorted(set(size.tolist()))[::7]:
        one = plans.index(fit(spec, B, n_steps, limit, rates))
        assert (cost[size < size[one]] > cost[one]*(1 + 1e-12)).all()
        assert (cost[size <= limit] >= cost[one]*(1 - 1e-12)).all()


@pytest.mark.parametrize('spec, B', [
    (GRUSpec(30, 16, 2), 40), (GRUSpec(30, 16, 3, norm='output', dropout=.1), 3),
    (GRUSpec(9, 8, 1, tied=True), 600)])
def test_several_answers_at_once_are_those_one_by_one(spec, B):
    "Words side by side in a `Stretch` give the bytes and the work of each"
    kept, lens = words(spec.n_layers), np.arange(1, 8)
    at_once = tuple(np.array(part)[:, None] for part in zip(*kept))
    for role, before in (('only', 0), ('first', 0), ('middle', 1), ('middle', 3), ('last', 2)):
        size = estimate(spec, B, Stretch(9, role, lens, before, at_once)).peak
        work = spec.work(B, Stretch(9, role, lens, 1, at_once))
        for i, keep in enumerate(kept):
            one = Stretch(9, role, lens, before, keep)
            assert (estimate(spec, B, one).peak == np.broadcast_to(size, (len(kept), 7))[i]).all()
            mine = [np.broadcast_to(n, (len(kept), 7))[i].tolist() for n in astuple(work)]
            assert mine == [np.broadcast_to(n, 7).tolist() for n in astuple(spec.work(B, one))]


@pytest.mark.parametrize('seed', [94, 1, 5, 11, *range(1000, 1020)])
def test_fit_is_the_best_by_dynamic_programming(seed):
    "A fixed few of tests/fuzz_plan.py; seed 94: bytes that each further segment costs a card"
    assert agrees(question_of(seed))


def test_the_example_of_v3a():
    "Of about 10 GiB, gates for 500 steps and then 12 ran 500 steps twice; half of the bytes do with 256"
    odd, even = Plan(512, 500, 'gates'), Plan(512, 256, 'gates')
    size, cost = ({p: f(V3A, 128, p) for p in (odd, even)} for f in (
        lambda *args: int(estimate(*args).total), seconds_of))
    assert cost[even] < cost[odd] and size[even] < .6*size[odd]
    for limit in (size[odd], size[even]):
        found = fit(V3A, 128, 512, limit)
        assert found.n_extra < 256 and seconds_of(V3A, 128, found) < cost[even]


@pytest.mark.parametrize('keep', ['hidden', 'gates'])
def test_no_equal_cut_is_better_in_bytes_and_in_time(keep):
    for plan in (Plan(512, s, keep) for s in (9, 32, 100, 256, 300, 500, 512)):
        found = fit(V3A, 64, 512, int(estimate(V3A, 64, plan).total))
        assert seconds_of(V3A, 64, found) <= seconds_of(V3A, 64, plan) * (1 + 1e-12)


@pytest.mark.parametrize('n_steps', [4096, 100_000])
def test_a_long_plan_fits_and_a_byte_less_is_another_question(n_steps):
    "Beyond the lengths that brute force can try: within the limit, and no slower with more bytes"
    least = frontier(V3A, 64, n_steps, n=5)
    for n, plan in zip(least.bytes, least.plan):
        assert fit(V3A, 64, n_steps, n).n_steps == n_steps and estimate(V3A, 64, plan).total == n
        assert seconds_of(V3A, 64, fit(V3A, 64, n_steps, n)) <= seconds_of(V3A, 64, plan) * (1 + 1e-12)
    assert least.seconds.is_monotonic_decreasing


@pytest.mark.parametrize('wrong, says', [
    (dict(device='tpu'), 'device must be one of'), (dict(precision='int8'), 'precision must be one of'),
    (dict(optimizer='adam'), 'optimizer must be one of'), (dict(frozen=('tail',)), 'frozen must be one of')])
def test_a_wrong_question_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says): fit(GRUSpec(9, 4, 1), 2, 5, '1MiB', **wrong)
