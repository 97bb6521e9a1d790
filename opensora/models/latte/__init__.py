from opensora.models.latte.latte import Latte, LatteT2V
