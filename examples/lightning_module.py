"""MNN as a LightningModule, in mixed precision.

    pip install lightning
    python examples/lightning_module.py

Data and network are those of own_loop.py. On several devices, pass `process_group=torch.distributed.group.WORLD` to the
method in `configure_model`, after Lightning has started the processes.
"""

import lightning
import torch
from own_loop import TwoViews, network
from torch.utils.data import DataLoader

import mixnn


class SelfSupervised(lightning.LightningModule):
    def __init__(self, backbone, **options):
        super().__init__()
        self.method = mixnn.methods.MNN(backbone, **options)

    def training_step(self, batch, _):
        loss = self.method(*batch)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.method.after_step()  # here, and not after each batch: gradients may be accumulated

    def configure_optimizers(self):
        return torch.optim.AdamW(self.method.student.parameters(), lr=1e-3)


if __name__ == "__main__":
    lightning.seed_everything(0)
    module = SelfSupervised(network(), topk=5, support_size=1024)
    trainer = lightning.Trainer(
        max_epochs=2,
        precision="bf16-mixed",
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(TwoViews(), batch_size=64, shuffle=True, drop_last=True))
    print(f"loss {trainer.callback_metrics['loss']:.3f}")
    encoder = module.method.student.f  # maps images to features
