"""The equations of MNN (arXiv 2311.00562) and its relatives, as functions of tensors.

Shapes: B images, D embedding, K neighbors, N = K + 1 targets (0 is z itself), Q support slots. A leading B may be any
batch of rows. Vectors come in raw and are made unit here, where they are used; nothing below holds state or draws a
random number. On CUDA, some functions run as one kernel if their inputs need no gradient (functional_kernels.py).
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mixnn.config import UserError, unknown

MIXERS = ("raw_renorm", "unit", "unit_renorm", "none")


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 unchanged.

    >>> mixnn.functional.at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _kernels(*tensors: Tensor) -> ModuleType | None:
    """functional_kernels if it supports these tensors and none needs a gradient; else None."""
    if not all(t.is_cuda for t in tensors) or torch.compiler.is_compiling():  # a compiler makes kernels of its own
        return None
    from mixnn import functional_kernels  # needs triton, which torch installs only with CUDA

    need_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return functional_kernels if not need_grad and all(map(functional_kernels.supports, tensors)) else None


def unit(v_D: Tensor) -> Tensor:
    """Each row divided by its l2 norm.

    >>> mixnn.functional.unit(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    kernels = _kernels(v_D)
    return kernels.unit(v_D) if kernels else F.normalize(v_D, dim=-1)


def cosines(z_BD: Tensor, s_QD: Tensor) -> Tensor:
    """cos(z, s) of every row with every support row, (B, Q).

    >>> mixnn.functional.cosines(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    tensor([[1., 0.]])
    """
    return unit(z_BD) @ unit(s_QD).T


def nearest(sim_BQ: Tensor, topk: int) -> Tensor:
    """The K columns of largest cosine, nearest first, (B, K). Equal cosines come in any order.

    >>> mixnn.functional.nearest(torch.tensor([[0.1, 0.9, 0.5]]), topk=2)
    tensor([[1, 2]])
    """
    return sim_BQ.topk(topk, dim=1).indices


def nearest_rows(z_BD: Tensor, s_QD: Tensor, topk: int) -> Tensor:
    """Eq. 2: the K support rows of largest cosine with each row, nearest first, (B, K).

    >>> mixnn.functional.nearest_rows(torch.tensor([[1.0, 0.2]]), torch.eye(2), topk=2)
    tensor([[0, 1]])
    """
    kernels = _kernels(z_BD, s_QD)
    if kernels and kernels.can_search(z_BD, s_QD, topk):
        return kernels.nearest_rows(z_BD, s_QD, topk)
    return nearest(cosines(z_BD, s_QD), topk)


def nearest_of_label(sim_BQ: Tensor, topk: int, labels_B: Tensor, labels_Q: Tensor) -> tuple[Tensor, Tensor]:
    """The K nearest rows of the anchor's own label, and which of them exist, both (B, K). The oracle of MNN(Labels).

    >>> similarity = torch.tensor([[0.1, 0.9, 0.5]])
    >>> mixnn.functional.nearest_of_label(similarity, 2, torch.tensor([7]), torch.tensor([7, 8, 7]))
    (tensor([[2, 0]]), tensor([[True, True]]))
    """
    same_BQ = (labels_B[:, None] == labels_Q[None, :]) & (labels_B >= 0)[:, None]
    sim_BQ = sim_BQ.masked_fill(~same_BQ, -torch.inf)
    index_BK = nearest(sim_BQ, topk)
    return index_BK, sim_BQ.gather(1, index_BK) > -torch.inf


def mix(neighbors_BKD: Tensor, z_BD: Tensor, lam: Tensor | float, mixer: str) -> Tensor:
    """Eq. 4: lam z_i + (1 - lam) z, in the space the mixer names; lam is a number, (B, 1, 1) or (B, K, 1).

    >>> mixnn.functional.mix(neighbors, z, 0.5, "unit").shape
    torch.Size([8, 3, 16])
    """
    _check_mixing(lam, mixer)
    z_B1D = z_BD[:, None]
    if mixer == "none":
        return unit(neighbors_BKD)
    if mixer == "raw_renorm":  # Algorithm 1: raw vectors, then made unit
        return unit(lam * neighbors_BKD + (1 - lam) * z_B1D)
    mixed_BKD = lam * unit(neighbors_BKD) + (1 - lam) * unit(z_B1D)
    return unit(mixed_BKD) if mixer == "unit_renorm" else mixed_BKD


def mixed_targets(neighbors_BKD: Tensor, z_BD: Tensor, lam: Tensor | float, mixer: str) -> Tensor:
    """Unit z, then z mixed with each of its neighbors as `mix` does it, (B, N, D).

    >>> mixnn.functional.mixed_targets(neighbors, z, 0.5, "unit").shape
    torch.Size([8, 4, 16])
    """
    _check_mixing(lam, mixer)
    kernels = _kernels(z_BD, neighbors_BKD, *([lam] if isinstance(lam, Tensor) else []))
    if kernels and kernels.can_mix(neighbors_BKD, z_BD, lam):
        return kernels.mixed_targets(neighbors_BKD, z_BD, lam, mixer)
    return torch.cat([unit(z_BD)[:, None], mix(neighbors_BKD, z_BD, lam, mixer)], dim=1)


def _check_mixing(lam: Tensor | float, mixer: str) -> None:
    if mixer not in MIXERS:
        raise unknown("mixer", mixer, MIXERS)
    if isinstance(lam, Tensor) and lam.dim() not in (0, 3):  # (B,) would be taken along D
        raise UserError(f"lam has shape {tuple(lam.shape)}: give a number, or a tensor (B, 1, 1) or (B, K, 1)")


def split_weights(positive: float, neighbors: float, topk: int, like: Tensor) -> Tensor:
    """`positive` for z, `neighbors` divided evenly among the K, (N,).

    >>> mixnn.functional.split_weights(1.5, 0.5, topk=2, like=z)
    tensor([1.5000, 0.2500, 0.2500])
    """
    w_N = like.new_full((topk + 1,), neighbors / max(topk, 1))
    w_N[:1].fill_(positive)
    return w_N


def wse_weights(topk: int, like: Tensor) -> Tensor:
    """Eq. 3: 1 for z, 1/K for each neighbor, (N,).

    >>> mixnn.functional.wse_weights(2, like=z)
    tensor([1.0000, 0.5000, 0.5000])
    """
    return split_weights(1.0, 1.0, topk, like)


def mse_weights(topk: int, like: Tensor) -> Tensor:
    """MSF: 1 / (K + 1) each, (N,).

    >>> mixnn.functional.mse_weights(3, like=z)
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    return like.new_full((topk + 1,), 1 / (topk + 1))


def attention(q_BD: Tensor, neighbors_BKD: Tensor, temperature: float = 1.0) -> Tensor:
    """SNCLR's cross-attention score: softmax over the K neighbors of cos(q, z_i) / temperature, (B, K).

    >>> mixnn.functional.attention(z, neighbors).sum(1).allclose(torch.ones(8))
    True
    """
    cos_BK = torch.einsum("bd,bkd->bk", unit(q_BD), unit(neighbors_BKD))
    return (cos_BK / temperature).softmax(dim=1)


def cas_weights(q_BD: Tensor, neighbors_BKD: Tensor, temperature: float) -> Tensor:
    """1 for z, the attention for the neighbors, (B, N).

    >>> mixnn.functional.cas_weights(z, neighbors, 0.1).shape
    torch.Size([8, 4])
    """
    return torch.cat([q_BD.new_ones(len(q_BD), 1), attention(q_BD, neighbors_BKD, temperature)], dim=1)


def weighted_squared_error(p_BD: Tensor, targets_BND: Tensor, w_BN: Tensor) -> Tensor:
    """Eq. 1: mean over B of sum_i w_i (2 - 2 p . target_i), p made unit, targets as they come.

    For unit targets this is the weighted sum of squared distances; for targets that mixing shortened it has the same
    gradient.

    >>> target = torch.tensor([[1.0, 0.0]])
    >>> mixnn.functional.weighted_squared_error(-target, target[:, None], torch.ones(1))
    tensor(4.)
    """
    _check_weights(p_BD, targets_BND, w_BN)
    kernels = _kernels(p_BD.detach(), targets_BND, w_BN)
    if kernels and p_BD.shape == targets_BND.shape[::2]:
        return kernels.WeightedSquaredError.apply(p_BD, targets_BND, w_BN)
    dot_BN = torch.einsum("bd,bnd->bn", unit(p_BD), targets_BND)
    return (w_BN * (2 - 2 * dot_BN)).sum(-1).mean()


def _check_weights(p_BD: Tensor, targets_BND: Tensor, w_BN: Tensor) -> None:
    """UserError unless every target of every prediction has one weight. Broadcasting would hide it: another loss."""
    batch, num = targets_BND.shape[:2]
    if len(p_BD) != batch:
        raise UserError(f"{len(p_BD)} predictions with the targets of {batch} images: give targets for each prediction")
    if w_BN.shape not in ((num,), (batch, num)):
        shape = " x ".join(map(str, w_BN.shape))
        raise UserError(f"weights {shape} for {num} targets: give {num} weights, or {batch} x {num}")


def purity(labels_BK: Tensor, labels_B: Tensor, counts_BK: Tensor, dim: int | None = None) -> Tensor:
    """Share of neighbors with the anchor's label, among the pairs that count. With dim=0, of each rank alone, (K,).

    >>> labels = torch.tensor([[1, 2]])
    >>> mixnn.functional.purity(labels, torch.tensor([1]), labels > 0)
    tensor(0.5000)
    """
    right_BK = (labels_BK == labels_B[:, None]) & counts_BK
    return right_BK.sum(dim) / counts_BK.sum(dim).clamp(min=1)


def spread(z_BD: Tensor) -> Tensor:
    """Deviation of unit embeddings over the batch, times sqrt(D): near 1 if they fill the sphere, 0 if collapsed.

    >>> mixnn.functional.spread(torch.ones(8, 16))
    tensor(0.)
    """
    return unit(z_BD).std(dim=0).mean() * z_BD.shape[1] ** 0.5


# Contrastive losses: pick the right key by cosine / temperature. All use log-softmax, so that no logit overflows.


def soft_cross_entropy(logits_BM: Tensor, target_BM: Tensor) -> Tensor:
    """Mean over B of -sum_m target log softmax(logits); a row of the target need not sum to 1.

    >>> mixnn.functional.soft_cross_entropy(torch.zeros(1, 4), torch.full((1, 4), 0.25))
    tensor(1.3863)
    """
    if target_BM.shape != logits_BM.shape:
        given, wanted = (" x ".join(map(str, t.shape)) for t in (target_BM, logits_BM))
        raise UserError(f"a target {given} for logits {wanted}: give both the same shape")
    return -(target_BM * logits_BM.log_softmax(dim=1)).sum(1).mean()


def info_nce(logits_BM: Tensor) -> Tensor:
    """Cross-entropy of column 0.

    >>> mixnn.functional.info_nce(torch.zeros(1, 4))
    tensor(1.3863)
    """
    return -logits_BM.log_softmax(dim=1)[:, 0].mean()


def queue_logits(q_BD: Tensor, z_BD: Tensor, support_QD: Tensor, temperature: float) -> Tensor:
    """cos(q, z) in column 0, then cos(q, s) of every support row, over the temperature, (B, 1 + Q).

    >>> mixnn.functional.queue_logits(z, z, support, 0.2).shape
    torch.Size([8, 33])
    """
    positive_B1 = (unit(q_BD) * unit(z_BD)).sum(1, keepdim=True)
    return torch.cat([positive_B1, cosines(q_BD, support_QD)], dim=1) / temperature


def sce_target(z_BD: Tensor, support_QD: Tensor, temperature: float, eta: float) -> Tensor:
    """eta on column 0, and 1 - eta by softmax([0 | cos(z, s)] / temperature), (B, 1 + Q).

    >>> mixnn.functional.sce_target(z, support, 0.05, eta=0.5).sum(1).allclose(torch.ones(8))
    True
    """
    sim_BQ = cosines(z_BD, support_QD) / temperature
    target_BM = (1 - eta) * torch.cat([torch.zeros_like(sim_BQ[:, :1]), sim_BQ], dim=1).softmax(dim=1)
    return torch.cat([target_BM[:, :1] + eta, target_BM[:, 1:]], dim=1)


def batch_contrast(q_BD: Tensor, z_BD: Tensor, same_view_BD: Tensor | None, temperature: float) -> Tensor:
    """Cross-entropy of q_n picking z_n among all z and, if given, among the other images of its own view.

    >>> loss = mixnn.functional.batch_contrast(z, z + 0.1, None, 0.2)
    """
    cross_BB = cosines(q_BD, z_BD) / temperature
    logits = cross_BB
    if same_view_BD is not None:
        own = torch.eye(len(q_BD), dtype=torch.bool, device=q_BD.device)
        same_BB = (cosines(q_BD, same_view_BD) / temperature).masked_fill(own, -torch.inf)
        logits = torch.cat([cross_BB, same_BB], dim=1)
    return (logits.logsumexp(dim=1) - cross_BB.diagonal()).mean()


def neighbor_contrast(p_BD: Tensor, neighbors_BKD: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """NNCLR, both ways: predictions pick their K neighbors among all B K; each neighbor picks its prediction.

    >>> one_way, other_way = mixnn.functional.neighbor_contrast(z, neighbors, 0.1)
    """
    topk = neighbors_BKD.shape[1]
    logits_BBK = cosines(p_BD, neighbors_BKD.flatten(0, 1)).unflatten(1, (-1, topk)) / temperature
    own_KB = logits_BBK.diagonal(dim1=0, dim2=1)
    among_neighbors = (logits_BBK.flatten(1).logsumexp(dim=1) - own_KB).sum(0).mean()
    among_predictions = (logits_BBK.logsumexp(dim=0).T - own_KB).mean()
    return among_neighbors, among_predictions


def set_contrast(p_BD: Tensor, targets_BND: Tensor, w_BN: Tensor, temperature: float) -> Tensor:
    """SNCLR: mean over B of -sum_i w_i log P(own target i), where P is a softmax over all B N targets.

    >>> loss = mixnn.functional.set_contrast(z, neighbors, torch.ones(8, 3), 0.1)
    """
    _check_weights(p_BD, targets_BND, w_BN)
    num = targets_BND.shape[1]
    logits_BBN = cosines(p_BD, targets_BND.flatten(0, 1)).unflatten(1, (-1, num)) / temperature
    own_BN = logits_BBN.diagonal(dim1=0, dim2=1).T
    return (w_BN * (logits_BBN.flatten(1).logsumexp(dim=1, keepdim=True) - own_BN)).sum(1).mean()


def mixing_map(coin: Tensor, share: Tensor, centre: Tensor, height: int, width: int) -> Tensor:
    """Un-Mix's share of the first image, pixel by pixel, (H, W): `share` everywhere, or 1 outside a box and 0 inside.

    coin >= 0.5 chooses the box. Its side is 2h, h = floor(floor(W sqrt(1 - share)) / 2); it is centered on a pixel and
    cut off at the border. The map's mean is lam. coin, share and centre are uniforms in [0, 1).

    >>> mixnn.functional.mixing_map(torch.tensor(0.9), torch.tensor(0.75), torch.rand(2), 4, 4).shape
    torch.Size([4, 4])
    """
    half = (width * (1 - share).sqrt()).floor().div(2, rounding_mode="floor")
    row, column = (centre[0] * height).floor(), (centre[1] * width).floor()
    y = torch.arange(height, device=centre.device)[:, None]
    x = torch.arange(width, device=centre.device)[None, :]
    inside = (y >= row - half) & (y < row + half) & (x >= column - half) & (x < column + half)
    return torch.where(coin >= 0.5, (~inside).to(share.dtype), share)
