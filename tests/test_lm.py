"""What lm promises that does not fit its page: files, copies, fake tensors, and a grid of forms and cuts."""
import copy
import pickle
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gruckpt.charlm import model as lm
from gruckpt.training.checkpoint_files import load_checkpoint
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.measure.meter import Meter
from gruckpt.charlm.sampling import Sampling, draw_tape, toss
from gruckpt.engine.cells import CELLS
from gruckpt.engine.mingru import MinGRUCell
from gruckpt.engine.scan import plain
from gruckpt.training.schedule import exponential_decay, inverse_sigmoid, linear_decay
from gruckpt.plan.budget import DoesNotFit, estimate, fit
from gruckpt.plan.segment import Plan
from gruckpt.charlm.text import Batch, TokenStream
from gruckpt.training.config import TrainConfig
from gruckpt.training.trainer import Trainer
from gruckpt.training.sessions import session

FORMS = [dict(norm=norm, reset=reset, dropout=dropout)
         for norm in (None, 'state', 'output') for reset in ('after', 'before') for dropout in (0., .5)]


def small(dtype=torch.float64, **form):
    torch.manual_seed(0)
    return GRULM(GRUSpec(vocab_size=13, hidden=10, n_layers=2, **form)).to(dtype)


def batch_of(n_rows, n_steps, V=13):
    coin = torch.Generator().manual_seed(1)
    return Batch(*torch.randint(V, (2, n_rows, n_steps), generator=coin), fresh=True)


def gradients(model, batch, plan, state=None):
    "Loss, carried state and gradients, and the caller's next random number after each pass"
    torch.manual_seed(2)
    model.zero_grad()
    loss, state = model.loss(batch, state, plan=plan)
    draws = [torch.rand(1)]
    loss.backward()
    return [loss.detach(), state, *[p.grad for p in model.parameters()], *draws, torch.rand(1)]


def assert_same(found, exact, eps=1e-12):
    for a, b in zip(found, exact, strict=True): assert b.norm() > 0 and (a - b).norm() <= eps * b.norm()


@pytest.mark.parametrize('form', FORMS, ids=str)
@pytest.mark.parametrize('n_steps', [1, 2, 13])
def test_the_cut_changes_nothing(form, n_steps):
    model, batch = small(**form), batch_of(3, n_steps)
    state = torch.randn(2, 3, 10, dtype=torch.float64)
    with plain(): exact = gradients(model, batch, Plan(n_steps, n_steps), state)
    for n_segments in {k for k in (1, 3, n_steps) if k <= n_steps}:
        for keep in ('hidden', 'gates'):
            assert_same(gradients(model, batch, Plan.split(n_steps, n_segments, keep), state), exact)


@pytest.mark.parametrize('form', FORMS, ids=str)
def test_n_params(form):
    for V, D, L in ((1, 1, 2), (7, 5, 2), (100, 8, 4)):
        spec = GRUSpec(V, D, L, **form)
        assert spec.n_params == sum(p.numel() for p in GRULM(spec).parameters())


@pytest.mark.parametrize('n_segments', [1, 3])
def test_one_seed_a_call_and_the_first_step_of_each_segment(n_segments):
    log, model = SimpleQueue(), small(dropout=.5)      # a list would be wound back for a recomputation
    inner = model.rnn.forward
    model.rnn.forward = lambda x, h, keep, **mask: log.put(mask) or inner(x, h, keep=keep, **mask)
    def told(): return [log.get() for _ in range(log.qsize())]
    gradients(model, batch_of(2, 7), Plan.split(7, n_segments))
    starts = [a for a, _ in Plan.split(7, n_segments).segments]
    masks = told()
    assert [o['start'] for o in masks] == starts + starts[-2::-1]        # forward, then the recomputation
    assert len({o['seed'] for o in masks}) == 1
    model.eval().loss(batch_of(2, 7))
    model.train().score(batch_of(2, 7))
    model.generate(torch.tensor([1]), 3)
    assert told() == [{}] * 5


def test_frozen_embedding_and_only_one_weight_trained():
    model, batch = small(), batch_of(3, 9)
    for name, p in model.named_parameters(): p.requires_grad_(name == 'rnn.weight_hh_l0')
    def grad(plan):
        model.zero_grad()
        model.loss(batch, plan=plan)[0].backward()
        return [p.grad for p in model.parameters() if p.requires_grad]
    with plain(): exact = grad(Plan(9, 9))
    assert_same(grad(Plan.split(9, 3)), exact)


