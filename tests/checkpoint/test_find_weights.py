"""Which file a name stands for: layouts of folders, ambiguity, the hub."""

import json

import pytest
import torch
from safetensors.torch import save, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from opensora.checkpoint.load import open_checkpoint, read_weights, save_checkpoint
from opensora.checkpoint.weight_files import find_weights, read_file, refuse_misnamed
from opensora.utils.errors import UserError
from tests.checkpoint.hub import serve
from tools.convert import copy_pipeline


def tensors(value):
    return {"a": torch.full((2,), float(value)), "b": torch.full((3,), float(value))}


def put(path, value):
    """A file of weights that all have one value; the form follows the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = tensors(value)
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)


def put_shards(folder, value, stem="model", suffix="safetensors", index=None):
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors(value).items(), start=1):
        shard = f"{stem}-{number:05d}-of-00002.{suffix}"
        part = {name: tensor}
        save_file(part, folder / shard) if suffix == "safetensors" else torch.save(part, folder / shard)
        weight_map[name] = shard
    (folder / (index or f"{stem}.{suffix}.index.json")).write_text(json.dumps({"weight_map": weight_map}))


def value(path):
    state = read_weights(path)
    assert state.keys() == {"a", "b"}
    (found,) = {float(tensor.unique()) for tensor in state.values()}
    return found


class TestFolders:
    @pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt", "pth", "ckpt"])
    def test_one_file_and_other_things(self, tmp_path, suffix):
        put(tmp_path / f"any name.{suffix}", 3)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "README.md").write_text("words")
        (tmp_path / ".hidden.safetensors").write_bytes(b"")
        assert value(tmp_path) == 3

    @pytest.mark.parametrize("suffix", ["safetensors", "bin"])
    def test_shards_with_an_index(self, tmp_path, suffix):
        put_shards(tmp_path, 4, suffix=suffix)
        assert value(tmp_path) == 4
        assert value(tmp_path / f"model.{suffix}.index.json") == 4

    def test_shards_may_have_any_name_and_lie_deeper(self, tmp_path):
        (tmp_path / "parts").mkdir()
        save_file({"a": torch.ones(2)}, tmp_path / "first")
        save_file({"b": torch.ones(3)}, tmp_path / "parts" / "second")
        weight_map = {"a": "first", "b": "parts/second"}
        (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert value(tmp_path) == 1

    def test_safetensors_are_taken_before_pickles(self, tmp_path):
        put(tmp_path / "pytorch_model.bin", 1)
        put(tmp_path / "model.safetensors", 2)
        assert value(tmp_path) == 2
        put_shards(tmp_path / "sharded", 3)
        put_shards(tmp_path / "sharded", 4, stem="pytorch_model", suffix="bin")
        assert value(tmp_path / "sharded") == 3

    def test_plain_files_are_taken_before_variants(self, tmp_path):
        for name, number in (("m.safetensors", 1), ("m.fp16.safetensors", 2), ("m.non_ema.safetensors", 3)):
            put(tmp_path / name, number)
        assert value(tmp_path) == 1
        put_shards(tmp_path / "s", 5)
        put_shards(tmp_path / "s", 6, stem="model.fp16", index="model.safetensors.index.fp16.json")
        assert value(tmp_path / "s") == 5

    def test_a_lone_variant_is_taken(self, tmp_path):
        put(tmp_path / "m.fp16.safetensors", 2)
        assert value(tmp_path) == 2

    def test_several_are_listed(self, tmp_path):
        put(tmp_path / "one.pth", 1)
        put(tmp_path / "two.pth", 2)
        with pytest.raises(UserError, match=r"2 sets of weights in .*: one\.pth, two\.pth\. Name one"):
            read_weights(tmp_path)
        put(tmp_path / "three.safetensors", 3)
        assert value(tmp_path) == 3

    def test_shards_without_their_index(self, tmp_path):
        put_shards(tmp_path, 1)
        (tmp_path / "model.safetensors.index.json").unlink()
        with pytest.raises(UserError, match=r"index \(\*\.index\.json\) is missing"):
            read_weights(tmp_path)

    @pytest.mark.parametrize("suffix", ["safetensors", "bin"])
    def test_another_file_is_not_taken_for_a_set_that_lacks_a_shard(self, tmp_path, suffix):
        put_shards(tmp_path, 1, suffix=suffix)
        (tmp_path / f"model-00002-of-00002.{suffix}").unlink()
        with pytest.raises(UserError, match=rf"missing: model-00002-of-00002\.{suffix}"):
            read_weights(tmp_path)
        put(tmp_path / f"my_lora.{suffix}", 2)
        with pytest.raises(UserError, match=r"2 sets of weights in .*index\.json, my_lora"):
            read_weights(tmp_path)

    def test_safe_shards_may_lie_deeper(self, tmp_path):
        put_shards(tmp_path / "parts", 3)
        weight_map = {"a": "parts/model-00001-of-00002.safetensors", "b": "parts/model-00002-of-00002.safetensors"}
        (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": weight_map}))
        put(tmp_path / "pytorch_model.bin", 1)
        assert value(tmp_path) == 3

    @pytest.mark.parametrize("wrong", ["modle-00001-of-00002.safetensors", "model-00001-of-00002.bin"])
    def test_a_lone_shard_is_not_taken_for_an_index_that_names_others(self, tmp_path, wrong):
        put_shards(tmp_path, 1)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": wrong, "b": wrong}}))
        with pytest.raises(UserError, match=r"2 sets of weights"):
            read_weights(tmp_path)

    @pytest.mark.parametrize("index", [None, '{"weight_map": {"a": "model-0'])
    def test_a_lone_shard_is_not_taken_for_the_whole(self, tmp_path, index):
        put(tmp_path / "model-00001-of-00002.safetensors", 1)
        if index is not None:
            (tmp_path / "model.safetensors.index.json").write_text(index)  # cut off
        with pytest.raises(UserError, match=r"is one shard of several, whose index .* is missing or damaged"):
            read_weights(tmp_path)
        assert value(tmp_path / "model-00001-of-00002.safetensors") == 1
        (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
        assert value(tmp_path) == 1

    def test_nothing_in_it(self, tmp_path):
        (tmp_path / "notes.txt").write_text("words")
        with pytest.raises(UserError, match="no weights in"):
            read_weights(tmp_path)

    def test_a_runs_folder_names_its_checkpoints(self, tmp_path):
        save_checkpoint(tmp_path / "epoch0-global_step5", {"model": tensors(1)}, state={}, manifest={"step": 5})
        with pytest.raises(UserError, match=r"no weights in .*epoch0-global_step5"):
            read_weights(tmp_path)

    def test_a_pipeline_gives_its_transformer(self, tmp_path, caplog):
        (tmp_path / "model_index.json").write_text("{}")
        put(tmp_path / "vae" / "diffusion_pytorch_model.safetensors", 1)
        with pytest.raises(UserError, match="pipeline without a folder transformer"):
            read_weights(tmp_path)
        put_shards(tmp_path / "transformer", 7, stem="diffusion_pytorch_model")
        with caplog.at_level("INFO"):
            assert value(tmp_path) == 7
        assert "reading its transformer" in caplog.text

    @pytest.mark.parametrize("suffix", ["safetensors", "bin"])
    def test_colossalai_gives_its_model_and_names_its_ema(self, tmp_path, caplog, suffix):
        put_shards(tmp_path / "model", 1, stem="pytorch_model", suffix=suffix)
        put(tmp_path / "ema.pt", 2)
        torch.save({"last_epoch": 3}, tmp_path / "lr_scheduler")
        (tmp_path / "running_states.json").write_text('{"step": 3}')
        with caplog.at_level("INFO"):
            assert value(tmp_path) == 1
        assert f"for the EMA weights name {tmp_path / 'ema.pt'}" in caplog.text
        assert value(tmp_path / "ema.pt") == 2
        message = f"ColossalAI.*weights: --ckpt-path {tmp_path}, or --ckpt-path {tmp_path / 'ema.pt'}"
        with pytest.raises(UserError, match=message):
            open_checkpoint(tmp_path)  # what --load does
        with pytest.raises(UserError, match=r"is a file, not the folder of a checkpoint.*--ckpt-path"):
            open_checkpoint(tmp_path / "ema.pt")

    def test_a_distributed_checkpoint_of_pytorch_is_named_with_the_command_that_converts_it(self, tmp_path):
        from torch.distributed.checkpoint import save as save_distributed

        folder = tmp_path / "step-3"
        save_distributed({"model": tensors(7), "step": 3}, checkpoint_id=folder, no_dist=True)
        for what in (folder, folder / "__0_0.distcp"):
            with pytest.raises(UserError, match=r"is a checkpoint of torch\.distributed\.checkpoint"):
                read_weights(what)
        with pytest.raises(UserError, match=r"python -m torch") as error:
            open_checkpoint(folder)
        assert (folder / ".metadata").is_file()
        words = str(error.value).splitlines()[1].split()
        assert words[1:4] == ["-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
        dcp_to_torch_save(words[4], words[5])  # what the command calls
        assert value(words[5]) == 7

    def test_ours_gives_the_average(self, tmp_path):
        parts = {"model": tensors(1), "ema": tensors(2), "optimizer": {"a/step": torch.zeros(1)}}
        save_checkpoint(tmp_path / "c", parts, state={}, manifest={"step": 5})
        assert value(tmp_path / "c") == 2
        del parts["ema"]
        save_checkpoint(tmp_path / "d", parts, state={}, manifest={"step": 5})
        assert value(tmp_path / "d") == 1

    def test_ours_cut_off_is_not_taken_for_something_else(self, tmp_path):
        path = save_checkpoint(tmp_path / "c", {"model": tensors(1)}, state={}, manifest={"step": 5})
        (path / "manifest.json").unlink()
        with pytest.raises(UserError, match="no weights in"):
            read_weights(path)


class TestMisspeltPaths:
    @pytest.mark.parametrize("name", ["nowhere", "./a/b", "~/nowhere/b", "weights/model.pth", "a b/c", "hf.co//x"])
    def test_what_can_be_no_hub_id(self, name):
        with pytest.raises(UserError, match=f"no weights at {name}: expected"):
            find_weights(name)
        with pytest.raises(UserError, match=f"no weights at {name}: expected"):
            refuse_misnamed(name)
        with pytest.raises(UserError, match=f"^model.from_pretrained_2: no weights at {name}"):
            refuse_misnamed(name, "model.from_pretrained_2")

    def test_what_may_be_weights_is_not_looked_into(self, tmp_path):
        for name in (None, tmp_path, "owner/name-that-nobody-has", "owner/name/file.safetensors"):
            refuse_misnamed(name)

    def test_a_path_below_an_existing_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        with pytest.raises(UserError, match="no weights at runs/vea"):
            find_weights("runs/vea")


class TestReleasedNames:
    """By which Open-Sora's configs and commands call files that it fetched by itself."""

    def test_a_file_that_it_kept_is_read(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        put(tmp_path / "pretrained_models" / "DiT-XL-2-256x256.pt", 3)
        refuse_misnamed("DiT-XL-2-256x256.pt")
        assert value("DiT-XL-2-256x256.pt") == 3

    @pytest.mark.parametrize("folder", ["", "pretrained_models/"])
    def test_one_that_the_hub_lacks_is_named_with_its_address(self, tmp_path, monkeypatch, folder):
        monkeypatch.chdir(tmp_path)
        for call in (find_weights, refuse_misnamed):
            with pytest.raises(
                UserError, match=r"from https://dl\.fb.*/DiT-XL-2-512x512\.pt into the folder pretrained_m"
            ):
                call(f"{folder}DiT-XL-2-512x512.pt")

    @pytest.mark.parametrize(
        ("name", "where"),
        [
            ("PixArt-XL-2-512x512.pth", "PixArt-alpha/PixArt-alpha/PixArt-XL-2-512x512.pth"),
            ("PixArt-Sigma-XL-2-2K-MS.pth", "PixArt-alpha/PixArt-Sigma/PixArt-Sigma-XL-2-2K-MS.pth"),
            ("Latte-XL-2-256x256-ucf101.pt", "maxin-cn/Latte/ucf101.pt"),
            ("OpenSora-v1-HQ-16x512x512.pth", "hpcai-tech/Open-Sora/OpenSora-v1-HQ-16x512x512.pth"),
        ],
    )
    def test_others_come_from_the_hub(self, hub, tmp_path, monkeypatch, caplog, name, where):
        monkeypatch.chdir(tmp_path)
        repo, file = where.rsplit("/", 1)
        put(tmp_path / "w.pt", 4)
        fetched = hub({file: (tmp_path / "w.pt").read_bytes()}, repo)
        with caplog.at_level("INFO"):
            assert value(name) == 4
        assert fetched == [file]
        assert f"it is {where} on the hub" in caplog.text
        with pytest.raises(UserError, match="no weights at elsewhere"):  # a path is not replaced
            find_weights(f"elsewhere/{name}")


REPO = "some-one/some.model"
INDEX = json.dumps({"weight_map": {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}}).encode()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Files -> a hub with one repository, an empty cache; gives the list of what was fetched."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    running = []

    def start(files, repo=REPO):
        context = serve(repo, files)
        address, fetched = context.__enter__()
        running.append(context)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        for module in (constants, file_download):  # huggingface_hub before 1.0 reads the latter
            url = address + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", url, raising=False)
        return fetched

    start.stop = lambda: [running.pop().__exit__(None, None, None) for _ in list(running)]
    yield start
    start.stop()


class TestHub:
    def test_only_weights_and_config_are_fetched_and_once(self, hub):
        fetched = hub(
            {
                "config.json": b"{}",
                "README.md": b"words",
                "m.safetensors": save(tensors(1)),
                "m.fp16.safetensors": b"not wanted",
                "pytorch_model.bin": b"not wanted",
                "text_encoder/model.safetensors": b"not wanted",
            }
        )
        assert value(REPO) == 1
        assert sorted(fetched) == ["config.json", "m.safetensors"]
        assert value(REPO) == 1
        assert len(fetched) == 2

    def test_a_pipelines_shards(self, hub):
        shards = {
            f"transformer/m-{i}-of-2.safetensors": save({name: torch.ones(2)}) for i, name in ((1, "a"), (2, "b"))
        }
        fetched = hub(
            {
                "model_index.json": b"{}",
                "transformer/config.json": b"{ }",  # one blob is fetched once
                "transformer/m.safetensors.index.json": INDEX,
                "vae/m.safetensors": b"not wanted",
                **shards,
            }
        )
        assert value(REPO) == 1
        index = "transformer/m.safetensors.index.json"
        assert set(fetched) == {"model_index.json", "transformer/config.json", index, *shards}
        hub.stop()
        assert value(REPO) == 1

    def test_the_second_network_of_a_pipeline_and_folders_by_name(self, hub, monkeypatch):
        folders = {"transformer": 1, "transformer_2": 2, "deep/low.noise": 3}
        files = {f"{folder}/m.safetensors": save(tensors(number)) for folder, number in folders.items()}
        fetched = hub({"model_index.json": b"{}", **files})
        for _ in range(2):  # from the hub, and from its cache
            assert read_file(find_weights(REPO, "transformer_2"))["a"][0] == 2
            assert "transformer/m.safetensors" not in fetched
            assert value(f"{REPO}/deep/low.noise") == 3
            hub.stop()
        with pytest.raises(UserError, match="could not load"):
            find_weights(f"{REPO}/transformer")

    def test_a_folder_without_weights_is_named(self, hub):
        hub({"model_index.json": b"{}", "transformer/m.safetensors": b"x"})
        with pytest.raises(UserError, match=f"no weights in {REPO}/transformer_2/ on the hub"):
            find_weights(REPO, "transformer_2")

    def test_a_pipeline_is_copied_without_its_networks(self, hub, tmp_path):
        fetched = hub({"model_index.json": b"{}", "transformer/m.safetensors": b"x", "vae/config.json": b"{ }"})
        copy_pipeline(REPO, tmp_path / "out", but=["transformer"])
        found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
        assert found == set(fetched) == {"model_index.json", "vae/config.json"}
        with pytest.raises(UserError, match="pipeline: could not load 'some-one/else'"):
            copy_pipeline("some-one/else", tmp_path / "out", but=[])

    def test_a_named_file(self, hub):
        fetched = hub({"one.safetensors": save(tensors(1)), "deep/two.safetensors": save(tensors(2))})
        assert value(f"{REPO}/deep/two.safetensors") == 2
        assert fetched == ["deep/two.safetensors"]

    def test_several_are_listed_before_anything_is_fetched(self, hub):
        fetched = hub({"one.pth": b"x", "two.pth": b"x"})
        with pytest.raises(UserError, match=r"2 sets of weights in .* on the hub: one\.pth, two\.pth"):
            read_weights(REPO)
        assert fetched == []

    def test_a_set_that_lacks_a_shard(self, hub):
        fetched = hub({"m.safetensors.index.json": INDEX, "m-1-of-2.safetensors": b"x", "my_lora.safetensors": b"x"})
        with pytest.raises(UserError, match=r"2 sets of weights in .*: m\.safetensors\.index\.json, my_lora"):
            read_weights(REPO)
        assert fetched == ["m.safetensors.index.json"]

    def test_no_such_file_or_repository(self, hub):
        hub({"one.safetensors": save(tensors(1))})
        with pytest.raises(UserError, match=r"has no file two\.safetensors"):
            read_weights(f"{REPO}/two.safetensors")
        with pytest.raises(UserError, match=r"could not load 'some-one/else'.*Check the spelling and the network"):
            read_weights("some-one/else")

    def test_an_index_that_names_other_places_is_refused(self, hub):
        fetched = hub({"m.safetensors.index.json": INDEX.replace(b"m-1-of-2", b"../../x")})
        with pytest.raises(UserError, match="is not inside the folder"):
            read_weights(REPO)
        assert fetched == ["m.safetensors.index.json"]

    @pytest.mark.parametrize("how", ["offline mode", "no network"])
    def test_without_network_the_cache_is_read(self, hub, monkeypatch, how):
        from huggingface_hub import constants

        hub({"config.json": b"{}", "m.safetensors": save(tensors(1))})
        assert value(REPO) == 1
        hub.stop()
        if how == "offline mode":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert value(REPO) == 1
        assert value(f"{REPO}/m.safetensors") == 1
        for name in ("some-one/else", "some-one/else/w.pth", f"{REPO}/other.pth"):
            with pytest.raises(UserError, match=r"weights: .*(could not load|has no file)"):
                read_weights(name)


def test_a_damaged_file_makes_no_room_for_another(tmp_path):
    """Such as a pointer of Git LFS next to an adapter: the adapter was taken for the weights."""
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match="LFS"):
        read_file(find_weights(tmp_path))
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"2 sets of weights.*model\.safetensors, other\.safetensors"):
        find_weights(tmp_path)
