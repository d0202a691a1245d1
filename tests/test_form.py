"""The form of the notebooks: what style.md asks of every page, held by a test. A failure names the cell."""
import ast
import builtins
import json
import keyword
import re
import shlex
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from nbdev.config import get_config
from nbdev.export import nb_export

ROOT = Path(__file__).resolve().parent.parent
CFG = get_config(path=ROOT)
NBS, LIB = CFG.nbs_path, CFG.lib_path
NAMES = sorted(f.relative_to(NBS).as_posix() for f in NBS.rglob('*.ipynb')
               if not any(o[0] in '._' for o in f.relative_to(NBS).parts))
SIDEBAR = yaml.safe_load((NBS/'sidebar.yml').read_text(encoding='utf-8'))['website']['sidebar']['contents']


def leaves(o):
    "Every notebook in a part of the sidebar."
    if isinstance(o, str): return [o]
    return [l for x in (o if isinstance(o, list) else o['contents']) for l in leaves(x)]


def dotted(name):
    "The module that a notebook exports, `room.name`; None for a tutorial and the index."
    m = re.fullmatch(r'(?:(\w+)/)?\d\d_(\w+)\.ipynb', name)
    return m and '.'.join(filter(None, m.groups()))


ORDER = leaves(SIDEBAR)                                        # as the site shows them
MODULES = {m: n for n in ORDER if (m := dotted(n))}            # gruckpt.<module> → notebook, in reading order
ROOMS = [o['section'] for o in SIDEBAR if isinstance(o, dict) and o['section'] != 'tutorials']
SKIPPED = {*CFG.tst_flags.split(), 'eval:'}
EXPORT = {'export', 'exports', 'exporti'}

every_notebook = pytest.mark.parametrize('name', NAMES)
every_module = pytest.mark.parametrize('module', MODULES)


class Cell(NamedTuple):
    "One cell, with nbdev's flags taken off its source."
    where: str        # notebook[index]
    kind: str         # code, markdown or raw
    source: str
    flags: frozenset  # first words of its `#|` lines
    outputs: list

    @property
    def exported(self): return bool(self.flags & EXPORT)

    @property
    def runs(self): return self.kind == 'code' and not self.flags & SKIPPED


@cache
def cells(name):
    "The cells of a notebook."
    out = []
    for i, c in enumerate(json.loads((NBS/name).read_text(encoding='utf-8'))['cells']):
        lines = ''.join(c['source']).split('\n')
        n = next((j for j, l in enumerate(lines) if not l.startswith('#|')), len(lines))
        flags = frozenset(l[2:].split()[0] for l in lines[:n] if l[2:].split())
        source, outputs = '\n'.join(lines[n:]), c.get('outputs', [])
        out.append(Cell(f'nbs/{name}[{i}]', c['cell_type'], source, flags, outputs))
    return out


def code(name): return [c for c in cells(name) if c.kind == 'code']


@cache
def parsed(source): return ast.parse(re.sub(r'^\s*[%!].*$', 'pass', source, flags=re.M))


def exported(module): return [c for c in code(MODULES[module]) if c.exported]


def definitions(cell):
    "Functions and classes that a cell defines at its top level."
    return [o for o in parsed(cell.source).body if isinstance(o, ast.FunctionDef | ast.ClassDef)]


def imports(tree):
    "Every module that code imports, wherever it does: its dotted name and the statement."
    for o in ast.walk(tree):
        if isinstance(o, ast.Import): yield from ((a.name, o) for a in o.names)
        elif isinstance(o, ast.ImportFrom):
            base = '.'*o.level + (o.module or '')
            yield from ((f'{base}.{a.name}' if o.level or base == LIB.name else base, o) for a in o.names)


def mentioned(source):
    "Names and attributes that code mentions."
    return {getattr(o, 'id', None) or getattr(o, 'attr', None) for o in ast.walk(parsed(source))} - {None}


def room_of(module): return module.rpartition('.')[0]


@pytest.mark.parametrize('room', ['', *ROOMS])
def test_numbers_have_no_gaps(room):
    held = [n for m, n in MODULES.items() if room_of(m) == room]
    assert [int(Path(n).name[:2]) for n in held] == list(range(len(held)))


