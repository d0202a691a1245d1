"""Build the docs site and README.md from the notebooks, without Quarto.

    python tools/docs.py                    # site into docs/, README.md from nbs/index.ipynb
    python tools/docs.py --check            # write nothing: check links, compare docs/ and README.md
    python tools/docs.py --serve 8000       # build, then show docs/ on localhost
    python tools/docs.py --out FOLDER       # the site alone, elsewhere

The source stays a plain nbdev/Quarto project: with Quarto installed, `nbdev_docs` and `nbdev_preview` build
these pages, without the folded sources and the tables of parameters. Steps, all in a temporary copy of the
project: `show_sources` keeps exported code for the reader; nbdev processes the notebooks (show_doc, doclinks,
hidden cells); `stage` gives each page its published name and numbers its cross-references; smalldocs renders
that; `finish` makes the site self-contained; `check_links` follows every internal link and anchor. The
package must be installed. The same notebooks give the same bytes. Exit status 1 if anything is broken, and
then nothing is written.
"""
import argparse, ast, base64, contextlib, hashlib, json, os, re, shutil, sys, tempfile
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from nbdev.config import get_config
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

HERE = Path(__file__).resolve().parent
KINDS = dict(fig='Figure', tbl='Table', eq='Equation')
BUILDERS = 'nbdev fastcore smalldocs markdown-it-py mdit-py-plugins Pygments'.split()


def text(o): return ''.join(o) if isinstance(o, list) else o


def norm(path): return Path(os.path.normpath(path))


def posix(path, start): return os.path.relpath(path, start).replace(os.sep, '/')


def write(path, data):
    "Write text or bytes, making the folder."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode('utf-8') if isinstance(data, str) else data)


def site_url():
    cfg = get_config()
    return cfg.doc_host.rstrip('/') + '/' + cfg.doc_baseurl.strip('/')


def unlink_private(s):
    "Undo doclinks to names with a leading underscore: nbdev links them, but no page shows them."
    return re.sub(r'\[(`[^`\n]+`)\]\([^)\s]+\.html#(?:[\w.]+\.)?_\w+\)', r'\1', s)


def unnest(s):
    "Undo a link around a doclink, which nbdev puts there too; one to a method leads to its class."
    s = re.sub(r'(\]\([^)\s]+\.html#\w+)\.[\w.]+\)', r'\1)', s)
    return re.sub(r'\[(\[`[^`\n]+`\]\([^)\s]+\))\]\([^)\s]+\)', r'\1', s)


def parameters(s):
    "A signature as `show_doc` gives it: comments go into a table, where they wrap and links work."
    def row(name, about): return f'| {name} | ' + about.strip().replace('|', '\\|') + ' |'
    def table(m):
        rows, code = [], []
        for line in m[1].replace(':NoneType=None', '=None').replace('__main__.', '').split('\n'):
            line, _, about = line.partition(' # ')
            code.append(line)
            name = re.match(r'\s+(\*{0,2}\w+)', line)
            if about: rows.append(row(f'`{name[1]}`' if name else 'returns', about))
        short = code[0] + ' '.join(o.strip() for o in code[1:-1]).rstrip(',') + code[-1]
        body = short if len(short) <= 105 else '\n'.join(code)
        return '\n'.join(['```python', body, '```', *(['', '| | |', '|:--|:--|', *rows] if rows else [])])
    return re.sub(r'```python\n((?:def|class) (?:(?!```).)*?)\n```', table, s, flags=re.S)


# ---- notebooks before and after processing ----------------------------------------------------------------

@contextlib.contextmanager
def scratch(root):
    "A temporary copy of what nbdev's processing reads, made the working folder; its writes stay there."
    cfg, old = get_config(path=root), Path.cwd()
    skip = shutil.ignore_patterns('.*', '_proc')
    with tempfile.TemporaryDirectory(prefix='docs-') as tmp:
        tmp = Path(tmp).resolve()
        shutil.copytree(cfg.nbs_path, tmp/cfg.nbs_path.relative_to(cfg.config_path), ignore=skip)
        for f in (cfg.config_file, cfg.config_path/'pyproject.toml'): shutil.copy(f, tmp)
        os.chdir(tmp)
        try: yield tmp
        finally: os.chdir(old)