def test_a_weight_changed_before_backward_raises():
    model = small()
    loss, _ = model.loss(batch_of(2, 8), plan=Plan.split(8, 4))
    with torch.no_grad(): model.head.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'): loss.backward()


def test_second_backward_says_so():
    loss, _ = small().loss(batch_of(2, 8), plan=Plan.split(8, 4))
    loss.backward()
    with pytest.raises(RuntimeError, match='second time'): loss.backward()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('n_segments', [1, 4])
def test_weights_of_16_bits(dtype, n_segments):
    model, batch = small(dtype), batch_of(2, 9)
    loss, state = model.loss(batch, plan=Plan.split(9, n_segments))
    loss.backward()
    assert loss.dtype == torch.float32 and state.dtype == dtype
    assert abs(loss.item() / small().loss(batch)[0].item() - 1) < 2**-7
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())
    assert model.generate(torch.tensor([1, 2]), 4).shape == (4,)


@pytest.mark.parametrize('n_segments', [1, 4])
def test_autocast_carries_the_same_types_whatever_the_cut(n_segments):
    model, state = small(torch.float32, norm='state', reset='before', dropout=.5), None
    for _ in range(3):
        with torch.autocast('cpu', torch.bfloat16):
            loss, state = model.loss(batch_of(2, 9), state, plan=Plan.split(9, n_segments))
        loss.backward()
        assert loss.dtype == state.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and p.grad.norm() > 0 for p in model.parameters())


def test_file_and_copies(tmp_path):
    model, batch = small(norm='state', reset='before'), batch_of(2, 6)
    torch.save({'spec': model.spec.to_dict(), 'weights': model.state_dict()}, tmp_path/'m.pt')
    saved = torch.load(tmp_path/'m.pt', weights_only=True)
    again = GRULM(GRUSpec.from_dict(saved['spec'])).double()
    again.load_state_dict(saved['weights'])
    assert again.spec == model.spec
    for other in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.loss(batch)[0], model.loss(batch)[0])


@pytest.mark.parametrize('n_segments', [1, 3])
def test_fake_tensors_run_a_step_and_a_score(n_segments):
    with FakeTensorMode():
        model = GRULM(GRUSpec(vocab_size=13, hidden=10, dropout=.5))
        batch = Batch(*torch.zeros(2, 4, 12, dtype=torch.int64), True)
        loss, state = model.loss(batch, plan=Plan.split(12, n_segments))
        loss.backward()
        score, _ = model.score(batch, state)
    assert loss.shape == () and score.n_tokens == 48


def test_ids_of_any_integer_type():
    model, batch, plan = small(), batch_of(2, 6), Plan.split(6, 2)
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        other = Batch(batch.inputs.to(dtype), batch.targets.to(dtype), True)
        assert torch.equal(model.loss(other, plan=plan)[0], model.loss(batch, plan=plan)[0])


def test_score_is_the_loss_of_a_model_that_does_not_drop():
    model, batch = small(dropout=.5), batch_of(3, 200)
    score, state = model.score(batch)
    loss, carried = model.eval().loss(batch)
    assert abs(score.loss_sum / score.n_tokens - loss) < 1e-12
    assert torch.allclose(state, carried, rtol=0, atol=1e-12)
    assert torch.equal(model.score(batch, plan=Plan(200, 200))[0].n_correct, score.n_correct)


def test_weights_that_diverged_give_an_error_not_text():
    model = small()
    with torch.no_grad(): model.head.bias[3] = float('nan')
    for temperature in (0, 1.):
        with pytest.raises(ValueError, match='diverged'):
            model.generate(torch.tensor([1]), 3, temperature=temperature)


# --- the model's own characters ---------------------------------------------------------------------------

WAYS = [Sampling(), Sampling(.7), Sampling(two_pass=True), Sampling(.7, two_pass=True, n_passes=2)]


def sampled(model, batch, plan, state=None, **knobs):
    "Loss, carried state, guess and gradients, and the caller's next random number after each pass"
    torch.manual_seed(2)
    model.zero_grad()
    loss, (state, guess) = model.loss(batch, state, plan=plan, **knobs)
    draws = [torch.rand(1)]
    loss.backward()
    return [loss.detach(), state, *[p.grad for p in model.parameters()], *draws, torch.rand(1)], guess


