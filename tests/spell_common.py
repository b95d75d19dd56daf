"""What every module of spellings names: dtypes as forms write them, and tensors."""

from __future__ import annotations

import torch

E4 = torch.float8_e4m3fn
Tensor = torch.Tensor

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