def test_notebooks_and_modules_are_the_same_set():
    files = {'.'.join(f.relative_to(LIB).with_suffix('').parts) for f in LIB.rglob('*.py')}
    odd = files ^ {*MODULES, '__init__', '_modidx', *(f'{r}.__init__' for r in ROOMS)}
    assert not odd, f'{odd}: a module without its notebook, or a notebook without its module'


def test_rooms_are_folders_sections_and_subpackages():
    folders = {Path(n).parts[0] for n in NAMES if len(Path(n).parts) > 1} - {'tutorials'}
    assert folders == set(ROOMS) == {f.name for f in LIB.iterdir() if f.is_dir() and f.name[0] != '_'}


@every_module
def test_exports_its_own_module_only(module):
    lines = [l for c in json.loads((NBS/MODULES[module]).read_text(encoding='utf-8'))['cells']
             for l in ''.join(c['source']).splitlines() if re.match(r'#\|\s*(default_exp|exports?i?)\b', l)]
    assert [l.split()[-1] for l in lines if 'default_exp' in l] == [module]
    assert not [l for l in lines if 'default_exp' not in l and len(l.replace('#|', '').split()) > 1]


def test_export_is_fresh(tmp_path, monkeypatch):
    "The same paths in another folder, so that the header of each file is the same too."
    monkeypatch.chdir(tmp_path)
    (tmp_path/'settings.ini').write_text(CFG.config_file.read_text(encoding='utf-8'), encoding='utf-8')
    new, nbs = tmp_path/LIB.name, tmp_path/NBS.name
    for folder in (new, nbs): folder.mkdir()
    for name in MODULES.values():
        (nbs/name).parent.mkdir(exist_ok=True)
        (nbs/name).write_bytes((NBS/name).read_bytes())
        nb_export(nbs/name, new)
    files = {m: m.replace('.', '/') + '.py' for m in MODULES}
    bad = [m for m, f in files.items() if (new/f).read_bytes() != (LIB/f).read_bytes()]
    assert not bad, f'{bad}: not what the notebook exports; run nbdev_export'
    assert f"__version__ = \"{CFG.version}\"" in (LIB/'__init__.py').read_text(encoding='utf-8')


def arrows(module):
    "(where, imported module of ours, name) of every import in a module's exported cells."
    for c in exported(module):
        for o in ast.walk(parsed(c.source)):
            if isinstance(o, ast.ImportFrom):
                assert not o.level, f'{c.where}: relative import; write `from {LIB.name}.x import y`'
                lib, _, target = o.module.partition('.')
                if lib == LIB.name: yield from ((c.where, target, a.name) for a in o.names)
            elif isinstance(o, ast.Import):
                yield from ((c.where, a.name.partition('.')[2], None) for a in o.names
                            if a.name.split('.')[0] == LIB.name)


@every_module
def test_arrows_point_down(module):
    "A module imports only modules that a reader has met, and a room only rooms above it."
    met = list(MODULES)[:list(MODULES).index(module)]
    bad = [f'{where} imports {target}' for where, target, name in arrows(module) if target not in met]
    assert not bad, bad


@cache
def defined_in(module):
    "Names that a module itself defines at its top level."
    tops = [o for c in exported(module) for o in parsed(c.source).body]
    inside = [o for t in tops for o in ast.walk(t)]
    names = {o.id for o in inside if isinstance(o, ast.Name) and isinstance(o.ctx, ast.Store)}
    return names | {o.name for o in tops if isinstance(o, ast.FunctionDef | ast.ClassDef)}


@every_module
def test_imports_public_names_from_where_they_are_defined(module):
    bad = [f'{where}: {target}.{name}' for where, target, name in arrows(module)
           if name is None or name[0] == '_' or target in MODULES and name not in defined_in(target)]
    assert not bad, f'{bad}: private, or not defined there'


def packages(key):
    "Import names of the packages in a line of settings.ini."
    dists = [re.match(r'[\w.-]+', o)[0] for o in shlex.split(CFG.d.get(key, ''))]
    return {'pynvml' if o == 'nvidia-ml-py' else o.replace('-', '_') for o in dists}


