"""Package metadata. Every setting is in settings.ini; edit there, not here."""
import shlex
from configparser import ConfigParser
from setuptools import setup, find_packages

config = ConfigParser(delimiters=['='])
config.read('settings.ini', encoding='utf-8')
cfg = config['DEFAULT']

required = ('lib_name lib_path version description keywords author author_email user branch license '
            'status min_python audience language git_url').split()
missing = [o for o in required if o not in cfg]
assert not missing, f'missing in settings.ini: {missing}'

# SPDX expressions: setuptools>=77 rejects `License ::` classifiers beside an SPDX licence
licenses = dict(apache2='Apache-2.0', mit='MIT', bsd3='BSD-3-Clause', gpl3='GPL-3.0-or-later')
statuses = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable', '6 - Mature',
            '7 - Inactive']
pythons = '3.10 3.11 3.12 3.13 3.14'.split()
min_python = cfg['min_python']

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    keywords=cfg['keywords'].split(),
    author=cfg['author'],
    author_email=cfg['author_email'],
    license_expression=licenses[cfg['license'].lower()],
    url=cfg['git_url'],
    project_urls={'Documentation': cfg['doc_host'] + cfg['doc_baseurl'], 'Source': cfg['git_url']},
    classifiers=[
        'Development Status :: ' + statuses[int(cfg['status']) - 1],
        'Intended Audience :: ' + cfg['audience'],
        'Natural Language :: ' + cfg['language'],
        'Framework :: Jupyter',
    ] + [f'Programming Language :: Python :: {o}' for o in pythons[pythons.index(min_python):]],
    python_requires='>=' + min_python,
    packages=find_packages(include=[cfg['lib_path'], cfg['lib_path'] + '.*']),
    include_package_data=True,
    install_requires=shlex.split(cfg.get('requirements', '')),
    extras_require={o: shlex.split(cfg.get(f'{o}_requirements', ''))
                    for o in ('dev', 'bench', 'peers', 'triton', 'onnx', 'widgets')},
    long_description=open('README.md', encoding='utf-8').read(),
    long_description_content_type='text/markdown',
    entry_points={
        'console_scripts': [o for o in cfg.get('console_scripts', '').split() if o],
        'nbdev': [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"],
    },
    zip_safe=False,
)
