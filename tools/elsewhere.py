"""All notebooks and the numeric tests under the kernels of other processors, each set in a fresh process.

    python tools/elsewhere.py                                # every set; about as long as `make pytest` each
    python tools/elsewhere.py --only shuffled "two threads"
    python tools/elsewhere.py tests/test_lm.py -k resume     # what pytest is told instead of the usual files

A set is environment variables that MKL, oneDNN and ATen read when they start; one thread is what `make test`
has. What a set can show depends on the machine: MKL's are without effect where its processor has no wider
ones. `shuffled` shows on every machine what another one might: there each matmul sums in an order that its
number of rows decides.
"""
import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ONE = {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}
# no thread waits in a loop, taking the core that another worker's needs
TWO = {'OMP_NUM_THREADS': '2', 'MKL_NUM_THREADS': '2', 'OMP_WAIT_POLICY': 'PASSIVE', 'GOMP_SPINCOUNT': '0'}
KERNELS = {
    'AVX2': ONE | {'MKL_ENABLE_INSTRUCTIONS': 'AVX2'},
    'SSE4_2': ONE | {'MKL_ENABLE_INSTRUCTIONS': 'SSE4_2'},
    'compatible': ONE | {'MKL_CBWR': 'COMPATIBLE'},
    'plain ATen': ONE | {'ATEN_CPU_CAPABILITY': 'default', 'ONEDNN_MAX_CPU_ISA': 'AVX2'},
    'two threads': TWO,
    'shuffled': ONE | {'PYTHONPATH': str(ROOT/'tests'/'kernels')},
}
# where no number depends on a processor: forms, files, bytes, plans, texts, tables, words of a command
OTHERS = {'form', 'install', 'files', 'segment', 'schedule', 'budget', 'meter', 'bench', 'text', 'series',
          'report', 'plan', 'fuzz_bytes', 'estimate_any', 'cases_tables', 'cases_shell', 'cli', 'gpu'}

# what sees the stand-in itself: the allocator its copies, an import of nothing the torch that it loads
SEEN = '00_meter or 00_front_door or 03_cli or no_torch or wait_for_torch'


def environment(name):
    "The variables of a set, beside those there are; paths go before those there are."
    new = {**os.environ, **KERNELS[name]}
    if (path := KERNELS[name].get('PYTHONPATH')) and (old := os.environ.get('PYTHONPATH')):
        new['PYTHONPATH'] = os.pathsep.join([path, old])
    return new


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', nargs='+', default=[*KERNELS], choices=[*KERNELS], metavar='SET',
                   help=f'of {[*KERNELS]}')
    a, rest = p.parse_known_args()
    tests = sorted(o for o in (ROOT/'tests').glob('test_*.py') if o.stem[5:] not in OTHERS)
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
    command += map(str, rest or ['-n', 'auto', '--dist', 'worksteal', *tests])
    failed = []
    for name in a.only:
        start = time.time()
        print(f'== {name}', flush=True)
        but = ['-k', f'not ({SEEN})'] if name == 'shuffled' and not rest else []
        if subprocess.run(command + but, cwd=ROOT, env=environment(name)).returncode: failed.append(name)
        print(f'== {name}: {time.time() - start:.0f} s', flush=True)
    sys.exit(f'elsewhere: failed with {", ".join(failed)}' if failed else 0)


if __name__ == '__main__': main()