@pytest.fixture
def tapes(monkeypatch):
    "What every call of `draw_tape` in lm was given and gave"
    seen = []
    def spy(*args):
        seen.append((args, draw_tape(*args)))
        return seen[-1][1]
    monkeypatch.setattr(lm, 'draw_tape', spy)
    return seen


@pytest.mark.parametrize('way', WAYS, ids=str)
@pytest.mark.parametrize('form', [{}] + [o | dict(dropout=.1) for o in FORMS if o['dropout']], ids=str)
def test_own_characters_do_not_depend_on_the_cut(form, way, tapes):
    model, batch, state = small(**form), batch_of(3, 16), torch.randn(2, 3, 10, dtype=torch.float64)
    knobs = dict(teacher_forcing=.5, sampling=way)
    with plain(): exact, guess = sampled(model, batch, Plan(16, 16), state, **knobs)
    for n_segments, keep in (1, 'gates'), (3, 'hidden'), (3, 'gates'), (8, 'hidden'):
        found, other = sampled(model, batch, Plan.split(16, n_segments, keep), state, **knobs)
        assert_same(found, exact)
        assert torch.equal(other, guess)
    assert len(tapes) == 5 and all(torch.equal(tape.ids_TB, tapes[0][1].ids_TB) for _, tape in tapes)


@pytest.mark.parametrize('form', FORMS, ids=str)
def test_the_training_pass_expects_what_was_fed(form, tapes):
    model, batch = small(**form), batch_of(4, 20)
    model.loss(batch, teacher_forcing=.3)
    (_, ids_TB, _, p, seed, V, *_), tape = tapes[0]
    own_TB = ~toss(ids_TB.shape, p, seed).truth_TB
    with torch.no_grad(): logits_TBV, _ = model(tape.ids_TB, model.init_state(4), seed=seed, start=0)
    likeliest_TB = logits_TBV.argmax(-1)
    assert own_TB[1:].float().mean() > .5
    assert torch.equal(tape.ids_TB[1:][own_TB[1:]].long(), likeliest_TB[:-1][own_TB[1:]])
    assert torch.equal(tape.guess_B, likeliest_TB[-1])


def test_g13_the_mix_is_per_token(tapes):
    model, batch = small(torch.float32), batch_of(64, 50)
    model.loss(batch, teacher_forcing=.5)
    (_, ids_TB, _, p, seed, V, *_), tape = tapes[0]
    truth_TB = toss(ids_TB.shape, p, seed).truth_TB
    assert ids_TB.shape == (50, 64) and abs(truth_TB.float().mean() - .5) < .03
    assert all(0 < n < 50 for n in truth_TB.sum(0).tolist())
    assert torch.equal(tape.ids_TB[truth_TB].long(), ids_TB[truth_TB])
    assert (tape.ids_TB != ids_TB)[1:][~truth_TB[1:]].float().mean() > .5


@pytest.mark.parametrize('dropout', [0., .5])
def test_g13_at_one_it_is_plain_training(dropout, tapes):
    model, batch, plan = small(dropout=dropout), batch_of(3, 12), Plan.split(12, 3)
    for way in (None, *WAYS):
        torch.manual_seed(2)
        model.zero_grad()
        loss, state = model.loss(batch, plan=plan, teacher_forcing=1, sampling=way)
        loss.backward()
        found = [loss.detach(), state, *[p.grad.clone() for p in model.parameters()], torch.rand(1)]
        for a, b in zip(found, gradients(model, batch, plan)[:-1], strict=True): assert torch.equal(a, b)
    assert not tapes


@pytest.mark.parametrize('way', WAYS[:2], ids=str)
def test_g13_at_zero_no_target_is_read(way):
    model, batch, plan = small(dropout=.5), batch_of(3, 12), Plan.split(12, 3)
    exact, guess = sampled(model, batch, plan, teacher_forcing=0, sampling=way)
    for k in range(1, 13):
        inputs_BT = torch.cat([batch.inputs[:, :1], (batch.inputs[:, 1:] + k) % 13], 1)
        perturbed = Batch(inputs_BT, batch.targets, True)
        found, other = sampled(model, perturbed, plan, teacher_forcing=0, sampling=way)
        for a, b in zip([*found, other], [*exact, guess], strict=True): assert torch.equal(a, b)


