from opensora.models.stdit.stdit import STDiT
from opensora.models.stdit.stdit2 import STDiT2
from opensora.models.stdit.stdit3 import STDiT3
