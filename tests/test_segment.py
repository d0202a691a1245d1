"""What does not fit the page of `segment`: bigger grids, an independent reference, sizes of real models."""
import random
import subprocess
import sys
from functools import lru_cache
from math import comb, inf

import pytest

from gruckpt.plan.segment import Plan, cut_frontier, lower_bound, replay


def peak_by_counting(plan, state, step):
    "Peak bytes by walking through `replay` with two counters"
    n_states, n_records, peak = 1, 0, state
    for a in replay(plan):
        if a.kind == 'forward': n_states += 1
        elif a.kind == 'record': n_records = a.stop - a.start
        peak = max(peak, n_states*state + n_records*step)
        if a.kind == 'reverse': n_states, n_records = n_states - 1, 0
    assert n_states == n_records == 0
    return peak


def test_long_plans():
    rng = random.Random(0)
    for _ in range(300):
        n_steps = rng.randint(1, 5000)
        plan = Plan(n_steps, rng.randint(1, n_steps))
        state, step = rng.randint(1, 10**9), rng.randint(1, 10**10)
        assert plan.peak(state, step) == peak_by_counting(plan, state, step)
        work = list(replay(plan))
        assert sum(a.stop - a.start for a in work if a.kind != 'reverse') == n_steps + plan.n_extra
        reversed_steps = [t for a in work if a.kind == 'reverse' for t in range(a.stop - 1, a.start - 1, -1)]
        assert reversed_steps == list(range(n_steps - 1, -1, -1))


def test_split_has_the_shortest_segments():
    for n_steps in range(1, 60):
        for n_segments in range(1, n_steps + 1):
            plan = Plan.split(n_steps, n_segments)
            assert plan.n_segments <= n_segments
            if plan.seg_len > 1: assert Plan(n_steps, plan.seg_len - 1).n_segments > n_segments


def reference(n_steps, limit, state, step):
    "The recurrence as it is written on the page, top down, in bytes"
    @lru_cache(None)
    def least(n, m):
        if m < 0: return inf
        if n == 0: return 0
        cut = (j + least(n - j, m - state) + least(j, m) for j in range(1, n) if m >= state)
        return min(1 + least(n - 1, m - step), *cut, inf)
    return least(n_steps, limit - state) - n_steps


@pytest.mark.parametrize('state,step', [(1, 1), (1, 8), (2, 5), (6, 9), (128, 921)])
def test_lower_bound_is_the_recurrence(state, step):
    for n_steps in (1, 2, 3, 9, 16):
        need = min(n_steps, 2)*state + step
        full = state + n_steps*step
        for limit in {need, *range(need, full + state + 2, max(1, full//25))}:
            assert lower_bound(n_steps, limit, state, step) == reference(n_steps, limit, state, step)
        with pytest.raises(ValueError, match=f'at least {need} .*got {need - 1}'):
            lower_bound(n_steps, need - 1, state, step)


def test_lower_bound_against_revolve():
    for n_snapshots in (1, 2, 4, 9):
        for n_steps in range(2, 80):
            r = next(r for r in range(1, n_steps + 1) if comb(n_snapshots + r, r) >= n_steps)
            least = r*n_steps - comb(n_snapshots + r, r - 1)
            assert lower_bound(n_steps, n_snapshots + 1 + 1000, 1, 1000) == least


def test_lower_bound_is_below_uniform_cuts_and_falls():
    for n_steps in (1, 5, 24, 50, 97):
        for state, step in [(1, 1), (1, 3), (2, 7)]:
            for o in cut_frontier(n_steps, state, step):
                if o.peak >= min(n_steps, 2)*state + step:
                    assert lower_bound(n_steps, o.peak, state, step) <= o.n_extra
            need = min(n_steps, 2)*state + step
            extra = [lower_bound(n_steps, limit, state, step) for limit in range(need, need + 12*step, step)]
            assert extra == sorted(extra, reverse=True)


def test_lower_bound_on_long_chains():
    assert lower_bound(1500, 1500, 1, 1) == 2                    # record all but the first two steps
    assert lower_bound(100_000, 100_001, 1, 1) == 0
    row = 64*2048*3*4                                            # bytes of a state of three layers, batch 64
    assert lower_bound(512, 40*row, row, row) == lower_bound(512, 40, 1, 1)    # only the ratio counts


def test_no_torch():
    "Importing the module takes the standard library only"
    code = ('import sys, gruckpt.plan.segment\n'
            'names = {n.split(".")[0] for n in sys.modules} - {"gruckpt", "__main__"}\n'
            'known = set(sys.stdlib_module_names) | set(sys.argv[1:])\n'
            'print(sorted(names - known))')
    blank = 'import sys; print(*{n.split(".")[0] for n in sys.modules})'
    def run(*args):
        cmd = [sys.executable, '-c', *args]
        return subprocess.run(cmd, capture_output=True, text=True, check=True).stdout.strip()
    assert run(code, *run(blank).split()) == '[]'
