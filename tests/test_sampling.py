"""What sampling promises that does not fit its page: settings, types, fake tensors, chance in numbers."""
import pickle
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gruckpt.charlm.sampling import Coins, Sampling, Tape, choose, draw_tape, mix, roll_out, toss

SETTINGS = [Sampling(t, *two) for t, two in product((0., .5), ((False,), (True,), (True, 3)))]
T, B, V = 20, 6, 13


def truth(n_steps=T, n_rows=B, V=V):
    return torch.randint(V, (n_steps, n_rows), generator=torch.Generator().manual_seed(1))


def table(V=V, seed=2):
    "A predictor without a state: the logits of what follows each character, drawn once"
    logits_VV = torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda ids_SB, state: (logits_VV[ids_SB.long()], state)


def adds():
    "A predictor with a state: expects the sum of all that it read, so every input matters for ever"
    def predict(ids_SB, sum_B):
        sums_SB = sum_B + ids_SB.long().cumsum(0)
        return torch.nn.functional.one_hot(sums_SB % V, V).double(), sums_SB[-1]
    return predict, torch.zeros(B, dtype=torch.int64)


@pytest.mark.parametrize('sampling', SETTINGS, ids=str)
@pytest.mark.parametrize('p', [0, .3, 1])
def test_every_input_is_the_truth_or_what_was_expected_before_it(sampling, p):
    inputs_TB, (predict, state), coins = truth(), adds(), toss((T, B), p, seed=5)
    tape = draw_tape(predict, inputs_TB, state, p, 5, V, sampling)
    assert torch.equal(tape.ids_TB[0], inputs_TB[0].to(torch.uint8))
    assert torch.equal(tape.ids_TB[1:][coins.truth_TB[1:]].long(), inputs_TB[1:][coins.truth_TB[1:]])
    if sampling.two_pass: return
    own_TB = choose(predict(tape.ids_TB, state)[0], coins.u_TB, sampling.temperature)
    assert torch.equal(tape.ids_TB[1:][~coins.truth_TB[1:]].long(), own_TB[:-1][~coins.truth_TB[1:]])
    assert torch.equal(tape.guess_B, own_TB[-1])


@pytest.mark.parametrize('temperature', [0., 1.])
@pytest.mark.parametrize('guess', [False, True])
def test_each_pass_makes_one_step_more_exact(temperature, guess):
    (predict, state), coins = adds(), toss((T, B), .4, seed=3)
    guess_B = torch.arange(B) if guess else None
    args = predict, truth(), state, coins, torch.uint8, temperature, guess_B
    tape = roll_out(*args)
    for n in range(1, T):
        assert torch.equal(mix(*args, n_passes=n).ids_TB[:n + 1], tape.ids_TB[:n + 1])
    assert not torch.equal(mix(*args).ids_TB, tape.ids_TB)
    assert torch.equal(mix(*args, n_passes=T).guess_B, tape.guess_B)
    if guess: assert (tape.ids_TB[0] != truth()[0]).any()


