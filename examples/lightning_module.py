"""MNN as a LightningModule, in mixed precision, on one or several devices.

    pip install lightning
    python examples/lightning_module.py
    DEVICES=2 python examples/lightning_module.py

Data and network are those of own_loop.py.
"""

import os

import lightning
import torch
from own_loop import TwoViews, network
from torch.utils.data import DataLoader

from mixnn.methods import MNN


class SelfSupervised(lightning.LightningModule):
    def __init__(self, network, **options):
        super().__init__()
        self.network, self.options, self.method = network, options, None

    def configure_model(self):  # not in __init__: here, Lightning has started its processes
        if self.method is None:
            torch.manual_seed(self.global_rank)  # for different views; Lightning makes the weights equal
            group = torch.distributed.group.WORLD if self.trainer.world_size > 1 else None
            self.method = MNN(self.network(), process_group=group, **self.options)

    def training_step(self, batch, _):
        loss = self.method(*batch)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.method.after_step()  # here, and not after each batch: gradients may be accumulated

    def configure_optimizers(self):
        return torch.optim.AdamW(self.method.trained_parameters(), lr=1e-3)


if __name__ == "__main__":
    module = SelfSupervised(network, topk=5, support_size=1024)
    devices = int(os.environ.get("DEVICES", "1"))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=2, precision="bf16-mixed", devices=devices, **quiet)
    trainer.fit(module, DataLoader(TwoViews(), batch_size=64 // devices, shuffle=True, drop_last=True))
    rows = module.method.support.z_QD.double().sum().item()
    print(f"rank {module.global_rank}, support set {rows:.6f}, loss {trainer.callback_metrics['loss']:.3f}")
    encoder = module.method.student.f  # maps images to features
