"""Schedules as functions of two counts: over grids, through files, and without torch."""
import json
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise, product

import pytest
import torch

from gruckpt.training.schedule import (Decay, clip_norm_for, data_gap, exponential_decay, inverse_sigmoid,
                                       linear_decay, read_curve)

KINDS = (linear_decay, {'step': 0.05}), (exponential_decay, {'rate': 0.9}), (inverse_sigmoid, {'k': 3.})
DECAYS = [f(**rate, floor=floor, start=start, per=per)
          for (f, rate), floor, start, per in product(KINDS, (0., 0.25), (1., 0.5), (None, 40))]

every_decay = pytest.mark.parametrize('decay', DECAYS, ids=str)


@every_decay
def test_shares_fall_and_stay_in_bounds(decay):
    "G14: at the start, in the middle, at the end and past it."
    times = [*range(30), 100, 10**4, 10**8, 10**12]
    shares = [decay(t, 0) if decay.per is None else decay(0, t) for t in times]
    assert all(a >= b for a, b in pairwise(shares)), 'monotone'
    assert all(decay.floor <= s <= decay.start for s in shares)
    assert shares[0] > shares[-1] == decay.floor, 'a decay that is asked for happens, by default too'
    assert all(0 <= s <= 1 and type(s) is float for s in shares)


@every_decay
def test_only_its_own_clock_counts(decay):
    "An epoch's schedule does not see updates, nor one of updates the epoch."
    fixed = {decay(3, n) for n in range(50)} if decay.per is None else {decay(e, 30) for e in range(50)}
    assert len(fixed) == 1


@every_decay
def test_survives_a_checkpoint(decay, tmp_path):
    "A file that torch reads with weights_only, and one of text."
    torch.save({'about': asdict(decay)}, tmp_path/'a.pt')
    assert Decay(**torch.load(tmp_path/'a.pt', weights_only=True)['about']) == decay
    assert Decay(**json.loads(json.dumps(asdict(decay)))) == decay


def test_each_of_them_is_another():
    assert len({*DECAYS}) == len(DECAYS)


def test_a_decay_of_updates_reaches_that_of_epochs():
    "500 updates an epoch: the two agree at every epoch's start, and one moves between them."
    per_epoch, per_update = linear_decay(), linear_decay(per=500)
    assert [per_epoch(e, 0) for e in range(25)] == [per_update(0, 500 * e) for e in range(25)]
    assert per_epoch(1, 750) == 0.95 and per_update(1, 750) == pytest.approx(0.925)


@pytest.mark.parametrize('wrong', [
    {'kind': 'step'}, {'rate': 1.5}, {'rate': -0.1}, {'rate': True}, {'rate': '1'}, {'rate': float('nan')},
    {'start': -0.1}, {'start': 2.}, {'floor': -1.}, {'floor': 1.1}, {'floor': None}, {'per': 0},
    {'per': 2.5}])
def test_a_wrong_field_is_named(wrong):
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f'^{name} must be .* got {value!r}$'):
        Decay(**{'kind': 'linear', 'rate': 0.05, **wrong})


def test_thresholds_scale_both_ways():
    assert clip_norm_for(1_200_000) == 0.5
    assert clip_norm_for(100, ref_params=400, ref_clip=2.) == 1.
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match='n_params'): clip_norm_for(wrong)
    with pytest.raises(ValueError, match='ref_clip'): clip_norm_for(1, ref_clip=0.)


def test_gap_closes_exactly_at_the_advised_amount():
    assert [data_gap(10, n).n_missing for n in (199, 200, 201)] == [1, 0, 0]
    assert 'at least the 20' in str(data_gap(10, 200)) and '2 times as many' in str(data_gap(10, 100))
    assert data_gap(10, 100, epochs=2.5).n_read == 250
    with pytest.raises(ValueError, match='epochs must be'): data_gap(10, 100, epochs=0)


@pytest.mark.parametrize('scores, verdict', [
    ([], 'open'), ([1., 2.], 'open'), ([float('inf')] * 5, 'open'),
    ([3., 2., 2.5, 3., 3.5], 'data'), ([2., 3., 4.], 'data'),        # worse from the second on
    ([3., 2.5, 2., 1.5, 1.], 'open'), ([2., 1., 1.], 'capacity'), ([1., 1., 1.], 'capacity'),
    ([3., 2., 1., 1.2], 'open')])
def test_curves(scores, verdict):
    assert read_curve(scores)[0] == verdict
    assert read_curve([-o for o in scores], lower_is_better=False)[0] == verdict


def test_tolerance_decides_what_a_fall_is():
    assert [read_curve([1., 1.01, 1.01, 1.01], tolerance=t)[0] for t in (0.02, 0.005)] == ['capacity', 'data']


def test_needs_no_torch():
    "Numbers only: a process that imports the module has not imported torch."
    code = 'import sys, gruckpt.training.schedule; sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], timeout=60).returncode == 0
