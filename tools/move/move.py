"Move the flat modules into rooms. Idempotent; run in the root of a tree."
import json, os, re, subprocess, textwrap
from pathlib import Path
ROOMS = {
 'measure': [('meter','meter')],
 'plan': [('segment','segment'), ('budget','budget')],
 'engine': [('cells','cells'), ('surroundings','captures'), ('scan','scan'), ('recurrent','recurrent'), ('convert','convert'), ('head','head'), ('certify','certify')],
 'training': [('schedule','schedule'), ('update','optimizer_step'), ('files','checkpoint_files'), ('parallel','parallel'), ('records','config'), ('judge','evaluation'), ('trainer','trainer'), ('train','sessions'), ('report','report')],
 'charlm': [('text','text'), ('sampling','sampling'), ('counted','step_bytes'), ('lm','model')],
 'tft': [('columns','table'), ('coding','encoding'), ('series','windows'), ('vsn','vsn'), ('tft','model'), ('tiers','tiers'), ('forecast','forecast')],
 'bench': [('bench','rnn'), ('peers','tft')],
 'commands': [('shell','shell'), ('train_lm','train_lm'), ('train_tft','train_tft'), ('cli','cli')],
}
NEW = {old: (room, new) for room, ms in ROOMS.items() for old, new in ms}
def nb_files(): return [p for p in Path('nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts]
def git(*a): subprocess.run(['git', *a], check=True, stdout=subprocess.DEVNULL)
old_nb = {p.stem[3:]: p for p in Path('nbs').glob('[0-9][0-9]_*.ipynb')}
names = {}            # old name -> new path
for room, ms in ROOMS.items():
    (Path('nbs')/room).mkdir(exist_ok=True)
    present = [(o, n) for o, n in ms if o in old_nb or list((Path('nbs')/room).glob(f'[0-9][0-9]_{n}.ipynb'))]
    for i, (o, n) in enumerate(present):
        to = Path('nbs')/room/f'{i:02d}_{n}.ipynb'
        names[o] = to
        was = old_nb.get(o) or next((Path('nbs')/room).glob(f'[0-9][0-9]_{n}.ipynb'))
        if was != to:
            if to.exists(): raise SystemExit(f'{to} exists')
            git('mv', str(was), str(to))
            print(was, '->', to)
rooms = '|'.join(n for r in ROOMS for _, n in ROOMS[r])
def dotted(m):
    o = m[1]
    if o not in NEW: return m[0]
    return 'gruckpt.' + '.'.join(NEW[o])
def fix_dots(s):
    for o in NEW:
        sub = '|'.join(n for _, n in ROOMS[o]) if o in ROOMS else None
        tail = rf'(?!\.(?:{sub})\b)' if sub else ''
        s = re.sub(rf'(?<![\w/])gruckpt\.{o}\b{tail}(?!\.[0-9])', 'gruckpt.' + '.'.join(NEW[o]), s)
    def one(m):
        o, alias = m[2], m[4]
        if o not in NEW: return m[0]
        room, n = NEW[o]
        a = alias or o
        return f'{m[1]}from gruckpt.{room} import {n}' + (f' as {a}' if a != n else '')
    return re.sub(r'^(\s*)from gruckpt import (\w+)( as (\w+))?(?=$|\s*#)', one, s, flags=re.M)
def reflow(s):
    out, lines = [], s.split('\n')
    i = 0
    while i < len(lines):
        l = lines[i]
        m = re.match(r'(\s*)from (gruckpt\.[\w.]+) import (.*)$', l)
        if m:
            body = m[3]
            if body.startswith('(') and ')' not in body:
                j = i
                while ')' not in lines[j]: j += 1
                body = ' '.join([body] + [x.strip() for x in lines[i+1:j+1]])
                k = j
            else: k = i
            hash_ = ''
            if '#' not in body:
                items = [x.strip() for x in body.strip().strip('()').split(',') if x.strip()]
                one = f'{m[1]}from {m[2]} import ' + ', '.join(items)
                if len(one) <= 110: out.append(one)
                else:
                    head = f'{m[1]}from {m[2]} import ('
                    text = textwrap.wrap(', '.join(items) + ')', 110 - len(head))
                    out += [head + text[0]] + [' ' * len(head) + t for t in text[1:]]
                i = k + 1
                continue
        out.append(l); i += 1
    return '\n'.join(out)
def fix_links(s, here):
    def one(m):
        text, n = m[1], m[3]
        if n not in names or (here.parent/re.search(r'\]\(([^)#]*)', m[0])[1]).exists(): return m[0]
        t = NEW[n][1] if text == n else text
        return f'[{t}]({os.path.relpath(names[n], here.parent)}{m[4] or ""})'
    s = re.sub(r'\[([^\]]*)\]\(([./\w]*?)\d\d_(\w+)\.ipynb(#[^)]*)?\)', one, s)
    if here.parent.name in ROOMS: s = re.sub(r'\]\(((?:tutorials/\w+|index)\.ipynb)', r'](../\1', s)
    return s
for p in nb_files():
    raw = p.read_text()
    nb = json.loads(raw)
    room = p.parent.name if p.parent.name in ROOMS else None
    name = p.stem[3:] if room else None
    for i, c in enumerate(nb['cells']):
        s = ''.join(c['source']); was = s
        if c['cell_type'] == 'code':
            if room: s = re.sub(r'^#\|\s*default_exp \S+', f'#| default_exp {room}.{name}', s, flags=re.M)
            s2 = fix_dots(s)
            if s2 != s: s2 = reflow(s2)
            s = s2
        elif c['cell_type'] == 'markdown':
            s = fix_links(fix_dots(s), p)
            if room and i == 0: s = re.sub(r'^# \S+', f'# {name}', s)
        if s != was: c['source'] = s.splitlines(keepends=True)
    new = json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + '\n'
    if new != raw: p.write_text(new)
for p in [*Path('tests').rglob('*.py'), *Path('tools').glob('*.py'), Path('CONTRIBUTING.md'), Path('Makefile'), Path('settings.ini'), Path('pyproject.toml')]:
    raw = p.read_text()
    s = fix_dots(raw)
    if s != raw and p.suffix == '.py': s = reflow(s)
    def path(m):
        n = m[1]
        return str(names[n]) if n in names else m[0]
    s = re.sub(r'nbs/\d\d_(\w+)\.ipynb', path, s)
    if s != raw: p.write_text(s)
tuts = sorted(p.relative_to('nbs').as_posix() for p in Path('nbs/tutorials').glob('*.ipynb'))
order = ['the_memory_wall', 'past_teacher_forcing', 'where_tft_memory_goes']
tuts.sort(key=lambda t: order.index(Path(t).stem) if Path(t).stem in order else 9)
side = ['website:', '  sidebar:', '    contents:', '      - index.ipynb'] + [f'      - {p.name}' for p in sorted(Path('nbs').glob('[0-9][0-9]_*.ipynb'))]
for room in ROOMS:
    side += [f'      - section: {room}', '        contents:']
    side += [f'          - {p.relative_to("nbs").as_posix()}' for p in sorted((Path('nbs')/room).glob('[0-9]*.ipynb'))]
side += ['      - section: tutorials', '        contents:'] + [f'          - {t}' for t in tuts]
Path('nbs/sidebar.yml').write_text('\n'.join(side) + '\n')
for f in Path('gruckpt').glob('*.py'):
    if f.stem in NEW: git('rm', '-q', '-f', str(f)) if subprocess.run(['git','ls-files','--error-unmatch',str(f)],capture_output=True).returncode==0 else f.unlink()
