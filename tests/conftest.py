import signal

import pytest
import torch

torch.set_num_threads(1)  # pytest-xdist runs one worker a core; more threads would only wait for each other
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell makes its background jobs deaf to what some tests send
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Decoded images of test folders do not land in the user's cache."""
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path_factory.getbasetemp() / "image-cache"))
