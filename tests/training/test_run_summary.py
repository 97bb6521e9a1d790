"""What a run says before its first step."""

from torch import nn

from opensora.datasets.buckets.bucket import Buckets
from opensora.training.run_summary import class_list, effective_batch, parameter_table


def test_parameters_by_top_level_module():
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 10)), "head": nn.Linear(10, 3)})
    model["blocks"][0].requires_grad_(False)
    rows = [line.split() for line in parameter_table(model).splitlines()]
    assert rows == [
        ["parameters", "trained", "frozen"],
        ["blocks", "1,010", "1,100"],
        ["head", "33", "0"],
        ["total", "1,043", "1,100"],
    ]


def test_shared_parameters_are_counted_once():
    layer = nn.Linear(10, 10)
    assert parameter_table(nn.ModuleDict({"a": layer, "b": layer})).splitlines()[-1].split() == ["total", "110", "0"]


def test_samples_of_a_step():
    assert effective_batch(4, 2, 3).splitlines()[1].strip() == "4 x 2 x 3 = 24"
    assert "each sample on 2 processes" in effective_batch(4, 2, 3, sp_size=2)


def test_samples_of_a_step_by_bucket():
    buckets = Buckets({"144p": {1: (1.0, 8), 16: (1.0, 2)}, "240p": {1: (0.0, None)}})
    lines = effective_batch(1, 4, 2, buckets=buckets).splitlines()[1:]
    assert len(lines) == sum(bucket.batch_size is not None for bucket in buckets)
    assert {line.split(": ")[1] for line in lines} == {"8 x 4 x 2 = 64", "2 x 4 x 2 = 16"}


def test_classes_are_named_by_number():
    assert class_list(["city", "dog & cup"]) == "\nclasses: 0 = city, 1 = dog & cup"
    assert class_list([str(i) for i in range(1000)]).endswith(
        "19 = 19 and 980 more, in the order of the folders' names"
    )
    assert class_list(()) == ""
