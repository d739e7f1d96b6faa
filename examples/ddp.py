"""MNN with DistributedDataParallel: every process has its own images, all share one support set.

    torchrun --nproc-per-node 2 examples/ddp.py

Data and network are those of own_loop.py. This runs on CPUs; on GPUs, use the backend "nccl" and move method and views
to the process's device.
"""

import torch
import torch.distributed as dist
from own_loop import TwoViews, network
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from mixnn.methods import MNN


def train():
    torch.manual_seed(dist.get_rank())  # for different views; DistributedDataParallel makes the weights equal
    method = MNN(network(), topk=5, support_size=1024, process_group=dist.group.WORLD)
    parallel = DistributedDataParallel(method)
    optimizer = torch.optim.AdamW(method.trained_parameters(), lr=1e-3)
    data = TwoViews()
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x1, x2 in DataLoader(data, batch_size=32, sampler=sampler, drop_last=True):
            loss = parallel(x1, x2)  # not method(x1, x2): gradients are averaged over processes
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            method.after_step()
        weights, rows = (t.double().sum().item() for t in (method.student.f[0].weight, method.support.z_QD))
        print(f"rank {dist.get_rank()}, epoch {epoch + 1}, weights {weights:.6f}, support set {rows:.6f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()  # a function, so that nothing holds the process group when it ends
    dist.destroy_process_group()
