"""What decides the speed on a GPU and can be counted without one: launches, waits, masks, constants."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gruckpt.charlm import model as charlm
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.charlm.text import Batch
from gruckpt.engine import layer
from gruckpt.engine.layer import MASKS, DropoutMask, mask_launches, philox
from gruckpt.engine.recurrent import GRU
from gruckpt.measure.meter import Launches
from gruckpt.plan.budget import estimate
from gruckpt.plan.segment import Plan, constants_of
from gruckpt.tft.model import TFT, TFTSpec, Tier
from gruckpt.tft.tiers import empty_batch, tier_ledger
from gruckpt.tft.vsn import default_group_len
from gruckpt.training.optimizer_step import OPTIMIZERS, update
from gruckpt.training.trainer import no_room

ROOT = Path(__file__).parent.parent
SEEDS = '_dropout_seed', '_drawn_seed', '_drops'      # one number of the processor's own generator


def one_kernel(mask, t, out): return out.fill_(1)


@pytest.fixture
def drawn_by_a_kernel(monkeypatch): monkeypatch.setitem(MASKS, 'cpu', one_kernel)


def counted(fn) -> Launches:
    with Launches() as count: fn()
    return count


# ---- masks ----

def test_masks_take_the_launches_that_are_said(monkeypatch):
    monkeypatch.setattr(layer, '_at_hand', lambda t: False)   # torch's way, as on a GPU without a kernel
    out = torch.empty(4, 3, 16)
    assert counted(lambda: DropoutMask(.3, 1, 2, 0).scale(0, out)).n == mask_launches('cpu') == 82
    by_torch = out.clone()
    monkeypatch.undo()
    assert torch.equal(DropoutMask(.3, 1, 2, 0).scale(0, out), by_torch)
    monkeypatch.setitem(MASKS, 'cpu', one_kernel)
    assert counted(lambda: DropoutMask(.3, 1, 2, 0).scale(0, out)).n == mask_launches('cpu') == 1


@pytest.mark.parametrize('runs, wanted', [(True, (0, 1)), (False, (3072, 82))])
def test_what_masks_take_on_cuda_does_not_depend_on_what_was_imported(runs, wanted):
    code = (f'import gruckpt.engine.layer as layer; layer.triton_runs = lambda: {runs}\n'
            'def count(): return layer.mask_scratch(4, 8, 16, "cuda"), layer.mask_launches("cuda")\n'
            'before = count()\nimport gruckpt.engine.triton\nprint(before == count(), before)')
    run = subprocess.run([sys.executable, '-c', code], text=True, capture_output=True, cwd=ROOT)
    assert run.stdout.strip() == f'True {wanted}', run.stderr


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masks_are_the_same_in_every_dtype(dtype):
    mask = DropoutMask(.25, 2**61 + 7, 1, 9)
    kept = mask.scale(0, torch.empty(5, 2, 33, dtype=torch.float64)) > 0
    assert torch.equal(mask.scale(0, torch.empty(5, 2, 33, dtype=dtype)) > 0, kept)


def test_words_look_random():
    lanes = torch.zeros(3, 2, 50_000, dtype=torch.int64)
    lanes[0, 0] = torch.arange(50_000)
    bits = philox(lanes, seed=3)[..., None] >> torch.arange(32) & 1
    assert (bits.double().mean(-2) - .5).abs().max() < .012           # five standard deviations
    p, n = 1e-4, 4_000_000                                            # 16 bits would make it 9.2e-5
    dropped = DropoutMask(p, 5, 1, 0).scale(0, torch.empty(1, 1000, n // 1000)) == 0
    assert abs(dropped.sum().item() - p * n) < 4 * (p * n)**.5


# ---- launches ----

FORMS = {'after': (5, 4), 'before': (6, 7)}

@pytest.mark.parametrize('reset', FORMS)
@pytest.mark.parametrize('norm', [None, 'state'])
def test_launches_a_step_and_layer(reset, norm):
    def launches(T, **more):
        rnn, x = GRU(8, 8, 2, reset=reset, norm=norm, **more), torch.randn(T, 16, 8)
        outs = []
        there = counted(lambda: outs.append(rnn(x)[0])).n
        return there, counted(lambda: outs[0].backward(torch.ones_like(outs[0]))).n
    (a, b), (c, d) = launches(8), launches(24)
    more = (6, 6) if norm else (0, 0)
    assert ((c - a) / 32, (d - b) / 32) == tuple(n + m for n, m in zip(FORMS[reset], more))


def test_a_chunk_on_cuda_has_64_steps():
    def launches(T):
        rnn, x = GRU(8, 8), torch.randn(T, 128, 8)
        return counted(lambda: rnn(x)[0].sum().backward()).n
    a_processors = launches(128) - launches(64)
    with constants_of('cuda'): a_gpus = launches(128) - launches(64)
    assert a_processors == 64 * 9 + 16 * 29 and a_gpus == 64 * 9 + 29    # 4 steps a chunk, or 64


def v3a(T, K, batch=128):
    "Launches of a step of the source's model, narrow: width changes none of them"
    model = GRULM(GRUSpec(84, 16, 3, norm='state', reset='before'))
    ids = torch.randint(84, (batch, T + 1))
    optimizer = OPTIMIZERS['adamw'](model.parameters(), lr=1e-3)
    def step():
        loss, _ = model.loss(Batch(ids[:, :-1], ids[:, 1:], True), plan=Plan.split(T, K))
        loss.backward()
        update(optimizer, loss.detach(), 1e-3)
    return counted(step).n


def test_launches_of_v3a():
    "512 steps in 16 segments, from fewer: what a segment of 32 steps adds, times the segments"
    def of_512(): return v3a(64, 2) + 14 * (v3a(96, 3) - v3a(64, 2))
    before = of_512()
    with constants_of('cuda'): after = of_512()
    assert (before, after) == (71_532, 58_417)


# ---- waits ----

@pytest.mark.parametrize('p', [1., .5])
def test_a_step_of_the_lm_waits_for_nothing_but_the_record(monkeypatch, p):
    monkeypatch.setattr(charlm, '_check_ids', lambda *a: None)        # looks at ids of a processor only
    model = GRULM(GRUSpec(84, 16, 3, norm='state', reset='before', dropout=.1))
    ids = torch.randint(84, (4, 33))
    optimizer = OPTIMIZERS['adamw'](model.parameters(), lr=1e-3)
    def step():
        loss, _ = model.loss(Batch(ids[:, :-1], ids[:, 1:], True), plan=Plan.split(32, 4), teacher_forcing=p)
        loss.backward()
        update(optimizer, loss.detach(), 1e-3, 1.)
    step()
    waits = {k: n for k, n in counted(step).waits.items() if not k[1].endswith(SEEDS)}
    assert waits in ({}, {('_local_scalar_dense', 'optimizer_step.py _read'): 2})


SMALL = TFTSpec(static=2, observed=5, known=3, hidden=16, lookback=6, horizon=3)

def tft_step(spec, batch, tier):
    model, windows = TFT(spec), empty_batch(spec, batch, device='cpu')
    optimizer = OPTIMIZERS['adamw'](model.parameters(), lr=1e-3)
    def step():
        loss, _ = model.loss(windows, plan=tier)
        loss.backward()
        update(optimizer, loss.detach(), 1e-3, 1.)
    return step


@pytest.mark.parametrize('tier', [Tier.off, Tier.full])
def test_a_step_of_the_tft_waits_for_nothing_but_the_record(tier):
    step = tft_step(SMALL, 4, tier)
    step()
    waits = {k: n for k, n in counted(step).waits.items() if not k[1].endswith(SEEDS)}
    assert waits in ({}, {('_local_scalar_dense', 'optimizer_step.py _read'): 2})


def test_launches_of_a_tft_with_225_columns(drawn_by_a_kernel):
    "Width and batch change the number of groups alone: 16 wide, 2 windows, in groups as of 128 and 64"
    assert default_group_len(64 * 50, 128, 'cuda') == 163                 # of 221 past columns: two groups
    assert default_group_len(64 * 50, 128) == 2                           # a processor's: 111
    spec = TFTSpec(static=5, observed=210, known=10, hidden=16, lookback=50, horizon=10)
    def launches(tier):
        step = tft_step(spec, 2, tier)
        step()
        return counted(step).n
    with constants_of('cuda'): assert launches(Tier(n_groups=2)) == 1_929
    assert launches(Tier(n_groups=111)) == 8_669


def test_libraries_that_find_no_room_say_so_in_words():
    assert no_room(torch.OutOfMemoryError('CUDA out of memory'))
    assert no_room(RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED'))
    assert no_room(RuntimeError('cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED'))
    assert no_room(RuntimeError('CUDA error: out of memory'))
    assert no_room(RuntimeError('Triton Error [CUDA]: out of memory'))
    assert no_room(RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`'))
    assert not no_room(RuntimeError('CUDA error: an illegal memory access was encountered'))


def test_the_check_of_a_gpu_runs_on_a_processor(tmp_path):
    run = subprocess.run(['tools/gpu_check.sh', '--device', 'cpu', '--tiny', '--out', tmp_path], text=True,
                         cwd=ROOT, env=os.environ | {'PYTHON': sys.executable}, capture_output=True)
    assert run.returncode == 0, run.stdout + run.stderr
    parts = json.loads((tmp_path/'gpu_check.json').read_text())
    assert list(parts) == ['facts', 'gradients', 'masks', 'waits', 'bytes', 'speed', 'v3a', 'tft', 'full']
    assert not [r for part in parts.values() for r in part['lines'] if r['ok'] is False]
    table = (tmp_path/'gpu_check.md').read_text()
    assert table.count('| right |') == sum(r['ok'] is True for p in parts.values() for r in p['lines']) > 30


@pytest.mark.parametrize('capability, mib', [((7, 5), 8.125), ((8, 9), 8.125), ((9, 0), 32), ((12, 0), 32)])
def test_workspace_by_capability(monkeypatch, capability, mib):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda: capability)
    beside = estimate(GRUSpec(50, 8, norm='state'), 2, Plan(8, 2), device='cuda').beside
    assert beside['library workspace'] == mib * 2**20


def test_a_tier_is_predicted_with_the_constants_and_the_autocast_of_its_device():
    spec = TFTSpec(static=2, observed=40, known=3, hidden=16, lookback=20, horizon=4)
    def peak(precision, device):
        return tier_ledger(spec, 64, Tier.vsn, precision=precision, device=device).peak
    narrow, wide = (peak('bfloat16', device) for device in ('cpu', 'cuda'))
    assert wide > narrow                                         # norms and softmaxes stay in float32
    here, there = peak('float32', 'cpu'), peak('float32', 'cuda')
    assert there > 1.3 * here                                    # one group of all variables, not of 25
