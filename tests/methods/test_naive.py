"""Every method's loss and gradient against loops over samples and keys, written from the formulas, in float64."""

import pytest
import torch

from mixnn import methods
from mixnn.methods import METHODS, Batch
from tests.methods.linear_networks import B, K, LinearStudent, Stub, inputs, run_linear, uniform


def cosine(u, v):
    return (u @ v) / (u @ u).sqrt() / (v @ v).sqrt()


def distance(u, v):
    return 2 - 2 * cosine(u, v)


def log_probabilities(logits):
    """Of each logit in a list; these are small, so nothing need be done about overflow."""
    total = sum(logit.exp() for logit in logits)
    return [(logit.exp() / total).log() for logit in logits]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def nearest(z, rows, k):
    """Numbers of the k rows of largest cosine, nearest first."""
    return sorted(range(len(rows)), key=lambda j: -cosine(z, rows[j]).item())[:k]


class Naive:
    """The networks, and the support sets as each direction sees them."""

    def __init__(self, given, options):
        self.given, self.o = given, options
        self.P, self.H = (w.clone().requires_grad_() for w in (given.P, given.H))

    def q(self, image):
        return image.flatten() @ self.P

    def p(self, image):
        return self.q(image) @ self.H

    def z(self, image):
        return image.flatten() @ self.given.T

    def support(self, i, number=0):
        """Rows of support set `number` in direction i; leaky: direction 2>1 comes after the push."""
        rows = list(self.given.rings[number].z_QD)
        if self.o["leaky_queue"] and i == 1:
            for n in range(B):
                rows[(self.given.position + n) % len(rows)] = self.pushed(n, number)
        return rows

    def pushed(self, n, number):
        return self.auxiliary(n) if number else self.target(self.given.views[1][n])

    def target(self, image):
        """What is searched for and pushed: the teacher's embedding, or the student's own without a gradient."""
        return self.q(image).detach() if self.o["method"] == "nnclr" else self.z(image)

    def auxiliary(self, n):
        remembers = self.o["auxiliary"] == "prev_epoch"
        return self.given.previous[self.given.index[n]] if remembers else self.z(self.given.views[2][n])

    def neighbors(self, i, n, image):
        """Rows of the support set that direction i takes for image n of the batch."""
        rows, z, label = self.support(i), self.target(image), self.given.labels[n]
        if self.o["select"] == "random":
            u = self.given.draws["random"][i, n].tolist()
            found = sorted(range(len(rows)), key=lambda j: -u[j])[: self.o["topk"]]
        elif self.o["select"] == "labels":  # the ring holds more than K rows of each label
            same = [j for j in range(len(rows)) if self.given.rings[0].labels_Q[j] == label]
            found = [same[j] for j in nearest(z, [rows[j] for j in same], self.o["topk"])]
        else:
            found = nearest(z, rows, self.o["topk"])
        return [rows[j] for j in found]

    def lam(self, i, n):
        draws = self.given.draws["lam"][i].flatten()
        return self.o["lam"] if self.o["lam"] != "uniform" else draws[n if len(draws) > 1 else 0]

    def mixtures(self, i, n, z, neighbors):
        lam, unit = self.lam(i, n), lambda v: v / (v @ v).sqrt()
        return {
            "none": lambda: [unit(row) for row in neighbors],
            "raw_renorm": lambda: [unit(lam * row + (1 - lam) * z) for row in neighbors],
            "unit": lambda: [lam * unit(row) + (1 - lam) * unit(z) for row in neighbors],
            "unit_renorm": lambda: [unit(lam * unit(row) + (1 - lam) * unit(z)) for row in neighbors],
        }[self.o["mixer"]]()

    def weights(self, q, neighbors):
        count, kind = len(neighbors), self.o["weights"]
        if kind == "mse":
            return [1 / (count + 1)] * (count + 1)
        if kind == "explicit":
            return [self.o["positive_weight"]] + [self.o["neighbor_weight"] / count] * count
        if kind == "wse":
            return [1] + [1 / count] * count
        q = q.detach() if self.o["cas_detach"] else q
        exp = [(cosine(q, row) / self.o["cas_temperature"]).exp() for row in neighbors]
        return [1] + [e / sum(exp) for e in exp]

    def regression(self, i, n, image, z, neighbors):
        """w_0 d(p, z) + sum_i w_i (2 - 2 <p, mixture_i>)."""
        w, p = self.weights(self.q(image), neighbors), self.p(image)
        mixed = self.mixtures(i, n, z, neighbors)
        return w[0] * distance(p, z) + sum(w[k + 1] * (2 - 2 * (p / (p @ p).sqrt()) @ m) for k, m in enumerate(mixed))


