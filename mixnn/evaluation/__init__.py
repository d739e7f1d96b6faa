"""How good is an encoder? Protocols that turn images or features into an accuracy.

    mixnn.evaluate(network, "cifar10")                                          the paper's protocols, on images
    mixnn.evaluation.knn(train_x, train_y, test_x, test_y).accuracy             on features that you have
    mixnn.evaluation.linear_probe(train_x, train_y, test_x, test_y).accuracy

docs/evaluation.md says what each number means.
"""

from mixnn.evaluation.knn import KNNResult, knn
from mixnn.evaluation.linear_probe import LinearProbeResult, linear_probe

__all__ = ["KNNResult", "LinearProbeResult", "knn", "linear_probe"]
