"""Models out of other people's packages, built as the packages build them, with random weights.

Each maker gives (model, batch, run); `run(model, batch)` gives what a loss is taken of: a tensor, or several.
Sizes are near the packages' defaults, so that bytes mean something, and small enough for two cores.
"""
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import nn


@dataclass(frozen=True)
class Real:
    """A model to try

    Parameters
    ----------
    package : name of the distribution
    name : of the model, as the package calls it
    make : takes nothing; (model, batch, run)
    layers : names of the modules that `convert` is to replace
    why : why bytes become much fewer, or hardly do
    seg_len : steps in a segment
    """
    package: str
    name: str
    make: Callable
    layers: tuple
    why: str
    seg_len: int = 25

    @property
    def id(self): return f'{self.package}: {self.name}'

    @property
    def version(self): return version(self.package)


def noise(*shape, seed=1): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
def ids(high, *shape): return torch.randint(high, shape, generator=torch.Generator().manual_seed(2))
def plainly(model, batch): return model(batch)


# ---- speech and sound

def speechbrain_crdnn():
    from speechbrain.lobes.models.CRDNN import CRDNN
    from speechbrain.nnet.RNN import LSTM
    model = CRDNN(input_size=40, cnn_channels=[16, 16], rnn_class=LSTM, rnn_layers=2, rnn_neurons=128,
                  dnn_neurons=128)
    return model, noise(4, 200, 40), plainly


def speechbrain_gru():
    from speechbrain.nnet.RNN import GRU
    class Tagger(nn.Module):
        "The package's wrapper with the initial state that its decoders hand in"
        def __init__(self):
            super().__init__()
            self.rnn, self.out = GRU(128, input_size=40, num_layers=2), nn.Linear(128, 30)

        def forward(self, batch):
            x, h = batch
            return self.out(self.rnn(x, hx=h)[0])
    return Tagger(), (noise(8, 200, 40), noise(2, 8, 128)), plainly


def pyannote_pyannet():
    import torchaudio
    # names of torchaudio's file reader, gone since 2.9; pyannote.audio 3 asks for them when it is imported
    torchaudio.AudioMetaData, torchaudio.list_audio_backends = object, lambda: ['soundfile']
    from pyannote.audio.models.segmentation import PyanNet
    model = PyanNet()
    model.classifier, model.activation = nn.Linear(128, 7), nn.LogSoftmax(-1)   # what build() makes of a task
    return model, noise(4, 1, 32000), plainly


def openunmix_umx():
    from openunmix.model import OpenUnmix
    return OpenUnmix(nb_bins=513, hidden_size=256, max_bin=300), noise(4, 2, 513, 200).abs(), plainly


def asteroid_dprnn():
    from asteroid.models import DPRNNTasNet
    model = DPRNNTasNet(2, n_filters=64, kernel_size=16, bn_chan=64, hid_size=64, chunk_size=50, n_repeats=2)
    return model, noise(2, 1, 16000), plainly


def torchaudio_tacotron2():
    from torchaudio.models import Tacotron2
    model = Tacotron2(n_mels=40, symbol_embedding_dim=256, encoder_embedding_dim=256, decoder_rnn_dim=256,
                      attention_rnn_dim=256)
    batch = (ids(140, 4, 100), torch.tensor([100, 90, 80, 70]), noise(4, 40, 60),
             torch.tensor([60, 50, 40, 30]))
    return model, batch, lambda m, b: m(*b)[:3]


def torchaudio_wavernn():
    from torchaudio.models import WaveRNN
    model = WaveRNN(upsample_scales=[5, 5, 8], n_classes=256, hop_length=200, n_rnn=256, n_fc=256,
                    n_freq=80)
    n_frames, kernel = 6, 5
    batch = noise(4, 1, 200*(n_frames - kernel + 1)), noise(4, 1, 80, n_frames)
    return model, batch, lambda m, b: m(*b)


def torchaudio_hdemucs():
    from torchaudio.models import HDemucs
    model = HDemucs(['drums', 'rest'], channels=16, nfft=1024, depth=5)
    return model, noise(1, 2, 22050), plainly