def show_sources(folder):
    "Keep the code of exported cells, folded under its names: `show_doc` shows no private function."
    for f in folder.rglob('*.ipynb'):
        nb = json.loads(f.read_text(encoding='utf-8'))
        for c in nb['cells']: c['source'] = unfolded(c)
        write(f, json.dumps(nb))


def unfolded(c):
    "Source of a cell, an exported one with the directives that show its code folded."
    s = text(c['source'])
    if c['cell_type'] != 'code' or not re.match(r'#\| export\s*\n', s): return s
    code = s.split('\n', 1)[1]
    names = [name for o in ast.parse(code).body for name in defined(o)]
    if not names: return s
    return f'#| exports\n#| code-fold: true\n#| code-summary: "Source: {", ".join(names)}"\n{code}'


def defined(node):
    "Names that a statement gives a module."
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)): return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [o.id for t in targets for o in ast.walk(t) if isinstance(o, ast.Name)]


def front(nb):
    "Front matter of a processed notebook."
    c = nb['cells'][0]
    s = text(c['source']).strip()
    return yaml.safe_load(s.strip('-')) or {} if c['cell_type'] == 'raw' and s.startswith('---') else {}


def options(src):
    "The `#| key: value` options of a code cell, and its code."
    lines, opts = src.split('\n'), {}
    while lines and lines[0].startswith('#|'):
        d = yaml.safe_load(lines.pop(0)[2:])
        if isinstance(d, dict): opts.update(d)
    return opts, '\n'.join(lines)


def imports_only(code):
    "Is this a block of imports, of more than three lines?"
    kinds = {type(o) for o in ast.parse(code).body}
    return len(code.strip().splitlines()) > 3 and kinds <= {ast.Import, ast.ImportFrom}


def titles(code):
    "What a cell writes above its plots, if that is plain text."
    calls = [o for o in ast.walk(ast.parse(code)) if isinstance(o, ast.Call)]
    named = [k.value for o in calls for k in o.keywords if k.arg == 'title']
    first = [o.args[0] for o in calls if o.args and getattr(o.func, 'attr', '') in ('set_title', 'suptitle')]
    return [o.value for o in named + first if isinstance(o, ast.Constant) and isinstance(o.value, str)]


