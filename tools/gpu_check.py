"""What gruckpt says of a GPU, checked on one, correctness first: one JSON file and one Markdown table.

    tools/gpu_check.sh                        # on the first CUDA device, at most ten minutes
    tools/gpu_check.sh --device cpu --tiny    # the script itself, in a minute
    tools/gpu_check.sh --only gradients bytes --out somewhere

Each part runs in a process of its own, and is stopped when its time is over; the others go on. Exit status 1
if a part found a wrong number, was stopped or broke. A line is `wrong` only where right and wrong are known;
times and rates are told, not judged.
"""
import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import traceback
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  once, not in every part
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import gruckpt
from gruckpt import plain
from gruckpt.bench.rnn import bench_rnn
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.charlm.text import Batch, TokenStream
from gruckpt.engine.cells import FUSED, PAGES, backend_for, triton_runs
from gruckpt.engine.layer import DropoutMask, mask_launches
from gruckpt.engine.recurrent import GRU, LSTM, use_backend
from gruckpt.measure.meter import Launches, Meter, human
from gruckpt.plan.budget import RATES, Rates, estimate
from gruckpt.plan.segment import Plan
from gruckpt.tft.model import TFT, TFTSpec, Tier
from gruckpt.tft.tiers import empty_batch, tier_ledger
from gruckpt.training.config import TrainConfig
from gruckpt.training.optimizer_step import OPTIMIZERS, update
from gruckpt.training.trainer import Trainer

SECONDS = {'facts': 45, 'gradients': 150, 'masks': 15, 'waits': 60, 'bytes': 90, 'speed': 90, 'v3a': 60,
           'tft': 60, 'full': 30}       # together ten minutes


def row(what, found, wanted='', ok=None):
    "A line of the table; `ok` is None where nothing is right or wrong"
    return dict(what=what, found=found, wanted=wanted, ok=None if ok is None else bool(ok))


def wait(o):
    if o.device == 'cuda': torch.cuda.synchronize()


def best(o, fn, n=3):
    "Seconds of the fastest of n calls, after one to warm up"
    times = []
    for _ in range(n + 1):
        wait(o)
        start = time.perf_counter()
        fn()
        wait(o)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def same_tf32():
    "float32 in products is float32, in cuDNN too"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


# ---- facts ----

def facts(o):
    "Versions, the card, what a process takes, rates on random numbers, cost of a launch"
    versions = gruckpt.__version__, torch.__version__, platform.python_version()
    yield row('gruckpt, torch, python', ', '.join(versions))
    if o.device == 'cuda':
        free, total = torch.cuda.mem_get_info()
        yield row('card', torch.cuda.get_device_name(), f'capability {torch.cuda.get_device_capability()}')
        yield row('cuda, cudnn', f'{torch.version.cuda}, {torch.backends.cudnn.version()}')
        yield row('bytes free of all', f'{human(free)} of {human(total)}')
        before = torch.cuda.memory_allocated()
        a = torch.ones(64, 64, device='cuda')
        torch.mm(a, a)
        yield row('workspace of cuBLAS', human(torch.cuda.memory_allocated() - before - a.nbytes))
    n = 128 if o.tiny else 8192
    for dtype in (torch.float32,) if o.device == 'cpu' else (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, n, n, device=o.device).to(dtype).unbind()
        out = torch.empty_like(a)
        rate = 2 * n**3 / best(o, partial(torch.mm, a, b, out=out))
        yield row(f'matmul of {n}, {dtype}', f'{rate / 1e12:.2f} TFLOP/s')
    small = torch.zeros(64, device=o.device)
    def launches():
        for _ in range(1000): small.add_(1)
    yield row('a small kernel', f'{best(o, launches) * 1e3:.2f} µs')
    if not o.tiny: yield row('rates measured', str(Rates.measured(128, 512, o.device)), str(RATES[o.device]))


# ---- gradients ----

def grads(rnn, x, **more):
    "Output and gradients of a layer, flat, in float64 on the processor"
    rnn.zero_grad()
    x = x.detach().requires_grad_()
    out = rnn(x, **more)[0]
    weights = torch.linspace(-1, 1, out.numel(), device=x.device).view(out.shape)
    (out.double() * weights).sum().backward()
    found = out, x.grad, *[p.grad for p in rnn.parameters()]
    return torch.cat([t.detach().double().flatten().cpu() for t in found])


def apart(found, oracle): return float((found - oracle).norm() / oracle.norm())


