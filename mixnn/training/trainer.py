"""Trainer: the parts of a run, its state for checkpoints, and the loop over epochs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from mixnn import dist, methods
from mixnn.augment import View
from mixnn.config import Config, Interrupted, UserError, calling, parse_duration, parse_resolution, setting
from mixnn.data import ImageSet
from mixnn.device import pick_device, seeded_generators
from mixnn.diagnostics import shrinkage
from mixnn.evaluation.features import features
from mixnn.evaluation.knn import accuracy_by_vote, default_k
from mixnn.methods import Method
from mixnn.nn.backbone import BUILT_IN, Network
from mixnn.nn.batch_norm import freeze_statistics
from mixnn.nn.encoder import set_compute_dtype
from mixnn.nn.folding import folded
from mixnn.processes import is_main_process
from mixnn.progress import Reporter, plural
from mixnn.runs import Run
from mixnn.runs.folder import Diverged
from mixnn.runs.layout import SAMPLE as LAYOUT_SAMPLE
from mixnn.runs.layout import Layout, mean_layout, read_layout
from mixnn.runs.weights import KEPT, load_weights, make_backbone
from mixnn.training.interrupt import interrupts
from mixnn.training.judgement import (
    Judge,
    WeightAverage,
    dominance_message,
    has_dominant_direction,
    heads_first,
    max_useful_steps,
    trained_share,
)
from mixnn.training.loggers import RunLoggers
from mixnn.training.optimizers import OptimizerState, can_be_captured, make_optimizer
from mixnn.training.schedule import (
    MAX_EVALUATION_SHARE,
    WARMUP_SHARE,
    Cost,
    TimePlan,
    backbone_rate,
    crop_side,
    learning_rate,
)
from mixnn.training.step import Step
from mixnn.training.views import configured_views

REFRESH = 1.0  # seconds between updates of the progress bar; each makes the host wait for the device
FIRST_SAVE, SAVE_EVERY = 60.0, 600.0  # seconds to a run's first checkpoint, and between two, even within an epoch
SAVE = 1  # what processes tell each other if a checkpoint is due; smaller than the numbers of the signals they catch
KNN_SAMPLE = 100  # images that are encoded to estimate the time of a kNN evaluation
DRAWS_SEED = 2**31  # added to the seed; otherwise a CPU's first draws would repeat the numbers that made the weights


class Trainer:
    """The parts of a run, and the loop that trains them.

    Its random numbers (order, crops, lam, shuffle) come from one generator, whose state is saved. Those that a network
    or a loss draws from torch's default generators follow from the seed and the step, see `_seeded_step`. A time budget
    counts from `started`, a reading of `clock`. `ending`: estimated seconds until the process has exited. `network`: a
    backbone that the user handed in.
    """

    def __init__(
        self,
        config: Config,
        images: ImageSet,
        reporter: Reporter,
        knn_sets: tuple[ImageSet, ImageSet] | None = None,
        started: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ending: float = 0.0,
        network: Network | None = None,
    ) -> None:
        self.config, self.reporter, self.clock = config, reporter, clock
        self.plan: TimePlan | None = None
        if config.time_budget:
            now = clock() if started is None else started
            budget = parse_duration(config.time_budget)
            self.plan = TimePlan(budget, now, clock, ending, warmup=WARMUP_SHARE, shape=config.lr_shape)
        device = pick_device(config.device)
        dist.init(device)
        self.group = dist.run_group()
        _check_same_images(images)
        self.can_measure_purity = images.can_measure_purity(config.batch_size)
        self.resident = images.fits(device) if config.resident == "auto" else config.resident == "yes"
        self.images = images.to(device) if self.resident else images
        self.knn_sets = None  # labeled training and test images for kNN readings
        if knn_sets:
            train, test = knn_sets
            bank = self.images if train is images else train.to_if_fits(device)
            self.knn_sets = bank, test.to_if_fits(device)
        if not self.resident:
            reporter.info(
                f"{images.images.nbytes / 2**30:.1f} GiB of images stay on the host and are read one step ahead"
            )
        if methods.uses_labels(config.method, config.options) and images.num_labeled < len(images):
            raise UserError(
                f"{config.method} trains with labels, and some images of {config.data} have none: add labels with "
                f"{setting('labels')}, or use a method that needs none (`{calling('methods')}` lists them)"
            )
        self.bf16 = device.type == "cuda" and config.precision != "fp32"
        self.method = self._make_method(device, network)
        self.optimizer = make_optimizer(self.method.named_parameters(), config)
        self.optimizer_state = OptimizerState(self.optimizer)
        may_capture = device.type == "cuda" and can_be_captured(self.optimizer)
        fastest = "recorded" if may_capture else "eager"
        self.mode = fastest if config.mode == "auto" else config.mode
        if self.mode != "eager" and device.type == "cuda" and not may_capture:
            raise UserError(
                f"a step with the optimizer {config.optimizer} cannot be captured, because it has state or a learning "
                f"rate outside tensors: use {setting('mode', 'eager')}"
            )
        if self.mode == "compiled":
            reporter.info("compiling: half a minute or more the first time")
        views = configured_views(config, images.mirror, self.method.views)
        self.stages = parse_resolution(config.resolution, views[0].size)
        self.step = self._make_step(views)
        self.generator = torch.Generator(device).manual_seed(config.seed + DRAWS_SEED)
        self.order = torch.arange(len(images), device=device)
        self.image_order = self.order  # the same on the device of the images, which may be the host
        self.done = 0  # steps
        self.saved = -1  # step of the last checkpoint
        self.saved_at = 0.0  # when that was, or when training began
        self.seconds = 0.0  # spent training, without kNN readings and checkpoints
        self.record: dict[str, Any] = {}  # log line of the last epoch
        self.spreads: list[tuple[int, float]] = []  # (epoch, spread of the embeddings)
        self.warned_of_collapse = False
        self.heads_first = heads_first(config, None)
        self.backbone_rate = 0.0  # of the last step, times the learning rate
        self.judge: Judge | None = None  # see judge_from
        self.layout: Layout | None = None  # of a folder of aligned images
        self.blend: WeightAverage | None = None  # makes the encoder to keep from the starting weights and the student's
        self.last_good: tuple[dict[str, Tensor], float] = {}, 0.0  # weights not worse than the start's, and their time

    def _make_method(self, device: torch.device, network: Network | None) -> Method:
        """The method with its networks, on the device; its weights follow from the seed alone."""
        config, images = self.config, self.images
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            facts = {"num_classes": images.num_classes, "num_images": len(images)}
            backbone = make_backbone(replace(config, bn_groups=config.bn_groups // dist.size()), network)
            method = methods.build(config.method, backbone, config.options, **facts)
        if config.batch_norm == "frozen":
            for f in _backbones(method):
                freeze_statistics(f)
        method.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        set_compute_dtype(method, torch.bfloat16 if self.bf16 else torch.float32)
        dist.set_data_parallel(method, self.group)
        return method

    def _make_step(self, views: list[View]) -> Step:
        """The step in this trainer's mode; UserError if somebody's network prevents that mode."""
        config, sides = self.config, [side for side, _ in self.stages]
        optimizer, group = self.optimizer, self.group
        try:
            return Step(
                self.method, self.images, views, config.batch_size, optimizer, self.mode, self.resident, group, sides
            )
        except RuntimeError as error:
            if self.mode == "eager" or config.backbone in BUILT_IN or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"a step with the backbone {config.backbone} cannot be {self.mode}: {reason}\n"
                f"use {setting('mode', 'eager')}, or take what depends on values of tensors out of the network"
            ) from error

    @property
    def steps_per_epoch(self) -> int:
        return len(self.images) // self.config.batch_size

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def over(self) -> bool:
        """Whether the run is complete: all its epochs are done, or its time is up."""
        return self.plan.over if self.plan else self.done >= self.total_steps

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        if self.over:
            return 1.0
        return self.plan.progress if self.plan else self.done / self.total_steps

    @property
    def epoch(self) -> float:
        """Epochs done: a whole number, or two digits of a fraction."""
        whole, rest = divmod(self.done, self.steps_per_epoch)
        return round(self.done / self.steps_per_epoch, 2) if rest else whole

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a run needs to continue as if it had never stopped: tensors, and a JSON state."""
        tensors = {f"method.{name}": t for name, t in self.method.state_dict().items()}
        optimizer_tensors, optimizer_values = self.optimizer_state.save()
        tensors |= optimizer_tensors
        tensors |= {f"{KEPT}{name}": t for name, t in self.encoder_weights().items()}
        tensors |= self.layout.tensors() if self.layout else {}
        tensors |= {"order": self.order, "generator": self.generator.get_state(), "sums": self.step.sums}
        state = {"step": self.done, "seconds": self.seconds, "names": self.step.names, "count": self.step.count}
        state |= {"device": self.order.device.type, "data": self.images.identity(), "batch": self.config.batch_size}
        state |= {"optimizer": optimizer_values, "settings": asdict(self.config)}
        state |= {"backbone_rate": self.backbone_rate} if self.heads_first else {}
        return tensors, state | ({"time": self.plan.state()} if self.plan else {})

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        changed = {k for k, v in self.images.identity().items() if k in state["data"] and state["data"][k] != v}
        if changed - {"labels"}:
            raise UserError(
                f"{self.config.data} has changed since the checkpoint was made: it has "
                f"{plural(len(self.images), 'image')} now, {state['data']['images']} then, or other ones\n"
                f"restore the images, or start a new run with {setting('init_from')}"
            )
        if changed and methods.uses_labels(self.config.method, self.config.options):
            raise UserError(
                f"{self.config.method} trains with labels, and those of {self.config.data} have changed since the "
                f"checkpoint was made\ngive the same labels, or start a new run with {setting('init_from')}"
            )
        if state.get("batch", self.config.batch_size) != self.config.batch_size:
            was = f"batch_size was {state['batch']} and is {self.config.batch_size} now"
            raise UserError(f"{was}: a run cannot change its settings; restore config.yaml")
        self._restore(tensors, state)
        self.saved = self.done
        if self.plan:
            warming_up = self.done < self.config.warmup_epochs * self.steps_per_epoch
            fixed = {"budget": 0.0, "spent": self.seconds, "over": True, "steps_left": 0, "costs": {}}
            fixed |= {"progress": float(not warming_up), "warmup": WARMUP_SHARE}  # it had a number of epochs until now
            self.plan.load(state.get("time", fixed))

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        weights = {name.removeprefix("method."): t for name, t in tensors.items() if name.startswith("method.")}
        load_weights(self.method, weights, "the checkpoint")
        self.optimizer_state.load(tensors, state.get("optimizer"))
        self.order = tensors["order"].to(self.order.device)
        self.image_order = self.order.to(self.images.images.device)
        if state["device"] == self.order.device.type:
            self.generator.set_state(tensors["generator"])
        else:
            self.generator.manual_seed(self.config.seed + DRAWS_SEED + state["step"])
            self.reporter.warn(
                f"saved on {state['device']}, resumed on {self.order.device.type}: random draws differ from here on"
            )
        self.layout = read_layout(tensors)
        self.step.restore(state["names"], tensors["sums"], state["count"])
        self.done = state["step"]
        self.seconds = state["seconds"]
        self.backbone_rate = state.get("backbone_rate", 0.0)

    def start_from(self, backbone: torch.nn.Module, source: str) -> None:
        """Start student and teacher with the weights of a given backbone."""
        for part in _backbones(self.method):
            load_weights(part, backbone.state_dict(), source)

    def judge_from(self, start: torch.nn.Module, judge: Judge, share: float | None = None) -> None:
        """Compare the encoder from now on with the one the run started from, which is kept if it is better.

        `judge` has measured the start. `share` is that of the trained weights, for a run that had one before.
        """
        self.judge = judge
        judge.images = self.images  # which may be on another device now
        if self.plan:
            self.plan.record("judgement", judge.seconds)
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(0))[:LAYOUT_SAMPLE]
        mean = mean_layout(self.images.images[order.to(self.images.images.device)])
        if mean is not None:
            self.layout = Layout(mean, judge.start["spread"])
            self.reporter.info("the images are aligned, so vectors will also hold their layout")
        if judge.from_weights:
            if share is None:
                share = trained_share(self.config, judge.start)
                if self.config.trained_share == "auto" and has_dominant_direction(judge.start):
                    self.reporter.info(dominance_message(judge.start))
            # one share for all processes, so that the backbone is unfrozen at the same step
            self.blend = WeightAverage(start, dist.broadcast(share))
            self.last_good = self.blend.weights(start), 0.0
            self.heads_first = heads_first(self.config, self.blend.share)

    def encoder_weights(self) -> dict[str, Tensor]:
        """Weights of the encoder to keep, if they are not those of the student."""
        if self.blend is None:
            return {}
        is_worse = self.judge is not None and self.over and self.judge.is_worse
        return self.last_good[0] if is_worse else self.blend.weights(self.method.student.f)

    def _encoder(self) -> torch.nn.Module:
        """The encoder as a run that ended now would keep it, unless it is worse than the start."""
        student: torch.nn.Module = self.method.student.f
        return self.blend.encoder(student) if self.blend else student

    def measure(self) -> None:
        """Make the first plan of a run with a time budget.

        It takes a few steps, which are undone, and encodes some images to estimate the time of a kNN evaluation.
        """
        assert self.plan is not None
        if self.knn_sets:
            seconds = self._estimate_knn(*self.knn_sets)
            if seconds <= MAX_EVALUATION_SHARE * self.plan.budget:
                self.plan.costs.setdefault("knn", [Cost(seconds)])
            else:
                self.knn_sets = None
                self.reporter.warn(
                    f"a kNN evaluation would take {seconds:.0f} of {self.plan.budget:.0f} s and is left out: "
                    f"`{calling('evaluate')}` does it afterwards"
                )
        tensors, state = self.state()
        tensors = {name: t.clone() for name, t in tensors.items()}
        times: list[float] = []
        self.backbone_rate = 1.0  # measures whole steps; those of the heads alone are faster
        while not dist.broadcast(self.plan.pace_known(times)):
            start = self.clock()
            self._one_step()
            self.step.means()  # waits for the device
            times.append(self.clock() - start)
        self._restore(tensors, state)
        if self.blend and self.config.trained_share == "auto" and not self.plan.extended:  # more time: more steps
            self.plan.max_steps = max_useful_steps(self.blend.share)
        self.plan.begin(times, self.done)

    def _estimate_knn(self, train: ImageSet, test: ImageSet) -> float:
        """Seconds of a kNN evaluation, from three times that a few images are encoded; the first is slower."""
        num, times = min(KNN_SAMPLE, len(train)), []
        for _ in range(3):
            start = self.clock()
            features(self.method.student.f, train, torch.arange(num), bf16=self.bf16).sum().item()  # waits for it
            times.append(self.clock() - start)
        return statistics.median(times) * (len(train) + len(test)) / num

    def fit(self, run: Run) -> None:
        """Train to the end, logging and saving as configured; raise Interrupted if asked to stop earlier."""
        plan, total = self.plan, round(self.plan.budget) if self.plan else self.config.epochs
        with (
            run.recording_divergence(),
            self._logging(run),
            interrupts() as flag,
            self.reporter.bar(self.config.method, total) as advance,
        ):
            self.spreads = [
                (line["epoch"], line["spread"]) for line in run.metrics() if "spread" in line and "epoch" in line
            ]
            if dist.broadcast(self._unlogged(run)):  # the last process saved this epoch and died before logging it
                self._log_epoch(run, self.done * self.config.batch_size / self.seconds)
            self.saved_at = self.clock()
            if plan and self.saved != self.done:  # to know what a checkpoint costs
                self._save(run)
            if self.judge and not self.over:  # a resumed run may have become longer
                self.judge.last = self.progress
            epoch_start = refreshed = self.clock()
            first_step = self.done
            while not self.over:
                if plan:
                    plan.begin_step()
                self._one_step()
                ended = self.done % self.steps_per_epoch == 0
                if plan:
                    plan.end_step(self._means, replan=ended)
                if self.judge and self.backbone_rate == 0:  # there is nothing to judge yet
                    self.judge.last = self.progress
                if self.judge and self.judge.due(self.progress) and self._has_time("judgement"):
                    epoch_start += self._judge(run)
                now = self.clock()
                if ended or self.over:
                    self._end_epoch(run, epoch_start, self.done - first_step)
                    epoch_start = refreshed = self.clock()
                    first_step = self.done
                    advance(*self._progress(self.record))
                elif now - refreshed > REFRESH and is_main_process():
                    refreshed = now
                    advance(*self._progress(self.record | self._means()))
                request = dist.all_max(flag.signal or SAVE * self._save_due())
                if request and not self.over:
                    self.seconds += self.clock() - epoch_start
                    self._save(run)
                    epoch_start, first_step = self.clock(), self.done
                if request > SAVE and not self.over:
                    how = f"continue with `{run.how_to_resume}`"
                    raise Interrupted(f"stopped and saved at step {self.done}: {how}", request)
            if self.judge and self.done and self.judge.due(self.progress):  # resumed when its time was up
                self._judge(run)
                self._save(run)
        if self.saved != self.done:  # a run of no epochs: the end of an epoch saves it otherwise
            self._save(run)

    def _judge(self, run: Run) -> float:
        """Check the encoder without labels. If it ends worse than its start, an earlier one is kept.

        The result is the seconds this took.
        """
        assert self.judge is not None
        self._means()  # waits for the device; a run that has diverged ends here
        if not is_main_process():
            self.judge.last = self.progress
            return 0.0
        start = self.clock()
        known = {name for point in self.judge.points for name in point["problems"]}
        student = self.method.student.f
        with self._timing("judgement"):
            sentences = self.judge.check(self._encoder(), self.progress, self.done)
        for name, sentence in zip(self.judge.points[-1]["problems"], sentences, strict=True):
            if name not in known:
                self.reporter.warn(f"after {self.progress:.0%} of the run: {sentence}")
        kept = self.progress
        if self.layout and not self.judge.is_worse:
            self.layout = Layout(self.layout.mean, self.judge.points[-1]["spread"])
        if self.blend and not self.judge.is_worse:
            self.last_good = self.blend.weights(student), self.progress
        elif self.blend and self.over:
            kept = self.last_good[1]
            which = f"from {kept:.0%} of the run" if kept else f"it started from ({self.config.init_from})"
            self.reporter.warn(f"training made the encoder worse: keeping the weights {which}")
        share = self.blend.share if self.blend else 1.0
        run.write_judgement({"start": self.judge.start, "points": self.judge.points, "kept": kept, "share": share})
        return self.clock() - start

    @contextmanager
    def _logging(self, run: Run) -> Iterator[None]:
        self.loggers = RunLoggers(self.config.loggers * is_main_process(), run, self.done, self.reporter.warn)
        try:
            yield
        finally:
            self.loggers.close()

    def _one_step(self) -> None:
        position = self.done % self.steps_per_epoch
        if position == 0:
            self.order = torch.randperm(len(self.images), generator=self.generator, device=self.order.device)
            self.image_order = self.order.to(self.images.images.device)
            self.step.reset()
        size = self.config.batch_size
        index, next_index = (self.image_order[i * size : (i + 1) * size] for i in (position, position + 1))
        ahead = next_index if position + 1 < self.steps_per_epoch else None
        self.backbone_rate = max(self.backbone_rate, backbone_rate(self.progress, self.heads_first))
        side = crop_side(self.stages, self.progress)
        with self._seeded_step():
            self.method.begin_step(self.progress)
            self.step(index, self.learning_rate(), self.generator, ahead, self.backbone_rate, side)
        self.done += 1

    def _seeded_step(self) -> AbstractContextManager[None]:
        """Make what a step draws from torch's default generators, as dropout does, depend on seed and step alone.

        So a resumed run repeats it, and the caller's own generators stay as they are. Each process has its own rows of
        a batch, and so its own numbers. A captured step is left alone: its graph holds on to the generator.
        """
        if self.step.captures:
            return nullcontext()
        return seeded_generators(self.order.device, self.config.seed, self.done, dist.rank())

    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        if self.plan:
            return self.plan.learning_rate(self.config.base_lr)
        warmup = self.config.warmup_epochs * self.steps_per_epoch
        return learning_rate(self.done, self.config.base_lr, warmup, self.total_steps, self.config.lr_shape)

    def _means(self) -> dict[str, float]:
        means = self.reliable_means()
        if not math.isfinite(means["loss"]):
            raise self._diverged(f"the loss is {means['loss']}")
        return means

    def reliable_means(self) -> dict[str, float]:
        """Running means of the step's numbers; without purity if too few images have labels."""
        means = self.step.means()
        return means if self.can_measure_purity else {k: v for k, v in means.items() if not k.startswith("purity")}

    def _diverged(self, what: str) -> Diverged:
        last = f"the last good checkpoint is step {self.saved}" if self.saved >= 0 else "nothing was saved yet"
        return Diverged(f"{what} at step {self.done}; {last}. A smaller {setting('lr')} usually helps")

    def _end_epoch(self, run: Run, start: float, num_steps: int) -> None:
        """Save before kNN is evaluated: if that fails, no training is lost, and a resumed run repeats it."""
        self._means()  # waits for the device, so the clock below is right
        seconds = self.clock() - start
        self.seconds += seconds
        if self._due(self.config.checkpoint_every):
            self._save(run)
        self._log_epoch(run, num_steps * self.config.batch_size / seconds)

    def _log_epoch(self, run: Run, images_per_s: float) -> None:
        """Write the epoch's log line; all but its speed can be computed from the checkpoint."""
        self.record = {"epoch": self.epoch, "step": self.done, **self._means()}
        dist.average_statistics(self.method, self.group)
        if not is_main_process():
            return
        if self.knn_sets and self._due(self.config.knn_every) and self._has_time("knn"):
            with self._timing("knn"):
                self.record |= self._knn_or_skip()
        self.record |= {"images_per_s": round(images_per_s), "seconds": round(self.seconds, 3)}
        run.log(self.record)
        with self._timing("loggers"):
            self.loggers.log(self.record)
        self.spreads += [(self.record["epoch"], self.record["spread"])] if "spread" in self.record else []
        if not self.warned_of_collapse and (reason := shrinkage(self.spreads)):
            self.warned_of_collapse = True
            self.reporter.warn(f"epoch {self.record['epoch']}: a collapse may have begun. {reason}")

    def _due(self, every: int) -> bool:
        return self.done % (every * self.steps_per_epoch) == 0 or self.over

    def _save_due(self) -> bool:
        return self.clock() - self.saved_at > (FIRST_SAVE if self.saved < 0 else SAVE_EVERY)

    def _has_time(self, name: str) -> bool:
        """Whether an evaluation may be done now; there is always time for the last one."""
        return self.plan is None or self.over or self.plan.affords(name)

    def _timing(self, name: str) -> AbstractContextManager[None]:
        """Measure what the end of a run with a time budget will take."""
        return self.plan.timing(name) if self.plan else nullcontext()

    def _unlogged(self, run: Run) -> bool:
        """Whether the epoch that has just ended is missing in the log."""
        ended = self.done > 0 and (self.done % self.steps_per_epoch == 0 or self.over)
        return ended and self.done not in {record.get("step") for record in run.metrics()}

    def _save(self, run: Run) -> None:
        with self._timing("checkpoint"):
            dist.average_statistics(self.method, self.group)
            tensors, state = self.state()
            if not all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point()):
                raise self._diverged("weights or loss are NaN or inf")  # never replace a good checkpoint by a bad one
            if is_main_process():
                run.save_checkpoint(self.done, tensors, state)
        self.saved, self.saved_at = self.done, self.clock()

    def _knn_or_skip(self) -> dict[str, float]:
        """kNN accuracy for the log. If it fails, perhaps for lack of memory, it is left out and training goes on."""
        try:
            return self._knn()
        except RuntimeError as error:
            self.reporter.warn(f"no kNN reading at step {self.done}: {(str(error).splitlines() or [repr(error)])[0]}")
            return {}

    def _knn(self) -> dict[str, float]:
        assert self.knn_sets is not None
        train, test = self.knn_sets
        encoder = folded(self._encoder())
        bank, queries = (features(encoder, images, bf16=self.bf16) for images in (train, test))
        k = default_k(len(train), train.num_classes)
        return {
            "knn": accuracy_by_vote(bank, train.labels, queries, test.labels, train.num_classes, k)["weighted"],
            "knn_k": k,
        }

    def _progress(self, values: dict[str, Any]) -> tuple[float, str]:
        """Progress in epochs or in seconds of the time budget, and a note for the progress bar."""
        if not self.plan:
            return self.done / self.steps_per_epoch, _progress_note(values)
        seconds = round(self.plan.budget) if self.over else int(self.plan.elapsed())
        return seconds, f"s  epoch {self.epoch:g}  {_progress_note(values)}"