def transformers_encodec():
    from transformers import EncodecConfig
    from transformers.models.encodec.modeling_encodec import EncodecDecoder, EncodecEncoder
    config = EncodecConfig(num_filters=8, hidden_size=64, upsampling_ratios=[5, 4, 2])
    return nn.Sequential(EncodecEncoder(config), EncodecDecoder(config)), noise(2, 1, 8000), plainly


# ---- text and images

def flair_language_model():
    from flair.data import Dictionary
    from flair.models.language_model import LanguageModel
    letters = Dictionary()
    for letter in 'abcdefghijklmnopqrstuvwxyz .,': letters.add_item(letter)
    model = LanguageModel(letters, True, hidden_size=256, nlayers=1, embedding_size=64)
    def run(m, b):
        hidden = tuple(m.encoder.weight.new_zeros(1, b.shape[1], 256) for _ in range(2))
        return m(b, hidden)[0]
    return model, ids(20, 250, 16), run


def flair_sequence_tagger():
    from flair.data import Dictionary, Sentence
    from flair.embeddings import CharacterEmbeddings
    from flair.models import SequenceTagger
    letters, tags = Dictionary(), Dictionary()
    for letter in 'abcdefghijklmnopqrstuvwxyz': letters.add_item(letter)
    for tag in ('noun', 'verb', 'other'): tags.add_item(tag)
    model = SequenceTagger(CharacterEmbeddings(letters), tags, 'pos', hidden_size=128, rnn_layers=2,
                           use_crf=False, reproject_embeddings=False)
    words = 'the quick brown fox jumps over a lazy dog while we count every letter of it'.split()
    texts = [' '.join((words*6)[i:i + 80 - 7*i]) for i in range(8)]
    def run(m, texts):
        sentences = [Sentence(text) for text in texts]
        m.embeddings.embed(sentences)
        return m(*m._prepare_tensors(sentences))
    return model, texts, run


def stanza_charlm():
    from stanza.models.common.char_model import CharacterLanguageModel
    args = dict(char_emb_dim=50, char_hidden_dim=256, char_num_layers=1, char_dropout=0.05,
                char_rec_dropout=0., char_unit_dropout=0.)
    model = CharacterLanguageModel(args, dict(char=[*'abcdefghijklmnopqrstuvwxyz']))
    return model, (ids(26, 16, 250), [250]*16), lambda m, b: m(*b)[2]


def doctr_crnn():
    from doctr.models import crnn_mobilenet_v3_small
    model = crnn_mobilenet_v3_small(pretrained=False, pretrained_backbone=False)
    return model, noise(16, 3, 32, 128), lambda m, b: m.linear(_columns(m, b))


def _columns(m, images):
    "What doctr's forward computes up to its classifier"
    features = m.feat_extractor(images)
    c, h, w = features.shape[1:]
    return m.decoder(features.reshape(-1, c*h, w).transpose(1, 2))[0]


def easyocr_vgg():
    from easyocr.model.vgg_model import Model
    return Model(1, 64, 128, 97), noise(16, 1, 64, 400), lambda m, b: m(b, None)


# ---- series

def pytorch_forecasting_tft():
    from pytorch_forecasting import TemporalFusionTransformer
    reals = ['level', 'a', 'b']
    model = TemporalFusionTransformer(hidden_size=32, hidden_continuous_size=16, output_size=7,
                                      max_encoder_length=120, static_reals=['level'],
                                      time_varying_reals_encoder=['a', 'b'], time_varying_reals_decoder=['a'],
                                      x_reals=reals, output_transformer=lambda out: out['prediction'])
    def run(m, b):
        past, ahead = b
        B, none = len(past), torch.zeros(len(past), 0, dtype=torch.int64)[:, None]
        return m(dict(encoder_cont=past, decoder_cont=ahead, encoder_cat=none.expand(B, 120, 0),
                      decoder_cat=none.expand(B, 24, 0), target_scale=past.new_tensor([0., 1.]).expand(B, 2),
                      encoder_lengths=torch.full((B,), 120),
                      decoder_lengths=torch.full((B,), 24)))['prediction']
    return model, (noise(16, 120, 3), noise(16, 24, 3, seed=3)), run