# The loss of direction i: a and b are the views that student and target side saw


def byol(net, _i, a, b):
    return mean(distance(net.p(a[n]), net.z(b[n])) for n in range(B))


def mnn(net, i, a, b):
    return mean(net.regression(i, n, a[n], net.z(b[n]), net.neighbors(i, n, b[n])) for n in range(B))


def msf(net, i, a, b):
    losses = []
    for n in range(B):
        targets = [net.z(b[n]), *net.neighbors(i, n, b[n])]
        losses.append(mean(distance(net.p(a[n]), target) for target in targets))
    return mean(losses)


def cmsf(net, i, a, b):
    losses = []
    for n in range(B):
        z, rows = net.z(b[n]), net.support(i)
        near = nearest(net.auxiliary(n), net.support(i, 1), net.o["constraint"] or net.o["topk"])
        near = [near[j] for j in nearest(z, [rows[j] for j in near], net.o["topk"])]
        for neighbors in (net.neighbors(i, n, b[n]), [rows[j] for j in near]):
            losses.append(net.regression(i, n, a[n], z, neighbors))
    return mean(losses)


def simclr(net, _i, a, b):
    tau, losses = net.o["temperature"], []
    for n in range(B):
        logits = [cosine(net.q(a[n]), net.q(b[m])) / tau for m in range(B)]
        if net.o["negatives"] == "all":
            logits += [cosine(net.q(a[n]), net.q(a[m])) / tau for m in range(B) if m != n]
        losses.append(-log_probabilities(logits)[n])
    return mean(losses)


def moco(net, i, a, b):
    tau, losses = net.o["temperature"], []
    for n in range(B):
        keys = [net.z(b[n]), *net.support(i)]
        losses.append(-log_probabilities([cosine(net.q(a[n]), key) / tau for key in keys])[0])
    return mean(losses)


def sce(net, i, a, b):
    tau, tau_t, eta, losses = net.o["temperature"], net.o["teacher_temperature"], net.o["eta"], []
    for n in range(B):
        q, z = net.q(a[n]), net.z(b[n])
        teacher = [torch.ones((), dtype=torch.float64), *((cosine(z, row) / tau_t).exp() for row in net.support(i))]
        target = [(1 - eta) * t / sum(teacher) for t in teacher]
        target[0] = target[0] + eta
        student = log_probabilities([cosine(q, key) / tau for key in [z, *net.support(i)]])
        losses.append(-sum(t * s for t, s in zip(target, student, strict=True)))
    return mean(losses)


def ressl(net, i, a, b):
    tau, tau_t, losses = net.o["temperature"], net.o["teacher_temperature"], []
    for n in range(B):
        teacher = [(cosine(net.z(b[n]), row) / tau_t).exp() for row in net.support(i)]
        student = log_probabilities([cosine(net.q(a[n]), row) / tau for row in net.support(i)])
        losses.append(-sum(t / sum(teacher) * s for t, s in zip(teacher, student, strict=True)))
    return mean(losses)


def nnclr(net, i, a, b):
    tau, topk = net.o["temperature"], net.o["topk"]
    predictions = [net.p(image) for image in a]
    neighbors = [(n, row) for n in range(B) for row in net.neighbors(i, n, b[n])]
    rows = columns = 0
    for n in range(B):
        logs = log_probabilities([cosine(predictions[n], row) / tau for _, row in neighbors])
        rows += -sum(log for log, (owner, _) in zip(logs, neighbors, strict=True) if owner == n) / B
    for owner, row in neighbors:
        columns += -log_probabilities([cosine(p, row) / tau for p in predictions])[owner] / (B * topk)
    return columns if net.o["sides"] == "keys" else (rows + columns) / 2


def snclr(net, i, a, b):
    tau, topk, bank, labels = net.o["temperature"], net.o["topk"], [], []
    for n in range(B):
        z, neighbors = net.z(b[n]), net.neighbors(i, n, b[n])
        bank += [(n, key) for key in [z, *net.mixtures(i, n, z, neighbors)]]
        first, *attention = net.weights(net.q(a[n]), neighbors)
        labels.append([first] + [w * (w > 1 / topk) if net.o["threshold"] else w for w in attention])
    losses = []
    for n in range(B):
        logs = log_probabilities([cosine(net.p(a[n]), key) / tau for _, key in bank])
        own = [log for log, (owner, _) in zip(logs, bank, strict=True) if owner == n]
        losses.append(-sum(label * log for label, log in zip(labels[n], own, strict=True)))
    return mean(losses)


