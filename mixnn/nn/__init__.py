"""Networks: backbone, heads, teacher and support set."""
