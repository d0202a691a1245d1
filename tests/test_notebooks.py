"""Every notebook as a pytest test, with nbdev's own runner and flags.

    pytest tests/test_notebooks.py                      # as nbdev_test runs them
    pytest tests/test_notebooks.py --nb-flags "slow"    # with cells flagged slow
    pytest tests/test_notebooks.py --nb-package --cov

With --nb-package the exported cells are not run: their names come from the installed module, so the tests in
the notebook exercise the file that users get, coverage sees it, and a stale export fails.
"""
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from execnb.shell import CaptureShell
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.frontmatter import FrontmatterProc
from nbdev.process import NBProcessor

from gruckpt.engine.cells import BACKENDS, CELLS
from gruckpt.engine.layer import MASKS

CFG = get_config(path=Path(__file__).resolve().parent.parent)
NBS = sorted(Path(o) for o in nbglob(CFG.nbs_path))
EXPORTS = {'export', 'exports', 'exporti'}


@pytest.fixture
def clean_process(monkeypatch):
    "What one notebook changes for its process is put back before the next."
    monkeypatch.setenv('IN_TEST', '1')
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    for name in ['mingru', 'graph'] + ['triton'] * (find_spec('triton') is not None):
        import_module(f'gruckpt.engine.{name}')            # what they register is the package's, not a page's
    registered = [(o, dict(o)) for o in (CELLS, MASKS, BACKENDS, *BACKENDS.values())]
    yield
    for o, was in registered:
        o.clear()
        o.update(was)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    plt.close('all')


def module_of(nb):
    "Name of the module that a notebook exports, or None."
    found = (re.search(r'^#\|\s*default_exp\s+(\S+)', c.source or '', re.M) for c in nb.cells)
    return next((m[1] for m in found if m), None)


def use_installed(shell, nb):
    "Put the names of the installed module where the exported cells would have put theirs."
    mod = module_of(nb)
    if mod is None: return
    shell.run(f"import importlib as _i; _m = _i.import_module('{CFG.lib_path.name}.{mod}')\n"
              "globals().update({a: b for a, b in vars(_m).items() if not a.startswith('__')})")


def left_out(cell, skip):
    "Is this a cell that does not run?"
    if cell.cell_type != 'code' or 'nbdev_export(' in cell.source: return True
    flags = cell.directives_ or {}
    return flags.get('eval:', [''])[0].lower() == 'false' or bool(skip & flags.keys())


@pytest.mark.parametrize('fn', NBS, ids=lambda f: f.relative_to(CFG.nbs_path).as_posix())
def test_notebook(fn, request, monkeypatch, clean_process):
    monkeypatch.chdir(fn.parent)
    skip = set(CFG.tst_flags.split()) - set(request.config.getoption('--nb-flags').split())
    nb = NBProcessor(fn, procs=FrontmatterProc, process=True).nb
    shell = CaptureShell(fn)
    if request.config.getoption('--nb-package'):
        use_installed(shell, nb)
        skip |= EXPORTS
    try: shell.run_all(nb, exc_stop=True, preproc=lambda c: left_out(c, skip))
    except Exception: pytest.fail(re.sub(r'\x1b\[[\d;]*m', '', shell.prettytb(fname=fn)), pytrace=False)