# module → extra that it may import where it is used, or try to
EXTRAS = {'bench.rnn': 'bench', 'bench.tft': 'peers', 'engine.triton': 'triton',
          'plan.budget': 'widgets', 'quant.export': 'onnx'}


@every_module
def test_imports_runtime_dependencies_only(module):
    allowed = {*sys.stdlib_module_names, LIB.name} | packages('requirements')
    inside = allowed | packages(f'{EXTRAS.get(module)}_requirements')    # imported where it is used
    bad = []
    for c in exported(module):
        for name, o in imports(parsed(c.source)):
            ok = allowed if o in parsed(c.source).body else inside
            if name.split('.')[0] not in ok: bad.append(f'{c.where} imports {name}')
    assert not bad, bad


@every_notebook
def test_no_star_imports(name):
    bad = [c.where for c in code(name) if re.search(r'^\s*from\s+\S+\s+import\s+\*', c.source, re.M)]
    assert not bad, f'{bad}: import by name'


@every_notebook
def test_imports_have_cells_of_their_own(name):
    "The docs build runs every cell that holds an import: whatever else it holds would run too, out of order."
    bad = []
    for c in code(name):
        body = parsed(c.source).body
        n = sum(isinstance(o, ast.Import | ast.ImportFrom) for o in body)
        if n and n < len(body) and 'nbdev_export(' not in c.source: bad.append(c.where)
    assert not bad, f'{bad}: move the imports to a cell of their own'


@every_notebook
def test_opens_with_title_and_promise(name):
    "Alone in their cell: nbdev makes it the page's front matter, and would drop whatever else it holds."
    first = cells(name)[0]
    m = re.fullmatch(r'# (\S[^\n]*)\n+> (\S[^\n]*)\n?', first.source)
    assert first.kind == 'markdown' and m, f'{first.where}: expected `# title`, `> promise` and no more'
    if dotted(name): assert m[1] == dotted(name).rpartition('.')[2], f'{first.where}: the title is the module'


@every_module
def test_ends_with_export(module):
    last = cells(MODULES[module])[-1]
    assert 'hide' in last.flags and last.source == 'import nbdev; nbdev.nbdev_export()', last.where


def following(name):
    "Notebooks that the Next section links to, as paths from nbs/."
    prose = '\n\n'.join(c.source for c in cells(name) if c.kind == 'markdown')
    heads = re.findall(r'^## .*$', prose, re.M)
    assert heads and heads[-1] == '## Next', f'nbs/{name}: the last section is `## Next`'
    links = re.findall(r'\]\(([^)#\s]+\.ipynb)', prose.rpartition('## Next')[2])
    assert links, f'nbs/{name}: Next links to a notebook'
    return [((NBS/name).parent/o).resolve().relative_to(NBS.resolve()).as_posix() for o in links]


@every_notebook
def test_next_leads_somewhere(name):
    missing = set(following(name)) - set(NAMES)
    assert not missing, f'nbs/{name}: Next links to {missing}'


def test_next_links_carry_a_reader_through_all_modules():
    steps = pairwise(['index.ipynb', *MODULES.values()])
    bad = [f'{a} does not lead to {b}' for a, b in steps if b not in following(a)]
    assert not bad, bad


def test_the_index_leads_to_every_page():
    text = ''.join(c.source for c in cells('index.ipynb') if c.kind == 'markdown')
    assert not [n for n in NAMES if n != 'index.ipynb' and f']({n}' not in text]


def test_sidebar_lists_every_notebook():
    assert sorted(ORDER) == NAMES, f'sidebar.yml differs from nbs/ in {set(ORDER) ^ set(NAMES) or "repeats"}'


def n_lines(cell): return sum(bool(l.strip()) for l in cell.source.splitlines())


def test_definitions_fit_a_screen():
    held = [c for m in MODULES for c in exported(m) if definitions(c)]
    sizes = sorted(((n_lines(c), c.where) for c in held), reverse=True)
    share = sum(n <= 30 for n, _ in sizes)/len(sizes)
    assert share >= .87, f'{share:.0%} of definition cells have at most 30 lines; longest: {sizes[:8]}'
    assert sizes[0][0] <= 60, f'no definition cell has over 60 lines: {sizes[0]}'