def test_g13_recomputation_reads_the_tape_and_no_gradient_passes_a_choice():
    model, seen = small(), SimpleQueue()
    model.embed.register_forward_pre_hook(lambda _, args: seen.put(args[0].clone()))
    sampled(model, batch_of(2, 12), Plan.split(12, 3), teacher_forcing=0)
    read = [seen.get() for _ in range(seen.qsize())]
    forward, again = [o for o in read if len(o) == 4][:3], [o for o in read if len(o) == 4][3:]
    assert len(again) == 2
    for a, b in zip(forward[1::-1], again, strict=True): assert torch.equal(a, b)
    fed = torch.cat(forward).unique()
    assert torch.equal(model.embed.weight.grad.norm(dim=1).nonzero()[:, 0], fed)


def test_e02_e09_what_changes_between_the_passes_is_not_read():
    model, batch, plan = small(dropout=.5), batch_of(3, 16), Plan.split(16, 4)
    exact, _ = sampled(model, batch, plan, teacher_forcing=.5)
    decay = linear_decay(start=.5, step=.25)
    torch.manual_seed(2)
    model.zero_grad()
    loss, (state, guess) = model.loss(batch, plan=plan, teacher_forcing=decay(0, 0))
    draws = [torch.rand(1)]
    model.generate(torch.tensor([1, 2]), 5)
    model.score(batch, free_running=True)
    model.eval().loss(batch, (state, guess), plan=plan, teacher_forcing=decay(1, 0))
    torch.rand(7)
    loss.backward()
    for a, b in zip([loss.detach(), state, *[p.grad for p in model.parameters()], *draws], exact[:-1]):
        assert torch.equal(a, b)


@pytest.mark.parametrize('n_segments', [1, 4, 16])
@pytest.mark.parametrize('dropout', [0., .1])
def test_one_draw_of_the_callers_numbers(n_segments, dropout):
    model, batch = small(dropout=dropout), batch_of(3, 16)
    torch.manual_seed(2)
    torch.randint(2**62, ())
    expected = torch.rand(1)
    for way in WAYS:
        torch.manual_seed(2)
        loss, _ = model.loss(batch, plan=Plan.split(16, n_segments), teacher_forcing=.5, sampling=way)
        here = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), here) and torch.rand(1) == expected


def test_windows_go_on_from_the_guess():
    model, whole = small(norm='output'), batch_of(3, 22)
    halves = [Batch(whole.inputs[:, a:b], whole.targets[:, a:b], a == 0) for a, b in ((0, 9), (9, 22))]
    for run in (lambda *a: model.loss(*a, teacher_forcing=0), lambda *a: model.score(*a, free_running=True)):
        exact, (h_LBD, guess) = run(whole)
        a, state = run(halves[0])
        b, (last_LBD, last) = run(halves[1], state)
        if torch.is_tensor(a): exact, a, b = 66 * exact, 27 * a, 39 * b
        else: exact, a, b = exact.loss_sum, a.loss_sum, b.loss_sum
        assert abs(a + b - exact) < 1e-9 * exact and torch.equal(last, guess)
        assert torch.allclose(last_LBD, h_LBD, rtol=0, atol=1e-12)


def test_either_state_is_taken_at_any_p(tmp_path):
    model, batch = small(), batch_of(3, 8)
    _, h_LBD = model.loss(batch)
    _, state = model.loss(batch, h_LBD, teacher_forcing=.5)
    torch.save(state, tmp_path/'s.pt')
    saved = torch.load(tmp_path/'s.pt', weights_only=True)
    assert torch.equal(model.loss(batch, saved)[0], model.loss(batch, state[0])[0])
    assert torch.equal(model.score(batch, saved)[0].loss_sum, model.score(batch, state[0])[0].loss_sum)
    assert torch.is_tensor(model.loss(batch, saved)[1]) and torch.is_tensor(model.score(batch, saved)[1])
    for n in (2, 4):
        with pytest.raises(ValueError, match=f'must have 3 ids, one a row, got {n}'):
            model.loss(batch, (h_LBD, torch.zeros(n).long()), teacher_forcing=.5)
    with pytest.raises(ValueError, match='the guess in state must lie in 0..12'):
        model.loss(batch, (h_LBD, torch.full((3,), 13)))
    for state in ((h_LBD, h_LBD), (h_LBD,), [h_LBD, None], (h_LBD, None, None)):
        with pytest.raises(ValueError, match='state'): model.loss(batch, state)


def test_settings_that_cannot_be():
    model, batch = small(), batch_of(3, 8)
    for p in (-.1, 1.5, float('nan'), None, True, '0.5'):
        with pytest.raises(ValueError, match='teacher_forcing must be a number in 0..1'):
            model.loss(batch, teacher_forcing=p)
    for way in ('argmax', 0., {'temperature': 0}):
        for p in (.5, 1.):
            with pytest.raises(ValueError, match='sampling must be a Sampling or None'):
                model.loss(batch, teacher_forcing=p, sampling=way)


