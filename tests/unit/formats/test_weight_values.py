"""Values that no trained weight has, found in files of every format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.formats.apr_write import write_apr
from engine.formats.open import open_weights
from engine.formats.values import check_values
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.tensor import QuantTensor


def findings(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, bool]]:
    save_file(tensors, path)
    found = check_values(open_weights(path))
    assert all(one.text.startswith(f"ST14 {path}, tensor ") for one in found)
    return {one.tensor: (one.text.split(": ", 1)[1], one.finite) for one in found}


def test_trained_values_are_not_remarkable(tmp_path: Path) -> None:
    tensors = {
        dtype: torch.tensor([[1, 2], [3, 1]]).to(getattr(torch, dtype))
        for dtype in ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool")
    }
    tensors["bool"][0, 0] = False
    tensors["float8_e4m3fn"] = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    tensors["complex64"] = torch.tensor([1 + 2j, 1 + 3j])
    tensors |= {"one value": torch.zeros(1), "none": torch.empty(0, 3), "scalar": torch.tensor(0.0)}
    assert findings(tmp_path / "m", tensors) == {}


def test_each_kind_of_finding_is_said_with_its_share(tmp_path: Path) -> None:
    nan, infinite, both = torch.ones(100), torch.ones(4, 25), torch.ones(10)
    nan[:31] = torch.nan
    infinite[0, 0] = -torch.inf
    both[0], both[1] = torch.nan, torch.inf
    assert findings(
        tmp_path / "m",
        {
            "nan": nan,
            "infinite": infinite.half(),
            "both": both,
            "zero": torch.zeros(3, 4, dtype=torch.bfloat16),
            "constant": torch.full((7,), 0.5),
            "integers": torch.full((7,), 3),
        },
    ) == {
        "nan": ("31.00% is NaN (31 of 100 values)", False),
        "infinite": ("1.00% is infinite (1 of 100 values)", False),
        "both": ("10.00% is NaN and 10.00% is infinite (2 of 10 values)", False),
        "zero": ("all 12 values are 0", True),
        "constant": ("all 7 values are 0.5", True),
        "integers": ("all 7 values are 3", True),
    }


def test_only_the_named_tensors_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, tmp_path / "m")
    weights = open_weights(tmp_path / "m")
    assert [one.tensor for one in check_values(weights, ["b"])] == ["b"]


@pytest.mark.parametrize("slice_values", [1, 600, 1 << 22])
def test_blocks_are_looked_into_slice_by_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_values: int
) -> None:
    monkeypatch.setattr("engine.formats.values._SLICE_VALUES", slice_values)
    q4_k = BLOCK_TYPES["Q4_K"]
    zero = torch.zeros(5, 288, dtype=torch.uint8)
    # The two bytes of an infinite scale, in the last row; a value of it is infinity times zero.
    broken = torch.randint(0, 256, (5, 288), dtype=torch.uint8)
    broken[:, [0, 1, 2, 3, 144, 145, 146, 147]] = 1
    broken[4, 1] = 0x7C
    broken[4, 0] = 0
    late = torch.zeros(5, 4)
    late[4, 3] = 1.0
    write_apr(
        tmp_path / "m.apr",
        config={"model_type": "qwen2"},
        tensors=[
            ("zero", QuantTensor(zero, q4_k, (5, 512))),
            ("broken", QuantTensor(broken, q4_k, (5, 512))),
            ("late", late),
        ],
        tokenizer_json=None,
        metadata={},
    )
    found = {one.tensor: one for one in check_values(open_weights(tmp_path / "m.apr"))}
    assert set(found) == {"zero", "broken"}
    assert "all 2,560 values are 0" in found["zero"].text and found["zero"].finite
    assert "(256 of 2,560 values)" in found["broken"].text and not found["broken"].finite