def _backbones(method: Method) -> list[torch.nn.Module]:
    """The backbones of student and teacher, if there is one."""
    return [part.f for part in (method.student, method.teacher) if part is not None]


def _check_same_images(images: ImageSet) -> None:
    """UserError in every process of a run if they do not all have the same images and labels."""
    if dist.size() == 1:
        return
    labels = images.identity()["labels"]
    found = dist.gather_values((f"{plural(len(images), 'image')} with digest {images.digest()[:8]}", labels))
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is None:
        return
    if found[other][0] == found[0][0]:
        raise UserError(f"processes 0 and {other} of this run have different labels: give all of them the same ones")
    raise UserError(
        f"the processes of this run have different images: process 0 has {found[0][0]}, process {other} has "
        f"{found[other][0]}\ngive all of them the same images"
    )


def _progress_note(values: dict[str, Any]) -> str:
    """loss 1.234  purity 0.56  kNN (k=200) 78.9  12,345 images/s"""
    parts = [f"loss {values['loss']:.3f}"]
    parts += [f"{name} {values[name]:.3f}" for name in ("purity", "accuracy") if name in values]
    if "knn" in values:
        parts.append(f"kNN (k={values['knn_k']}) {values['knn']:.1f}")
    if "images_per_s" in values:
        parts.append(f"{values['images_per_s']:,} images/s")
    return "  ".join(parts)
