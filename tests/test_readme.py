"""Every command that index.ipynb, and so README.md, shows runs as printed; and what else a release has."""
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from nbdev.config import get_config

import gruckpt
from gruckpt.commands.cli import main

ROOT = Path(__file__).resolve().parent.parent
CELLS = json.loads((ROOT/'nbs'/'index.ipynb').read_text(encoding='utf-8'))['cells']
PROSE = '\n\n'.join(''.join(c['source']) for c in CELLS if c['cell_type'] == 'markdown')
SHELL = re.sub(r'\\\n\s*', '', '\n'.join(re.findall(r'^```sh\n(.*?)^```$', PROSE, re.M | re.S)))
COMMANDS = [shlex.split(line) for line in SHELL.splitlines() if line.strip()]


def of(program): return [words[1:] for words in COMMANDS if words[0] == program]


def test_each_gruckpt_command_runs_as_printed(tmp_path, monkeypatch, capsys):
    "In the order of the page; the second reads what the first wrote, all others files of the checkout."
    monkeypatch.chdir(tmp_path)
    asked = of('gruckpt')
    assert {args[0] for args in asked} == {'train-lm', 'generate', 'budget', 'train-tft'}
    for args in asked:
        for name in filter(lambda o: (ROOT/o).is_file(), args):
            (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT/name, tmp_path/name)
        assert main(args) == 0, (args, capsys.readouterr())
    assert {f.name for f in (tmp_path/'runs').iterdir()} == {'lm', 'tft'}


def test_only_what_is_there_is_installed_and_made():
    assert {words[0] for words in COMMANDS} <= {'gruckpt', 'pip', 'make'}
    assert of('pip') == [['install', 'torch>=2.10'], ['install', '.']]
    targets = set(re.findall(r'^([a-z-]+):.*## ', (ROOT/'Makefile').read_text(encoding='utf-8'), re.M))
    made = set(re.findall(r'`make ([a-z-]+)`', PROSE))
    assert made and made <= targets, made - targets


@pytest.mark.parametrize('name', sorted(set(re.findall(r'`((?:tools|tests|nbs)/[\w./]+)`', PROSE))))
def test_files_that_it_names_are_there(name): assert (ROOT/name).exists()


# ---- citation, workflows, security ----

CFG = get_config(path=ROOT)
WORKFLOWS = {f.stem: yaml.safe_load(f.read_text(encoding='utf-8'))
             for f in (ROOT/'.github/workflows').glob('*.yml')}


def test_citation_says_what_the_settings_and_the_readme_say():
    cited = yaml.safe_load((ROOT/'CITATION.cff').read_text(encoding='utf-8'))
    assert (cited['version'], cited['repository-code']) == (gruckpt.__version__, CFG.git_url)
    assert [o['name'] for o in cited['authors']] == [CFG.author] and cited['license'] == 'Apache-2.0'
    assert ' '.join(cited['abstract'].split()) == CFG.description + '.'
    assert f'{{{cited["title"]}}}' in PROSE and set(cited['keywords']) <= set(CFG.keywords.split())


def test_workflows_make_what_there_is():
    "Each target of a `make` exists; the published folder is the one that `make docs` writes."
    steps = [o for w in WORKFLOWS.values() for job in w['jobs'].values() for o in job['steps']]
    made = {word for o in steps for word in shlex.split(o.get('run', ''))[1:] if '=' not in word}
    targets = set(re.findall(r'^([a-z-]+):.*## ', (ROOT/'Makefile').read_text(encoding='utf-8'), re.M))
    assert made == {'setup', 'test', 'wheel', 'pytest'} <= targets
    assert [o['with']['path'] for o in steps if 'upload-pages' in o.get('uses', '')] == [CFG.doc_path.name]


def test_nothing_is_unpickled_that_may_hold_code():
    "SECURITY.md: every file is read with weights_only=True."
    sources = [f.read_text(encoding='utf-8') for f in (ROOT/'gruckpt').rglob('*.py')]
    calls = [line for s in sources for line in s.splitlines() if 'torch.load(' in line]
    assert len(calls) >= 3 and all('weights_only=True' in line for line in calls)
    assert not any(re.search(r'pickle\.loads?\(|urllib|requests', s) for s in sources)