def test_g12_state_and_guess_are_carried_over_fifty_batches():
    model, state, levels = small(torch.float32), None, []
    stream = TokenStream(torch.randint(13, (1200,), generator=torch.Generator().manual_seed(0)), 3, 8)
    with Meter(model) as meter:
        for batch in islice(stream, 49):
            before = state
            torch.manual_seed(5)
            loss, state = model.loss(batch, state, plan=Plan.split(8, 2), teacher_forcing=.5)
            model.zero_grad()
            loss.backward()
            carried = [p.grad for p in model.parameters()]
            del loss
            levels.append(meter.live)
    assert len(levels) == 49 and set(levels[3:]) == {levels[3]}
    assert not state[0].requires_grad and len(before) == 2
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    leaf = before[0].clone().requires_grad_()
    model.loss(batch, (leaf, before[1].clone()), plan=Plan.split(8, 2), teacher_forcing=.5)[0].backward()
    for g, p in zip(carried, model.parameters(), strict=True): assert torch.equal(g, p.grad)
    assert leaf.grad.norm() > 0
    fewer = Batch(batch.inputs[:2], batch.targets[:2], False)
    with pytest.raises(ValueError, match='use init_state'): model.loss(fewer, state, teacher_forcing=.5)
    assert model.loss(fewer, None, teacher_forcing=.5)[1][1].shape == (2,)


@pytest.mark.parametrize('decay', [linear_decay(), linear_decay(1., .3, .2), exponential_decay(.5, .1),
                                   inverse_sigmoid(3., .0)], ids=str)
def test_g14_every_p_of_a_schedule_is_taken_and_the_tape_follows_it(decay, tapes):
    model, batch = small(torch.float32), batch_of(16, 40)
    ps = [decay(n, n) for n in (0, 1, 2, 5, 20, 1000)]
    assert ps == sorted(ps, reverse=True) and ps[0] > ps[-1] and all(0 <= p <= 1 for p in ps)
    for p in ps:
        model.loss(batch, teacher_forcing=p)
        if p == 1: assert not tapes
        else: assert tapes[-1][0][3] == p
    shares = [toss((40, 16), p, 0).truth_TB.float().mean() for p in ps]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize('way', WAYS, ids=str)
def test_r01_g14_a_sampled_run_resumes_to_the_bit(way, tmp_path):
    decay = linear_decay(start=1., step=.25, floor=.25, per=3)
    ids = torch.randint(13, (3 * 8 * 8 + 5,), generator=torch.Generator().manual_seed(0))
    def trainer(max_steps):
        def knobs(epoch, n_updates): return {'teacher_forcing': decay(epoch, n_updates), 'sampling': way}
        torch.manual_seed(4)
        model, stream = small(torch.float32, dropout=.1), TokenStream(ids, 3, 8)
        return Trainer(model, stream, TrainConfig(max_steps=max_steps), Plan.split(8, 2), knobs=knobs)
    straight = trainer(20)
    exact = list(straight.steps())
    first = trainer(7)
    records = list(session(first, tmp_path))
    torch.manual_seed(9)
    second = trainer(20)
    second.load_state_dict(load_checkpoint(tmp_path).state)
    records += session(second, tmp_path)
    def told(o): return o.step, o.epoch, o.loss, o.grad_norm, o.lr, o.teacher_forcing
    assert [told(o) for o in records] == [told(o) for o in exact]
    ps = [o.teacher_forcing for o in exact]                                     # counted in updates
    assert ps == [decay(0, n) for n in range(20)] and ps[0] == 1 > ps[6] > ps[-1] == .25
    assert all(map(torch.equal, second.model.parameters(), straight.model.parameters()))
    (h_LBD, guess), (other_LBD, other) = second.carried, straight.carried
    assert torch.equal(h_LBD, other_LBD) and torch.equal(guess, other)


