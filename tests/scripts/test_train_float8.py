"""scripts/train.py with float8 where there is none: one clear error before anything is loaded."""

import pytest

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[quant]'")


@pytest.mark.parametrize("option", ["--float8", "--float8=tensorwise"])
def test_a_cpu_is_refused_before_data_are_loaded(train, capsys, option):
    with pytest.raises(SystemExit):
        train(option, "--dtype=bf16", "--data-path=missing.csv", "--device=cpu")
    told = capsys.readouterr().err
    assert "needs a GPU with float8 products" in told
    assert "missing.csv" not in told
