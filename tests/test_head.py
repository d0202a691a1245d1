"""head beyond its page: its bytes at many forms."""
import pytest
import torch

from gruckpt.engine.head import HeadBytes, head_loss
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
