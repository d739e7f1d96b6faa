"""MNN in a loop with Hugging Face Accelerate, with accumulated gradients.

    pip install accelerate
    python examples/accelerate_loop.py              # or: accelerate launch examples/accelerate_loop.py

Data and network are those of own_loop.py.
"""

import torch
from accelerate import Accelerator
from own_loop import TwoViews, network
from torch.utils.data import DataLoader

from mixnn.methods import MNN


def train(accelerator):
    torch.manual_seed(accelerator.process_index)
    group = torch.distributed.group.WORLD if accelerator.num_processes > 1 else None
    method = MNN(network(), topk=5, support_size=1024, process_group=group)
    optimizer = torch.optim.AdamW(method.trained_parameters(), lr=1e-3)
    loader = DataLoader(TwoViews(), batch_size=32, shuffle=True, drop_last=True)
    prepared, optimizer, loader = accelerator.prepare(method, optimizer, loader)
    for epoch in range(5):
        for x1, x2 in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(x1, x2)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # the optimizer has made a step
                method.after_step()
        accelerator.print(f"epoch {epoch + 1}, loss {loss.item():.3f}")
    return method.student.f  # maps images to features


if __name__ == "__main__":
    accelerator = Accelerator(gradient_accumulation_steps=2)
    encoder = train(accelerator)
    accelerator.free_memory()  # so that nothing holds the process group when it ends
    accelerator.end_training()