class Page:
    "A processed notebook on its way to the site."
    def __init__(self, path, root):
        self.nb = json.loads(path.read_text(encoding='utf-8'))
        self.front = front(self.nb)
        self.src = path.relative_to(root)
        self.dst = self.src.with_name(Path(self.front.get('output-file', self.src.name)).stem + '.ipynb')
        self.nums = {}

    def number(self, label):
        "`Figure 2` for the second figure of the page, as Quarto numbers websites."
        kind = label.split('-')[0]
        if label not in self.nums: self.nums[label] = 1 + sum(o.startswith(kind + '-') for o in self.nums)
        return f'{KINDS[kind]} {self.nums[label]}'

    def label(self):
        "Number every labelled figure, table and equation; smalldocs has no cross-references."
        maths, heading = False, self.front.get('title', '')
        for c in self.nb['cells']:
            c['source'] = text(c['source'])
            if c['cell_type'] == 'code': maths |= self.label_code(c, heading)
            elif c['cell_type'] == 'markdown':
                heading = ([heading] + re.findall(r'^#+ (.+)$', c['source'], flags=re.M))[-1]
                self.label_markdown(c)
        if maths:  # smalldocs loads KaTeX where the Markdown has maths, and looks for none in captions
            self.nb['cells'].append(dict(cell_type='markdown', metadata={}, source='[$~$]{.d-none}'))

    def label_code(self, c, heading):
        "Number a caption, and say in words what a picture shows; gives whether the caption has maths."
        opts, code = options(c['source'])
        cap, maths = '', False
        key = str(opts.get('label', '')).split('-')[0] + '-cap'
        if key in ('fig-cap', 'tbl-cap'):
            cap = str(opts.get(key, ''))
            maths = '$' in cap
            opts[key] = f"{self.number(opts['label'])}: " + re.sub(r'\$([^$]+)\$', r'\\(\1\\)', cap)
        if any('image/png' in o.get('data', {}) for o in c.get('outputs', [])) and 'fig-alt' not in opts:
            opts['fig-alt'] = cap or ' '.join(titles(code)) or re.sub(r'[`*]', '', heading)
            if 'fig-cap' not in opts: opts['fig-align'] = 'left'
        if self.src.parts[0] != 'tutorials' and imports_only(code):        # a page opens with its use
            opts = {'code-fold': True, 'code-summary': 'Imports of this page'} | opts
        lines = [f'#| {k}: {json.dumps(v, ensure_ascii=False)}' for k, v in opts.items()]
        c['source'] = '\n'.join([*lines, code])
        return maths

    def label_markdown(self, c):
        "Number labelled equations and pictures."
        def eq(m): return f"[]{{#{m[2]}}}\n\n$${m[1].rstrip()} \\tag{{{self.number(m[2]).split()[-1]}}}\n$$"
        c['source'] = re.sub(r'\$\$((?:(?!\$\$).)+)\$\$\s*\{#(eq-[\w-]+)\}', eq, c['source'], flags=re.S)
        for m in re.finditer(r'\]\([^)]*\)\{#(fig-[\w-]+)', c['source']): self.number(m[1])

    def link(self, names):
        "Make doclinks relative, point notebook links at published names, and resolve `@fig-x`."
        site = re.escape(site_url())
        def nblink(m):
            p = norm(self.src.parent/m[1])
            return f"]({posix(names[p], self.dst.parent)}{m[2] or ''})" if p in names else m[0]
        def ref(m):
            if m[1] not in self.nums: raise SystemExit(f'docs: {self.src}: nothing is labelled {m[1]}')
            return f'[{self.number(m[1])}](#{m[1]})'
        def md(s):
            s = re.sub(r'\]\(([^)#\s:]+\.ipynb)(#[^)\s]*)?\)', nblink, unnest(unlink_private(s)))
            s = re.sub(site + r'/([\w./-]+)\.html', lambda m: posix(m[1] + '.ipynb', self.dst.parent), s)
            return re.sub(r'(?<![\w`@])@((?:fig|tbl|eq)-[\w-]*\w)', ref, s)
        for c in self.nb['cells']:
            if c['cell_type'] == 'markdown': c['source'] = md(c['source'])
            for o in c.get('outputs', []):
                d = o.get('data', {})
                if 'text/markdown' in d: d['text/markdown'] = parameters(md(text(d['text/markdown'])))

    def save(self, root):
        fm = {k: v for k, v in self.front.items() if k != 'output-file'}
        if fm: self.nb['cells'][0]['source'] = f'---\n{yaml.safe_dump(fm, sort_keys=False)}---\n'
        write(root/self.dst, json.dumps(self.nb))


# ---- the site ---------------------------------------------------------------------------------------------

MISSING = """---
title: No such page
---

The page may have moved. Start from [the map of all pages](index.ipynb#the-pages-in-order), or search for a
name or a question in the box above.
"""


def stage(proc, site, out):
    "Copy processed notebooks from `proc` to `site`, rewritten for smalldocs, which will build into `out`."
    files = sorted(f for f in proc.rglob('*') if f.is_file())
    pages = [Page(f, proc) for f in files if f.suffix == '.ipynb']
    names = {p.src: p.dst for p in pages}
    for p in pages:
        p.label()
        p.link(names)
        p.save(site)
    for f in files:
        if f.suffix != '.ipynb': write(site/f.relative_to(proc), f.read_bytes())
    write(site/'404.md', MISSING)
    stage_settings(site, names, out)