@pytest.mark.parametrize('n_steps', [1, 15, 16, 17, 40])
def test_stretches_of_a_long_window_are_one_window(n_steps):
    lengths = []
    def predict(ids_SB, sum_B):
        lengths.append(len(ids_SB))
        return adds()[0](ids_SB, sum_B)
    args = truth(n_steps), torch.zeros(B, dtype=torch.int64), toss((n_steps, B), .5, 0), torch.uint8
    whole = mix(adds()[0], *args, n_passes=n_steps)
    assert torch.equal(whole.ids_TB, roll_out(adds()[0], *args).ids_TB)
    mix(predict, *args)
    assert lengths == [16] * (n_steps // 16) + [n_steps % 16] * (n_steps % 16 > 0)


def test_at_zero_no_later_input_is_read():
    inputs_TB, (predict, state) = truth(), adds()
    def tape(inputs_TB, guess_B=None): return draw_tape(predict, inputs_TB, state, 0, 7, V, guess_B=guess_B)
    first = tape(inputs_TB)
    for k in range(1, V):
        other = tape(torch.cat([inputs_TB[:1], (inputs_TB[1:] + k) % V]))
        assert torch.equal(other.ids_TB, first.ids_TB) and torch.equal(other.guess_B, first.guess_B)
        guessed = tape((inputs_TB + k) % V, first.guess_B)
        assert torch.equal(guessed.ids_TB, tape(inputs_TB, first.guess_B).ids_TB)
        assert torch.equal(guessed.ids_TB[0].long(), first.guess_B)


@pytest.mark.parametrize('p', [.05, .5, .95])
def test_shares(p):
    coins = toss((200, 100), p, seed=1)
    assert abs(coins.truth_TB.float().mean() - p) < 4 * (p * (1 - p) / 20_000)**.5
    for shares in (coins.truth_TB.float().mean(0), coins.truth_TB.float().mean(1)):
        assert abs(shares - p).max() < 5 * (p * (1 - p) / 100)**.5
    following = (coins.truth_TB[1:] == coins.truth_TB[:-1]).float().mean()      # tosses do not hang together
    assert abs(following - (p**2 + (1 - p)**2)) < .02
    high = coins.u_TB[coins.truth_TB].mean(), coins.u_TB[~coins.truth_TB].mean()    # nor coin and number
    assert all(abs(o - .5) < .05 for o in high)


def test_drawn_characters_follow_the_softmax():
    tape = draw_tape(table(), truth(400, 200), None, 0, 3, V, Sampling(.7))
    before, after = tape.ids_TB[:-1].flatten().long(), tape.ids_TB[1:].flatten().long()
    logits_VV = table()(torch.arange(V)[:, None], None)[0][:, 0]
    p_VV = (logits_VV / .7).softmax(-1)
    counts_VV = (before * V + after).bincount(minlength=V * V).view(V, V).double()
    n_V = counts_VV.sum(1, keepdim=True)
    chi2 = ((counts_VV - n_V * p_VV)**2 / (n_V * p_VV)).sum()
    assert n_V.min() > 500 and abs(chi2 - V * (V - 1)) < 5 * (2 * V * (V - 1))**.5


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_choose_in_every_type(dtype):
    logits_NV = torch.randn(50, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    u_N = torch.rand(50, generator=torch.Generator().manual_seed(1))
    for temperature in (0, .1, 1, 10.):
        ids_N = choose(logits_NV, u_N, temperature)
        assert ids_N.dtype == torch.int64 and torch.equal(ids_N, choose(logits_NV.double(), u_N, temperature))
    assert torch.equal(choose(logits_NV, u_N, 1e-300), logits_NV.argmax(-1))
    assert not choose(logits_NV, torch.zeros(50), 1.).any()                                 # the first
    assert (choose(logits_NV, torch.full((50,), 1 - 2**-24), 1.) == V - 1).all()            # the last


def test_callers_random_numbers_stay():
    before = torch.get_rng_state()
    for sampling in SETTINGS: draw_tape(*[adds()[0], truth(), adds()[1]], .5, 0, V, sampling)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize('sampling', SETTINGS, ids=str)
def test_fake_tensors(sampling):
    with FakeTensorMode():
        def predict(ids_SB, state): return torch.zeros(*ids_SB.shape, V), state
        tape = draw_tape(predict, torch.zeros(T, B, dtype=torch.int64), None, .5, 0, V, sampling)
    assert (tape.ids_TB.shape, tape.ids_TB.dtype) == ((T, B), torch.uint8)
    assert (tape.guess_B.shape, tape.guess_B.dtype) == ((B,), torch.int64)


def test_no_graph_whatever_the_predictor():
    weight = torch.randn(V, V, requires_grad=True)
    seen = []
    def predict(ids_SB, state):
        logits_SBV = weight[ids_SB.long()]
        seen.append(logits_SBV.requires_grad)
        return logits_SBV, state
    for sampling in SETTINGS: draw_tape(predict, truth(), None, .5, 0, V, sampling)
    assert seen and not any(seen)


def test_values_travel():
    sampling = Sampling(.5, True, 2)
    assert pickle.loads(pickle.dumps(sampling)) == sampling and hash(sampling) == hash(Sampling(.5, True, 2))
    assert Tape._fields == ('ids_TB', 'guess_B') and Coins._fields == ('truth_TB', 'u_TB')