def names_of(cell, device):
    "Backends that can run a cell here"
    kernels = device == 'cuda' and triton_runs()
    others = [name for name in PAGES if kernels or 'triton' not in name]
    return ['eager', *['torch'] * (cell.form in FUSED), *others]


def worst(rnn, x, oracle, **more):
    "How far from the oracle, at most: a size is run, then recorded, then replayed"
    times = 3 if 'graph' in backend_for(rnn.cell, x.device.type, rnn.backend).name else 1
    return max(apart(grads(rnn, x, **more), oracle) for _ in range(times))


def gradients(o):
    "Every backend against torch's own layer, and GRU-L3 against a plain loop"
    same_tf32()
    T, B, D = (12, 3, 8) if o.tiny else (96, 32, 128)
    for kind, theirs in (('GRU', nn.GRU), ('LSTM', nn.LSTM)):
        for way, options in {'': {}, ' bidirectional': dict(bidirectional=True)}.items():
            torch.manual_seed(0)
            wide, x = theirs(D, D, 2, **options).double(), torch.randn(T, B, D, dtype=torch.float64)
            oracle = grads(wide, x)
            of_theirs = partial(apart_of, o, theirs, wide, x, options, oracle)
            for name in names_of(getattr(gruckpt, kind)(2, 2).cell, o.device):
                keeps = ('hidden', 'gates') if name == 'torch' else ('hidden',)
                for cut, keep in product((None, T // 4), keeps):
                    made = partial(getattr(gruckpt, kind), seg_len=cut, keep=keep)
                    for dtype, eps in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, None)):
                        found = apart_of(o, made, wide, x, options, oracle, dtype, name)
                        limit = eps or 1.5 * of_theirs(dtype) + 1e-3
                        what = f'{kind}{way} {name} {keep}{" cut" if cut else ""} {str(dtype)[6:]}'
                        yield row(what, f'{found:.1e}', f'< {limit:.0e}', found < limit)
    yield from against_plain(o, T, B, D)
    yield from changing(o, T, B, D)
    if o.device == 'cuda' and torch.cuda.device_count() > 1: yield elsewhere(o, T, B, D)
    yield packed(o, T, B, D)
    if not o.tiny: yield long(o)


def apart_of(o, make, like, x, options, oracle, dtype, backend=None):
    "How far a layer with these weights is from the oracle"
    rnn = make(like.input_size, like.hidden_size, like.num_layers, **options).to(o.device, dtype)
    rnn.load_state_dict(like.state_dict())
    if backend is None: return apart(grads(rnn, x.to(o.device, dtype)), oracle)
    use_backend(rnn, backend)
    return worst(rnn, x.to(o.device, dtype), oracle)