def stage_settings(site, names, out):
    "Published names in the sidebar, HTML as the only format, and the output folder."
    def rename(d):
        if isinstance(d, dict): return {k: rename(v) for k, v in d.items()}
        if isinstance(d, list): return [rename(o) for o in d]
        return names[Path(d)].as_posix() if isinstance(d, str) and Path(d) in names else d
    def load(name): return yaml.safe_load((site/name).read_text(encoding='utf-8'))
    def save(name, d): write(site/name, yaml.safe_dump(d, sort_keys=False))
    quarto, nbdev = rename(load('_quarto.yml')), load('nbdev.yml')
    quarto['format'] = {'html': {k: v for k, v in quarto['format']['html'].items() if k != 'keep-md'}}
    nbdev['project']['output-dir'] = os.path.relpath(out, site)
    save('sidebar.yml', rename(load('sidebar.yml')))
    save('_quarto.yml', quarto)
    save('nbdev.yml', nbdev)


# what people type into the search box, and where it is answered
ASKED = {
    'LSTM, GRU: convert a model (lstm convert)': 'engine/convert.html',
    'Save a model, load a model, checkpoint (save model)':
        'tutorials/short_answers.html#how-do-i-save-a-model-load-a-model-get-nn.lstm-back',
    'Several GPUs: multi-gpu, multigpu, DDP, torchrun': 'tutorials/several_gpus.html',
    'ONNX, export, jit, torch.compile':
        'tutorials/short_answers.html#onnx-torch.export-torchscript-how-do-i-export-a-model',
    'Out of memory, OOM: what fits my GPU?': 'plan/budget.html',
    'Out of memory (OOM) nevertheless':
        'tutorials/short_answers.html#out-of-memory-nevertheless-what-now',
    'Install, first steps, getting started': 'tutorials/getting_started.html',
    'Dropout, packed sequences, AMP, seeds, hooks: short answers': 'tutorials/short_answers.html',
    'Forecast a table, time series': 'tutorials/forecast.html',
}

HERE_IN_SIDEBAR = """{
const side = document.querySelector('#quarto-sidebar'), here = side?.querySelector('.active')
if (here) side.scrollTop = here.getBoundingClientRect().top - side.getBoundingClientRect().top - 300
}"""


def finish(out):
    "Serve KaTeX from the site, drop web fonts and times: pages work offline and do not change by themselves."
    shutil.copytree(HERE/'katex', out/'site_libs/katex')
    for f in out.rglob('*.html'):
        katex = posix(out/'site_libs/katex', f.parent)
        s = f.read_text(encoding='utf-8')
        s = re.sub(r'https://cdn\.jsdelivr\.net/npm/katex@[\d.]+/dist', katex, s)
        write(f, s.replace('</body>', f'<script>{HERE_IN_SIDEBAR}</script></body>', 1))
    for f in out.rglob('*.css'):
        s = f.read_text(encoding='utf-8')
        write(f, re.sub(r'@import url\(["\']?https://fonts\.googleapis\.com[^)]*\);', '', s))
    index_for_search(out)
    sitemap = (out/'sitemap.xml').read_text(encoding='utf-8')
    write(out/'sitemap.xml', re.sub(r'\s*<lastmod>[^<]*</lastmod>', '', sitemap))
    missing = out/'404.html'        # served under any address, so its links start at the site's own
    base = f'<base href="{urlsplit(site_url()).path}/">'
    write(missing, missing.read_text(encoding='utf-8').replace('<head>', '<head>' + base, 1))
    write(out/'.nojekyll', '')


def index_for_search(out):
    "Add what people ask to the search index, and take out the page that says that there is none."
    found = json.loads((out/'search.json').read_text(encoding='utf-8'))
    found = [o for o in found if o['href'] != '404.html']
    there = {o['href'] for o in found}                  # pages and their sections
    for i, (words, href) in enumerate(ASKED.items()):
        if href not in there: raise SystemExit(f'docs: ASKED: no page or section {href}')
        found.insert(i, dict(objectID=f'asked-{i}', href=href, title=words, section='', text=words))
    write(out/'search.json', json.dumps(found, ensure_ascii=False))