def two_views(direction):
    """Direction 1>2, averaged with 2>1 unless asymmetric."""

    def loss(net):
        x1, x2, _ = net.given.views
        one = direction(net, 0, x1, x2)
        return (one + direction(net, 1, x2, x1)) / 2 if net.o["symmetric"] else one

    return loss


def unmix(net):
    x1, x2, _ = net.given.views
    share, coin, (cy, cx) = (net.given.draws[key] for key in ("share", "coin", "centre"))
    height, width = x2.shape[-2:]
    reach, shares = int(int(width * (1 - share) ** 0.5) / 2), []
    row, column = int(cy * height), int(cx * width)
    mixed = x2.clone()
    for y in range(height):
        for x in range(width):
            in_box = -reach <= y - row < reach and -reach <= x - column < reach
            shares.append(share if coin < 0.5 else 0.0 if in_box else 1.0)
            for n in range(B):
                mixed[n, 0, y, x] = shares[-1] * x2[n, 0, y, x] + (1 - shares[-1]) * x2[B - 1 - n, 0, y, x]
    lam, flipped = mean(shares), torch.stack([mixed[B - 1 - n] for n in range(B)])
    base = {"byol": byol, "moco": moco}[net.o["base"]]

    def one_way(a, b, i=0):
        return base(net, i, a, b)

    if net.o["mixed"] == "both":
        one = one_way(x1, x2) + lam * one_way(x1, mixed) + (1 - lam) * one_way(x1, flipped)
        two = one_way(x2, x1, 1) + lam * one_way(mixed, x1) + (1 - lam) * one_way(flipped, x1)
    else:
        one = one_way(x1, x2) + lam * one_way(mixed, x2) + (1 - lam) * one_way(flipped, x2)
        two = one_way(x2, x1, 1) + lam * one_way(mixed, x1) + (1 - lam) * one_way(flipped, x1)
    return (one + two) / 2 if net.o["symmetric"] else one


NAIVE = {name: two_views(direction) for name, direction in globals().items() if name in METHODS and name != "unmix"}
NAIVE["unmix"] = unmix
MNNS = {"weights": "wse", "mixer": "raw_renorm"}
SAMPLES = {"lam": uniform(2, B, 1, 1, seed=20)}
BOX = {"coin": torch.tensor(0.5)}
CASES = {  # options, and draws other than the usual
    "mnn": [
        ({}, {}),
        ({"topk": 1}, {}),
        ({"mixer": "unit"}, {}),
        ({"mixer": "unit_renorm", "weights": "mse"}, {}),
        ({"mixer": "none", "weights": "cas"}, {}),
        ({"weights": "cas", "cas_temperature": 0.2, "cas_detach": True}, {}),
        ({"weights": "explicit", "positive_weight": 1.2, "neighbor_weight": 0.3, "lam": 0.7}, {}),
        ({"lam_scope": "sample"}, SAMPLES),
        ({"select": "random"}, {}),
        ({"select": "labels"}, {}),
        ({"leaky_queue": True}, {}),
        ({"symmetric": False, "leaky_queue": True}, {}),
    ],
    "msf": [({}, {}), ({"topk": 1}, {}), ({"leaky_queue": True}, {}), ({"symmetric": False}, {})],
    "cmsf": [
        ({}, {}),
        (MNNS, {}),
        (MNNS | {"lam_scope": "sample", "constraint": 7}, SAMPLES),
        ({"constraint": 7}, {}),
        ({"auxiliary": "prev_epoch"}, {}),
        ({"auxiliary": "prev_epoch", "constraint": 9}, {}),
        (MNNS | {"auxiliary": "prev_epoch", "constraint": 9, "leaky_queue": True}, {}),
        ({"leaky_queue": True}, {}),
        ({"symmetric": False}, {}),
        ({"weights": "cas"}, {}),
        ({"select": "random"}, {}),
    ],
    "byol": [({}, {}), ({"symmetric": False}, {})],
    "unmix": [
        ({}, {}),
        ({}, BOX),
        ({"base": "moco"}, BOX),
        ({"base": "moco", "leaky_queue": True}, {}),
        ({"mixed": "student"}, BOX),
        ({"base": "moco", "mixed": "student"}, {}),
        ({"symmetric": False}, BOX),
        ({"base": "moco", "mixed": "student", "symmetric": False}, {}),
        ({"base": "moco", "leaky_queue": True, "symmetric": False}, {}),
    ],
    "snclr": [
        ({}, {}),
        ({"topk": 1}, {}),
        ({"threshold": True}, {}),
        ({"threshold": True, "topk": 1}, {}),
        ({"threshold": True, "weights": "wse"}, {}),
        ({"cas_detach": True}, {}),
        ({"cas_temperature": 0.2, "temperature": 0.5}, {}),
        (MNNS, {}),
        ({"mixer": "unit", "threshold": True}, {}),
        (MNNS | {"lam_scope": "sample"}, SAMPLES),
        ({"leaky_queue": True}, {}),
        ({"symmetric": False}, {}),
    ],
    "nnclr": [
        ({"topk": 1}, {}),
        ({"topk": 3}, {}),
        ({"topk": 1, "sides": "keys"}, {}),
        ({"topk": 3, "sides": "keys"}, {}),
        ({"temperature": 0.5, "select": "random"}, {}),
        ({"leaky_queue": True}, {}),
        ({"symmetric": False}, {}),
    ],
    "simclr": [
        ({}, {}),
        ({"negatives": "all"}, {}),
        ({"negatives": "all", "temperature": 0.5}, {}),
        ({"symmetric": False}, {}),
    ],
    "moco": [({}, {}), ({"temperature": 0.5}, {}), ({"leaky_queue": True}, {}), ({"symmetric": False}, {})],
    "sce": [
        ({}, {}),
        ({"eta": 0}, {}),
        ({"eta": 0.2, "teacher_temperature": 0.3}, {}),
        ({"eta": 1}, {}),
        ({"leaky_queue": True}, {}),
        ({"symmetric": False}, {}),
    ],
    "ressl": [
        ({}, {}),
        ({"symmetric": True}, {}),
        ({"symmetric": True, "leaky_queue": True}, {}),
        ({"temperature": 0.4, "teacher_temperature": 0.3}, {}),
    ],
}