def against_plain(o, T, B, D):
    torch.manual_seed(0)
    x = torch.randn(T, B, D, dtype=torch.float64, device=o.device)
    rnn = GRU(D, D, 3, norm='state', reset='before', dropout=.1, seg_len=T // 4, device=o.device).double()
    with plain(): oracle = grads(rnn, x, seed=5)
    for name in names_of(rnn.cell, o.device):
        use_backend(rnn, name)
        found = worst(rnn, x, oracle, seed=5)
        yield row(f'GRU-L3 with dropout {name} cut', f'{found:.1e}', '< 1e-10', found < 1e-10)


def changing(o, T, B, D):
    "Lengths and batches in turn, so that recordings come and go, and weights that an update writes"
    torch.manual_seed(0)
    rnn, most = GRU(D, D, 2, norm='state', reset='before', chunk_len=T // 3, device=o.device).double(), 0.
    for turn in range(36):
        n, rows = T - turn * 5 % 9, 1 + turn % 7
        x = torch.randn(n, rows, D, dtype=torch.float64, device=o.device)
        with plain(): oracle = grads(rnn, x)
        most = max(most, apart(grads(rnn, x), oracle))
        with torch.no_grad():
            for p in rnn.parameters(): p.mul_(.99)
    yield row("GRU-L3 'auto', sizes in turn", f'{most:.1e}', '< 1e-10', most < 1e-10)


def elsewhere(o, T, B, D):
    "On a second device, while the first is the current one"
    torch.manual_seed(0)
    x = torch.randn(T, B, D, dtype=torch.float64, device='cuda:1')
    rnn = GRU(D, D, 2, norm='state', reset='before', dropout=.1, seg_len=T // 4, device='cuda:1').double()
    with plain(): oracle = grads(rnn, x, seed=5)
    found = worst(rnn, x, oracle, seed=5)
    return row('GRU-L3 on cuda:1', f'{found:.1e}', '< 1e-10', found < 1e-10)


def packed(o, T, B, D):
    torch.manual_seed(0)
    x, lens = torch.randn(T, B, D, dtype=torch.float64), torch.randint(1, T + 1, (B,))
    theirs = nn.LSTM(D, D).double()
    def of(rnn, device):
        out = rnn(pack_padded_sequence(x.to(device), lens, enforce_sorted=False))[0].data
        found = torch.autograd.grad(out.square().sum(), list(rnn.parameters()))
        return torch.cat([g.flatten().cpu() for g in found])
    ours = LSTM(D, D, seg_len=T // 4).double()
    ours.load_state_dict(theirs.state_dict())
    found = apart(of(ours.to(o.device), o.device), of(theirs, 'cpu'))
    return row('LSTM packed, cut', f'{found:.1e}', '< 1e-10', found < 1e-10)


def long(o):
    "More steps than cuDNN takes in one call"
    rnn, x = GRU(4, 4, seg_len=4096, device=o.device), torch.randn(70_000, 2, 4, device=o.device)
    rnn(x)[0].sum().backward()
    good = all(p.grad.isfinite().all().item() for p in rnn.parameters())
    return row('GRU of 70,000 steps, cut', 'gradients finite' if good else 'not finite', 'finite', good)


# ---- masks, waits ----

def masks(o):
    "The same bits as on a processor"
    for p, shape in ((.1, (4, 3, 40)), (.5, (2, 5, 19)), (1 / 3, (1, 700, 64))):
        mask = DropoutMask(p, 2**61 + 3, 2, 7)
        here = mask.scale(1, torch.empty(shape, device=o.device)).cpu()
        good = torch.equal(here, mask.scale(1, torch.empty(shape)))
        yield row(f'mask p={p:.2f} {shape}', 'equal' if good else 'differ', 'equal', good)
    yield row('kernels that draw a mask', str(mask_launches(o.device)))


def lm(o, spec, batch, n_steps, n_segments, dtype=torch.float32):
    "What a step of the language model holds, the optimizer, and the step without its update"
    torch.manual_seed(0)
    model = GRULM(spec).to(o.device, dtype)
    batch = Batch(*[torch.randint(spec.vocab_size, (batch, n_steps)).to(o.device) for _ in range(2)], True)
    optimizer, plan = OPTIMIZERS['adamw'](model.parameters(), lr=1e-3), Plan.split(n_steps, n_segments)
    def step():
        loss, _ = model.loss(batch, plan=plan)
        loss.backward()
        return loss.detach()
    return (model, optimizer, batch), optimizer, step


def tft(o, spec, batch, tier):
    torch.manual_seed(0)
    model, windows = TFT(spec).to(o.device), empty_batch(spec, batch, device=o.device)
    optimizer = OPTIMIZERS['adamw'](model.parameters(), lr=1e-3)
    def step():
        loss, _ = model.loss(windows, plan=tier)
        loss.backward()
        return loss.detach()
    return (model, optimizer, windows), optimizer, step


def warmed_up(optimizer, step):
    "Two steps: what a first one runs a second one records"
    for _ in range(2):
        update(optimizer, step(), 1e-3)
        optimizer.zero_grad()


def waits(o):
    "Does a step wait for the device before the record is read? On CUDA torch raises where it does"
    spec = TFTSpec(static=2, observed=5, known=3, hidden=16, lookback=6, horizon=3)
    made = {'LM': lm(o, GRUSpec(84, 16, 3, .1, 'state', 'before'), 4, 32, 4),
            'TFT off': tft(o, spec, 4, Tier.off), 'TFT full': tft(o, spec, 4, Tier.full)}
    for name, (_, optimizer, step) in made.items():
        warmed_up(optimizer, step)
        if o.device == 'cuda': torch.cuda.set_sync_debug_mode('error')
        try:
            step()
            found = 'no wait'
        except RuntimeError as error: found = f'{error}'[:200]
        finally:
            if o.device == 'cuda': torch.cuda.set_sync_debug_mode('default')
        yield row(f'{name}: forward and backward', found, 'no wait', found == 'no wait')
        optimizer.zero_grad()
        with Launches() as count: update(optimizer, step(), 1e-3)
        yield row(f'{name}: launches of a step', f'{count.n:,}')


# ---- bytes ----

def metered(o, held, step, optimizer):
    "Peak of a third step: (requested, allocated, reserved); on a processor the same three times"
    warmed_up(optimizer, step)
    wait(o)
    if o.device == 'cuda':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        update(optimizer, step(), 1e-3)
        stats = torch.cuda.memory_stats()
        return [stats[f'{kind}_bytes.all.peak'] for kind in ('requested', 'allocated', 'reserved')]
    with Meter(*held) as meter: update(optimizer, step(), 1e-3)
    return [meter.peak] * 3


def bytes_of(o):
    "Predicted peaks against what was asked for, given out and reserved"
    B, T = (4, 16) if o.tiny else (64, 256)
    large = (256, 16, 'state'), (512, 1, None), (512, 8, 'output')
    for D, K, norm in ((16, 4, 'state'), (32, 1, None)) if o.tiny else large:
        spec = GRUSpec(84, D, 3, 0., norm)
        held, optimizer, step = lm(o, spec, B, T, K)
        found = metered(o, held, step, optimizer)
        ledger = estimate(spec, B, Plan.split(T, K), device=o.device, carried=False)
        yield told(o, f'LM D={D} K={K} norm={norm}', ledger.peak, found)
    spec = TFTSpec(static=2, observed=20, known=3, hidden=16 if o.tiny else 64, lookback=12, horizon=4)
    for tier in Tier.off, Tier.full:
        held, optimizer, step = tft(o, spec, 4 if o.tiny else 32, tier)
        found = metered(o, held, step, optimizer)
        ledger = tier_ledger(spec, 4 if o.tiny else 32, tier, device=o.device)
        yield told(o, f'TFT {tier}', ledger.peak, found)


def told(o, what, predicted, found):
    "To the byte on a processor; on a GPU torch's libraries take their own: within five percent and 48 MiB"
    requested, slack = found[0], .05 * predicted + 48 * 2**20 if o.device == 'cuda' else 0
    return row(f'{what}: predicted {human(int(predicted))}', ' / '.join(map(human, found)),
               'requested / allocated / reserved', abs(requested - predicted) <= slack)


# ---- speed ----

def speed(o):
    "Layers against torch's own, in turn"
    size = dict(batch=4, n_steps=16, hidden=16, n_layers=2, n_segments=4, repeats=1) if o.tiny else \
        dict(batch=64, n_steps=256, hidden=512, n_layers=3, n_segments=16, repeats=10)
    if not o.tiny: same_tf32()
    for dtype in ('float32',) if o.device == 'cpu' else ('float32', 'bfloat16'):
        table = bench_rnn(**size, dtype=dtype, device=o.device, naive=False, jax=False)
        for r in table.frame().itertuples():
            yield row(f'{dtype} {r.row}', f'{r.ms:.1f} ms, {r.ratio:.2f} of nn.GRU',
                      f'{human(int(r.peak_bytes))}, {r.launches:,} launches')


def whole(optimizer, step):
    "A step with its update"
    optimizer.zero_grad()
    update(optimizer, step(), 1e-3)


def v3a(o):
    "Tokens a second of the source's model, GRU-L3"
    B, T, D, K = (2, 16, 16, 4) if o.tiny else (128, 512, 2048, 16)
    spec = GRUSpec(84, D, 3, norm='state', reset='before')
    for dtype in (torch.float32,) if o.tiny else (torch.bfloat16, torch.float32):
        _, optimizer, step = lm(o, spec, B, T, K, dtype)
        seconds = best(o, partial(whole, optimizer, step), 2)
        flops = spec.work(B, Plan.split(T, K), dtype.itemsize, dtype.itemsize, (), o.device)
        total = flops.flops + flops.step_flops
        yield row(f'V3a B={B} T={T} D={D} K={K} {str(dtype)[6:]}', f'{B*T/seconds:,.0f} tokens/s',
                  f'{total/seconds/1e12:.2f} TFLOP/s in products, {flops.launches:,} launches counted')


def tft_225(o):
    "Seconds a step on 225 columns"
    wide = dict(hidden=8, lookback=4, horizon=2) if o.tiny else dict(hidden=128, lookback=50, horizon=10)
    spec = TFTSpec(static=5, observed=210, known=10, **wide)
    for batch in (2,) if o.tiny else (64, 256):
        for tier in (Tier.off, Tier.vsn) if not o.tiny else (Tier.vsn,):
            _, optimizer, step = tft(o, spec, batch, tier)
            try: seconds = best(o, partial(whole, optimizer, step), 2)
            except torch.OutOfMemoryError: yield row(f'TFT-225 B={batch} {tier}', 'no room')
            else: yield row(f'TFT-225 B={batch} {tier}', f'{seconds*1e3:.0f} ms')


# ---- a full device ----

def full(o):
    "A step that finds no room goes on under a smaller plan"
    spec, (B, T), asked = GRUSpec(84, 16 if o.tiny else 512, 2), (4, 32) if o.tiny else (64, 512), []
    model = GRULM(spec).to(o.device)
    def replan(plan):
        asked.append(plan)
        if o.device == 'cuda': torch.cuda.set_per_process_memory_fraction(1.)
        return Plan.split(T, 8), None
    stream = TokenStream(torch.randint(84, (3 * B * T + 1,)), B, T)
    trainer = Trainer(model, stream, TrainConfig(max_steps=2), Plan(T, T), replan=replan)
    usual = model.loss
    if o.device == 'cuda':
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(max(2**28, torch.cuda.memory_reserved() + 2**27) / total)
    else:
        def loss(batch, state=None, *, plan=None):
            if not asked: raise RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED')   # its words
            return usual(batch, state, plan=plan)
        model.loss = loss
    done = list(trainer.steps())
    yield row('a full device', f'{len(asked)} new plan, {len(done)} steps', '1 new plan, 2 steps',
              len(asked) == 1 and len(done) == 2)


PARTS = {'facts': facts, 'gradients': gradients, 'masks': masks, 'waits': waits, 'bytes': bytes_of,
         'speed': speed, 'v3a': v3a, 'tft': tft_225, 'full': full}


def run(name, o, path):
    "Run a part in this process; its lines go into a file as they come"
    with open(path, 'w') as f:
        def put(line):
            f.write(json.dumps(line) + '\n')
            f.flush()
        try:
            for line in PARTS[name](o): put(line)
        except Exception as error:
            put(row('broke', f'{type(error).__name__}: {error}'.splitlines()[0][:300], ok=False))
            traceback.print_exc()


def told_of(name, o, folder):
    "(lines of a part, seconds it took); one that is stopped ends in a line that says so"
    start, path, limit = time.perf_counter(), folder/f'{name}.jsonl', SECONDS[name]
    process = multiprocessing.get_context('fork').Process(target=run, args=(name, o, path))    # CUDA's too
    process.start()
    process.join(limit)
    stopped = process.is_alive()
    if stopped:
        process.kill()
        process.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if stopped: lines.append(row('stopped', f'after {limit} s', ok=False))
    elif process.exitcode: lines.append(row('broke', f'exit status {process.exitcode}', ok=False))
    return lines, time.perf_counter() - start


def table_of(found):
    "The Markdown table"
    mark = {None: '', True: 'right', False: '**wrong**'}
    lines = ['| part | what | found | wanted | |', '|:--|:--|:--|:--|:--|']
    for name, (rows, seconds) in found.items():
        lines += [f'| {name} | {r["what"]} | {r["found"]} | {r["wanted"]} | {mark[r["ok"]]} |' for r in rows]
        lines.append(f'| {name} | took | {seconds:.0f} s | | |')
    return '\n'.join(lines) + '\n'


def asked(args):
    about = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    about.add_argument('--tiny', action='store_true', help='sizes that take a second')
    about.add_argument('--only', nargs='+', choices=PARTS, default=list(PARTS), help='these parts')
    about.add_argument('--out', type=Path, default=Path('gpu_check'), help='folder of gpu_check.json and .md')
    return about.parse_args(args)


def main(args=None):
    o, found = asked(args), {}
    os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'    # who asks must not start CUDA before the fork
    if o.device == 'cuda' and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --device cpu --tiny tries the script itself")
        return 2
    o.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in o.only:
            found[name] = told_of(name, o, Path(folder))
            wrong = sum(r['ok'] is False for r in found[name][0])
            print(f'{name}: {len(found[name][0])} lines, {wrong} wrong, {found[name][1]:.0f} s', flush=True)
    text = {name: dict(seconds=seconds, lines=rows) for name, (rows, seconds) in found.items()}
    (o.out/'gpu_check.json').write_text(json.dumps(text, indent=1, ensure_ascii=False))
    (o.out/'gpu_check.md').write_text(table_of(found))
    print(f'{o.out/"gpu_check.md"} and {o.out/"gpu_check.json"} are written')
    return int(any(r['ok'] is False for rows, _ in found.values() for r in rows))


if __name__ == '__main__': sys.exit(main())