def build(tmp, out):
    "Build the site into `out`; gives the number of pages and the problems."
    try: from smalldocs.site import build as render
    except ImportError as e: raise SystemExit('docs: needs smalldocs and Python 3.11 or later') from e
    refresh_quarto_yml()
    show_sources(get_config().nbs_path)
    proc = Path(proc_nbs(n_workers=os.cpu_count()))
    stage(proc, tmp/'site', out)
    site = render(tmp/'site', quiet=True)
    finish(out)
    write(out/'GENERATED.md', marker(get_config().nbs_path))
    return len(site.pages), [*site.warnings, *check_links(out)]


class Links(HTMLParser):
    "The ids of a page, its links, and what it loads while it is shown."
    def __init__(self):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if a.get('id'): self.ids.add(a['id'])
        links = [a[k] for k in ('href', 'src') if a.get(k) and tag != 'base']
        self.links += links
        if tag in ('link', 'script', 'img'): self.loads += links
        if a.get('class') == 'mermaid': self.loads.append('//mermaid (draw it with matplotlib)')


def check_links(out):
    "Internal links whose file or anchor is missing, and what a page would fetch from elsewhere."
    pages, bad = {}, []
    for f in sorted(out.rglob('*.html')):
        pages[f] = Links()
        pages[f].feed(f.read_text(encoding='utf-8'))
    for f, p in pages.items():
        name = f.relative_to(out)
        bad += [f'{name}: loads {l} from outside the site' for l in p.loads if urlsplit(l).netloc]
        for l in p.links:
            u = urlsplit(l)
            if u.scheme or u.netloc: continue
            t = norm(f.parent/unquote(u.path)) if u.path else f
            if t.is_dir(): t = t/'index.html'
            if not t.exists(): bad.append(f'{name}: no file for {l}')
            elif u.fragment and t in pages and unquote(u.fragment) not in pages[t].ids:
                bad.append(f'{name}: no anchor for {l}')
    return bad


# ---- README.md --------------------------------------------------------------------------------------------

def readme(proc):
    "README.md as GitHub Markdown from the processed index notebook, and its pictures: bytes by file name."
    cfg = get_config()
    names = {p.src: p.dst for p in (Page(f, proc) for f in proc.rglob('*.ipynb'))}
    nb = json.loads((proc/cfg.readme_nb).read_text(encoding='utf-8'))
    fm = front(nb)
    parts = [f"# {fm.get('title', cfg.title)}", '<!-- WARNING: THIS FILE WAS AUTOGENERATED! DO NOT EDIT! -->']
    if 'description' in fm: parts.append(f"> {fm['description']}")
    pictures = {}
    for c in nb['cells']:
        if c['cell_type'] == 'markdown': parts.append(readme_prose(text(c['source']), names))
        elif c['cell_type'] == 'code': parts += readme_code(c, names, pictures)
    return {'README.md': ('\n\n'.join(o for o in parts if o) + '\n').encode('utf-8'), **pictures}


def readme_prose(s, names):
    "Markdown with callouts as GitHub's alerts and links to notebooks as links to the site."
    def callout(m):
        body = re.sub(r'^#+ (.*)$', r'**\1**', m[2].strip(), count=1, flags=re.M)
        return '\n'.join(f'> {l}'.rstrip() for l in [f'[!{m[1].upper()}]', *body.splitlines()])
    def nblink(m):
        p = norm(m[1])
        return f"]({site_url()}/{names[p].with_suffix('.html').as_posix()}" if p in names else m[0]
    s = re.sub(r'^<!-- WARNING.*-->$', '', unlink_private(s), flags=re.M)
    s = re.sub(r'^::: *\{\.callout-(\w+)[^}]*\}\n(.*?)^:::$', callout, s, flags=re.M | re.S)
    return re.sub(r'\]\(([^)#\s:]+\.ipynb)', nblink, s).strip()


