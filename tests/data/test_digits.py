from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from mixnn.data import digits


def test_train_and_test_are_fixed_and_together_hold_every_digit_once():
    train, train_labels, _ = digits.read(Path(), "train")
    test, test_labels, _ = digits.read(Path(), "test")
    assert (len(train), len(test)) == (1297, 500)
    both = np.concatenate([train, test])[:, 0].reshape(-1, 64)
    original = np.rint(load_digits().data * 255 / 16).astype(np.uint8)
    assert sorted(map(bytes, both)) == sorted(map(bytes, original))
    # the first ones of each part, so that another order would be noticed: results depend on it
    assert train_labels[:8].tolist() == FIRST_TRAIN
    assert test_labels[:8].tolist() == FIRST_TEST


def test_gray_is_replicated_and_the_scale_is_full():
    images, labels, classes = digits.read(Path(), "pretrain")
    assert (images.min(), images.max()) == (0, 255)
    assert (images[:, 0] == images[:, 1]).all()
    assert (images[:, 0] == images[:, 2]).all()
    assert classes == [str(i) for i in range(10)]
    assert set(labels.tolist()) == set(range(10))


FIRST_TRAIN = [2, 8, 2, 6, 6, 7, 1, 9]
FIRST_TEST = [0, 9, 6, 9, 8, 4, 5, 8]
