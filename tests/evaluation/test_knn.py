import math

import numpy as np
import pytest
import torch
from torch import Tensor

import mixnn
from mixnn.config import UserError
from mixnn.evaluation import linear_probe
from mixnn.evaluation.knn import accuracy_by_vote, default_k, knn, votes
from mixnn.progress import Reporter


def brute_force(bank: Tensor, bank_labels: list[int], queries: Tensor, k: int, classes: int, vote: str) -> list[int]:
    """The authors' vote as loops: score_c = sum over the k nearest of exp(cos / 0.1) [y = c], or of [y = c]."""
    guesses = []
    for query in queries.double().tolist():
        cosines = []
        for row, label in zip(bank.double().tolist(), bank_labels, strict=True):
            dot = sum(a * b for a, b in zip(query, row, strict=True))
            cosines.append((dot / math.hypot(*query) / math.hypot(*row), label))
        score = [0.0] * classes
        for cosine, label in sorted(cosines, reverse=True)[:k]:
            score[label] += math.exp(cosine / 0.1) if vote == "weighted" else 1.0
        guesses.append(score.index(max(score)))
    return guesses


def problem(
    seed: int = 0, bank: int = 60, queries: int = 50, classes: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Classes of unequal size that overlap, so that the two votes and different k disagree."""
    g = torch.Generator().manual_seed(seed)
    labels, truth = (torch.rand(n, generator=g).pow(2).mul(classes).long() for n in (bank, queries))
    centers = torch.randn(classes, 6, generator=g)
    scale = 1 + 9 * torch.rand(bank, 1, generator=g)  # vectors of unequal length: cosine and dot product disagree
    rows = (centers[labels] + 1.2 * torch.randn(bank, 6, generator=g)) * scale
    return rows, labels, centers[truth] + 1.2 * torch.randn(queries, 6, generator=g), truth


@pytest.mark.parametrize("k", [1, 7, 40])
def test_both_votes_equal_the_definition_written_as_loops(k: int):
    bank, labels, queries, truth = problem()
    found = accuracy_by_vote(bank, labels, queries, truth, 3, k)
    assert found.keys() == {"weighted", "majority"}
    for vote, accuracy in found.items():
        guess = torch.tensor(brute_force(bank, labels.tolist(), queries, k, 3, vote))
        assert accuracy == pytest.approx(100 * (guess == truth).double().mean().item()), vote
    assert (found["weighted"] == found["majority"]) == (k == 1), "the problem tells the votes apart"


def test_a_score_is_the_sum_of_the_weights_of_its_neighbors():
    similarity = torch.tensor([[0.9, 0.5, -0.2], [1.0, 0.0, 0.0]])
    labels = torch.tensor([[2, 0, 2], [1, 1, 1]])
    weighted = [[math.exp(5), 0, math.exp(9) + math.exp(-2)], [0, math.exp(10) + 2, 0]]
    torch.testing.assert_close(votes(similarity, labels, 3, "weighted"), torch.tensor(weighted))
    assert votes(similarity, labels, 3, "majority").tolist() == [[1, 0, 2], [0, 3, 0]]


def test_one_near_neighbor_outvotes_many_far_ones_by_weight_alone():
    bank = torch.tensor([[1.0, 0.1], [0.5, 1.0], [0.5, 1.0], [0.5, 1.0]])
    one = torch.tensor([[1.0, 0.0]])
    found = accuracy_by_vote(bank, torch.tensor([0, 1, 1, 1]), one, torch.tensor([0]), 2, 4)
    assert found == {"weighted": 100.0, "majority": 0.0}


def test_a_bank_smaller_than_k_is_used_whole():
    bank, labels, queries, truth = problem()
    assert accuracy_by_vote(bank, labels, queries, truth, 3, 10**6) == accuracy_by_vote(
        bank, labels, queries, truth, 3, len(bank)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_labels_may_lie_on_the_host_where_the_features_do_not():
    bank, labels, queries, truth = problem()
    assert accuracy_by_vote(bank.cuda(), labels, queries.cuda(), truth, 3, 7) == accuracy_by_vote(
        bank, labels, queries, truth, 3, 7
    )


@pytest.mark.parametrize("images, classes", [(50_000, 10), (50_000, 100), (5_000, 10), (100_000, 200)])
def test_the_default_is_200_for_each_of_the_papers_sets(images: int, classes: int):
    assert default_k(images, classes) == 200


def test_the_default_is_half_a_class_where_classes_are_small():
    assert default_k(1297, 10) == 64
    assert default_k(3, 10) == 1


def test_the_default_is_what_votes():
    """The hundred nearest say 1, the next hundred 0, all others 1: only 200 voters make a tie, which 0 wins."""
    angle = torch.cat([torch.full((100,), 0.1), torch.full((100,), 0.2), torch.full((600,), 0.3)])
    bank = torch.stack([angle.cos(), angle.sin()], dim=1)
    labels = torch.ones(800, dtype=torch.long)
    labels[100:200] = 0
    query, truth = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    query, truth = query.expand(2, 2), torch.tensor([0, 0])
    assert knn(bank, labels, query, truth).majority == 100.0
    assert [knn(bank, labels, query, truth, k=k).majority for k in (199, 200, 201)] == [0.0, 100.0, 0.0]
    assert [knn(bank, labels, query, truth, k=k).k for k in (0, 7, 10**6)] == [200, 7, 800]


def test_lengths_of_features_do_not_matter():
    bank, labels, queries, truth = problem()
    scaled = bank * torch.rand(len(bank), 1).add(0.1), queries * torch.rand(len(queries), 1).add(0.1)
    assert accuracy_by_vote(scaled[0], labels, scaled[1], truth, 3, 7) == accuracy_by_vote(
        bank, labels, queries, truth, 3, 7
    )


def test_a_tie_goes_to_the_class_with_the_lower_number():
    bank, query = torch.eye(4), torch.ones(1, 4)
    for low, high in [(0, 1), (1, 3), (0, 3)]:
        labels = torch.tensor([high, low, high, low])
        for truth, accuracy in [(low, 100.0), (high, 0.0)]:
            assert set(accuracy_by_vote(bank, labels, query, torch.tensor([truth]), 4, 4).values()) == {accuracy}


def test_a_class_without_a_row_in_the_bank_is_never_guessed():
    bank, labels, queries, _ = problem(classes=2)
    assert set(accuracy_by_vote(bank, labels, queries, torch.full((len(queries),), 4), 5, 7).values()) == {0.0}


# Anyone's features


@pytest.mark.parametrize("k", [1, 7])
def test_features_and_labels_may_be_arrays_lists_numbers_or_text(k: int):
    bank, labels, queries, truth = problem()
    names = np.array(["a cat", "b dog", "c owl"])
    expected = accuracy_by_vote(bank, labels, queries, truth, 3, k)
    for convert in (lambda y: y, lambda y: (10 * y + 5).numpy(), lambda y: names[y.numpy()], lambda y: y.tolist()):
        found = knn(bank.double().numpy(), convert(labels), queries.tolist(), convert(truth), k=k)
        assert (found.accuracy, found.majority) == (expected["weighted"], expected["majority"])
        assert (found.k, found.temperature, found.num_train, found.num_test, found.num_classes) == (k, 0.1, 60, 50, 3)


def test_a_class_of_the_test_rows_alone_counts_and_is_never_right():
    bank, labels, queries, truth = problem(classes=2)
    half = torch.where(torch.arange(50) % 2 == 0, truth, torch.tensor(9))
    found, all_known = knn(bank, labels, queries, half, k=7), knn(bank, labels, queries[::2], truth[::2], k=7)
    assert found.num_classes == 3
    assert found.accuracy == pytest.approx(all_known.accuracy / 2)


X, Y = torch.eye(4), [0, 0, 1, 1]


@pytest.mark.parametrize("judge", [knn, linear_probe])
@pytest.mark.parametrize(
    "rows, message",
    [
        ((X[0], Y, X, Y), r"train_features must have the shape \(images, features\), not \(4,\)"),
        ((X, Y, X[:, :3], Y), "train_features have 4 columns, test_features 3"),
        ((X, Y[:3], X, Y), "train_labels must have one label for each of the 4 rows"),
        ((X, Y, X * torch.nan, Y), "test_features contain NaN or inf"),
        ((X, [1] * 4, X, [1] * 4), "all labels are 1: there must be two classes"),
        ((X, ["a", None, "b", "a"], X, ["a"] * 4), "all numbers or all text, and none may be missing"),
        ((X, [0.0, math.nan, 1.0, 0.0], X, Y), "all numbers or all text, and none may be missing"),
        ((X, np.array(["a", math.nan, "b", "a"], object), X, ["a"] * 4), "all numbers or all text, and none may be"),
        ((X, ["0", "0", "1", "1"], X, Y), "all numbers or all text"),
    ],
)
def test_what_is_wrong_with_features_or_labels_is_said(judge, rows, message: str):
    with pytest.raises(UserError, match=message):
        judge(*rows)


@pytest.mark.parametrize("protocol", ["knn", "linear"])
def test_an_encoder_whose_features_are_no_numbers_has_no_accuracy(protocol):
    with pytest.raises(UserError, match="the encoder gives features that are NaN or inf"):
        mixnn.evaluate(
            lambda x: x.flatten(1) * math.nan, "digits", protocol=protocol, epochs=1, verbose=Reporter(quiet=True)
        )
