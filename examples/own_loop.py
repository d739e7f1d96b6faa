"""MNN in a plain PyTorch loop: your data, your network, your optimizer.

    python examples/own_loop.py

The data are the training images of scikit-learn's handwritten digits. A Dataset of your own may use any transform
instead of `augment`, for example torchvision's, as long as it returns two views of an image.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mixnn


def augment(image):
    """A crop of 24 x 24 from a 32 x 32 image, with another contrast and some noise."""
    top, left = torch.randint(0, 9, (2,)).tolist()
    contrast = 0.5 + torch.rand(())
    return contrast * image[:, top : top + 24, left : left + 24] + 0.2 * torch.randn(3, 24, 24)


class TwoViews(Dataset):
    def __init__(self):
        train = mixnn.data.load("digits", "train")
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (train.mean, train.std))
        images = nn.functional.interpolate(train.images / 255, size=32, mode="bilinear")
        self.images = (images - mean) / std

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return augment(self.images[i]), augment(self.images[i])


def network():
    layers, inputs = [], 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(inputs, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


if __name__ == "__main__":
    torch.manual_seed(0)
    backbone = network()
    method = mixnn.methods.MNN(backbone, topk=5, support_size=1024)  # trains a copy of the backbone
    optimizer = torch.optim.AdamW(method.trained_parameters(), lr=1e-3)
    for epoch in range(5):
        for x1, x2 in DataLoader(TwoViews(), batch_size=64, shuffle=True, drop_last=True):
            loss = method(x1, x2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            method.after_step()  # the teacher follows the student, the support set gets new rows
        print(f"epoch {epoch + 1}, loss {loss.item():.3f}")
    backbone.load_state_dict(method.student.f.state_dict())  # the trained weights, in your module
