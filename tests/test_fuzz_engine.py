"""A fixed 150 of the compositions of `fuzz_engine`: hooks, checkpoints, derived weights, threads"""
import time

import pytest

dist = pytest.importorskip('torch.distributed')
from fuzz_engine import WAYS, case_of, difference, joined  # noqa: E402


@pytest.fixture(autouse=True, scope='module')
def no_group_stays():
    yield
    time.sleep(.1)                                          # as `processes.group_of_one`
    if dist.is_initialized(): dist.destroy_process_group()
    joined.cache_clear()


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('block', range(10))
def test_compositions(block):
    "Fifteen a block: in float64 at 1e-10, in bf16 as near as plain() is"
    for seed in range(15 * block, 15 * block + 15):
        c, far, allowed = difference(seed)
        assert far <= allowed, (far, c)

def test_the_fixed_ones_hold_every_way():
    "Each way in both precisions, cut and uncut, packed, reversed, of two layers"
    cases = [case_of(seed) for seed in range(150)]
    assert {c.way for c in cases} == set(WAYS) and cases == [case_of(seed) for seed in range(150)]
    assert {(c.bf16, c.way) for c in cases} == {(b, way) for b in (False, True) for way in WAYS}
    for name in ('packed', 'bidirectional'): assert {getattr(c, name) for c in cases} == {False, True}
