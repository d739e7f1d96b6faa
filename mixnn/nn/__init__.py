"""Networks: backbone, heads, teacher and support set."""

from mixnn.nn.backbone import BACKBONES, build_backbone
from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.encoder import Student, Teacher, mlp
from mixnn.nn.resnet import ResNet
from mixnn.nn.support_set import SupportSet

__all__ = ["BACKBONES", "ResNet", "SplitBatchNorm", "Student", "SupportSet", "Teacher", "build_backbone", "mlp"]
