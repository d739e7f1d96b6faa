import torch

torch.set_num_threads(1)  # pytest-xdist runs one worker a core; more threads would only wait for each other
