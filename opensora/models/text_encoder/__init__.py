from opensora.models.text_encoder.classes import ClassEncoder
from opensora.models.text_encoder.condition import TextCondition
from opensora.models.text_encoder.hf import ClipEncoder, HFTextEncoder
from opensora.models.text_encoder.memo import MemoizedTextEncoder
from opensora.models.text_encoder.t5 import T5Encoder
