"""Several processes on one machine. Run as a script, this file is one of those processes."""
import hashlib
import json
import sys
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from processes import ranks
from torch import nn

from gruckpt.charlm.model import GRULM, GRUSpec
from gruckpt.training.parallel import World, all_rows, every_rank, joined, own_rows, sum_over_ranks, wrap
from gruckpt.plan.segment import Plan
from gruckpt.charlm.text import Batch, TokenStream

IDS = torch.randint(20, (4000,), generator=torch.Generator().manual_seed(1))


# ---- starting processes ----

def start(case, size, out):
    "The processes of a case; each writes what it has to `out`-RANK."
    return ranks(size, __file__, case, out)


def finished(case, size, tmp_path):
    "What the processes of a case wrote, by rank."
    running = start(case, size, tmp_path/case)
    errors = [p.communicate(timeout=200)[1] for p in running]
    assert [p.returncode for p in running] == [0] * size, errors
    return [json.loads((tmp_path/f'{case}-{rank}').read_text()) for rank in range(size)]


# ---- what a process does ----

def fingerprint(model):
    "Of the weights, to the bit."
    return hashlib.sha256(b''.join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def gap(model, twin):
    "The largest difference between gradients of two models."
    return max((p.grad - q.grad).abs().max().item() for p, q in zip(model.parameters(), twin.parameters()))


def train(world, n_segments, find_unused, micro=1, dropout=0.):
    "Five steps; without dropout against a twin on the joined batch."
    torch.manual_seed(0)
    model, plan, rounds = GRULM(GRUSpec(20, 16, 2, dropout)), Plan.split(16, n_segments), []
    torch.manual_seed(world.rank)                                     # other masks on every rank
    twin, wrapped = GRULM(model.spec), wrap(model, world, find_unused)
    wrapped.register_comm_hook(rounds, counted)
    own = iter(TokenStream(IDS, 6 // world.size, 16, rank=world.rank, world_size=world.size))
    whole = iter(TokenStream(IDS, 6, 16))
    optimizer, errors, prints, state, twin_state = torch.optim.AdamW(model.parameters()), [], [], None, None
    for _ in range(5):
        twin.load_state_dict(model.state_dict())
        for o in model, twin: o.zero_grad()
        for i in range(micro):
            with wrapped.no_sync() if i < micro - 1 else nullcontext():
                loss, state = wrapped(next(own), state, plan=plan)
                (loss / micro).backward()
            loss, twin_state = twin.loss(next(whole), twin_state)
            (loss / micro).backward()
        errors.append(0. if dropout else gap(model, twin))
        optimizer.step()
        prints.append(fingerprint(model))
    return {'errors': errors, 'prints': prints, 'rounds': len(rounds), 'last': loss.item()}


def counted(rounds, bucket):
    "Average the gradients, and note when the last part of them is exchanged."
    if bucket.is_last(): rounds.append(1)
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def case_train(world):
    return {f'{k} {find}': train(world, k, find) for k in (1, 4) for find in (False, True)}


def case_more(world):
    return {'micro': train(world, 4, False, micro=3), 'dropout': train(world, 4, False, dropout=0.3)}


class Uneven(nn.Module):
    "A mean over some targets, and a weight that not every rank uses."
    def __init__(self, uses):
        super().__init__()
        self.w, self.side, self.uses = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), uses
    def loss(self, batch, state=None):
        loss = (self.w * batch).mean()
        return (loss * self.side if self.uses else loss), state


def case_uneven(world):
    "R05's 10 and 2 valid targets; then a weight that one rank, or none, uses."
    batch = [torch.full((10,), 1.), torch.full((2,), 3.)][world.rank]
    n_all = sum_over_ranks(torch.tensor(len(batch), dtype=torch.float64))
    model = Uneven(True)
    wrapped = wrap(model, world)
    loss, _ = wrapped(batch)
    (loss * float(world.size * len(batch) / n_all)).backward()
    out, unused = {'grad': model.w.grad.item()}, {}
    for name, uses in ('nowhere', False), ('on one rank', world.rank == 0):
        model = Uneven(uses)
        wrapped = wrap(model, world, find_unused=True)
        for _ in range(2): wrapped(batch)[0].backward()
        unused[name] = [None if p.grad is None else p.grad.item() for p in (model.w, model.side)]
    try: wrap(Uneven(False), world)(batch)[0].backward()
    except ValueError as e: out['said'] = str(e)
    return out | {'unused': unused}


def case_rows(world):
    "Rows there and back, and sums of integers and doubles."
    whole = torch.arange(48.).view(2, 6, 4)
    own = own_rows(whole, world, 1)
    kinds = [torch.tensor([2**60, world.rank]), torch.tensor(0.1, dtype=torch.float64)]
    return {'back': all_rows(own, 1).equal(whole), 'sums': [sum_over_ranks(o).tolist() for o in kinds],
            'own': tuple(own.shape), 'kept': kinds[0].tolist(), 'values': every_rank({'rank': world.rank})}


def case_fails(world):
    "Rank 1 dies before it exchanges anything."
    if world.rank == 1: raise RuntimeError('this rank fails')
    sum_over_ranks(torch.ones(1))


def case_hangs(world):
    "Rank 1 does not come."
    if world.rank == 1: time.sleep(30)
    sum_over_ranks(torch.ones(1))


if __name__ == '__main__':
    torch.set_num_threads(1)
    with joined(World.from_env(), timeout_s={'hangs': 4, 'fails': 15}.get(sys.argv[1], 60)) as here:
        result = globals()[f'case_{sys.argv[1]}'](here)
        every_rank(None)                                              # nobody leaves before all are done
    with open(f'{sys.argv[2]}-{here.rank}', 'w') as f: f.write(json.dumps(result))


# ---- tests ----

@pytest.fixture(scope='module', params=[2, 3])
def trained(request, tmp_path_factory):
    return finished('train', request.param, tmp_path_factory.mktemp('train'))


@pytest.mark.parametrize('find_unused', [False, True])
@pytest.mark.parametrize('n_segments', [1, 4])
def test_gradients_are_those_of_the_joined_batch(trained, n_segments, find_unused):
    "X01: recomputed segments hand each gradient over once; X02: weights equal to the bit after each step."
    ranks = [o[f'{n_segments} {find_unused}'] for o in trained]
    assert max(e for o in ranks for e in o['errors']) < 1e-5
    assert all(len(set(prints)) == 1 for prints in zip(*[o['prints'] for o in ranks]))
    assert len(set(ranks[0]['prints'])) == 5 and {o['rounds'] for o in ranks} == {5}


def test_looking_for_unused_weights_changes_nothing(trained):
    "With two ranks to the bit; the sum of three depends on where a number lies in what is exchanged."
    for o in trained:
        for k in 1, 4:
            assert o[f'{k} False']['last'] == pytest.approx(o[f'{k} True']['last'], rel=1e-5)
            assert len(trained) > 2 or o[f'{k} False'] == o[f'{k} True']


def test_accumulation_and_dropout(tmp_path):
    "X03: three micro-batches are the batch of three times the rows, and one exchange a step."
    ranks = finished('more', 2, tmp_path)
    assert max(e for o in ranks for e in o['micro']['errors']) < 1e-5
    assert [o['micro']['rounds'] for o in ranks] == [5, 5]
    for name in 'micro', 'dropout':
        assert ranks[0][name]['prints'] == ranks[1][name]['prints'], name


def test_uneven_targets_and_unused_weights(tmp_path):
    "The token mean (R05), and X04: an error that names the weight, or with find_unused what is expected."
    ranks = finished('uneven', 2, tmp_path)
    assert [o['grad'] for o in ranks] == [pytest.approx(16 / 12)] * 2
    assert all(o['said'].startswith('the loss does not depend on side: freeze') for o in ranks)
    assert [o['unused']['nowhere'] for o in ranks] == [[4., None]] * 2
    assert [o['unused']['on one rank'] for o in ranks] == [[4., 1.]] * 2       # two passes, averaged


def test_rows_and_sums(tmp_path):
    ranks = finished('rows', 3, tmp_path)
    for i, o in enumerate(ranks):
        assert o['back'] and o['own'] == [2, 2, 4] and o['kept'] == [2**60, i]
        assert o['sums'] == [[3 * 2**60, 3], pytest.approx(0.3)]
        assert o['values'] == [{'rank': r} for r in range(3)]


@pytest.mark.parametrize('case', ['fails', 'hangs'])
def test_no_rank_waits_for_ever(case, tmp_path):
    "The other one dies, or does not come: an error, in time."
    begun, (first, second) = time.monotonic(), start(case, 2, tmp_path/case)
    try: said = first.communicate(timeout=100)[1]
    finally: second.kill()
    second.communicate()
    assert first.returncode != 0 and 'RuntimeError' in said or 'Error' in said.splitlines()[-1]
    assert not list(tmp_path.glob('*')) and time.monotonic() - begun < 100


def test_one_process_needs_no_group():
    model = GRULM(GRUSpec(20, 8, 1))
    ids = IDS[:34].view(2, 17)
    loss, state = wrap(model, World())(Batch(ids[:, :-1], ids[:, 1:], True), plan=Plan.split(16, 4))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters()) and not state.requires_grad
    assert not dist.is_initialized()


@pytest.mark.parametrize('env, said', [
    ({'RANK': '0'}, 'lacks WORLD_SIZE, LOCAL_RANK'), ({'WORLD_SIZE': '2', 'LOCAL_RANK': '0'}, 'lacks RANK'),
    ({'RANK': '-1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '0'}, "RANK must be an integer from 0 on, got '-1'"),
    ({'RANK': '2', 'WORLD_SIZE': '2', 'LOCAL_RANK': '0'}, 'rank must be in 0..1')])
def test_a_wrong_environment_is_named(env, said):
    with pytest.raises(ValueError, match=said.replace('.', r'\.')): World.from_env(env)