@pytest.mark.parametrize('way', WAYS, ids=str)
@pytest.mark.parametrize('n_segments', [1, 4])
def test_e05_e06_roll_out_and_pass_in_one_autocast_block(n_segments, way, tapes):
    model, batch = small(torch.float32, norm='output'), batch_of(3, 16)
    def grads(batch, **knobs):
        model.zero_grad(set_to_none=True)
        with torch.autocast('cpu', torch.bfloat16):
            loss, state = model.loss(batch, plan=Plan.split(16, n_segments), **knobs)
            loss.backward()
        assert loss.dtype == torch.float32
        return state, [p.grad for p in model.parameters()]
    (h_LBD, _), found = grads(batch, teacher_forcing=.5, sampling=way)
    exact_LBD, exact = grads(Batch(tapes[0][1].ids_TB.t(), batch.targets, True))
    for a, b in zip([h_LBD, *found], [exact_LBD, *exact], strict=True): assert torch.equal(a, b)
    assert h_LBD.dtype == torch.float32 and len(tapes) == 1


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('way', WAYS, ids=str)
def test_own_characters_of_16_bit_weights(dtype, way):
    model = small(dtype, norm='output', dropout=.5)
    loss, (h_LBD, _) = model.loss(batch_of(3, 9), plan=Plan.split(9, 3), teacher_forcing=.2, sampling=way)
    loss.backward()
    assert loss.isfinite() and h_LBD.dtype == dtype
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('way', WAYS, ids=str)
def test_fake_tensors_draw_a_tape(way):
    with FakeTensorMode():
        model = GRULM(GRUSpec(vocab_size=13, hidden=10, dropout=.5, norm='output'))
        batch = Batch(*torch.zeros(2, 4, 5, dtype=torch.int64), True)
        loss, state = model.loss(batch, plan=Plan.split(5, 2), teacher_forcing=.5, sampling=way)
        loss.backward()
        score, (_, guess) = model.score(batch, state, free_running=True)
    assert loss.shape == () and guess.shape == (4,) and score.n_tokens == 20


@pytest.mark.parametrize('V', [256, 257])
@pytest.mark.parametrize('form', [{'norm': 'output'}, {'norm': 'state', 'dropout': .5}], ids=str)
@pytest.mark.parametrize('n_segments', [1, 5])
def test_a_tape_is_small_and_counted(V, form, n_segments):
    spec, plan, peaks = GRUSpec(V, hidden=16, n_layers=2, **form), Plan.split(32, n_segments), []
    for p in (1., .5):
        torch.manual_seed(0)
        model, batch = GRULM(spec), batch_of(6, 32, V)
        _, state = model.loss(batch, teacher_forcing=p)
        with Meter(model, state) as meter:
            loss, after = model.loss(batch, state, plan=plan, teacher_forcing=p)
            loss.backward()
        peaks.append(meter.peak)
    assert peaks[1] - peaks[0] == spec.tape_bytes(6, plan)


@pytest.mark.parametrize('cell', ['gru', 'mingru'])       # the second has no recurrent weights
def test_free_running_after_reading_a_prompt(cell):
    model, batch = small(norm='output', cell=cell, dropout=.1), batch_of(3, 12)
    model.loss(batch, teacher_forcing=0)[0].backward()
    model.eval()
    h_LBD = model.score(Batch(batch.inputs[:, :5], batch.targets[:, :5], True))[1]
    rest = Batch(batch.inputs[:, 5:], batch.targets[:, 5:], False)
    other = Batch(torch.cat([rest.inputs[:, :1], (rest.inputs[:, 1:] + 3) % 13], 1), rest.targets, False)
    score, (_, guess) = model.score(rest, h_LBD, free_running=True)
    assert torch.equal(score.loss_sum, model.score(other, h_LBD, free_running=True)[0].loss_sum)
    for b in range(3):
        text = model.generate(batch.inputs[b, :6], 7, temperature=0)
        assert text[-1] == guess[b]


def test_a_cell_registered_anew_is_the_one_that_counts():
    "Bytes, plans and models were those of the class that had the name first."
    @dataclass(frozen=True)
    class Wide(MinGRUCell):
        def scratch(self, o, n_rows): return super().scratch(o, n_rows)._replace(reverse=10**6)
    spec, was = GRUSpec(vocab_size=13, hidden=10, n_layers=2, cell='mingru'), CELLS['mingru']
    def least(): return estimate(spec, 2, fit(spec, 2, 12, '4MiB')).peak
    before = least()
    try:
        CELLS['mingru'] = Wide
        assert estimate(spec, 2, Plan(12, 12)).peak > 10**6 and type(GRULM(spec).rnn.cell) is Wide
        with pytest.raises(DoesNotFit): fit(spec, 2, 12, '200KiB')
    finally: CELLS['mingru'] = was
    assert least() == before and fit(spec, 2, 12, '200KiB')
