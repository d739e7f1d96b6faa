"""SplitBatchNorm against a loop of torch's own batch norm over views and strided groups."""

import copy

import pytest
import torch
from torch import nn

from mixnn.config import UserError
from mixnn.nn.batch_norm import SplitBatchNorm, batch_norm, batch_norm_backward, freeze_statistics, set_views

C, SIDE = 3, 5
CASES = [(groups, views) for groups in (1, 2, 4) for views in (1, 2, 3)]  # eight images a view


def split_bn(groups, views, affine=True, dtype=torch.float64):
    """With weight, bias and running statistics that are not the initial ones."""
    layer = SplitBatchNorm(C, groups, affine).to(dtype)
    set_views(layer, views)
    rng = torch.Generator().manual_seed(1)
    for name, t in layer.state_dict().items():
        if name != "num_batches_tracked":
            t.copy_(torch.rand(C, generator=rng) + 0.5)
    return layer


def images(num, dtype=torch.float64, shape=(C, SIDE, SIDE)):
    """Every image has its own mean and scale, so that it matters who shares statistics with whom."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(num, *shape, generator=rng, dtype=dtype)
    per_image = torch.rand(2, num, *(1,) * len(shape), generator=rng, dtype=dtype)
    return x * (0.5 + per_image[0]) + 3 * per_image[1]


def plain_bn(layer):
    """torch's batch norm with this layer's parameters (shared, for gradients) and running statistics (copied)."""
    plain = nn.BatchNorm2d(C, affine=layer.affine).to(layer.running_mean.dtype)
    plain.running_mean.copy_(layer.running_mean)
    plain.running_var.copy_(layer.running_var)
    plain.weight, plain.bias = layer.weight, layer.bias
    return plain


def naive(layer, x):
    """Output, running mean and running variance by the definition; the layer itself is left as it is."""
    layer = copy.deepcopy(layer)
    out = []
    for view in x.chunk(layer.views):
        result, means, variances = torch.zeros_like(view), [], []
        for g in range(layer.groups):
            bn = plain_bn(layer)
            members = [i for i in range(len(view)) if i % layer.groups == g]
            part = view[members] if x.dim() == 4 else view[members][:, :, None, None]
            result = result.index_put((torch.tensor(members),), bn(part).view_as(view[members]))
            means.append(bn.running_mean)
            variances.append(bn.running_var)
        layer.running_mean.copy_(torch.stack(means).mean(0))
        layer.running_var.copy_(torch.stack(variances).mean(0))
        out.append(result)
    return torch.cat(out), layer


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("groups, views", CASES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(C, SIDE, SIDE), (C,)], ids=["maps", "vectors"])
def test_output_and_running_statistics_equal_the_loop(groups, views, affine, shape):
    layer, x = split_bn(groups, views, affine), images(8 * views, shape=shape)
    want, want_layer = naive(layer, x)
    close(layer(x), want)
    close(layer.running_mean, want_layer.running_mean, 1e-7)  # the shares of views are kept in float32
    close(layer.running_var, want_layer.running_var, 1e-7)


@pytest.mark.parametrize("groups, views", CASES)
def test_gradients_equal_those_of_the_loop(groups, views):
    layer, x = split_bn(groups, views), images(8 * views).requires_grad_()
    upstream = images(8 * views).roll(1, 0)
    out, want_layer = naive(layer, x)
    want = torch.autograd.grad((out * upstream).sum(), [x, want_layer.weight, want_layer.bias])
    ours = torch.autograd.grad((layer(x) * upstream).sum(), [x, layer.weight, layer.bias])
    for a, b in zip(ours, want, strict=True):
        close(a, b, 1e-11)


def test_running_variance_is_the_mean_over_groups_of_unbiased_within_group_variances():
    layer, x = split_bn(4, 1), images(8)
    before = layer.running_var.clone()
    layer(x)
    within = torch.stack([x[g::4].transpose(0, 1).flatten(1).var(1, correction=1) for g in range(4)]).mean(0)
    close(layer.running_var, 0.9 * before + 0.1 * within)


def test_each_view_updates_the_running_statistics_once_in_order():
    layer, x = split_bn(2, 2), images(16)
    before = layer.running_mean.clone()
    layer(x)
    first, second = (view.mean((0, 2, 3)) for view in x.chunk(2))  # groups of equal size: the mean of means
    close(layer.running_mean, 0.9 * (0.9 * before + 0.1 * first) + 0.1 * second, 1e-7)


@pytest.mark.parametrize("groups", [1, 4])
def test_views_never_share_statistics(groups):
    x = images(16)
    other = torch.cat([x[:8], 5 * x[8:] - 3])
    assert torch.equal(split_bn(groups, 2)(x)[:8], split_bn(groups, 2)(other)[:8])
    assert not torch.allclose(split_bn(groups, 1)(x)[:8], split_bn(groups, 1)(other)[:8])


def test_one_group_and_one_view_is_plain_batch_norm():
    layer, x = split_bn(1, 1), images(8).requires_grad_()
    plain = copy.deepcopy(plain_bn(layer))
    want = plain(x)
    ours = layer(x)
    close(ours, want)
    close(layer.running_mean, plain.running_mean)
    close(layer.running_var, plain.running_var)
    upstream = images(8).roll(1, 0)
    for a, b in zip(
        torch.autograd.grad(ours, [x, layer.weight, layer.bias], upstream),
        torch.autograd.grad(want, [x, plain.weight, plain.bias], upstream),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("groups, views", CASES)
def test_eval_mode_is_plain_batch_norm_whatever_groups_and_views(groups, views):
    layer, x = split_bn(groups, views).eval(), images(7)  # seven is a multiple of neither
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    close(layer(x), plain_bn(layer).eval()(x))
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


@pytest.mark.parametrize("groups, views", CASES)
@pytest.mark.parametrize("side", [1, 5])
def test_channels_last_memory_gives_the_same_and_is_kept(groups, views, side):
    x = images(8 * views, shape=(C, side, side))
    plain, last = split_bn(groups, views), split_bn(groups, views)
    want, ours = plain(x), last(x.to(memory_format=torch.channels_last))
    close(ours, want)
    close(last.running_var, plain.running_var)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert want.is_contiguous()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_reversing_each_view_reverses_the_output(groups):
    """n -> N-1-n maps group g onto group G-1-g whole when G divides N, so encoding a reversed batch is reversing."""
    x = images(16)
    reverse = torch.cat([torch.arange(7, -1, -1), torch.arange(15, 7, -1)])
    there, back = split_bn(groups, 2), split_bn(groups, 2)
    close(back(x[reverse]), there(x)[reverse])
    close(back.running_mean, there.running_mean)
    close(back.running_var, there.running_var)


def test_a_permutation_that_breaks_groups_up_changes_the_output():
    x, swap = images(8), torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    assert not torch.allclose(split_bn(4, 1)(x[swap]), split_bn(4, 1)(x)[swap], atol=1e-3)
    inside = torch.tensor([4, 1, 2, 3, 0, 5, 6, 7])  # 0 and 4 are of one group
    close(split_bn(4, 1)(x[inside]), split_bn(4, 1)(x)[inside])


@pytest.mark.parametrize("groups", [1, 4])
def test_half_precision_comes_back_as_such_with_statistics_in_float32(groups):
    x = (images(8, torch.float32) * 0.01 + 4).bfloat16()  # the spread is a few steps of bf16
    layer, reference = split_bn(groups, 1, dtype=torch.float32), split_bn(groups, 1, dtype=torch.float32)
    ours, want = layer(x), reference(x.float())
    assert ours.dtype == torch.bfloat16
    assert want.dtype == torch.float32
    torch.testing.assert_close(layer.running_mean, reference.running_mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.running_var, reference.running_var, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.float(), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_mean_of_thirty_deviations_costs_float32_no_more_than_three_digits(groups):
    x = torch.randn(16, C, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) + 30
    layer, exact = split_bn(groups, 1, dtype=torch.float32), split_bn(groups, 1)
    torch.testing.assert_close(layer(x).double(), exact(x.double()), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layer.running_var.double(), exact.running_var, rtol=1e-4, atol=0)


@pytest.mark.parametrize("groups", [1, 4])
def test_equal_images_give_the_bias_and_finite_gradients(groups):
    """A variance of 0 must not come out below zero, however large the values."""
    for value in (0.3, *(100.3 + 7.3 * i for i in range(20))):
        layer, x = split_bn(groups, 1, dtype=torch.float32), torch.full((8, C, 7, 7), value, requires_grad=True)
        out = layer(x)
        torch.testing.assert_close(out, layer.bias.view(-1, 1, 1).expand_as(out), rtol=0, atol=1e-3 * (1 + value))
        out.square().sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("groups", [1, 4])
def test_untracked_layers_give_the_same_and_keep_no_statistics(groups):
    tracked, untracked, x = split_bn(groups, 2), split_bn(groups, 2), images(16)
    set_views(untracked, 2, tracked=False)
    before = {name: t.clone() for name, t in untracked.state_dict().items()}
    assert torch.equal(untracked(x), tracked(x))
    assert all(torch.equal(t, before[name]) for name, t in untracked.state_dict().items())


def test_set_views_reaches_every_layer_below():
    network = nn.Sequential(SplitBatchNorm(C, 2), nn.Sequential(SplitBatchNorm(C)))
    set_views(network, 3, tracked=False)
    layers = [layer for layer in network.modules() if isinstance(layer, SplitBatchNorm)]
    assert [(layer.views, layer.tracked) for layer in layers] == [(3, False)] * 2


def test_the_state_dict_is_that_of_batch_norm():
    assert list(split_bn(4, 3).state_dict()) == list(nn.BatchNorm2d(C).state_dict())


@pytest.mark.parametrize("groups, views", CASES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_residual_and_relu_equal_the_loop(groups, views, with_residual):
    layer, x = split_bn(groups, views), images(8 * views).requires_grad_()
    residual = images(8 * views).roll(2, 0).sub(2).requires_grad_() if with_residual else None
    upstream = images(8 * views).roll(1, 0)
    out, want_layer = naive(layer, x)
    out = torch.relu(out - 1 if residual is None else out + residual)
    with torch.no_grad():
        layer.bias -= 0 if with_residual else 1  # so that many outputs are cut off
    ours = layer(x, residual, relu=True)
    close(ours, out)
    assert 0.1 < (ours == 0).double().mean() < 0.9
    inputs = [x, *([residual] if with_residual else [])]
    want = torch.autograd.grad((out * upstream).sum(), [*inputs, want_layer.weight, want_layer.bias])
    got = torch.autograd.grad((ours * upstream).sum(), [*inputs, layer.weight, layer.bias])
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-11)
    layer.eval()
    running = plain_bn(layer).eval()(x)
    close(layer(x, residual, relu=True), torch.relu(running if residual is None else running + residual))


@pytest.mark.parametrize("with_residual", [False, True])
def test_the_operator_keeps_its_promises_to_the_compiler(with_residual):
    x = images(16).requires_grad_()
    residual = images(16).roll(1, 0).requires_grad_() if with_residual else None
    weight, bias = (torch.rand(C, dtype=torch.float64).requires_grad_() for _ in range(2))
    torch.library.opcheck(batch_norm, (x, residual, weight, bias, 2, 4, 1e-5, True))


@pytest.mark.parametrize("two", [False, True])
def test_the_operator_of_the_gradient_keeps_its_promises_to_the_compiler(two):
    x, dy, dy2 = images(16), images(16).roll(1, 0), images(16).roll(2, 0)
    weight, bias = (torch.rand(C, dtype=torch.float64) for _ in range(2))
    y, stats, _ = batch_norm(x, dy, weight, bias, 2, 4, 1e-5, True)
    torch.library.opcheck(batch_norm_backward, (dy, dy2 if two else None, x, y, stats, weight, bias, 2, 4, 1e-5, True))


@pytest.mark.parametrize("groups, views", [(1, 2), (2, 2)])
@pytest.mark.parametrize("with_residual, relu", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_an_output_that_comes_twice_has_the_gradient_of_the_sum(groups, views, with_residual, relu, used):
    layer, x = split_bn(groups, views), images(8 * views).requires_grad_()
    residual = images(8 * views).roll(2, 0).sub(2).requires_grad_() if with_residual else None
    inputs = [x, *([residual] if with_residual else []), layer.weight, layer.bias]
    upstream = [images(8 * views).roll(1 + i, 0) for i in used]
    pair = layer(x, residual, relu, twice=True)
    y = layer(x, residual, relu)
    assert torch.equal(pair[0], y)
    assert pair[0].data_ptr() == pair[1].data_ptr()
    ours = torch.autograd.grad([pair[i] for i in used], inputs, upstream)
    for a, b in zip(ours, torch.autograd.grad(y, inputs, sum(upstream)), strict=True):
        close(a, b)


def test_an_output_that_comes_twice_compiles():
    layer, x, residual = split_bn(2, 2), images(16).requires_grad_(), images(16).roll(2, 0).sub(2)
    upstream = [images(16).roll(1 + i, 0) for i in range(2)]

    def loss():
        return sum((y * dy).sum() for y, dy in zip(layer(x, residual, True, twice=True), upstream, strict=True))

    inputs = [x, layer.weight, layer.bias]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(), inputs), torch.autograd.grad(loss(), inputs), strict=True):
        close(a, b)


def test_an_output_that_comes_twice_may_do_so_without_gradients_and_in_eval_mode():
    layer, x = split_bn(2, 2), images(16)
    with torch.no_grad():
        pair = layer(x, relu=True, twice=True)
        assert all(torch.equal(y, layer(x, relu=True)) for y in pair)
        layer.eval()
        pair = layer(x, relu=True, twice=True)
        assert all(torch.equal(y, layer(x, relu=True)) for y in pair)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_mean_far_from_zero_costs_no_precision(groups):
    x = images(16, torch.float32) + 1000
    layer = split_bn(groups, 2, dtype=torch.float32)
    want, _ = naive(copy.deepcopy(layer).double(), x.double())
    close(layer(x), want.float(), 1e-3)


@pytest.mark.parametrize("groups, views", CASES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_frozen_layers_normalize_with_their_running_statistics_in_training_too(groups, views, with_residual):
    layer, x = split_bn(groups, views), images(8 * views).requires_grad_()
    residual = images(8 * views).roll(2, 0).sub(2) if with_residual else None
    freeze_statistics(layer)
    assert layer.training
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    plain = plain_bn(layer).eval()
    want = plain(x)
    want = torch.relu(want + residual) if with_residual else want
    ours = layer(x, residual, relu=with_residual)
    close(ours, want)
    upstream = images(8 * views).roll(1, 0)
    for a, b in zip(
        torch.autograd.grad(ours, [x, layer.weight, layer.bias], upstream),
        torch.autograd.grad(want, [x, plain.weight, plain.bias], upstream),
        strict=True,
    ):
        close(a, b)
    assert layer.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_an_image_of_a_frozen_layer_does_not_depend_on_the_others():
    layer, x = split_bn(2, 1), images(8)
    freeze_statistics(layer)
    close(layer(x)[:2], layer(x[:2]))


def test_freezing_reaches_every_layer_below_and_untracked_ones_have_their_statistics():
    network = nn.Sequential(split_bn(2, 1), nn.Sequential(split_bn(1, 1)))
    set_views(network, 2, tracked=False)  # as in a teacher
    freeze_statistics(network)
    x = images(8)
    close(network(x), plain_bn(network[1][0]).eval()(plain_bn(network[0]).eval()(x)))
    close(copy.deepcopy(network)(x), network(x))  # a teacher is a copy of a student


@pytest.mark.parametrize("groups, images", [(1, 5), (2, 6), (4, 12)])
def test_images_that_the_groups_cannot_share_are_refused(groups, images):
    layer = SplitBatchNorm(3, groups)
    set_views(layer, 2)
    with pytest.raises(UserError, match=f"{images} images cannot be split into {2 * groups} equal batch-norm groups"):
        layer(torch.randn(images, 3, 2, 2))
    layer.eval()(torch.randn(images, 3, 2, 2))  # running statistics need no groups


@pytest.mark.parametrize("groups, tracked", [(1, True), (4, True), (4, False)])
def test_groups_of_one_value_per_channel_are_refused(groups, tracked):
    layer = SplitBatchNorm(3, groups)
    set_views(layer, 1, tracked)
    with pytest.raises(UserError, match=rf"give each of {groups} batch-norm groups .* one value per channel"):
        layer(torch.randn(groups, 3))
    layer(torch.randn(groups, 3, 1, 2))
