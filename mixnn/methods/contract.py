"""What a method is: a module that turns the views of a batch into a loss, and whose state only one function writes.

`Method` lists what the trainer relies on, with defaults for what most methods do not need. `siamese.Siamese` is all of
it but the loss, for methods that compare two views.

There are two ways to call a method. The trainer calls `forward_batch`, which reads state, and `update_state`, which
writes it. A training loop of your own calls `method(x1, x2)` and `after_step()`, which are made of these two.

In what the trainer calls, shapes are fixed and nothing is read back to the host, so a step can be compiled whole and
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mixnn.config import Checked, UserError, make
from mixnn.dist import PartialBatch, broadcast_tensors, gather_batch
from mixnn.nn.encoder import Student, Teacher, feature_length, shuffle_order
from mixnn.nn.support_set import SupportRows, SupportSet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

VIEW_PAIRS = {"s/w": ("strong", "weak"), "s/s": ("strong", "strong"), "w/w": ("weak", "weak")}


class About(NamedTuple):
    """Where a method comes from, and its idea in a line."""

    year: int
    paper: str
    idea: str


class Batch(NamedTuple):
    """One step's input. On several processes, a process makes only the rows of a view that it uses."""

    views: tuple[Tensor | PartialBatch, ...]
    labels_B: Tensor
    index_B: Tensor  # which images of the data set these are
    draws: dict[str, Tensor]


class NeighborList(NamedTuple):
    """Neighbors of each anchor in the support set, nearest first."""

    index_BK: Tensor
    z_BKD: Tensor  # raw
    labels_BK: Tensor
    images_BK: Tensor  # which images of the data set they are


class Direction(NamedTuple):
    """What a loss may use of direction a>b."""

    number: int  # 0 for 1>2, 1 for 2>1
    q_BD: Tensor
    p_BD: Tensor
    z_BD: Tensor
    neighbor_lists: tuple[NeighborList, ...]  # CMSF has two, most methods one; none without the options of neighbors
    support_QD: Tensor  # the support set as this direction searches it, raw; Q = 0 without one
    draws: dict[str, Tensor]

    @property
    def neighbors_BKD(self) -> Tensor:
        """Neighbors of z, raw and nearest first; K is 0 with topk=0."""
        if not self.neighbor_lists:
            raise UserError(
                "this method has no neighbors: derive it from one that has, such as mixnn.methods.MSF or MNN, "
                "or from their Options"
            )
        return self.neighbor_lists[0].z_BKD


class DirectionRecord(NamedTuple):
    """The A directions of a step (1>2, then 2>1), stacked for the diagnostics; K = 0 without neighbors."""

    q_ABD: Tensor
    p_ABD: Tensor
    z_ABD: Tensor
    index_ABK: Tensor
    neighbors_ABKD: Tensor
    labels_ABK: Tensor
    images_ABK: Tensor

    @staticmethod
    def stack(directions: Sequence[Direction]) -> DirectionRecord:
        """Copies without gradient: a compiled step that returns views of its tensors has crashed torch 2.13."""
        with torch.no_grad():
            rows = [
                (d.q_BD, d.p_BD, d.z_BD, *(d.neighbor_lists[0] if d.neighbor_lists else no_neighbors(d.z_BD)))
                for d in directions
            ]
            return DirectionRecord(*(torch.stack(column) for column in zip(*rows, strict=True)))


def no_neighbors(z_BD: Tensor) -> NeighborList:
    """An empty list for each anchor: K = 0."""
    none = torch.zeros(len(z_BD), 0, dtype=torch.long, device=z_BD.device)
    return NeighborList(none, z_BD[:, None][:, :0], none, none)


class Aux(NamedTuple):
    """What `forward_batch` returns besides the loss, without gradient."""

    push: tuple[SupportRows, ...]  # new rows of each support set
    record: DirectionRecord | None  # None for a method that does not compare two views
    metrics: dict[str, Tensor]  # other scalars to log


