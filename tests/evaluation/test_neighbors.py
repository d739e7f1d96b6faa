"""Nearest neighbors: the same as brute force for any block size, in bounded memory."""

import pytest
import torch
from torch import Tensor

from mixnn.evaluation import neighbors
from mixnn.evaluation.neighbors import nearest
from mixnn.functional import unit


def rows(count: int, width: int = 9, seed: int = 0) -> Tensor:
    return unit(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)))


def brute_force(queries: Tensor, bank: Tensor, k: int, own: list[int | None]) -> list[list[tuple[float, int]]]:
    """Every cosine in float64, sorted; pairs of cosine and position."""
    found = []
    for query, mine in zip(queries.double(), own, strict=True):
        cosines = [(float(query @ row), i) for i, row in enumerate(bank.double()) if i != mine]
        found.append(sorted(cosines, reverse=True)[:k])
    return found


@pytest.mark.parametrize("block", [1, 40, 700, 2**22])
@pytest.mark.parametrize("at_once", [1, 16, 256])
@pytest.mark.parametrize("own", [[], list(range(70)), [99, *range(69)]])
def test_neighbors_equal_brute_force_for_any_block_size(monkeypatch, block, at_once, own):
    monkeypatch.setattr(neighbors, "BLOCK", block)
    monkeypatch.setattr(neighbors, "QUERIES", at_once)
    bank = rows(100)
    queries = bank[own] if own else rows(70, seed=1)
    cosines, positions = nearest(queries, bank, 5, torch.tensor(own) if own else None)
    expected = brute_force(queries, bank, 5, own or [None] * 70)
    assert positions.tolist() == [[i for _, i in row] for row in expected]
    torch.testing.assert_close(cosines, torch.tensor([[cos for cos, _ in row] for row in expected]), rtol=0, atol=1e-6)


def test_a_copy_of_the_query_is_a_neighbor_and_the_query_itself_is_not():
    bank = rows(50)
    bank[[7, 20, 45]] = bank[3].clone()
    _, positions = nearest(bank[[20]], bank, 3, torch.tensor([20]))
    assert sorted(positions[0].tolist()) == [3, 7, 45]


@pytest.mark.parametrize("block", [2, 2**22])
def test_there_are_at_most_as_many_neighbors_as_rows(monkeypatch, block):
    monkeypatch.setattr(neighbors, "BLOCK", block)
    bank, everyone = rows(3), torch.arange(3)
    assert nearest(bank[:2], bank, 10)[1].shape == (2, 3)
    assert nearest(bank, bank, 10, everyone)[1].shape == (3, 2)
    assert nearest(bank[:1], bank[:1], 10, everyone[:1])[1].shape == (1, 0)
    assert nearest(bank[:0], bank, 2)[1].shape == (0, 2)


@pytest.mark.parametrize("num_queries, k", [(1, 5), (10, 5), (400, 300)])
def test_memory_stays_within_a_block_of_similarities(monkeypatch, num_queries, k):
    monkeypatch.setattr(neighbors, "BLOCK", 1000)
    seen, real = [], Tensor.topk

    def topk(self, *args, **options):
        seen.append(self.numel())
        return real(self, *args, **options)

    monkeypatch.setattr(Tensor, "topk", topk)
    nearest(rows(num_queries, seed=1), rows(5000), k)
    assert max(seen) <= 2 * 1000  # a block's nearest are added to those found so far


def test_progress_counts_queries(monkeypatch):
    monkeypatch.setattr(neighbors, "QUERIES", 4)
    done: list[int] = []
    nearest(rows(10), rows(20), 3, advance=done.append)
    assert done == [4, 8, 10]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_bank_on_a_gpu_is_searched_there():
    bank, own = rows(300), torch.arange(300)
    cosines, positions = nearest(bank.cuda(), bank.cuda(), 5, own)
    assert cosines.is_cuda
    assert positions.tolist() == nearest(bank, bank, 5, own)[1].tolist()
