"""Optimizers by name: SGD, AdamW, LARS, Muon, and those of your own.

One of your own is a function of parameter groups and a `Config`, with the decorator `OPTIMIZERS.register(NAME)`. The
trainer sets the learning rate of each group before each step, to that of the schedule times the group's lr_scale if it
has one. With heads_first, the backbone has groups of its own, marked by "backbone". Whatever an optimizer keeps as
state is saved and resumed: tensors, numbers, text, lists, tuples and dicts.

A step that is captured in a CUDA graph cannot create tensors between replays. It needs a learning rate in a tensor, and
state that exists before the first step. Steps of other optimizers are not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mixnn.config import Config, UserError
from mixnn.device import side_stream, wait_side_stream
from mixnn.registry import Registry

Group = dict[str, Any]  # params, names, weight_decay; as torch's optimizers take it
BACKBONE = "student.f."  # the backbone's parameters in a method
# Muon: learning rate of biases and norms, relative to that of matrices; 0.012 becomes SGD's 0.06
VECTOR_LR_SCALE = 5.0
MIN_WEIGHT_NORM = 0.1  # Muon: shorter matrices, such as those that start from zero, grow until they have this length
TRUST_COEFFICIENT = 1e-3  # LARS: length of an update, in lengths of the weights it changes
CHECKPOINT_NAMES = {"momentum_buffer": "momentum"}  # state of an optimizer -> its name in a checkpoint, if another


def parameter_groups(named: Iterable[tuple[str, Parameter]], config: Config) -> list[Group]:
    """One group with weight decay; with decayed=weights a second, without it, for biases and parameters of norms.

    Muon has these two groups in any case. With heads_first, those of the backbone come first, and those of the heads
    are separate.
    """
    named = list(named)
    if not config.heads_first:
        return _by_decay(named, config)
    backbone, heads = ([one for one in named if one[0].startswith(BACKBONE) == is_f] for is_f in (True, False))
    return [group | {"backbone": True} for group in _by_decay(backbone, config)] + _by_decay(heads, config)


def _by_decay(named: list[tuple[str, Parameter]], config: Config) -> list[Group]:
    decays_all = config.decayed == "all" and config.optimizer != "lars"
    if decays_all and config.optimizer != "muon":
        return [_group(named, config.weight_decay)] if named else []
    weights, others = ([one for one in named if (one[1].ndim > 1) == is_weight] for is_weight in (True, False))
    groups = [_group(weights, config.weight_decay), _group(others, config.weight_decay if decays_all else 0.0)]
    if config.optimizer == "muon":
        groups = [groups[0] | {"weight_decay": 0.0}, groups[1] | {"lr_scale": VECTOR_LR_SCALE}]
    return [group for group in groups if group["params"]]


def _group(named: Sequence[tuple[str, Parameter]], weight_decay: float) -> Group:
    return {"params": [p for _, p in named], "names": [name for name, _ in named], "weight_decay": weight_decay}


def _with_tensor_lr(groups: list[Group]) -> list[Group]:
    """Learning rates in tensors: no host read, no recompilation."""
    return [group | {"lr": torch.zeros((), device=group["params"][0].device)} for group in groups]


def sgd(groups: list[Group], momentum: float) -> torch.optim.SGD:
    """SGD whose learning rate is a tensor and whose momentum exists from the start."""
    optimizer = torch.optim.SGD(_with_tensor_lr(groups), momentum=momentum, fused=True)
    for p in _parameters(optimizer):  # zeros here equal torch's own first step, and can be saved, loaded and captured
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def adamw(groups: list[Group]) -> torch.optim.AdamW:
    """AdamW with a learning rate in a tensor and moments that exist from the start, as for SGD above."""
    on_cuda = groups[0]["params"][0].is_cuda
    optimizer = torch.optim.AdamW(_with_tensor_lr(groups), fused=True, capturable=on_cuda)
    for p in _parameters(optimizer):
        optimizer.state[p] = {"step": torch.zeros((), device=p.device)}
        optimizer.state[p] |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
    return optimizer


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rates (arXiv 1708.03888): each weight's update has a length in proportion to that weight.

    u = g + weight_decay w;  b <- momentum b + trust |w| / |u| u;  w <- w - lr b

    Biases and parameters of norms are updated as by SGD, u = g. The learning rate may be a tensor, and all state exists
    before the first step, so that a step can be captured in a CUDA graph.
    """

    def __init__(self, params: Any, lr: float | Tensor = 0.0, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for p in _parameters(self):
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update, momentum = p.grad, self.state[p]["momentum_buffer"]
                if p.ndim > 1:
                    update = update.add(p, alpha=group["weight_decay"])
                    ratio = TRUST_COEFFICIENT * p.norm() / update.norm()
                    update = update * torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
                momentum.mul_(group["momentum"]).add_(update)
                p.sub_(momentum * group["lr"])


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal (Jordan et al., 2024), for weights that turn and keep their length.

    b <- momentum b + g;  u = orthogonal(g + momentum b);  v = w - lr |w| / |u| u;  w <- |w| / |v| v

    A convolution counts as a matrix with a row per output channel. All directions in which a matrix can change get the
    same share of the step, so that a learning rate is the angle by which weights turn per step: 0.03 is much. A layer
    before batch norm or a cosine does not depend on the length of its weights. Steps in proportion to that length would
    make it grow or shrink exponentially, so each step restores it, and matrices have no weight decay. Biases and
    parameters of norms are updated as by SGD, with weight decay. As with LARS, steps can be captured.
    """

    def __init__(self, params: Any, lr: float | Tensor = 0.0, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for p in _parameters(self):
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            momenta = [self.state[p]["momentum_buffer"] for p in params]
            vectors = [p for p in params if p.ndim < 2]
            if params:
                torch._foreach_mul_(momenta, group["momentum"])
                torch._foreach_add_(momenta, [p.grad for p in params])
            if vectors:
                momenta = [self.state[p]["momentum_buffer"] for p in vectors]
                if group["weight_decay"]:
                    torch._foreach_add_(momenta, vectors, alpha=group["weight_decay"])
                torch._foreach_sub_(vectors, torch._foreach_mul(momenta, group["lr"]))
            batches = _batches_by_rows([p for p in params if p.ndim > 1])
            if batches:
                device = params[0].device
                with side_stream(device):
                    for batch in batches[:-1]:
                        self._update_matrices(batch, group)
                self._update_matrices(batches[-1], group)  # takes about as long as all others
                wait_side_stream(device)

    def _update_matrices(self, params: list[Tensor], group: Group) -> None:
        """Turn the matrices of a batch, all at once."""
        rows, columns = (max(sizes) for sizes in zip(*map(_matrix_shape, params), strict=True))
        dtype = torch.bfloat16 if params[0].is_cuda else params[0].dtype
        x_NRC = torch.zeros(len(params), _padded(rows), columns, dtype=dtype, device=params[0].device)
        for p, matrix in zip(params, x_NRC, strict=True):
            assert p.grad is not None
            momentum = self.state[p]["momentum_buffer"]
            torch.add(p.grad, momentum, alpha=group["momentum"], out=_like_weights(matrix, p))
        x_NRC = orthogonal(x_NRC)
        lengths_N = torch.stack(torch._foreach_norm(params))
        of_updates_N = torch.linalg.vector_norm(x_NRC, dim=(1, 2), dtype=lengths_N.dtype)
        ratios_N = lengths_N.clamp(min=MIN_WEIGHT_NORM) / of_updates_N.clamp(min=1e-12)
        for p, matrix, step in zip(params, x_NRC, ratios_N * group["lr"], strict=True):
            p.addcmul_(_like_weights(matrix, p), step, value=-1)
        after_N = torch.stack(torch._foreach_norm(params)).clamp(min=1e-12)
        for p, scale in zip(params, torch.where(lengths_N < MIN_WEIGHT_NORM, 1.0, lengths_N / after_N), strict=True):
            p.mul_(scale)


def _batches_by_rows(params: list[Tensor]) -> list[list[Tensor]]:
    """Weights whose matrices have the same number of rows if zeros are added, fewest rows first.

    Zeros do not change how the rest is made orthogonal, and a few large products take less time than many small ones.
    """
    batches: dict[int, list[Tensor]] = {}
    for p in params:
        batches.setdefault(_padded(_matrix_shape(p)[0]), []).append(p)
    return [batch for _, batch in sorted(batches.items())]


def _padded(rows: int) -> int:
    return max(64, 2 ** (rows - 1).bit_length())


def _matrix_shape(p: Tensor) -> tuple[int, int]:
    """Rows and columns of weights as a matrix that is not tall."""
    sizes = len(p), p[0].numel()
    return min(sizes), max(sizes)


def _like_weights(matrix_RC: Tensor, p: Tensor) -> Tensor:
    """The part of a padded matrix that belongs to these weights, with their shape; it shares the matrix's memory.

    Columns are in the order that convolutions have in channels_last memory.
    """
    rows, columns = len(p), p[0].numel()
    part = matrix_RC[:rows, :columns] if rows <= columns else matrix_RC[:columns, :rows].mT
    return part.unflatten(1, (*p.shape[2:], p.shape[1])).movedim(-1, 1)


# a, b, c of the polynomials a s + b s^3 + c s^5 that are applied to singular values one after another. Each is the best
# one for the range that the one before produces (the first: from 0.006 to 1), widened by 10% on both sides. Values
# above it explode, and products in bf16 move values by a few percent.
POLYNOMIALS = (7.527, -18.298, 11.195), (3.601, -2.237, 0.356), (3.11, -1.977, 0.341), (2.347, -1.537, 0.325)


def orthogonal(matrices_NRC: Tensor) -> Tensor:
    """Each matrix with its singular values changed to about 1, by four Newton-Schulz steps.

    Values of at least 0.006 of the matrix's length come out between 0.75 and 1.25. bf16 is exact enough for it.
    """
    x = matrices_NRC.to(torch.bfloat16 if matrices_NRC.is_cuda else matrices_NRC.dtype)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    length = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = torch.div(x, length.clamp(min=1e-12), out=torch.empty_like(x))
    for a, b, c in POLYNOMIALS:
        square = x @ x.mT
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        x = factor @ x
    return (x.mT if is_tall else x).to(matrices_NRC.dtype)


OPTIMIZERS: Registry[Callable[[list[Group], Config], torch.optim.Optimizer]] = Registry(
    "optimizer",
    "optimizers",
    {
        "sgd": lambda groups, config: sgd(groups, config.sgd_momentum),
        "adamw": lambda groups, config: adamw(groups),  # noqa: ARG005
        "lars": lambda groups, config: LARS(_with_tensor_lr(groups), momentum=config.sgd_momentum),
        "muon": lambda groups, config: Muon(_with_tensor_lr(groups), momentum=config.sgd_momentum),
    },
)
"""Registry: name -> function of parameter groups and a Config that returns a torch.optim.Optimizer."""


def make_optimizer(named: Iterable[tuple[str, Parameter]], config: Config) -> torch.optim.Optimizer:
    """The configured optimizer of these parameters; those that need no gradient are left out."""
    learned = [(name, p) for name, p in named if p.requires_grad]
    groups = parameter_groups(learned, config)
    optimizer = OPTIMIZERS.find(config.optimizer)(groups, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = type(optimizer).__name__
        raise UserError(f"the optimizer {config.optimizer} must be a torch.optim.Optimizer, not a {got}")
    held = {id(p) for p in _parameters(optimizer)}
    if missing := [name for name, p in learned if id(p) not in held]:
        raise UserError(
            f"the optimizer {config.optimizer} lacks {len(missing)} of {len(learned)} parameters, among them "
            f"{missing[0]}: pass it all groups"
        )
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, backbone: float = 1.0) -> None:
    """Set the learning rate of all groups, each times its lr_scale; `backbone` multiplies that of the backbone's."""
    for group in optimizer.param_groups:
        own = lr * group.get("lr_scale", 1.0) * (backbone if group.get("backbone") else 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def backbone_parameters(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    """Those in groups of the backbone; none without heads_first."""
    return [p for group in optimizer.param_groups if group.get("backbone") for p in group["params"]]


def can_be_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Whether learning rates and state are tensors that exist before the first step."""
    states = [optimizer.state.get(p, {}) for p in _parameters(optimizer)]
    has_state = all(states) and all(isinstance(value, Tensor) for state in states for value in state.values())
    return has_state and all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# State in checkpoints


class OptimizerState:
    """All that an optimizer remembers, to save and to restore: tensors by name, and values that JSON can hold.

    That is `optimizer.state`, and what has changed in its parameter groups. An optimizer with a state_dict of its own
    is saved and restored by that and its load_state_dict.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.has_own_format = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
        self._first_groups = self._groups({})

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors, named momentum.0, momentum.1 and so on by the number of the parameter, and all other values."""
        tensors: dict[str, Tensor] = {}
        if self.has_own_format:
            return tensors, {"state_dict": _pack(self.optimizer.state_dict(), "optimizer", tensors)}
        numbers, state = {id(p): i for i, p in enumerate(_parameters(self.optimizer))}, []
        for key, values in self.optimizer.state.items():
            place = numbers.get(id(key), key)
            if not isinstance(values, dict):
                state.append([place, _pack(values, f"optimizer.{place}", tensors)])
                continue
            names = {name: f"{CHECKPOINT_NAMES.get(name, name)}.{place}" for name in values}
            state.append([place, {"dict": [[k, _pack(v, names[k], tensors)] for k, v in values.items()]}])
        groups = self._groups(tensors)
        changed = [
            [[k, v] for k, v in group.items() if _has_tensor(v) or k not in first or v != first[k]]
            for group, first in zip(groups, self._first_groups, strict=True)
        ]
        return tensors, {"state": state, "groups": changed}

    def load(self, tensors: dict[str, Tensor], saved: dict[str, Any] | None) -> None:
        """Continue from what `save` returned. `saved` is None in old checkpoints, which had tensors only."""
        parameters = _parameters(self.optimizer)
        if saved is None:
            for name, tensor in optimizer_tensors(self.optimizer).items():
                tensor.copy_(tensors[name])
        elif "state_dict" in saved:
            self.optimizer.load_state_dict(_unpack(saved["state_dict"], tensors, parameters[0], None))
        else:
            before, state = dict(self.optimizer.state), {}
            for place, values in saved["state"]:
                key = parameters[place] if isinstance(place, int) else place
                like = key if isinstance(key, Tensor) else parameters[0]
                state[key] = _unpack(values, tensors, like, before.get(key))
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
            groups = self.optimizer.param_groups
            for group, first, changed in zip(groups, self._first_groups, saved["groups"], strict=True):
                values = {k: v for k, v in first.items() if not _has_tensor(v)} | dict(changed)
                for key, value in values.items():
                    group[key] = _unpack(value, tensors, parameters[0], group.get(key))

    def _groups(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        """All values of the parameter groups but the parameters themselves and the learning rate, which is set anew."""
        return [
            {k: _pack(v, f"{k}.group{i}", tensors) for k, v in group.items() if k not in ("params", "names", "lr")}
            for i, group in enumerate(self.optimizer.param_groups)
        ]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of the optimizer's state, by their names in a checkpoint: momentum.0, momentum.1, ..."""
    return OptimizerState(optimizer).save()[0]


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON can hold it; tensors in it are added to `tensors` under this name."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_pack(k, name, {}), _pack(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UserError(
        f"the optimizer keeps a {type(value).__name__} ({name}), which a checkpoint cannot hold\n"
        "use tensors, numbers, text, lists, tuples and dicts, or give the optimizer a state_dict of these"
    )


def _has_tensor(packed: Any) -> bool:
    if isinstance(packed, dict):
        return "tensor" in packed or any(map(_has_tensor, packed.values()))
    return isinstance(packed, list) and any(map(_has_tensor, packed))


def _unpack(packed: Any, tensors: dict[str, Tensor], like: Tensor, before: Any) -> Any:
    """The value again. A tensor that exists is written in place; a new one gets the device and layout of `like`."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        saved = tensors[content]
        if isinstance(before, Tensor) and (before.shape, before.dtype) == (saved.shape, saved.dtype):
            return before.copy_(saved)
        layout = like.detach() if saved.shape == like.shape else saved
        return torch.empty_like(layout, dtype=saved.dtype, device=like.device).copy_(saved)
    if kind == "dict":
        old = before if isinstance(before, dict) else {}
        return {key: _unpack(value, tensors, like, old.get(key)) for key, value in content}
    values = [_unpack(value, tensors, like, None) for value in content]
    return tuple(values) if kind == "tuple" else values
