"""The page of a run: whatever the run has left so far, and whatever it is called."""
import base64
import re
from html.parser import HTMLParser
from itertools import product
from math import inf, nan

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from gruckpt.training.checkpoint_files import Telemetry, save_checkpoint, write_history
from gruckpt.training.schedule import data_gap
from gruckpt.training.report import (draw, facts, plot_bytes, plot_history, plot_loss, plot_speed, read_run,
                                     write_report)
from gruckpt.training.config import StepRecord


def record(step, loss=2., **kw):
    return StepRecord(**{'step': step, 'epoch': step // 10, 'loss': loss, 'bpb': loss / .7, 'grad_norm': loss,
                         'clip_scale': .5, 'lr': 1e-3, 'tokens_per_s': 10., **kw})


def lost(step, loss): return record(step, loss, clip_scale=0., skipped='loss not finite')


def run_of(folder, records, history=(), state=None):
    "A folder as `session` leaves it."
    folder.mkdir()
    log = Telemetry(folder/'telemetry.csv', StepRecord)
    for o in records: log.write(o)
    log.close()
    if history: write_history(folder/'history.csv', list(history))
    if state: save_checkpoint(folder, state)
    return folder


def evaluations(n, **numbers):
    return [{'step': 10 * i, 'epoch': i - 1, 'teacher_forcing': 1., **{k: v / i for k, v in numbers.items()}}
            for i in range(1, n + 1)]


class Page(HTMLParser):
    "What a page refers to, and what it says."
    def __init__(self, text):
        super().__init__()
        self.links, self.tags, self.said = [], [], []
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ('src', 'href', 'action', 'data', 'srcset')]
    def handle_data(self, data): self.said.append(data)


ROWS = {'none': [], 'one': [record(1)], 'one lost': [lost(1, nan)], 'all lost': [lost(1, inf), lost(2, nan)],
        'some lost': [record(1), lost(2, inf), record(3)], 'many': [record(i, 9 / i) for i in range(1, 400)],
        'negative': [record(1, -1.), record(2, -2.)],
        'gpu': [record(i, peak_predicted=2**30, peak_measured=2**29, gpu_used=2**31, gpu_utilisation=50,
                       seconds=.2, seconds_predicted=.1)
                for i in range(1, 4)]}
HISTORIES = {'none': (), 'one': evaluations(1, loss=2., bpb=3., top1=.1),
             'text': evaluations(4, loss=2., bpb=3., top1=.1, free_loss=3., free_bpb=4., free_top1=.05),
             'lost': evaluations(3, loss=nan, bpb=nan, top1=0.),
             'series': evaluations(4, quantile_loss=1., q_risk_50=.5, coverage_80=.8)}


@pytest.mark.parametrize('rows, history', product(ROWS, HISTORIES))
def test_every_run_has_its_figure_and_facts(tmp_path, rows, history):
    "No step yet, one, skipped ones, other judges: all plots are there, and none is without a title."
    run = read_run(run_of(tmp_path/'a', ROWS[rows], HISTORIES[history]))
    titled = [ax for ax in draw(run).axes if ax.get_title()]
    assert len(titled) == 5 + (rows == 'gpu') + {'none': 0, 'series': 3}.get(history, 2)
    known = facts(run)
    assert known['steps'] == str(len(ROWS[rows])) and all(type(v) is str for v in known.values())
    assert sum(k.startswith('evaluation') for k in known) == {'none': 0, 'text': 2}.get(history, 1)


def test_page_opens_alone(tmp_path):
    "One picture, inside the file and equal to the PNG; no link to anything else."
    folder = run_of(tmp_path/'a', ROWS['gpu'], HISTORIES['text'])
    png, page = write_report(folder)
    seen = Page(page.read_text(encoding='utf-8'))
    assert len(seen.links) == 1 and seen.links[0].startswith('data:image/png;base64,')
    assert base64.b64decode(seen.links[0].partition(',')[2]) == png.read_bytes()
    assert 'script' not in seen.tags and 'link' not in seen.tags
    assert 'How busy was the GPU? 50 % of the time' in page.read_text()
    assert {o.name for o in folder.iterdir()} == {'history.csv', 'report.html', 'report.png', 'telemetry.csv'}


def test_text_stays_text(tmp_path):
    "Names that look like markup: of the folder, of a number, and in what the run remembers."
    evil = '<script>alert("1")</script>&{0}%s'
    state = {'step': 1, 'about': {'text': evil, evil: 1}, 'config': {'lr': 1}, 'plan': None, 'model': {},
             'stream': {}}
    folder = run_of(tmp_path/'<i>&{x}', ROWS['one'], evaluations(3, **{evil: 1.}), state)
    seen = Page(write_report(folder)[1].read_text(encoding='utf-8'))
    assert not {'script', 'i', 'b'} & {*seen.tags}
    assert ''.join(seen.said).count(evil) == 5 and 'Run <i>&{x}' in ''.join(seen.said)


def test_settings_come_from_the_checkpoint(tmp_path):
    state = {'step': 3, 'about': {'spec': {'hidden': 8}, 'symbols': 'x' * 1000}, 'config': {'lr': .1},
             'plan': None, 'model': {'w': torch.zeros(3, 4), 'b': torch.zeros(8)},
             'stream': {'characters': 100}}
    known = facts(read_run(run_of(tmp_path/'a', ROWS['many'], state=state)))
    assert known['parameters'] == '20' and known['spec'] == 'hidden 8' and len(known['symbols']) == 398
    assert known['data'].startswith('100 tokens for 20 parameters are 5 a parameter, read 40 times')
    assert known['epochs'].startswith('40')


