"""What lm promises that does not fit its page: files, copies, fake tensors, and a grid of forms and cuts."""
import copy
import pickle
from queue import SimpleQueue

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gruckpt.lm import GRULM, GRUSpec
from gruckpt.scan import plain
from gruckpt.segment import Plan
from gruckpt.text import Batch

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
    model.rnn.forward = lambda x, h, **mask: log.put(mask) or inner(x, h, **mask)
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
