"""Options of the notebook bridge, test_notebooks.py, and what Triton reads when it is first imported."""
import os

os.environ.setdefault('TRITON_INTERPRET', '1')     # other packages may import it before a test does


def pytest_addoption(parser):
    parser.addoption('--nb-flags', default='', help='nbdev test flags to run that are normally skipped')
    parser.addoption('--nb-package', action='store_true',
                     help='test the installed package instead of the exported cells')
