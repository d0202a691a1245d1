"""From losses to new weights: the token mean of all parts, scales, clipping, skips, and one wait."""
import copy
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.charlm.text import TokenStream
from gruckpt.training.config import TrainConfig
from gruckpt.training.trainer import Trainer
from gruckpt.training.optimizer_step import PRECISIONS, LossScale, accumulate, update

IDS = (torch.arange(700) * 7 // 3) % 11


class Masked(NamedTuple):
    "A batch of which some targets are valid."
    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    fresh: bool = True

    @property
    def n_targets(self): return int(self.mask.sum())


def masked(n_valid, seed, rows=3, steps=4):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, steps, 5, generator=draw), torch.randint(3, (rows, steps), generator=draw)
    return Masked(x, y, torch.arange(rows * steps).view(rows, steps) < n_valid)


class Classes(nn.Module):
    "Scores of three classes; the mean over valid targets."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch, state=None, *, plan=None):
        return F.cross_entropy(self.net(batch.inputs)[batch.mask], batch.targets[batch.mask]), None


class Batches:
    "A stream of the same batches in every epoch."
    def __init__(self, batches): self.batches, self.epoch, self.at = batches, 0, 0
    def __iter__(self):
        epoch = self.epoch
        while self.epoch == epoch:
            batch, n = self.batches[self.at], len(self.batches)
            self.epoch, self.at = divmod(epoch * n + self.at + 1, n)
            yield batch
    def state_dict(self): return {'epoch': self.epoch, 'at': self.at}
    def load_state_dict(self, state): self.epoch, self.at = state['epoch'], state['at']


TEN = [masked(n, seed) for seed, n in enumerate((10, 2) * 5)]


def joined(batches):
    "One batch of all rows."
    return Masked(*(torch.cat(o) for o in list(zip(*batches, strict=True))[:3]))


def gradient_of(model, batch):
    "Gradients of the token mean of a batch, of a copy of the model."
    model = copy.deepcopy(model)
    model.zero_grad()
    model.loss(batch)[0].backward()
    return [p.grad for p in model.parameters()]


# ---- parts of a batch ----

def test_r05_a_token_counts_once_wherever_it_is():
    "16/12 and not 2.0."
    w = torch.ones((), requires_grad=True)
    class Part(NamedTuple):
        value: float
        fresh: bool = True
    loss, _ = accumulate(lambda part, _: (w * part.value, None), [Part(1.), Part(3.)], [10, 2])
    assert math.isclose(loss.item(), 16 / 12, rel_tol=1e-5) and math.isclose(w.grad, 16 / 12, rel_tol=1e-5)


@pytest.mark.parametrize('precision', ['float32', 'float64', 'float16'])
def test_r05_each_step_has_the_joined_batchs_gradient(precision):
    "Accumulate 4 over ten micro-batches: windows of 4, 4 and 2 in every epoch, each with its own divisor."
    model = Classes().to(PRECISIONS[precision].weights)
    cast = [b._replace(inputs=b.inputs.to(PRECISIONS[precision].weights)) for b in TEN]
    config = TrainConfig(6, accumulate=4, clip=None, precision=precision)
    trainer, before = Trainer(model, Batches(cast), config), copy.deepcopy(model)
    bound = {'float32': 1e-5, 'float64': 1e-12, 'float16': 5e-3}[precision]
    for record in trainer.steps():
        start = (record.step - 1) % 3 * 4
        whole = joined(cast[start:start + 4])
        assert whole.n_targets == (24, 24, 12)[(record.step - 1) % 3]
        for p, expected in zip(model.parameters(), gradient_of(before, whole), strict=True):
            assert (p.grad - expected).norm() <= bound * expected.norm()
        assert math.isclose(record.loss, before.loss(whole)[0].item(), rel_tol=bound)
        before = copy.deepcopy(model)
    assert (record.step, record.epoch, trainer.stream.epoch) == (6, 1, 2)


def test_r06_the_norm_is_the_joined_gradients_and_is_clipped_once():
    "Four micro-batches and one batch of all their rows: the same norms, scales and weights."
    runs = []
    for batches, n in (TEN, 5), ([joined(TEN[:5]), joined(TEN[5:])], 1):
        trainer = Trainer(Classes(), Batches(batches), TrainConfig(8, lr=1e-2, clip=0.1, accumulate=n))
        records = list(trainer.steps())
        numbers = [(r.loss, r.grad_norm, r.clip_scale) for r in records]
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        runs.append((torch.tensor(numbers), weights))
    (parts, w_parts), (whole, w_whole) = runs
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(w_parts, w_whole, rtol=1e-5, atol=1e-5)
    assert (whole[:, 1] > 0.1).all() and (whole[:, 1] * whole[:, 2] - 0.1).abs().max() < 1e-5


def test_a_batch_without_a_valid_target_is_refused():
    trainer = Trainer(Classes(), Batches([masked(0, 1)]), TrainConfig(3))
    with pytest.raises(ValueError, match='no valid target'): next(trainer.steps())


