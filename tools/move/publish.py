"Private names that other modules need become public, and names are imported from where they are defined. Idempotent."
import ast, json, re, sys
from pathlib import Path
sys.path.insert(0, 'tools/move')
R = {
 'engine.captures': {'_LEFT_ERROR': 'LEFT_ERROR'},
 'engine.scan': {'_autocast_of': 'autocast_now'},
 'engine.cells': {'_add_mm': 'add_product', '_add_rows': 'add_row_sums'},
 'engine.recurrent': {'_ONCE': 'NO_SECOND_DERIVATIVE', '_cast': 'cast_weights', '_sum_of': 'gradient_sum', '_Drop': 'DropoutMask',
    '_Job': 'LayerRun', '_named': 'parameter_name', '_weights_of': 'layer_weights', '_mixed': 'mixed_seed',
    '_default_chunk': 'default_chunk_len', '_norm_scratch': 'norm_scratch', '_norm_back_scratch': 'norm_back_scratch'},
 'training.schedule': {'_check': 'check_field', '_whole': 'is_whole', '_number': 'is_number'},
 'charlm.text': {'_narrowest': 'narrowest_int', '_check_counts': 'check_counts', '_place': 'saved_place'},
 'charlm.sampling': {'_check_p': 'check_probability'},
 'tft.table': {'_CALENDAR': 'CALENDAR', '_FROM_1': 'COUNTED_FROM_1', '_LONG': 'PANDAS_NAMES', '_offset': 'step_offset', '_times': 'local_times'},
 'tft.encoding': {'_groups_of': 'scale_groups'},
 'plan.budget': {'_limit': 'limit_bytes'},
 'bench.rnn': {'_at_least_1': 'check_at_least_1', '_threads': 'using_threads'},
 'commands.train_lm': {'_PRECISIONS': 'PRECISION_NAMES', '_train_lm_command': 'train_lm_command'},
 'commands.train_tft': {'_backtest_command': 'backtest_command', '_forecast_command': 'forecast_command', '_train_tft_command': 'train_tft_command'},
}
from importlib.machinery import SourceFileLoader
src = Path('tools/move/move.py').read_text()
ns = {}
exec(src[src.index('def reflow'):src.index('def fix_links')], {'re': re, 'textwrap': __import__('textwrap')}, ns)
reflow = ns['reflow']
def nb_files(): return [p for p in Path('nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts]
def code(nb): return [''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'code']
def parse(s): return ast.parse(re.sub(r'^\s*[%!].*$', 'pass', '\n'.join('' if l.startswith('#|') else l for l in s.split('\n')), flags=re.M))
def module_of(p):
    m = re.fullmatch(r'nbs/(\w+)/\d\d_(\w+)\.ipynb', str(p))
    return f'{m[1]}.{m[2]}' if m and m[1] != 'tutorials' else None
nbs = {p: json.loads(p.read_text()) for p in nb_files()}
def local_renames(mod, text):
    out = dict(R.get(mod, {}))
    for m, d in R.items():
        for imp in re.finditer(rf'from gruckpt\.{re.escape(m)} import (\([^)]*\)|[^\n]*)', text):
            out |= {a: b for a, b in d.items() if re.search(rf'\b{a}\b', imp[1])}
        room, name = m.split('.')
        for al in re.finditer(rf'from gruckpt\.{room} import {name}(?: as (\w+))?', text):
            out |= {a: b for a, b in d.items() if re.search(rf'\b{al[1] or name}\.{a}\b', text)}
    return out
def sub(s, ren):
    for a, b in ren.items(): s = re.sub(rf'(?<![\w]){a}\b', b, s)
    return s
for p, nb in nbs.items():
    ren = local_renames(module_of(p), '\n'.join(code(nb)))
    for c in nb['cells']:
        s = ''.join(c['source']); t = sub(s, ren)
        if t != s: c['source'] = t.splitlines(keepends=True)
defined = {}
for p, nb in nbs.items():
    if not (m := module_of(p)): continue
    names = set()
    for c in nb['cells']:
        s = ''.join(c['source'])
        if c['cell_type'] == 'code' and '#| export' in s:
            for o in parse(s).body:
                if isinstance(o, (ast.FunctionDef, ast.ClassDef)): names.add(o.name)
                names |= {n.id for n in ast.walk(o) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} if not isinstance(o, (ast.FunctionDef, ast.ClassDef)) else set()
    defined[m] = names
def retarget(s):
    def one(m):
        ind, mod, body = m[1], m[2], m[3]
        if mod not in defined or '#' in body: return m[0]
        items = [x.strip() for x in body.strip().strip('()').split(',') if x.strip()]
        groups = {}
        for it in items:
            n = it.split(' as ')[0].strip()
            t = mod
            if n not in defined[mod]:
                homes = [k for k, v in defined.items() if n in v]
                if len(homes) == 1: t = homes[0]
                elif homes: print('ambiguous', mod, n, homes)
            groups.setdefault(t, []).append(it)
        if list(groups) == [mod]: return m[0]
        return '\n'.join(f'{ind}from gruckpt.{t} import ' + ', '.join(v) for t, v in groups.items())
    s2 = re.sub(r'^([ \t]*)from gruckpt\.([\w.]+) import (\([^)]*\)|[^\n]*)', one, s, flags=re.M)
    return reflow(s2) if s2 != s else s
for p, nb in nbs.items():
    for c in nb['cells']:
        if c['cell_type'] != 'code': continue
        s = ''.join(c['source']); t = retarget(s)
        t = reflow(t) if t != s or any(len(l) > 110 and 'import' in l for l in t.split('\n')) else t
        if t != s: c['source'] = t.splitlines(keepends=True)
    new = json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + '\n'
    if new != p.read_text(): p.write_text(new)
for p in [*Path('tests').rglob('*.py'), *Path('tools').glob('*.py')]:
    raw = p.read_text()
    s = sub(raw, local_renames(None, raw)); s = retarget(s)
    if s != raw: p.write_text(s)
