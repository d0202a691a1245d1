"""Train GRU-L3 on plays, checkpointed by segments; a step's bytes predicted, measured, and uncheckpointed.

    python tools/demo.py        # make demo, which fetches data/plays.txt first

About two minutes on two cores. STEPS is what that takes; everything else is the command's own option. Exit
status 1 if a figure that is promised does not come out.
"""
import argparse
import math
import os
import sys
import time
import weakref
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from gruckpt.commands import cli
from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.measure.meter import Meter, human, nbytes, shadow
from gruckpt.plan.segment import Plan
from gruckpt.charlm.text import TokenStream, Vocab, read_text

ROOT = Path(__file__).resolve().parent.parent
STEPS = 80  # of 8,192 characters; BPB falls below 3.2 after about 30
MODEL = {'hidden': 256, 'layers': 3, 'norm': 'output'}
BATCH, WINDOW, SEGMENTS = 32, 256, 16
RATE = {'lr': 6e-3, 'warmup': 5, 'decay-steps': STEPS}


def best_threads(seconds=0.3):
    "One or all, whichever does more small products now: on a busy machine all can be 100 times slower."
    x, w, out, rates = torch.randn(BATCH, 256), torch.randn(256, 768), torch.empty(BATCH, 768), {}
    for n in {1, torch.get_num_threads()}:
        torch.set_num_threads(n)
        start, done = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            torch.mm(x, w, out=out)
            done += 1
        rates[n] = done
    return max(rates, key=rates.get)


def kept_states(model, batch, plan):
    "Bytes of the segments' start states that still live after the forward pass, as the layers saw them."
    seen = {}
    def look(layers, args):
        storage = args[1].untyped_storage()
        seen[storage._cdata] = weakref.ref(storage)
    hook = model.rnn.register_forward_pre_hook(look)
    loss, _ = model.loss(batch, plan=plan)
    hook.remove()
    return sum(ref().nbytes() for ref in seen.values() if ref() is not None)


def step(model, batch, plan):
    "Forward and backward, cut by the plan."
    model.loss(batch, plan=plan)[0].backward()


def torch_step(model, rnn, batch):
    "The same sizes as one writes them without this library: torch's GRU, all logits, autograd."
    out, _ = rnn(model.embed(batch.inputs.t()))
    F.cross_entropy(model.head(out).flatten(0, 1), batch.targets.t().flatten()).backward()


def peak(fn, model, *args):
    "Peak bytes of a step whose gradients are not there yet."
    model.zero_grad(set_to_none=True)
    with Meter() as meter: fn(model, *args)
    return meter.peak


def both(fn, model, *args):
    "Peak bytes of a step on fake tensors, then of the step itself."
    model.zero_grad(set_to_none=True)
    return shadow(fn, model, *args).peak, peak(fn, model, *args)


def ledger(vocab, stream):
    "Rows of (what, predicted bytes or None, measured bytes) for one training step."
    torch.manual_seed(0)
    model = GRULM(GRUSpec(len(vocab), MODEL['hidden'], MODEL['layers'], norm=MODEL['norm']))
    batch, plan = next(iter(stream)), Plan.split(WINDOW, SEGMENTS)
    spec, size = model.spec, model.head.weight.element_size()
    cut, whole = both(step, model, batch, plan), both(step, model, batch, Plan.split(WINDOW, 1, keep='gates'))
    gradients = spec.n_params * size, nbytes([p.grad for p in model.parameters()])
    rnn = nn.GRU(spec.hidden, spec.hidden, spec.n_layers)
    states = plan.n_segments * spec.n_layers * BATCH * spec.hidden * size
    return [(f'states at {plan.n_segments} cuts, K·L·B·D·{size}', states, kept_states(model, batch, plan)),
            (f'gradients of {spec.n_params:,} weights', *gradients),
            (f'peak of a step in {plan.n_segments} segments', *cut),
            ('peak of a step, nothing recomputed', *whole),
            ("peak of a step, torch's nn.GRU", None, peak(torch_step, model, rnn, batch))]


def near(name):
    "A path of the repository as seen from here."
    return Path(os.path.relpath(ROOT/name))


def check(name, ok, said):
    "Print a promised figure and whether it came out."
    print(f'{"ok" if ok else "NOT":4}{name}: {said}')
    return ok


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--text', type=Path, default=near('data/plays.txt'))
    p.add_argument('--out', type=Path, default=near('runs/demo'), help='an earlier run in it is removed')
    p.add_argument('--steps', type=int, default=STEPS, help='training steps')
    a = p.parse_args()
    start, n_threads = time.time(), best_threads()
    torch.set_num_threads(n_threads)
    text = read_text(a.text)
    vocab = Vocab.from_text(text)
    stream = TokenStream(vocab.encode(text, vocab.dtype), BATCH, WINDOW)

    print(f'Bytes of a training step, {BATCH} rows of {WINDOW} characters, float32, counted to the byte\n')
    print(f'{"":46}{"predicted":>14}{"measured":>14}')
    rows = ledger(vocab, stream)
    for name, *sizes in rows: print(f'{name:46}', *(f'{"" if n is None else human(n):>13}' for n in sizes))

    print(f'\nTraining ({time.time() - start:.0f} s so far)\n')
    for pattern in 'step-*', 'best.pt', '*.csv', 'loss.png':
        for file in a.out.glob(pattern): file.unlink()
    options = {'text': a.text, 'out': a.out, **MODEL, 'batch-size': BATCH, 'steps': WINDOW,
               'segments': SEGMENTS, 'max-steps': a.steps, **RATE, 'valid-share': 0.01,
               'eval-every': 20, 'threads': n_threads}
    code = cli.main(['train-lm', *(str(o) for k, v in options.items() for o in (f'--{k}', v))])
    if code: sys.exit(code)
    seen = pd.read_csv(a.out/'telemetry.csv')

    print('\nA sample\n')
    cli.main(['generate', str(a.out), '--prompt', text[:text.index('\n') + 1] or text[:1], '--length', '400',
              '--temperature', '0.7'])

    print(f'\nWhat was promised ({time.time() - start:.0f} s, {n_threads} thread(s))\n')
    (_, states, kept), _, (_, _, cut), (_, _, whole), (_, _, by_torch) = rows
    first, most, below = seen.loss[0], math.log(len(vocab)), seen.step[seen.bpb < 3.2]
    ratios = f'1/{whole / cut:.1f} of the uncheckpointed step, 1/{by_torch / cut:.1f} of nn.GRU'
    fell = f'from step {below.min()} on' if len(below) else 'never'
    good = [check('first loss', abs(first / most - 1) < 0.02, f'{first:.3f}, ln {len(vocab)} is {most:.3f}'),
            check('states at the cuts', states == kept, f'{states:,} bytes predicted, {kept:,} measured'),
            check('every row as predicted', all(p in (None, m) for _, p, m in rows), 'equal to the byte'),
            check('peak', 4 * cut <= whole, ratios),
            check('BPB below 3.2', len(below) > 0, f'{fell}; {seen.bpb.iloc[-1]:.2f} at the end')]
    print(f'\nFiles in {a.out}: telemetry.csv (a row a step), loss.png, step-{a.steps:08}.pt')
    sys.exit(not all(good))


if __name__ == '__main__': main()