def close(ours, naive):
    torch.testing.assert_close(ours, naive, rtol=0, atol=1e-10)


def words(value):
    return (
        value if isinstance(value, str) else ",".join(k if torch.is_tensor(v) else f"{k}={v}" for k, v in value.items())
    )


@pytest.mark.parametrize(
    "name, options, draws", [(name, *case) for name, cases in CASES.items() for case in cases], ids=words
)
def test_loss_and_gradient_equal_the_loop(name, options, draws):
    given = inputs()
    given = given._replace(draws=given.draws | draws)
    ours = run_linear(name, given, **options)
    known = methods.resolve_options(name, {"topk": K}, options)
    net = Naive(given, {"leaky_queue": False, "select": "topk", "auxiliary": "", "method": name} | known)
    naive = NAIVE[name](net)
    naive.backward()
    close(ours.loss, naive.detach())
    for grad, want in zip(ours.grads, (net.P.grad, net.H.grad), strict=False):
        close(grad, want)


def test_every_method_has_a_loop():
    assert {*CASES, "supervised"} == METHODS.keys()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_supervised_loss_is_the_cross_entropy_of_the_label_and_of_all_classes(smoothing):
    given = inputs()
    method = methods.build("supervised", Stub(), {"label_smoothing": smoothing}, num_classes=3)
    method.student = LinearStudent(given.P[:, :3].clone(), None)
    P = given.P[:, :3].clone().requires_grad_()
    logits = [[image.flatten() @ P[:, y] for y in range(3)] for image in given.views[0]]
    labels = [max(range(3), key=lambda y, row=row: row[y].item()) for row in logits]
    labels[0] = (labels[0] + 1) % 3  # all are right but this one
    losses = []
    for row, label in zip(logits, labels, strict=True):
        logs = log_probabilities(row)
        losses.append(-(1 - smoothing) * logs[label] - smoothing * mean(logs))
    naive = mean(losses)
    naive.backward()
    loss, aux = method.forward_batch(Batch(given.views[:1], torch.tensor(labels), given.index, {}))
    loss.backward()
    close(loss.detach(), naive.detach())
    close(method.student.P.grad, P.grad)
    assert aux.metrics["accuracy"].item() == pytest.approx((B - 1) / B)
    assert aux.push == ()