def imports_only(cell):
    return all(isinstance(o, ast.Import | ast.ImportFrom) for o in parsed(cell.source).body)


@pytest.mark.parametrize('module', [m for m in MODULES if room_of(m) not in ('', 'commands')])
def test_pages_open_with_their_use(module):
    "The first cell that does something is what a user types, not a definition of ours."
    nb = [c for c in code(MODULES[module]) if not (c.flags & {'hide', 'default_exp'} or imports_only(c))]
    assert not nb[0].exported, f'{nb[0].where} defines before the page has shown its use'


def reached(cell, defined):
    "Names that a cell mentions, itself or through what it mentions; `defined` holds definitions by name."
    seen, todo = set(), mentioned(cell.source)
    while todo:
        seen |= todo
        todo = set().union(*(mentioned(ast.unparse(defined[n])) for n in todo & defined.keys())) - seen
    return seen


@every_module
def test_definitions_are_run_at_once(module):
    "One of the next two cells, prose and imports aside, runs it: by name or through what is defined by then."
    nb = [c for c in code(MODULES[module]) if not imports_only(c)]
    bad, defined = [], {}
    for i, c in enumerate(nb):
        if not c.exported: continue
        window = nb[i+1:i+3]
        defined |= {d.name: d for o in [c, *window] if o.exported for d in definitions(o)}
        run = set().union(*(reached(o, defined) for o in window if o.runs and not o.exported))
        bad += [f'{c.where} {d.name}' for d in definitions(c) if d.name not in run]
    assert not bad, f'{bad}: none of the next two cells runs it'


@every_module
def test_no_prints(module):
    if module == 'commands.shell': return
    bad = [c.where for c in exported(module) for o in ast.walk(parsed(c.source))
           if isinstance(o, ast.Call) and getattr(o.func, 'id', '') == 'print']
    assert not bad, f'{bad}: yield or return it; a command hands it to shell.print_answer'


def parameters(f):
    "Every parameter of a function."
    a = f.args
    return [*a.posonlyargs, *a.args, *filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]


def uncommented(f, lines):
    "Parameters without a comment on their line (docments); an option of a command has its `help`."
    named = [p for p in parameters(f) if p.arg not in ('self', 'cls', 'ctx')]
    helped = [p for p in named if p.annotation and 'help=' in ast.unparse(p.annotation)]
    return [p.arg for p in named if p not in helped and '#' not in lines[p.end_lineno - 1][p.end_col_offset:]]


def bases(d): return [ast.unparse(o) for o in d.bases]


@cache
def protocols():
    "Methods that a protocol documents for the classes that name it as their base."
    found = [d for module in MODULES for c in exported(module) for d in definitions(c)
             if isinstance(d, ast.ClassDef) and 'Protocol' in bases(d)]
    def methods(d): return [o for o in d.body if isinstance(o, ast.FunctionDef)]
    return {d.name: {o.name for o in methods(d) if ast.get_docstring(o)} for d in found}


def undocumented_class(d, lines):
    "Methods of more than a line without a docstring; fields and parameters of `__init__` without a word."
    doc = ast.get_docstring(d) or ''
    elsewhere = set().union(*(protocols().get(name, set()) for name in bases(d)))
    for o in d.body:
        if isinstance(o, ast.AnnAssign): names = [o.target.id]
        elif isinstance(o, ast.FunctionDef) and o.name == '__init__': names = uncommented(o, lines)
        else: names = []
        yield from (f'{d.name}({n})' for n in names if n[0] != '_' and not re.search(rf'^{n} :', doc, re.M))
        public = isinstance(o, ast.FunctionDef) and o.name[0] != '_' and o.end_lineno > o.lineno
        if public and o.name not in elsewhere and not ast.get_docstring(o): yield f'{d.name}.{o.name}'


def undocumented(cell):
    "Public names of a cell about which something is not said."
    lines = cell.source.splitlines()
    for d in definitions(cell):
        if d.name[0] == '_': continue
        if not ast.get_docstring(d): yield d.name
        if isinstance(d, ast.ClassDef): yield from undocumented_class(d, lines)
        else: yield from (f'{d.name}({n})' for n in uncommented(d, lines))


