"""head beyond its page: its bytes at many forms."""
import pytest
import torch
import torch.nn.functional as F

from gruckpt.engine.head import HeadBytes, head_loss
from gruckpt.engine.scan import plain, scan_segments
from gruckpt.measure.meter import Meter
from gruckpt.plan.segment import Plan


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


@pytest.mark.parametrize('keep', ['hidden', 'gates'])
@pytest.mark.parametrize('ignored', [-100, 0, 3])
def test_ignored_rows_add_nothing_in_segments_too(keep, ignored):
    "Also where a symbol of the vocabulary is left out, and where all rows of a segment are."
    x_ND, targets_N = torch.randn(12, 4, dtype=torch.double), torch.randint(5, (12,))
    targets_N[4:8] = ignored
    weight = torch.randn(5, 4, dtype=torch.double, requires_grad=True)
    counted = targets_N != ignored
    oracle = F.cross_entropy(x_ND[counted] @ weight.T, targets_N[counted], reduction='sum')
    def step(xs, h): return head_loss(*xs, weight, None, keep, ignore_index=ignored), h
    losses, _ = scan_segments(step, (x_ND, targets_N), None, Plan.split(12, 3))
    assert (sum(losses) - oracle).abs() < 1e-10 * oracle.abs()
    found, expected = (torch.autograd.grad(o, weight)[0] for o in (sum(losses), oracle))
    assert (found - expected).norm() < 1e-10 * expected.norm()
    with plain():
        same = head_loss(x_ND, targets_N, weight, None, ignore_index=ignored)
    assert (same - oracle).abs() < 1e-10 * oracle.abs()


@pytest.mark.parametrize('wrong', [-100, -1, 5])
def test_a_target_that_is_no_symbol_is_refused_with_and_without_the_node(wrong):
    "torch's `cross_entropy` leaves -100 out unasked, and so did the plain way."
    x_ND, targets_N, weight = torch.randn(6, 4), torch.randint(5, (6,)), torch.randn(5, 4)
    targets_N[2] = wrong
    said = r'^targets_N must be symbols in 0\.\.4, or ignore_index; [^\n]*$'
    for keep in 'hidden', 'gates':
        with pytest.raises(ValueError, match=said):
            head_loss(x_ND, targets_N, weight.requires_grad_(), None, keep)
    with plain(), pytest.raises(ValueError, match=said):
        head_loss(x_ND, targets_N, weight, None)
