"""One row of the table: what a model keeps and holds before and after `convert`."""
import csv
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from gruckpt.measure.meter import Meter, nbytes
from gruckpt.engine.convert import convert

TABLE = Path(__file__).with_name('results.csv')
HEAD = ('package', 'version', 'model', 'layers', 'kept before', 'kept, seg_len=None', 'kept, cut',
        'peak before', 'peak, seg_len=None', 'peak, cut', 'seg_len', 'why')


def build(real, dtype=torch.float32, seed=0):
    "(model, batch, run), the same each time; dropout between recurrent layers, whose masks torch draws, off"
    torch.manual_seed(seed)
    model, batch, run = real.make()
    for m in model.modules():
        if isinstance(m, nn.RNNBase): m.dropout = 0.
    def cast(t): return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
    model.to(dtype)
    model.train()                # some packages' own train() returns nothing
    return model, tree_map(cast, batch), run


def made(real, seg_len=None, dtype=torch.float32):
    "The same, converted"
    model, batch, run = build(real, dtype)
    convert(model, seg_len=seg_len)
    return model, batch, run


def numbers(out):
    "The tensors of an output that a loss can be taken of"
    return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def loss_of(run):
    "A loss that every output takes part in"
    return lambda model, batch: sum(t.square().mean() for t in numbers(run(model, batch)))


def bytes_of(model, batch, run) -> tuple:
    "(bytes that a forward pass leaves for the backward pass, most bytes at a time beyond weights and batch)"
    with Meter(model, batch) as meter:
        out = run(model, batch)
        kept = meter.live - meter.start - nbytes(out)
        sum(t.square().mean() for t in numbers(out)).backward()
    return kept, meter.peak - meter.start


def row(real) -> dict:
    "Bytes before and after"
    ways = dict(before=build(real), none=made(real), cut=made(real, real.seg_len))
    (k, p), (k_none, p_none), (k_cut, p_cut) = (bytes_of(*way) for way in ways.values())
    values = (real.package, real.version, real.name, len(real.layers), k, k_none, k_cut, p, p_none, p_cut,
              real.seg_len, real.why)
    return dict(zip(HEAD, values, strict=True))


def write(rows:list):
    "Put these rows into the table in place of those of the same models"
    old = list(csv.DictReader(TABLE.open(encoding='utf-8'))) if TABLE.exists() else []
    new = {(r['package'], r['model']): r for r in [*old, *rows]}
    with TABLE.open('w', encoding='utf-8', newline='') as f:
        out = csv.DictWriter(f, HEAD)
        out.writeheader()
        out.writerows(new[key] for key in sorted(new))
