from opensora.models.nova.nova import NOVA
