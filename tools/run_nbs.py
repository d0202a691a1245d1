"""Run notebooks in a fresh Jupyter kernel each, honouring nbdev's cell flags, and keep their outputs.

    python tools/run_nbs.py                              # every notebook
    python tools/run_nbs.py --check                      # the same, writing nothing
    python tools/run_nbs.py --flags "slow gpu" nbs/bench/00_rnn.ipynb

Cells that nbdev_test skips (`#| eval: false`, and the flags in `tst_flags` not named in --flags) are not run
and keep the outputs they have; nor is the cell that exports. Progress bars are dropped, metadata is cleaned
as nbdev_clean does. A notebook that fails is left as it was; exit status 1.
"""
import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob

WIDGET = 'application/vnd.jupyter.widget-view+json'
FAILURES = CellExecutionError, CellTimeoutError, DeadKernelError


def directives(source):
    "The `#|` lines at the top of a cell, without the marker."
    out = []
    for line in source.splitlines():
        if not line.startswith('#|'): break
        out.append(line[2:].strip())
    return out


def left_alone(cell, skip):
    "Is this a cell that does not run, and keeps its outputs?"
    if cell.cell_type != 'code' or 'nbdev_export(' in cell.source: return True
    lines = directives(cell.source)
    return 'eval: false' in lines or any(o.split()[0] in skip for o in lines if o)


class FlagClient(NotebookClient):
    "A client that leaves flagged cells alone."
    skip = frozenset()

    async def async_execute_cell(self, cell, cell_index, **kw):
        if left_alone(cell, self.skip): return cell
        return await super().async_execute_cell(cell, cell_index, **kw)


def progress(output):
    "Is this output a progress bar? A widget that is a table, too, stays as that"
    if output.get('data', {}).pop(WIDGET, None): return 'text/html' not in output.data
    return output.get('name') == 'stderr' and '\r' in output.get('text', '')


def execute(fn, skip, timeout):
    "The notebook in `fn`, run and cleaned."
    nb = nbformat.read(fn, as_version=4)
    where = {'metadata': {'path': str(fn.parent)}}
    client = FlagClient(nb, timeout=timeout, kernel_name='python3', resources=where)
    client.skip = skip
    client.execute()
    for c in nb.cells:
        if c.cell_type == 'code': c.outputs = [o for o in c.outputs if not progress(o)]
    nb.metadata.pop('widgets', None)
    clean_nb(nb)
    return nb


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('paths', nargs='*', type=Path)
    p.add_argument('--check', action='store_true', help='write nothing')
    p.add_argument('--flags', default='', help='flags to run that are normally skipped')
    p.add_argument('--timeout', type=int, default=1200, help='seconds a cell may take')
    a = p.parse_args()
    cfg = get_config()
    skip = frozenset(cfg.tst_flags.split()) - set(a.flags.split())
    failed = 0
    for fn in a.paths or sorted(Path(o) for o in nbglob(cfg.nbs_path)):
        start = time.time()
        try: nb = execute(fn, skip, a.timeout)
        except FAILURES as e:
            failed += 1
            print(f'{fn}: FAILED\n{e}', file=sys.stderr)
            continue
        if not a.check: nbformat.write(nb, fn)
        print(f'{fn}: {time.time() - start:.1f} s', flush=True)
    sys.exit(bool(failed))


if __name__ == '__main__': main()