# ---- steps that do no harm ----

BAD = {'inf': [1., math.inf, 2.], 'nan': [1., math.nan, 2.], 'overflow of the norm': [1e25, 1e25, 0.]}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('grad', BAD.values(), ids=BAD)
@pytest.mark.parametrize('scale', [1., 1024.])
def test_r07_without_a_finite_norm_nothing_changes(grad, dtype, scale):
    w = torch.zeros(3, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.AdamW([w], fused=True)
    def step(values):
        w.grad = torch.tensor(values, dtype=dtype) * scale
        return update(optimizer, torch.ones(()), lr=0.1, clip=1., scale=scale)
    step([1., 2., 2.])
    kept = [w.detach().clone(), *(t.clone() for t in optimizer.state[w].values())]
    done = step(grad)
    assert (done.skipped, done.clip_scale) == ('gradient norm not finite', 0.)
    assert all(map(torch.equal, kept, [w.detach(), *optimizer.state[w].values()]))
    assert step([1., 2., 2.]).skipped == '' and not torch.equal(kept[0], w)


# ---- precision ----

def test_float16_is_torchs_own_scaler_to_the_bit():
    "Autocast, loss scale, an overflow in the fourth step: GradScaler's losses, scales and weights."
    def spoiled(model):
        model.calls = 0
        def spoil(g):
            model.calls += 1
            return g * (math.inf if model.calls == 4 else 1)
        model.net[0].weight.register_hook(spoil)
        return model
    model, scaler, theirs = spoiled(Classes()), torch.amp.GradScaler('cpu'), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    for batch in TEN:
        optimizer.zero_grad()
        with torch.autocast('cpu', dtype=torch.float16): loss, _ = model.loss(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        theirs.append((loss.item(), scaler.get_scale()))
    config = TrainConfig(10, lr=1e-2, lr_floor=1., clip=None, precision='float16')
    trainer = Trainer(spoiled(Classes()), Batches(TEN), config)
    records = list(trainer.steps())
    losses, scales = zip(*theirs)                                   # torch's scaler is another implementation
    assert [r.loss for r in records] == pytest.approx(losses, rel=1e-5)
    assert [r.loss_scale for r in records] == list(scales)
    assert [r.skipped for r in records] == [''] * 3 + ['gradient norm not finite'] + [''] * 6
    for p, q in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert (p - q).norm() <= 1e-5 * p.norm()
    assert trainer.loss_scale == LossScale(32768., 6)
    assert trainer.state_dict()['loss_scale'] == {'scale': 32768., 'n_good': 6}


@pytest.mark.parametrize('precision, bound', [('bfloat16', 0.05), ('float16', 0.01), ('pure bfloat16', 0.1)])
def test_every_precision_trains_and_keeps_its_types(precision, bound):
    "The recurrent language model, state carried: near float32, and everything is of the type it should be."
    def run(name):
        torch.manual_seed(0)
        model = GRULM(GRUSpec(11, hidden=12, n_layers=2)).to(PRECISIONS[name].weights)
        o = Trainer(model, TokenStream(IDS, 4, 22), TrainConfig(25, lr=2e-2, precision=name))
        return o, [r.loss for r in o.steps()]
    (o, losses), (_, reference) = run(precision), run('float32')
    assert max(abs(a / b - 1) for a, b in zip(losses, reference, strict=True)) < bound
    assert losses[-1] < 0.8 * losses[0]
    params, weights = [*o.model.parameters()], PRECISIONS[precision].weights
    assert {p.dtype for p in params} == {p.grad.dtype for p in params} == {weights}
    assert {s['exp_avg'].dtype for s in o.optimizer.state.values()} == {weights}


def test_a_model_of_another_precision_is_refused():
    with pytest.raises(ValueError, match=r"'bfloat16' trains weights in torch.float32, got torch.bfloat16"):
        Trainer(Classes().bfloat16(), Batches(TEN), TrainConfig(1, precision='bfloat16'))


# ---- cost ----

class Waits(TorchFunctionMode):
    "Counts calls that hand the value of a tensor to Python."
    names = {'tolist', 'item', '__bool__', '__float__', '__int__', '__index__', 'cpu', 'numpy', 'nonzero'}
    n = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += (resolve_name(func) or '').rpartition('.')[2] in self.names
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('precision', ['float32', 'float16'])
@pytest.mark.parametrize('n', [1, 4])
def test_one_wait_a_step(n, precision):
    "However many micro-batches; the data's own counts, made on the processor, are not the trainer's."
    class Known(Masked):
        n_targets = 10
    batches = [Known(*masked(10, seed)[:3]) for seed in range(8)]
    trainer = Trainer(Classes(), Batches(batches), TrainConfig(5, accumulate=n, precision=precision))
    usual = trainer.model.loss
    def loss(batch, state, plan):
        with torch._C.DisableTorchFunction(): return usual(batch, state, plan=plan)
    trainer.model.loss = loss
    with Waits() as waits:
        for record in trainer.steps(): assert waits.n == record.step
