"""The ring against a model in Python lists."""

import pytest
import torch

from mixnn.nn.support_set import SupportRows, SupportSet

Q, D = 8, 3


def rows(first, count):
    """Rows of the images first, first + 1, ...; all columns tell the image."""
    index = torch.arange(first, first + count)
    return SupportRows(index[:, None] * 1.0 + torch.arange(D) / 10, index % 5, index)


def snapshot(support):
    return {name: t.clone() for name, t in support.state_dict().items()}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 8])
def test_push_is_first_in_first_out_also_when_the_size_is_no_multiple_of_the_batch(batch):
    support = SupportSet(Q, D)
    model = [None] * Q
    for step in range(7):
        pushed = rows(step * batch, batch)
        support.push(pushed)
        for i in range(batch):
            model[(step * batch + i) % Q] = [column[i] for column in pushed]
        z, labels, index = support.read()
        for slot, row in enumerate(model):
            assert index[slot] == (-1 if row is None else row[2])
            assert labels[slot] == (-1 if row is None else row[1])
            assert row is None or torch.equal(z[slot], row[0])
        assert support.position == (step + 1) * batch % Q
    last = torch.arange(7 * batch - min(7 * batch, Q), 7 * batch)
    assert torch.equal(index[index >= 0].sort().values, last)  # the Q youngest, each once


@pytest.mark.parametrize("position", [0, 5, 7])
def test_read_pushed_is_what_read_gives_after_a_push_and_writes_nothing(position):
    support = SupportSet(Q, D)
    support.push(rows(0, position))
    before = snapshot(support)
    seen = support.preview_push(rows(20, 3))
    assert same(snapshot(support).values(), before.values())
    assert not same(seen, support.read())
    support.push(rows(20, 3))
    assert same(seen, support.read())


def test_rows_start_as_random_unit_vectors_without_label_or_image():
    support = SupportSet(500, 16)
    torch.testing.assert_close(support.z_QD.norm(dim=1), torch.ones(500))
    torch.testing.assert_close(support.z_QD.mean(0), torch.zeros(16), rtol=0, atol=0.05)
    assert (support.labels_Q == -1).all()
    assert (support.index_Q == -1).all()
    assert support.position == 0


def test_everything_travels_with_the_state_dict():
    support, other = SupportSet(Q, D), SupportSet(Q, D)
    support.push(rows(0, 5))
    assert set(support.state_dict()) == {"z_QD", "labels_Q", "index_Q", "position"}
    other.load_state_dict(support.state_dict())
    for each in (support, other):
        each.push(rows(30, 5))
    assert same(snapshot(other).values(), snapshot(support).values())


def test_rows_are_stored_raw():
    support = SupportSet(Q, D)
    support.push(SupportRows(torch.full((2, D), 7.0), torch.zeros(2, dtype=torch.long), torch.arange(2)))
    assert torch.equal(support.z_QD[:2], torch.full((2, D), 7.0))


def test_push_keeps_no_graph():
    support, z = SupportSet(Q, D), torch.ones(2, D, requires_grad=True)
    support.push(SupportRows(z, torch.zeros(2, dtype=torch.long), torch.arange(2)))
    assert not support.z_QD.requires_grad
