"""head beyond its page: its bytes at many forms."""
import pytest
import torch

from gruckpt.engine.head import HeadBytes, head_loss
from gruckpt.engine.scan import plain
from gruckpt.measure.meter import Meter


@pytest.mark.parametrize('keep', ['hidden', 'gates'])
@pytest.mark.parametrize('V, D', [(5, 3), (2000, 32), (5000, 3)])
def test_bytes_are_what_is_measured(V, D, keep):
    for N in (1, 50, 300):
        o, x_ND, targets_N = HeadBytes(V, D, keep), torch.randn(N, D).requires_grad_(), torch.randint(V, (N,))
        weight, bias = torch.randn(V, D).requires_grad_(), torch.zeros(V).requires_grad_()
        with Meter() as meter:
            with Meter.phase('forward'): loss = head_loss(x_ND, targets_N, weight, bias, keep)
            with Meter.phase('backward'): loss.backward()
        assert meter.phases == {'forward': o.kept(N) + 4 + o.forward(N),
                                'backward': o.kept(N) + 2*4 + o.sums + N*D*4 + o.backward(N)}


def test_batch_and_time_side_by_side_are_refused():
    "Taken as rows they gave another number, without a word."
    x_BTD, targets_BT = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    weight, bias = torch.randn(5, 4), torch.randn(5)
    for x, targets in ((x_BTD, targets_BT), (x_BTD[0], targets_BT), (x_BTD[0], targets_BT[0, :2])):
        with pytest.raises(ValueError, match='flatten batch and time'): head_loss(x, targets, weight, bias)


def test_a_map_without_a_bias():
    x_ND, targets_N = torch.randn(6, 4, dtype=torch.double), torch.randint(5, (6,))
    weight = torch.randn(5, 4, dtype=torch.double, requires_grad=True)
    def grad(): return torch.autograd.grad(head_loss(x_ND, targets_N, weight, None), weight)[0]
    with plain(): oracle = grad()
    assert (grad() - oracle).norm() < 1e-10 * oracle.norm()
