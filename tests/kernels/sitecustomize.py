"""A processor that there is not: every matmul sums its products in an order that its number of rows decides.

On PYTHONPATH while `tools/elsewhere.py` runs. What is computed twice by the same operations on the same
shapes is the same to the bit; a product of 3 rows is not a slice of one of 10, on this machine for certain.
"""
import warnings

import torch

lib = torch.library.Library('aten', 'IMPL')
warnings.filterwarnings('ignore', '.*Warning only once for all operators', UserWarning)


def shuffled(a, b):
    "Two factors with the terms of their product in another order"
    n, rows = a.shape[-1], a.shape[-2]
    if n < 2: return a, b
    index = torch.arange(n).roll(rows)
    if rows % 2: index = index.flip(0)
    return a.index_select(-1, index), b.index_select(-2, index)


def replace(name, first):
    "The CPU's kernel of an operation, its factors (arguments `first` and the next) shuffled before"
    kernel = torch.library.get_kernel(f'aten::{name}', 'CPU')
    def run(keys, *args, **kw):
        args = list(args)
        args[first:first + 2] = shuffled(*args[first:first + 2])
        return kernel.call_boxed(keys, *args, **kw)
    lib.impl(name, run, 'CPU', with_keyset=True)


for name in 'mm', 'mm.out', 'bmm', 'bmm.out': replace(name, 0)
for name in 'addmm', 'addmm.out', 'addmm_', 'baddbmm', 'baddbmm.out', 'baddbmm_': replace(name, 1)
