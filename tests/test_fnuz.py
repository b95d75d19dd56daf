"""to_fnuz: all codes keep their value."""

from __future__ import annotations

import pytest
import torch

from fp8pass.errors import UnsupportedError
from fp8pass.fnuz import to_fnuz


def test_every_code_keeps_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor(0.25)
    converted, doubled = to_fnuz(codes, scale)
    assert converted.dtype == torch.float8_e4m3fnuz and float(doubled) == 0.5
    wanted, got = codes.float() * scale, converted.float() * doubled
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert int(got.isnan().sum()) == 2  # and minus zero is not one of them


def test_known_codes_in_any_shape() -> None:
    values = torch.tensor([[1.0, -0.0, 448.0], [-448.0, 0.0625, 240.0]])
    converted, scale = to_fnuz(values.to(torch.float8_e4m3fn).t(), torch.ones(3, 1))
    assert torch.equal(converted.float() * scale, values.t().abs() * values.t().sign())
    # neither the bytes by themselves nor a conversion of the values would do
    raw = values.to(torch.float8_e4m3fn).view(torch.float8_e4m3fnuz).float()
    assert raw[0, 0] == 0.5 and raw[0, 1].isnan()


def test_other_codes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        to_fnuz(torch.zeros(2).to(torch.float8_e5m2), torch.ones(()))
