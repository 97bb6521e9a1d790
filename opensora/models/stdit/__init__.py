from opensora.models.stdit.stdit import STDiT
