import json, uuid
from pathlib import Path
def load(p): return json.loads(Path(p).read_text())
def save(p, nb): Path(p).write_text(json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + '\n')
def rep(p, *pairs, count=1):
    nb = load(p)
    for old, new in pairs:
        hits = [c for c in nb['cells'] if old in ''.join(c['source'])]
        n = sum(''.join(c['source']).count(old) for c in hits)
        assert n == count, f'{p}: {n} matches of {old!r}'
        for c in hits: c['source'] = ''.join(c['source']).replace(old, new).splitlines(keepends=True)
    save(p, nb)
def cell(kind, src):
    c = dict(cell_type=kind, id=uuid.uuid4().hex[:8], metadata={}, source=src.splitlines(keepends=True))
    if kind == 'code': c |= dict(execution_count=None, outputs=[])
    return c
def new(p, cells):
    nb = dict(cells=[cell(k, s.strip('\n')) for k, s in cells], metadata={'kernelspec': {'display_name': 'python3', 'language': 'python', 'name': 'python3'}}, nbformat=4, nbformat_minor=5)
    Path(p).parent.mkdir(exist_ok=True); save(p, nb)
def show(p, a=0, b=None, outputs=False):
    for i, c in list(enumerate(load(p)['cells']))[a:b]:
        print(f'--- {i} {c["cell_type"]}'); print(''.join(c['source']))