class Method(nn.Module):
    """Base of all methods. `student.f` is the encoder that is evaluated.

    In a training loop of your own:

        method = mixnn.methods.MNN(backbone, topk=5)
        optimizer = torch.optim.SGD(method.trained_parameters(), lr=0.06)
        for x1, x2 in loader:
            loss = method(x1, x2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            method.after_step()
        backbone.load_state_dict(method.student.f.state_dict())

    It trains a copy of the backbone, on the backbone's device, under your autocast if there is one. In the copy, each
    BatchNorm1d and BatchNorm2d takes its statistics from one view at a time. With `copy=False` it trains the backbone
    itself, and these layers are replaced in it. `num_features` is the length of the backbone's features; by default it
    is the backbone's attribute of that name, or found by a forward pass.

    With `process_group`, after_step collects the new rows of the support set from all processes, so that they all hold
    the same one. Each process must then pass the same number of images. Losses still compare the images of one process,
    and gradients are left to DistributedDataParallel or whatever you use. Without it, nothing is communicated.

    >>> method = mixnn.methods.MNN(backbone, topk=5)
    >>> loss = method(x1, x2)
    >>> loss.backward()
    >>> method.after_step()
    """

    about: ClassVar[About]
    Options: ClassVar[type[Checked]]
    """Frozen dataclass of `config.option` fields: every setting with its default, meaning and source."""
    facts: ClassVar[tuple[str, ...]] = ()
    """Facts about the data that __init__ takes as arguments: num_classes, num_images."""
    split: ClassVar[str] = "pretrain"
    """Which split of a data set it trains on."""
    recipe: ClassVar[dict[str, Any]] = {}
    """Settings of the run that it prefers, unless the user gives others."""

    options: Any  # an instance of Options
    student: Student
    teacher: Teacher | None
    topk: int  # neighbors of an anchor; 0 if it uses none

    def __init__(
        self,
        backbone: nn.Module | None,
        *,
        copy: bool = True,
        num_features: int | None = None,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = make(self.Options, "option", options)
        self.topk = getattr(self.options, "topk", 0)
        self.teacher = None
        self.process_group = process_group
        self._is_shared = False  # whether all processes hold the same support set
        self._pending: list[Aux] = []  # of forward passes since the last after_step
        if backbone is not None:
            num_features = num_features or feature_length(backbone)
            self.build(deepcopy(backbone) if copy else backbone, num_features)
            self.to(next(backbone.parameters(), torch.zeros(())).device)

    def build(self, backbone: nn.Module, num_features: int) -> None:
        """Make networks and state; the backbone now belongs to the method."""
        raise NotImplementedError

    @classmethod
    def encoded_views(cls, options: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which views the student encodes, and which the teacher: (0, 1), (1,) for example."""
        raise NotImplementedError

    @classmethod
    def uses_labels(cls, options: Any) -> bool:
        """Whether training itself reads labels."""
        return False

    @classmethod
    def uses_index(cls, options: Any) -> bool:
        """Whether it must know which images of the data set a batch holds."""
        return False

    @classmethod
    def has_support(cls, options: Any) -> bool:
        """Whether it keeps a support set."""
        return False

    @property
    def views(self) -> tuple[str, ...]:
        """Which augmentation makes each view: ("strong", "weak") for example."""
        raise NotImplementedError

    @property
    def support(self) -> SupportSet | None:
        """The support set that neighbors are taken from."""
        return None

    def trained_parameters(self) -> list[nn.Parameter]:
        """What an optimizer trains: all parameters that need a gradient, the student's and the method's own."""
        return [p for p in self.parameters() if p.requires_grad]

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the uniforms in [0, 1) that one forward pass consumes."""
        return {}

    def image_rows(self, draws: Mapping[str, Tensor], own: Tensor) -> Tensor:
        """Rows of the batch a process must load to encode rows `own`. May repeat rows.

        By default, these are its own rows for the student, and those that the shuffle gives it for the teacher. A
        method that uses other rows of a view in `forward_batch` must add them.
        """
        orders = () if self.teacher is None else shuffle_order(draws["shuffle"])
        return torch.cat([own, *(order[own] for order in orders)])

    def forward_batch(self, batch: Batch) -> tuple[Tensor, Aux]:
        """The loss. Reads state and writes none, except batch norm's running statistics."""
        raise NotImplementedError

    def begin_step(self, progress: float) -> None:
        """Called before each step with the share of the run that is done; what changes over a run is set here."""

    def update_state(self, aux: Aux) -> None:
        """Called after the optimizer: the teacher moves, the support set is pushed."""

    def forward(
        self,
        *views: Tensor,
        labels: Tensor | Sequence[int] | None = None,
        index: Tensor | Sequence[int] | None = None,
        draws: Mapping[str, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Loss of a batch, in a training loop of your own.

        Views are normalized images (B, 3, H, W); the attribute `views` says which augmentation the method's paper has
        for each. Only some methods need labels (B,), or index (B,), the numbers of the images in the data set. Random
        numbers come from the generator, by default torch's own for the device; `draws` replaces them.
        """
        if len(views) != len(self.views):
            wanted = f"{len(self.views)} ({', '.join(self.views)})"
            raise UserError(f"{type(self).__name__} takes {wanted} views of a batch, and got {len(views)}")
        sizes = [len(view) for view in views]
        if len(set(sizes)) > 1:
            raise UserError(f"the views have {' and '.join(map(str, sizes))} images: give views of the same images")
        if not all(view.is_floating_point() for view in views):
            kinds = " and ".join(str(view.dtype).removeprefix("torch.") for view in views)
            raise UserError(
                f"the views are {kinds}: give normalized floats, which mixnn.augment.TwoViews makes of uint8 images"
            )
        size, device = sizes[0], views[0].device
        numbers = []
        for name, value, needed in (
            ("labels", labels, self.uses_labels(self.options)),
            ("index", index, self.uses_index(self.options)),
        ):
            if needed and value is None:
                raise UserError(f"{type(self).__name__} with these options needs {name}: pass {name}=, one per image")
            unknown = torch.full((size,), -1, device=device)
            numbers.append(unknown if value is None else _whole_numbers(name, value, size, device))
        if draws is None:
            shapes = self.draws(size).items()
            draws = {name: torch.rand(shape, generator=generator, device=device) for name, shape in shapes}
        labels_B, index_B = numbers
        batch = Batch(views, labels_B, index_B, dict(draws))
        if self.process_group is not None and not self._is_shared:
            networks = ("student.", "teacher.")
            broadcast_tensors((t for n, t in self.named_buffers() if not n.startswith(networks)), self.process_group)
            self._is_shared = True
        loss, aux = self.forward_batch(batch)
        if self.training and torch.is_grad_enabled():  # and not for a loss of validation images
            self._keep(aux)
        return loss

    def after_step(self) -> None:
        """Call it after each step of the optimizer: the teacher moves, the support set gets its new rows.

        With accumulated gradients, these are the rows of all forward passes since the last call.
        """
        if not self._pending:
            raise UserError("after_step() follows a forward pass in training mode: call the method on a batch first")
        push = []
        for passes in zip(*(aux.push for aux in self._pending), strict=True):
            columns = zip(*passes, strict=True)
            push.append(SupportRows(*(gather_batch(torch.cat(column), self.process_group) for column in columns)))
        aux = self._pending[-1]._replace(push=tuple(push))
        self._pending.clear()
        self.update_state(aux)

    def _keep(self, aux: Aux) -> None:
        """Keep `aux` for after_step, and forget the oldest whose rows the support set could not hold."""
        self._pending.append(aux)
        size = 0 if self.support is None else len(self.support.z_QD)
        while len(self._pending) > 1 and sum(len(a.push[0].z_QD) if a.push else 0 for a in self._pending[1:]) >= size:
            self._pending.pop(0)

    def neighbor_share(self, norm_ratio: float, cosine: float) -> float | None:
        """Share of the neighbors in the loss's weights on unit z and z_i; None if the loss has no such weights.

        norm_ratio is the mean of |z_i| / |z|, cosine the mean of cos(z, z_i), both as measured on a run. `diagnose`
        leaves the share out for a class that overrides `loss` and not this.
        """
        return None


def _whole_numbers(name: str, given: Any, count: int, device: torch.device) -> Tensor:
    """The labels or indices of a batch as int64, on the device of its views; UserError unless each image has one."""
    try:
        numbers = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name} must be whole numbers, one per image, not {type(given).__name__}") from None
    if numbers.is_floating_point() or numbers.is_complex():
        raise UserError(f"{name} are {str(numbers.dtype).removeprefix('torch.')}: give whole numbers, one per image")
    if numbers.shape != (count,):
        raise UserError(f"{name} have the shape {tuple(numbers.shape)}: give one for each of the {count} images")
    return numbers.long()