def readme_code(c, names, pictures):
    "A code cell and its outputs; PNGs are added to `pictures`."
    opts, code = options(text(c['source']))
    parts = [f'```python\n{code}\n```'] if opts.get('echo', True) and code.strip() else []
    for out in c.get('outputs', []):
        d = out.get('data', {})
        if 'image/png' in d:
            name = f'index_files/figure-{len(pictures) + 1}.png'
            pictures[name] = base64.b64decode(text(d['image/png']))
            parts.append(f'![]({name})')
        elif 'text/markdown' in d: parts.append(readme_prose(text(d['text/markdown']), names))
        elif 'text/html' in d: parts.append(text(d['text/html']).strip())
        else:
            plain = text(d.get('text/plain', out.get('text', ''))).rstrip()
            parts.append('\n'.join('    ' + l for l in plain.splitlines()))
    return parts


# ---- what is committed, and whether it is stale -----------------------------------------------------------

def marker(nbs):
    "Text of docs/GENERATED.md: what the site was built from, and with which tools."
    sha = hashlib.sha256()
    for name, data in tree(nbs).items(): sha.update(name.encode() + b'\0' + data + b'\0')
    tools = ', '.join(['python {}.{}'.format(*sys.version_info), *(f'{o} {version(o)}' for o in BUILDERS)])
    return ('This folder is generated from the notebooks in `nbs/` by `make docs`, which empties it first.\n'
            f'Do not edit it.\n\nNotebooks: {sha.hexdigest()}\nBuilt with: {tools}\n')


def tree(folder):
    "Bytes of every file in a folder, by its path there."
    files = sorted(f for f in folder.rglob('*') if f.is_file())
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}


def stale(root, made, docs, fresh):
    "How the committed README.md, settings and site differ from `made` and from the site in `fresh`."
    def differ(old, new): return [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
    had = {n: (root/n).read_bytes() for n in made if (root/n).exists()}
    bad = [f'{n} differs' for n in differ(had, made)]
    old, new = tree(docs), tree(fresh)
    if 'GENERATED.md' not in old: return [*bad, f'{docs.name}/ is missing']
    (was, were), (source, tools) = (o['GENERATED.md'].decode().splitlines()[-2:] for o in (old, new))
    if was != source: return [*bad, f'{docs.name}/ was built from other notebooks']
    if were != tools:
        print(f'docs: pages not compared, since {docs.name}/ was built with other tools'
              f'\n  there: {were}\n  here:  {tools}')
        return bad
    return bad + [f'{docs.name}/{n} differs' for n in differ(old, new)]


def publish(root, made, docs, fresh):
    "Replace the committed site, README.md, its pictures and nbs/nbdev.yml."
    shutil.rmtree(docs, ignore_errors=True)
    shutil.copytree(fresh, docs)
    shutil.rmtree(root/'index_files', ignore_errors=True)
    for n, data in made.items(): write(root/n, data)


def serve(folder, port):
    print(f'http://127.0.0.1:{port}/')
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    ThreadingHTTPServer(('127.0.0.1', port), handler).serve_forever()


def run(check=False, out=None):
    "Build; then compare, write `out`, or publish. Gives the problems."
    cfg = get_config(path=HERE.parent)
    root, docs = cfg.config_path, cfg.doc_path
    out = out.resolve() if out else None
    with scratch(root) as tmp:
        n, bad = build(tmp, tmp/'docs')
        here = get_config()
        settings = here.nbs_path/'nbdev.yml'
        made = {**readme(tmp/'_proc'), settings.relative_to(tmp).as_posix(): settings.read_bytes()}
        if out: shutil.copytree(tmp/'docs', out, dirs_exist_ok=True)
        elif check and not bad: bad = [f'{o}: run `make docs`' for o in stale(root, made, docs, tmp/'docs')]
        elif not bad: publish(root, made, docs, tmp/'docs')
    print(f'docs: {n} pages; {len(bad)} problem(s)')
    return bad


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--check', action='store_true', help='write nothing; a stale page is an error')
    p.add_argument('--out', type=Path, help='write the site there, and nothing else')
    p.add_argument('--serve', type=int, metavar='PORT', help='then serve the site on localhost')
    a = p.parse_args()
    bad = run(a.check, a.out)
    for b in bad: print('docs:', b, file=sys.stderr)
    if a.serve and not bad: serve(a.out or get_config(path=HERE.parent).doc_path, a.serve)
    sys.exit(bool(bad))


if __name__ == '__main__': main()
