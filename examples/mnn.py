"""MNN, mixed nearest neighbors (arXiv 2311.00562), on CIFAR-10: the whole method in one file of plain PyTorch.

A student network learns to predict the embedding that a teacher, its own moving average, has of another view of the
same image, and of the most similar images. No labels are used for training; a kNN classifier shows the result. Loss:

    d(p, z) + mean over i of d(p, lam z_i + (1 - lam) z),    d(a, b) = 2 - 2 cos(a, b),

with the student's prediction p, the teacher's embedding z, its K nearest neighbors z_i in the support set, and a random
lam. It is averaged over both directions: the student sees view 1 and the teacher view 2, and the other way around.

    python examples/mnn.py ~/data/cifar-10-batches-bin              # the paper's 200 epochs; you want a GPU
    python examples/mnn.py ~/data/cifar-10-batches-bin --epochs 1   # a first look

The folder is CIFAR-10's binary version. Read from top to bottom: data, views, network, method, evaluation, training.
Given the same views, losses equal those of `mixnn` with bn_groups=1 (tests/test_examples.py). This file was not yet run
for 200 epochs. It is simpler than `mixnn` and the authors' code:

- Batch norm sees the whole batch instead of eight groups of it, so the teacher needs no shuffled batch.
- Views approximate torchvision's: color jitter in one fixed order, hue as a rotation in YIQ, an exact Gaussian blur.
- Warm-up scales with --epochs: it is always 1/40 of the training.
- The only evaluation is kNN; there is no linear probe.

Shapes: B images of a batch, K neighbors, Q rows of the support set, D numbers of an embedding.
"""

import argparse
import copy
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# Data: all of CIFAR-10 is 184 MB as bytes, so it lives on the device and needs no loader


def load(folder, names, device):
    rows = np.concatenate([np.fromfile(Path(folder) / name, np.uint8).reshape(-1, 1 + 3 * 32 * 32) for name in names])
    images, labels = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)
    return torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)


def normalize(images):
    """Bytes, or floats in [0, 255], to what the network sees."""
    mean, std = images.new_tensor([[125.3, 123.0, 113.9], [51.6, 50.8, 51.3]], dtype=torch.float32).view(2, 3, 1, 1)
    return (images - mean) / std


# Views: each image of a batch draws its own crop, colors and blur


def uniform(like, low, high):
    return torch.empty(len(like), device=like.device).uniform_(low, high)  # (B,)


def weak(images, flip=0.9):  # the paper gives no probability for the weak view's flip; the authors' code has 0.9
    """A random crop of 20 to 100% of the area, resized to 32 x 32, and a mirror image."""
    area, ratio = uniform(images, 0.2, 1), uniform(images, math.log(3 / 4), math.log(4 / 3)).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)  # 1 is the whole side
    x, y = uniform(images, -1, 1) * (1 - width), uniform(images, -1, 1) * (1 - height)  # center; the image is [-1, 1]
    width = torch.where(uniform(images, 0, 1) < flip, -width, width)  # a negative width mirrors
    zero = torch.zeros_like(x)
    boxes = torch.stack([width, zero, x, zero, height, y], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(boxes, list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)


def strong(images):
    """Crop and flip, then color jitter (80%), grayscale (20%) and Gaussian blur (50%)."""
    images = weak(images, flip=0.5)
    jitter = uniform(images, 0, 1) < 0.8
    brightness, contrast, saturation = (torch.where(jitter, uniform(images, 0.6, 1.4), 1.0) for _ in range(3))
    saturation = torch.where(uniform(images, 0, 1) < 0.2, 0.0, saturation)  # without color: grayscale
    angle = torch.where(jitter, uniform(images, -0.1, 0.1), 0.0) * 2 * math.pi

    # In YIQ, Y is the gray image and (I, Q) its color: saturation scales that vector, hue turns it.
    to_yiq = images.new_tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    cos, sin = saturation * angle.cos(), saturation * angle.sin()
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], dim=1).view(-1, 3, 3)
    images = torch.einsum("bij,bjhw->bihw", to_yiq.inverse() @ turn @ to_yiq, images)
    mean = images.mean((1, 2, 3), keepdim=True)
    images = brightness.view(-1, 1, 1, 1) * (mean + contrast.view(-1, 1, 1, 1) * (images - mean))

    # A blur is a matrix that mixes rows, and once more columns. At sigma = 0.01 it is the identity: no blur.
    sigma = torch.where(uniform(images, 0, 1) < 0.5, uniform(images, 0.1, 2), 0.01)
    pixel = torch.arange(32, device=images.device)
    offset = (pixel[:, None] - pixel[None, :]) / sigma.view(-1, 1, 1, 1)
    blur = (-(offset**2) / 2).softmax(dim=-1)  # (B, 1, 32, 32)
    return (blur @ images @ blur.mT).clamp(0, 255)


# Network: ResNet-18 with a 3x3 stem and no max-pool, for 32 x 32 images