def neuralforecast_model(kind, **how):
    def make():
        import neuralforecast.models as models
        from neuralforecast.losses.pytorch import MAE
        model = getattr(models, kind)(h=24, input_size=200, futr_exog_list=['f'], loss=MAE(), **how)
        def run(m, b):
            y, future = b
            if kind == 'DeepAR': future = future[:, :200]
            return m(dict(insample_y=y, futr_exog=future, hist_exog=None, stat_exog=None))
        return model, (noise(16, 200, 1), noise(16, 224, 1)), run
    return make


def gluonts_deepar():
    from gluonts.torch.model.deepar.module import DeepARModel
    model = DeepARModel(freq='h', context_length=120, prediction_length=24, num_feat_dynamic_real=2,
                        cardinality=[5], hidden_size=64, lags_seq=[1, 2, 24])
    past = 120 + 24
    batch = dict(feat_static_cat=ids(5, 16, 1), feat_static_real=noise(16, 1),
                 past_time_feat=noise(16, past, 2),
                 past_target=noise(16, past).abs(), past_observed_values=torch.ones(16, past),
                 future_time_feat=noise(16, 24, 2), future_target=noise(16, 24).abs(),
                 future_observed_values=torch.ones(16, 24))
    return model, batch, lambda m, b: m.loss(**b)


def gluonts_tft():
    from gluonts.torch.model.tft.module import TemporalFusionTransformerModel
    model = TemporalFusionTransformerModel(context_length=120, prediction_length=24, c_feat_static_cat=[5])
    batch = dict(past_target=noise(16, 120), past_observed_values=torch.ones(16, 120),
                 feat_static_real=noise(16, 1), feat_static_cat=ids(5, 16, 1),
                 feat_dynamic_real=noise(16, 144, 1),
                 future_target=noise(16, 24), future_observed_values=torch.ones(16, 24))
    return model, batch, lambda m, b: m.loss(**b)


def darts_rnn():
    from darts.models.forecasting.rnn_model import _RNNModule
    model = _RNNModule('GRU', input_size=3, hidden_dim=64, num_layers=2, target_size=1, nr_params=1,
                       dropout=0., input_chunk_length=200, output_chunk_length=1, train_sample_shape=None,
                       use_reversible_instance_norm=False)
    def run(m, b): return m(_darts_input(*b)).prediction
    return model, (noise(16, 200, 1), noise(16, 200, 2)), run


def _darts_input(target, future):
    from darts.utils.data.torch_datasets.utils import PLModuleInput
    return PLModuleInput(past_target=target, past_covariates=None, historic_future_covariates=future,
                         future_covariates=None, static_covariates=None, future_target=None)


# ---- control

def sb3_lstm_policy():
    import numpy as np
    from gymnasium import spaces
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
    from sb3_contrib.common.recurrent.type_aliases import RNNStates
    def box(n): return spaces.Box(-1, 1, (n,), np.float32)
    model = RecurrentActorCriticPolicy(box(12), box(3), _rate)
    def run(m, b):
        seen, done, starts = b
        rest = [seen.new_zeros(1, 8, 256) for _ in range(4)]
        return m.evaluate_actions(seen, done, RNNStates(tuple(rest[:2]), tuple(rest[2:])), starts)
    return model, (noise(8*128, 12), noise(8*128, 3), torch.zeros(8*128)), run


def _rate(progress): return 3e-4


def torchrl_module(kind):
    def make():
        from tensordict import TensorDict
        from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode
        if kind == 'LSTM':
            model = LSTMModule(input_size=12, hidden_size=128, in_key='seen', out_key='out')
        else: model = GRUModule(input_size=12, hidden_size=128, in_key='seen', out_key='out')
        def run(m, b):
            seen, starts = b
            with set_recurrent_mode(True):
                return m(TensorDict({'seen': seen, 'is_init': starts}, seen.shape[:2]))['out']
        starts = torch.zeros(16, 128, 1, dtype=torch.bool)
        starts[:, 0] = True
        return model, (noise(16, 128, 12), starts), run
    return make