def test_a_table_is_told_as_a_list(tmp_path):
    "Which column has which role, and where the parts begin: no dictionary, no means of columns."
    spec = {'time': 'when', 'target': 'sold', 'ids': ['shop'], 'known_cats': [], 'observed_reals': ['a', 'b'],
            'missing': None}
    setup = {'coding': {'spec': spec, 'means': [[.1] * 99]}, 'lookback': 24, 'horizon': 6, 'min_past': 12,
             'parts': {'valid_from': 0, 'test_from': 86400 * 10**9}}
    state = {'step': 3, 'about': {'setup': setup, 'tft': {'quantiles': (.1, .9), 'known_cats': ()}},
             'config': {'lr': .1, 'eval_every': None}, 'plan': None, 'model': {}, 'stream': {}}
    known = facts(read_run(run_of(tmp_path/'a', ROWS['many'], state=state)))
    assert known['columns'] == 'time when; target sold; ids shop; observed, numbers a b'
    assert known['parts'] == 'valid from 1970-01-01 00:00:00, test from 1970-01-02 00:00:00'
    assert (known['past'], known['tft']) == ('12 to 24 rows', 'quantiles 0.1 0.9, known_cats none')
    assert known['training'] == 'lr 0.1, eval_every none' and not re.search(r'[{\[]', ''.join(known.values()))


def test_what_was_read_once_is_not_read_1_times():
    assert 'a parameter, read once: ' in str(data_gap(20, 100))
    assert 'a parameter, read 2 times: ' in str(data_gap(20, 100, 2))


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    folder = run_of(tmp_path/'a', ROWS['some lost'], HISTORIES['one'])
    for name in 'telemetry.csv', 'history.csv':
        with open(folder/name, 'a') as f: f.write('7,0,0.0')
    run = read_run(folder)
    assert (len(run.rows), len(run.history)) == (3, 1)


def test_no_run_is_one_line(tmp_path):
    for folder in tmp_path, tmp_path/'none':
        with pytest.raises(ValueError, match=r"has no telemetry\.csv; give the folder of a run$"):
            write_report(folder)


def test_the_best_is_the_lowest_loss_and_the_highest_share():
    rows = pd.DataFrame({'step': [1, 2, 3], 'epoch': [0, 1, 2], 'teacher_forcing': 1.,
                         'loss': [3., 1., 2.], 'top1': [.1, .3, .2], 'free_top1': [.2, .1, .1]})
    titles = []
    for name in 'loss', 'top1':
        ax = Figure().add_subplot()
        plot_history(rows, ax, name)
        titles.append(ax.get_title().splitlines()[1])
    assert titles == ['step 2 (1)', 'true past: step 2 (0.3), own past: step 1 (0.2)']


def test_a_plot_draws_on_the_axes_it_is_given():
    "And lost steps leave a gap, over which no line is drawn."
    ax = Figure().add_subplot()
    plot_loss(pd.DataFrame({'step': [1, 2, 3], 'bpb': [3., nan, 1.]}), ax)
    assert str(ax.lines[0].get_ydata().tolist()) == '[3.0, nan, 1.0]'
    assert re.search('From 3.00 to 1.00', ax.get_title())


def test_predicted_and_measured_stand_beside_each_other():
    "Bytes and seconds; on a CPU the steps that a count made slower are left out."
    rows = pd.DataFrame({'step': range(1, 7), 'seconds': [1., 9., 1., 9., 3., 9.], 'tokens_per_s': 5.,
                         'seconds_predicted': 2., 'peak_measured': [nan, 99, nan, 99, nan, 99],
                         'peak_predicted': 100})
    seconds, peaks = Figure().subplots(2)
    plot_speed(rows, seconds)
    plot_bytes(rows, peaks)
    assert seconds.lines[0].get_ydata().tolist() == [1, 1, 3] and set(seconds.lines[1].get_ydata()) == {2}
    assert '1 s (median), 5 targets a second; predicted 2 s' in seconds.get_title()
    assert [len(o.get_xdata()) for o in peaks.lines] == [6, 3]
    assert 'predicted 100 B, measured 99 B' in peaks.get_title()
    for ax in seconds, peaks: assert [o.get_text() for o in ax.get_legend().get_texts()]


def test_a_coverage_is_best_where_it_is_nearest_to_its_level():
    rows = pd.DataFrame({'step': [10, 20, 30], 'epoch': [0, 1, 2], 'teacher_forcing': nan,
                         'coverage_0.1': [0., .09, .3], 'coverage_0.9': [.85, .99, .5]})
    titles = []
    for name in 'coverage_0.1', 'coverage_0.9':
        ax = Figure().add_subplot()
        plot_history(rows, ax, name)
        titles.append(ax.get_title())
    assert titles == ['Which evaluation has coverage_0.1 nearest to 0.1?\nstep 20 (0.09)',
                      'Which evaluation has coverage_0.9 nearest to 0.9?\nstep 10 (0.85)']


def test_a_forecaster_is_told_without_words_of_a_language_model(tmp_path):
    "With and without evaluations, and no verdict before all has been read once."
    forecasts = [record(i, teacher_forcing=None) for i in range(1, 9)]
    numbers = [{'step': i, 'epoch': 0, 'teacher_forcing': None, 'quantile_loss': 1 / i, 'coverage_0.5': .4}
               for i in (4, 8)]
    for name, history in ('a', numbers), ('b', ()):
        text = write_report(run_of(tmp_path/name, forecasts, history))[1].read_text(encoding='utf-8')
        said = re.sub('base64,[^"]*', '', text)
        assert not [o for o in ('bpb', 'bits per', 'token', 'teacher', 'past') if o in said]
        assert ('no verdict before the end of the first epoch' in said) == (name == 'a')
