"""Options of the notebook bridge, test_notebooks.py."""


def pytest_addoption(parser):
    parser.addoption('--nb-flags', default='', help='nbdev test flags to run that are normally skipped')
    parser.addoption('--nb-package', action='store_true',
                     help='test the installed package instead of the exported cells')