class Block(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


def resnet(widths=(64, 128, 256, 512), depth=2):
    layers, inputs = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()], widths[0]
    for width in widths:
        for i in range(depth):
            layers.append(Block(inputs, width, stride=2 if i == 0 and width != widths[0] else 1))
            inputs = width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return network


def mlp(inputs, hidden, outputs):
    layers = nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    return nn.Sequential(*layers)


# Method: Algorithm 1 of the paper, in both directions


class MNN(nn.Module):
    def __init__(self, backbone, features=512, hidden=2048, dim=128, support_size=4096, topk=5, momentum=0.99):
        super().__init__()
        self.topk, self.momentum = topk, momentum
        self.student = nn.Sequential(backbone, mlp(features, hidden, dim))  # backbone and projector
        self.predictor = mlp(dim, hidden, dim)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        # The teacher's embeddings of the last Q images. Until there are Q, the others are random vectors.
        self.register_buffer("support", F.normalize(torch.randn(support_size, dim)))

    def forward(self, x1, x2, lam):
        """Loss of two views of a batch, and the embeddings for the support set; lam is one uniform per direction."""
        p1, p2 = self.predictor(self.student(x1)), self.predictor(self.student(x2))  # (B, D)
        with torch.no_grad():
            z1, z2 = self.teacher(x1), self.teacher(x2)  # (B, D)
        # Both searches come before the push. With z2 in the support set, an image would be its own neighbor.
        return (self.loss(p1, z2, lam[0]) + self.loss(p2, z1, lam[1])) / 2, z2

    def loss(self, p, z, lam):
        """Distance of the prediction p to z and, on average, to z's neighbors, each mixed with z."""
        similarity = F.normalize(z) @ F.normalize(self.support).T  # (B, Q)
        neighbors = self.support[similarity.topk(self.topk).indices]  # (B, K, D)
        # The paper's idea: a neighbor may be of another class, and mixed with z it does less harm
        # (docs/reproduction.md: it acts like a smaller weight).
        mixed = lam * neighbors + (1 - lam) * z[:, None]  # (B, K, D)
        return (distance(p, z) + distance(p[:, None], mixed).mean(dim=1)).mean()

    @torch.no_grad()
    def update(self, z):
        """After each optimizer step: the teacher follows the student, and z replaces the oldest rows."""
        for teacher_p, student_p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            teacher_p.lerp_(student_p, 1 - self.momentum)
        self.support = torch.cat([self.support, z])[len(z) :]  # oldest first


def distance(a, b):
    """Squared distance of a and b after both are made unit vectors."""
    return 2 - 2 * F.cosine_similarity(a, b, dim=-1)


# Evaluation: the 200 training images most like a test image vote for its class, weighted by similarity


@torch.no_grad()
def knn_accuracy(network, train, test, k=200, temperature=0.1):
    network.eval()
    bank, queries = (F.normalize(torch.cat([network(normalize(b)) for b in x.split(500)])) for x in (train[0], test[0]))
    network.train()
    correct = 0
    for query, truth in zip(queries.split(500), test[1].split(500), strict=True):
        similarity, index = (query @ bank.T).topk(min(k, len(bank)))  # (B, k)
        votes = query.new_zeros(len(query), 10)
        votes.scatter_add_(1, train[1][index], (similarity / temperature).exp())
        correct += (votes.argmax(1) == truth).sum().item()
    return 100 * correct / len(queries)


# Training: SGD, five of 200 epochs of warm-up, then half a cosine


def main():
    parser = argparse.ArgumentParser(description="MNN on CIFAR-10")
    parser.add_argument("folder", help="with data_batch_1.bin to data_batch_5.bin and test_batch.bin")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train = load(args.folder, [f"data_batch_{i}.bin" for i in range(1, 6)], device)
    test = load(args.folder, ["test_batch.bin"], device)
    model = MNN(resnet()).to(device)
    steps_per_epoch = len(train[0]) // args.batch_size
    steps = args.epochs * steps_per_epoch

    def learning_rate(step):
        warmup = steps / 40  # 5 of 200 epochs
        return min(step / warmup, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / (steps - warmup)))

    trained = [*model.student.parameters(), *model.predictor.parameters()]
    optimizer = torch.optim.SGD(trained, lr=0.06 * args.batch_size / 256, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(train[0]), device=device).split(args.batch_size)[:steps_per_epoch]:
            images = train[0][batch]
            x1, x2 = normalize(strong(images)), normalize(weak(images))
            loss, z = model(x1, x2, lam=torch.rand(2, device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            model.update(z)
            total += loss.detach()  # no .item() in the loop: it would make the GPU wait
        line = f"epoch {epoch}/{args.epochs}, loss {total / steps_per_epoch:.4f}"
        if epoch % 10 == 0 or epoch == args.epochs:
            line += f", kNN accuracy {knn_accuracy(model.student[0], train, test):.2f}%"
        print(line, flush=True)


if __name__ == "__main__":
    main()