@every_module
def test_public_names_are_documented(module):
    bad = [f'{c.where} {o}' for c in exported(module) for o in undocumented(c)]
    assert not bad, f'{bad}: no docstring or, for a parameter or a field, no word about it'


@every_notebook
def test_lines_fit(name):
    bad = [f'{c.where}: {l[:50]}' for c in code(name) for l in c.source.splitlines() if len(l) > 110]
    assert not bad, f'{bad}: over 110 columns'


@every_notebook
def test_a_kernel_is_named(name):
    "JupyterLab then opens the page without a question."
    kernel = json.loads((NBS/name).read_text(encoding='utf-8'))['metadata'].get('kernelspec', {})
    assert (kernel.get('name'), kernel.get('language')) == ('python3', 'python')


@every_notebook
def test_nothing_hidden_or_switched_off(name):
    bad = [c.where for c in code(name) if 'eval:' in c.flags]
    assert not bad, f'{bad}: never eval: false'
    bad = [c.where for c in code(name) if 'hide' in c.flags and re.search(r'\b(assert|test_\w+)\b', c.source)]
    assert not bad, f'{bad}: tests are visible'


@every_notebook
def test_stored_outputs_have_no_errors(name):
    bad = [c.where for c in code(name) if any(o['output_type'] == 'error' for o in c.outputs)]
    assert not bad, f'{bad}: stored outputs hold an error'


def shown(cell):
    "The text of a cell's outputs."
    parts = [o.get('text', '') for o in cell.outputs]
    parts += [v for o in cell.outputs for k, v in o.get('data', {}).items() if k.startswith('text/')]
    return '\n'.join(''.join(o) for o in parts)


@every_notebook
def test_no_path_of_a_machine(name):
    path = re.compile(r'(?<![\w.-])/(?:work|farm|root|tmp|home|Users)/')
    bad = [c.where for c in cells(name) if path.search(c.source) or path.search(shown(c))]
    assert not bad, f'{bad}: names a folder of one machine'


@every_notebook
def test_N29_no_timed_assertion(name):
    "How long something takes on a loaded machine proves nothing: measure in a `slow` cell, assert counts."
    timed = re.compile(r'^\s*assert .*(?:\.(?:best|median)\b.*<(?!=)|<(?!=).*\.(?:best|median)\b)', re.M)
    bad = [c.where for c in code(name) if c.runs and timed.search(c.source)]
    assert not bad, f'{bad}: asserts a time'


@cache
def known_words():
    "Every identifier of every code cell, of the tests and tools, of Python, and words of the strings there."
    sources = [c.source for n in NAMES for c in code(n)]
    words = {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names, LIB.name, *MODULES, *ROOMS, 'self',
             *(m.rpartition('.')[2] for m in MODULES)}
    for s in sources: words |= set(re.findall(r'[A-Za-z_]\w*', s))
    files = *(ROOT/'tests').rglob('*.py'), *(ROOT/'tools').glob('*.py'), ROOT/'Makefile', ROOT/'settings.ini'
    for f in files:
        words |= set(re.findall(r'[A-Za-z_][\w-]*', f.read_text(encoding='utf-8')))
    return words


def exists(name):
    "Is a dotted name one of ours, or one that torch, numpy or pandas has?"
    if all(part in known_words() for part in name.split('.')): return True
    root, *rest = name.replace('nn.', 'torch.nn.').split('.')
    o = sys.modules.get({'np': 'numpy', 'pd': 'pandas'}.get(root, root))
    for part in rest: o = getattr(o, part, None)
    return o is not None


@every_notebook
def test_backticked_names_exist(name):
    "A name in the prose is one that a reader finds: in the code, or in a library that it uses."
    said = [(c.where, n) for c in cells(name) if c.kind == 'markdown'
            for n in re.findall(r'`([A-Za-z_][\w.]*[A-Za-z_0-9])(?:\(\))?`', c.source)]
    bad = [f'{where} `{n}`' for where, n in said if not exists(n)]
    assert not bad, f'{bad}: nothing has that name'
