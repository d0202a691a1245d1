"""What a user gets: the wheel, in a venv with the runtime requirements and no development tools."""
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = (f.relative_to(ROOT/'gruckpt').with_suffix('') for f in (ROOT/'gruckpt').rglob('[!_]*.py'))
MODULES = sorted('.'.join(f.parts) for f in FILES)

pytestmark = pytest.mark.slow  # under a minute, most of it torch's installation


def run(*args, **kw):
    "Run a command outside the checkout; give what it prints, and fail with what it says."
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'VIRTUAL_ENV')}
    p = subprocess.run([str(o) for o in args], env=env, text=True, capture_output=True, **kw)
    assert p.returncode == 0, f'{args}\n{p.stdout}\n{p.stderr}'
    return p.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "Built from the sdist, so that MANIFEST.in is tried as well."
    out = tmp_path_factory.mktemp('dist')
    run(sys.executable, '-m', 'build', '--outdir', out, ROOT, cwd=out)
    return next(out.glob('*.whl'))


@pytest.fixture(scope='module')
def clean_bin(wheel, tmp_path_factory):
    "Programs of a venv with this torch release, the wheel and its requirements."
    venv = tmp_path_factory.mktemp('clean')/'venv'
    run(sys.executable, '-m', 'venv', venv)
    programs = venv/('Scripts' if sys.platform == 'win32' else 'bin')
    torch = f"torch=={version('torch').split('+')[0]}"
    run(programs/'pip', 'install', '--quiet', '--no-compile', torch, wheel)
    return programs


def test_help_runs(clean_bin, tmp_path):
    assert 'Usage: gruckpt' in run(clean_bin/'gruckpt', '--help', cwd=tmp_path)


def test_every_module_imports_without_development_tools(clean_bin, tmp_path):
    code = (f'import importlib, sys\nfor m in {MODULES}: importlib.import_module("gruckpt." + m)\n'
            'assert not {"nbdev", "fastcore", "IPython"} & set(sys.modules)')
    assert run(clean_bin/'python', '-W', 'error', '-c', code, cwd=tmp_path) == ''
    assert not {'nbdev', 'fastcore'} & {o.split('==')[0] for o in run(clean_bin/'pip', 'freeze').splitlines()}
