"""The linear probe on features: against scikit-learn, and what must not matter."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from mixnn.config import UserError
from mixnn.data import load
from mixnn.evaluation import linear_probe
from mixnn.evaluation.linear_probe import PENALTIES


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels of half the digits, to be quick."""
    train, test = load("digits", "train", limit=600), load("digits", "test", limit=300)
    return train.images[:, 0].flatten(1).float(), train.labels, test.images[:, 0].flatten(1).float(), test.labels


def scikit_learns(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, penalty: float) -> float:
    mean, std = x.mean(0), x.std(0, correction=0)
    std[std == 0] = 1
    fitted = LogisticRegression(C=1 / (penalty * len(x)), max_iter=5000, tol=1e-6).fit((x - mean) / std, y)
    return 100 * fitted.score((test_x - mean) / std, test_y)


@pytest.mark.parametrize("penalty", [1e-1, 1e-3])
def test_accuracies_are_those_of_scikit_learns_logistic_regression(digits, penalty: float):
    found = linear_probe(*digits, penalty=penalty)
    assert found.accuracy == pytest.approx(scikit_learns(*digits, penalty), abs=0.7)  # two of 300 rows
    assert (found.penalty, found.penalty_from) == (penalty, "given")
    assert (found.num_train, found.num_test, found.num_classes) == (600, 300, 10)


def test_the_training_rows_choose_a_strong_penalty_where_labels_are_noisy(digits):
    x, y, test_x, test_y = digits
    g = torch.Generator().manual_seed(0)
    noisy = torch.where(torch.rand(len(y), generator=g) < 0.4, torch.randint(0, 10, y.shape, generator=g), y)
    clean, found = linear_probe(*digits), linear_probe(x, noisy, test_x, test_y)
    assert {clean.penalty, found.penalty} <= set(PENALTIES)
    assert found.penalty > clean.penalty
    assert found.accuracy > linear_probe(x, noisy, test_x, test_y, penalty=1e-5).accuracy + 10
    assert found.penalty_from == "one in 5 training rows, seed 0"


def test_scale_and_offset_of_the_features_and_constant_columns_do_not_matter(digits):
    x, y, test_x, test_y = digits
    scale, offset = torch.linspace(0.01, 100, x.shape[1]), torch.linspace(-5, 5, x.shape[1])

    def change(z: Tensor) -> Tensor:
        return torch.cat([z * scale + offset, torch.full((len(z), 2), 3.0)], 1)

    found = linear_probe(change(x), y, change(test_x), test_y, penalty=1e-2)
    assert found.accuracy == pytest.approx(linear_probe(*digits, penalty=1e-2).accuracy, abs=0.7)


def test_the_test_rows_decide_nothing_but_the_accuracy(digits):
    x, y, test_x, test_y = digits
    found, other = linear_probe(*digits), linear_probe(x, y, test_x[:50] + 100, test_y[:50])
    assert (other.penalty, other.train_accuracy) == (found.penalty, found.train_accuracy)


def test_labels_without_meaning_are_learned_by_heart_and_worth_nothing(digits):
    x, _, test_x, test_y = digits
    y = torch.randint(0, 10, (len(x),), generator=torch.Generator().manual_seed(0))
    found = linear_probe(x, y, test_x, test_y, penalty=1e-5)
    assert found.accuracy < 25 < found.train_accuracy


def test_a_negative_penalty_is_refused(digits):
    with pytest.raises(UserError, match="penalty=-1: penalty must be more than 0"):
        linear_probe(*digits, penalty=-1)