# ---- all of them

ALONE = 'the recurrent layers are most of the model'
BOTH = 'two directions: the output of each is part of what is kept, and half of it is joined'
CONV = 'the convolutions in front keep more than the recurrent layers'
SHORT = 'few steps: a segment is the sequence'

REAL = (
    Real('speechbrain', 'CRDNN', speechbrain_crdnn, ('RNN.rnn',), CONV),
    Real('speechbrain', 'GRU given hx', speechbrain_gru, ('rnn.rnn',), ALONE),
    Real('pyannote.audio', 'PyanNet', pyannote_pyannet, ('lstm',), CONV),
    Real('openunmix', 'OpenUnmix', openunmix_umx, ('lstm',), BOTH),
    Real('asteroid', 'DPRNN-TasNet', asteroid_dprnn,
         tuple(f'masker.net.{i}.{o}_RNN.rnn' for i in (0, 1) for o in ('intra', 'inter')), BOTH),
    Real('torchaudio', 'Tacotron2', torchaudio_tacotron2, ('encoder.lstm',),
         'only the encoder is converted; the decoder is a loop over LSTMCell'),
    Real('torchaudio', 'WaveRNN', torchaudio_wavernn, ('rnn1', 'rnn2'), ALONE),
    Real('torchaudio', 'HDemucs', torchaudio_hdemucs,
         tuple(f'freq_encoder.4.dconv.layers.{i}.3.lstm' for i in (0, 1)), CONV),
    Real('transformers', 'EnCodec', transformers_encodec, ('0.layers.10.lstm', '1.layers.1.lstm'), CONV),
    Real('flair', 'LanguageModel', flair_language_model, ('rnn',), ALONE),
    Real('flair', 'SequenceTagger', flair_sequence_tagger, ('embeddings.char_rnn', 'rnn'), BOTH),
    Real('stanza', 'CharacterLanguageModel', stanza_charlm, ('charlstm.lstm',), ALONE),
    Real('python-doctr', 'CRNN', doctr_crnn, ('decoder',), CONV),
    Real('easyocr', 'VGG', easyocr_vgg, tuple(f'SequenceModeling.{i}.rnn' for i in (0, 1)), CONV),
    Real('pytorch-forecasting', 'TemporalFusionTransformer', pytorch_forecasting_tft,
         ('lstm_encoder', 'lstm_decoder'), 'variable selection keeps more than the two layers'),
    Real('neuralforecast', 'LSTM', neuralforecast_model('LSTM'), ('hist_encoder',), ALONE),
    Real('neuralforecast', 'GRU', neuralforecast_model('GRU'), ('hist_encoder',), ALONE),
    Real('neuralforecast', 'DeepAR', neuralforecast_model('DeepAR'), ('hist_encoder',), ALONE),
    Real('neuralforecast', 'TFT', neuralforecast_model('TFT', hidden_size=32),
         ('temporal_encoder.history_encoder', 'temporal_encoder.future_encoder'),
         'variable selection keeps more than the two layers'),
    Real('gluonts', 'DeepAR', gluonts_deepar, ('rnn',), ALONE),
    Real('gluonts', 'TFT', gluonts_tft, ('temporal_encoder.encoder_lstm', 'temporal_encoder.decoder_lstm'),
         'variable selection keeps more than the two layers'),
    Real('darts', 'RNNModel, GRU', darts_rnn, ('rnn',), ALONE),
    Real('sb3-contrib', 'RecurrentActorCriticPolicy', sb3_lstm_policy, ('lstm_actor', 'lstm_critic'), ALONE),
    Real('torchrl', 'LSTMModule', torchrl_module('LSTM'), ('lstm',), ALONE),
    Real('torchrl', 'GRUModule', torchrl_module('GRU'), ('gru',), ALONE),
)
